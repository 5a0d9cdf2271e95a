"""What is refused, by which exception, and that the message names the argument, what was given and what is allowed."""
import unittest

import kvonce
import numpy
from oracle import values


class Differentiable:
    """Stands for a tensor that wants gradients."""

    requires_grad = True


class OnADevice:
    """Stands for a tensor in the memory of a CUDA device."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise BufferError("not here")


class ErrorsTest(unittest.TestCase):
    def setUp(self):
        self.q, self.k, self.v = values((2, 4, 1, 64), 1), values((2, 2, 50, 64), 2), values((2, 2, 50, 64), 3)

    def refused(self, pattern, *, error=ValueError, q=None, k=None, v=None, **options):
        q, k, v = (own if given is None else given for given, own in ((q, self.q), (k, self.k), (v, self.v)))
        with self.assertRaisesRegex(error, pattern):
            kvonce.attend(q, k, v, **options)

    def test_shapes(self):
        self.refused(r"^q: got shape \[4, 1, 64\], allowed: \[num_seqs, num_q_heads, q_len, head_dim_qk\]$",
                     q=self.q[0])
        self.refused(r"^k: got shape \[1, 2, 50, 64\], allowed: \[2, 2, 50, 64\]$", k=self.k[:1])
        self.refused(r"^v: got shape \[2, 2, 49, 64\], allowed: \[2, 2, 50, 64\]$", v=self.v[:, :, 1:])
        self.refused("^num_q_heads: got 3", q=self.q[:, :3])
        self.refused("^num_kv_heads: got 0", k=self.k[:, :0], v=self.v[:, :0])
        self.refused("^v: got shape .* head_dim_v", v=self.v[..., :0])

    def test_too_many_query_tokens(self):
        self.refused("^q_len: got 65", q=values((2, 4, 65, 64), 1))

    def test_dtypes(self):
        self.refused("^q: got dtype float64, allowed: float32, float16, bfloat16$", q=self.q.astype("float64"))
        self.refused("^k: got dtype int32", k=self.k.astype("int32"))
        self.refused("^out_dtype: got 'int8', allowed: float32, float16, bfloat16$", out_dtype="int8")
        self.refused("^q: got an object of type ndarray", q=self.q.astype(">f4"))

    def test_what_is_no_array(self):
        self.refused("^q: got an object of type list, allowed: a NumPy array, a torch tensor", q=self.q.tolist())
        self.refused("^v: got an object of type str", v="v")
        self.refused("^k: got an object of type OnADevice on cuda:0, allowed: a NumPy array", k=OnADevice())

    def test_gradients(self):
        for name in ("q", "k", "v", "sinks", "out"):
            self.refused(f"^{name}: got a tensor with requires_grad, allowed: one without: no gradients are computed",
                         **{name: Differentiable()})

    def test_last_strides(self):
        wide = values((2, 2, 50, 128), 2)
        self.refused(r"^k: got a last dim of stride 2, allowed: 1", k=wide[..., ::2])

    def test_unaligned_memory(self):
        raw = numpy.zeros(self.q.nbytes + 1, "uint8")[1:]
        self.refused("^q: got memory that is not aligned", q=raw.view("float32").reshape(self.q.shape))

    def test_lengths(self):
        self.refused(r"^kv_lens\[1\]: got 51, allowed: 0 to kv_len = 50$", kv_lens=[50, 51])
        self.refused(r"^kv_lens\[0\]: got -1", kv_lens=[-1, 5])
        self.refused(r"^kv_lens: got 3 values, allowed: 2$", kv_lens=[1, 2, 3])
        self.refused(r"^kv_lens: got shape \[2, 1\], allowed: \[2\]$", kv_lens=numpy.ones((2, 1), "int32"))
        self.refused("^kv_lens: got dtype float32", kv_lens=numpy.ones(2, "float32"))
        self.refused(r"^kv_lens\[1\]: got 'x'", kv_lens=[1, "x"])
        self.refused(r"^kv_lens\[0\]: got 4294967297", kv_lens=numpy.array([(1 << 32) + 1, 1]))
        self.refused("^kv_lens: got an object of type str", kv_lens="12")
        self.refused(r"^kv_starts\[1\]: got 8, allowed: 0 to kv_len = 7$", kv_lens=[7, 7], kv_starts=[7, 8])

    def test_sinks(self):
        self.refused(r"^sinks: got shape \[3\], allowed: \[4\]$", sinks=numpy.zeros(3))
        self.refused("^sinks: got dtype float16", sinks=numpy.zeros(4, "float16"))

    def test_out(self):
        shape = (2, 4, 1, 64)
        self.refused(r"^out: got shape \[2, 4, 64\], allowed: \[2, 4, 1, 64\]$", out=numpy.zeros((2, 4, 64), "float32"))
        self.refused("^out: got dtype f16, allowed: f32", out=numpy.zeros(shape, "float16"), out_dtype="float32")
        self.refused("^out: got the memory of an input", out=self.q)
        self.refused(r"^out: got a last dim of stride 2", out=numpy.zeros((2, 4, 1, 128), "float32")[..., ::2])
        frozen = numpy.zeros(shape, "float32")
        frozen.flags.writeable = False
        self.refused("^out: got an object of type ndarray, allowed: .* that may be written$", out=frozen)
        shared = numpy.lib.stride_tricks.as_strided(numpy.zeros(64, "float32"), shape, (0, 0, 0, 4))
        self.refused(r"^out: got a broadcast array \(dim 0 has stride 0\)", out=shared)

    def test_a_refused_call_writes_nothing(self):
        out = numpy.full((2, 4, 1, 64), 7, "float32")
        self.refused("kv_starts", kv_starts=[51, 0], out=out)
        self.assertTrue((out == 7).all())

    def test_options(self):
        self.refused("^window: got -1", window=-1)
        self.refused("^softcap: got -1", softcap=-1.0)
        self.refused("^target: got 'sse', allowed: ", target="sse")
        self.refused("^num_threads: got -3", threads=-3)
        self.refused("row_tiles", policy="row_tiles=3")
        self.refused("/nowhere", policy="/nowhere")
        self.refused("v_is_k_prefix", v_is_k_prefix=True)
        self.refused("chunk_tokens", chunk_tokens=-4)

    def test_layouts(self):
        self.refused("^kv_layout: got 'SBHD', allowed: BHSD, BSHD$", kv_layout="SBHD")
        for layout in ("NHD", "HND"):
            self.refused(f"^kv_layout {layout}: paged caches are not served yet", error=NotImplementedError, kv_layout=layout)
        plan = kvonce.plan(4, 2, 64, 50, num_seqs=2)
        with self.assertRaisesRegex(ValueError, "^kv_layout: got 'SBHD', allowed: BHSD, BSHD$"):
            plan.attend(self.q, self.k, self.v, kv_layout="SBHD")
        self.refused("^block_table is not served yet", error=NotImplementedError, block_table=[[0]])
        self.refused("^segments is not served yet", error=NotImplementedError, segments=[])

    def test_targets_of_other_machines(self):
        missing = [device for device in kvonce.devices() if device.backend == "cpu" and device.unavailable]
        self.assertTrue(missing)
        with self.assertRaises(RuntimeError) as caught:
            kvonce.attend(self.q, self.k, self.v, target=missing[0].target)
        self.assertEqual(str(caught.exception), missing[0].unavailable)

    def test_wrong_types_of_options(self):
        self.refused("", error=TypeError, threads="two")
        self.refused("", error=TypeError, unknown=1)


if __name__ == "__main__":
    unittest.main()

"""MLX's quantised caches in kvonce.attend and Plan.attend, against the oracle on the dequantised values."""
import unittest

import kvonce
import ml_dtypes
import numpy
import torch

from oracle import TOLERANCE, attention, error, values

NUM_SEQS, NUM_KV_HEADS, KV_LEN, HEAD_DIM = 2, 2, 150, 128
DTYPES = {"float32": numpy.float32, "float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16}


class Quantised:
    """Codes packed as MLX packs them, scales, biases, and the values that they stand for in float64."""

    def __init__(self, bits, group, dtype="float32", seed=1, head_dim=HEAD_DIM):
        random = numpy.random.default_rng(seed)
        shape = (NUM_SEQS, NUM_KV_HEADS, KV_LEN)
        codes = random.integers(0, 1 << bits, (*shape, head_dim), dtype=numpy.uint32)
        groups = (*shape, head_dim // group)
        self.scales = (random.uniform(0.5, 1.5, groups) * 4 / (1 << bits)).astype(DTYPES[dtype])
        self.biases = random.uniform(-2.5, -1.5, groups).astype(DTYPES[dtype])
        words = codes.reshape(*shape, -1, 32 // bits)
        self.codes = (words << (bits * numpy.arange(32 // bits, dtype=numpy.uint32))).sum(-1, dtype=numpy.uint32)
        spread = [numpy.repeat(side.astype("float64"), group, -1) for side in (self.scales, self.biases)]
        self.values = codes * spread[0] + spread[1]


def query(group_size=4, q_len=2, dtype="float32"):
    return values((NUM_SEQS, NUM_KV_HEADS * group_size, q_len, HEAD_DIM), 9, dtype)


def sides(k, v):
    return {"k_scales": k.scales, "k_biases": k.biases, "v_scales": v.scales, "v_biases": v.biases}


class AffineTest(unittest.TestCase):
    def check(self, q, k, v, attend, **options):
        out, lse = attend(q, k, v, return_lse=True, **options)
        expected, expected_lse = attention(q, k.values, v.values)
        self.assertLess(error(out, expected), TOLERANCE[str(out.dtype).rpartition(".")[2]])
        numpy.testing.assert_allclose(numpy.asarray(lse), expected_lse, rtol=1e-4, atol=1e-4)

    def test_bits_groups_and_dtypes(self):
        for bits in (8, 4):
            for group in (32, 64, 128):
                for dtype in DTYPES:
                    for group_size, q_len in ((1, 1), (4, 2), (7, 1)):
                        with self.subTest(bits=bits, group=group, dtype=dtype, group_size=group_size):
                            k, v = Quantised(bits, group, dtype, 1), Quantised(bits, group, dtype, 2)
                            self.check(query(group_size, q_len, dtype), k, v, lambda q, k, v, **options: kvonce.attend(
                                q, k.codes, v.codes, k_format=f"mlx_int{bits}", **sides(k, v), **options))

    def test_formats_may_differ(self):
        k, v = Quantised(8, 64, "float16", 1), Quantised(4, 64, "float16", 2)
        self.check(query(), k, v, lambda q, k, v, **options: kvonce.attend(
            q, k.codes, v.codes, k_format="mlx_int8", v_format="mlx_int4", **sides(k, v), **options))
        plain = Quantised(8, 64)
        plain.values = plain.values.astype("float32")
        self.check(query(), plain, v, lambda q, k, v, **options: kvonce.attend(
            q, k.values, v.codes, v_format="mlx_int4", v_scales=v.scales, v_biases=v.biases, **options))
        self.check(query(), k, plain, lambda q, k, v, **options: kvonce.attend(
            q, k.codes, v.values, k_format="mlx_int8", v_format="float32", k_scales=k.scales, k_biases=k.biases,
            **options))

    def test_words_and_bytes_and_views(self):
        k, v = Quantised(4, 32, seed=1), Quantised(4, 32, seed=2)
        expected = kvonce.attend(query(), k.codes, v.codes, k_format="mlx_int4", **sides(k, v))
        for dtype in ("int32", "uint8"):
            out = kvonce.attend(query(), k.codes.view(dtype), v.codes.view(dtype), k_format="mlx_int4", **sides(k, v))
            numpy.testing.assert_array_equal(out, expected)

        def view(array, spare):  # token-major, longer and wider than what is attended to
            large = numpy.zeros((NUM_SEQS, KV_LEN + 9, NUM_KV_HEADS, array.shape[3] + spare), array.dtype)
            large[:, :KV_LEN, :, :array.shape[3]] = array.transpose(0, 2, 1, 3)
            return large[:, :KV_LEN, :, :array.shape[3]].transpose(0, 2, 1, 3)

        out = kvonce.attend(query(), view(k.codes, 1), view(v.codes, 2), k_format="mlx_int4", k_scales=view(k.scales, 0),
                            k_biases=view(k.biases, 1), v_scales=view(v.scales, 2), v_biases=view(v.biases, 0))
        numpy.testing.assert_array_equal(out, expected)

    def test_torch(self):
        k, v = Quantised(8, 64, "float32", 1), Quantised(8, 64, "float32", 2)
        expected = kvonce.attend(query(), k.codes, v.codes, k_format="mlx_int8", **sides(k, v))
        out = kvonce.attend(torch.from_numpy(query()), torch.from_numpy(k.codes.view("int32")),
                            torch.from_numpy(v.codes.view("uint8")), k_format="mlx_int8",
                            **{name: torch.from_numpy(side) for name, side in sides(k, v).items()})
        self.assertIsInstance(out, torch.Tensor)
        numpy.testing.assert_array_equal(out.numpy(), expected)

    def test_tokens_before_heads(self):
        k, v = Quantised(8, 64, seed=1), Quantised(4, 64, seed=2)
        self.check(query(), k, v, lambda q, k, v, **options: kvonce.attend(
            q, *(numpy.ascontiguousarray(one.codes.swapaxes(1, 2)) for one in (k, v)), k_format="mlx_int8", v_format="mlx_int4",
            kv_layout="BSHD", **{name: numpy.ascontiguousarray(side.swapaxes(1, 2)) for name, side in sides(k, v).items()},
            **options))

    def test_plan(self):
        plan = kvonce.plan(8, NUM_KV_HEADS, HEAD_DIM, 200, num_seqs=NUM_SEQS, q_len=2, q_dtype="float16",
                           k_format="mlx_int8", v_format="mlx_int4", quant_group=64, scales_dtype="float16")
        self.assertIn("kmlx_int8_vmlx_int4_d128x128", plan.kernel_id)
        self.assertEqual(plan.max_kv_bytes, NUM_SEQS * NUM_KV_HEADS * 200 * (128 + 64 + 2 * 2 * 2 * 2))
        k, v = Quantised(8, 64, "float16", 1), Quantised(4, 64, "float16", 2)
        self.check(query(4, 2, "float16"), k, v, lambda q, k, v, **options: plan.attend(
            q, k.codes, v.codes, **sides(k, v), **options))
        with self.assertRaisesRegex(ValueError, r"k_scales: got dtype f32, allowed: f16"):
            plan.attend(query(4, 2, "float16"), k.codes, v.codes,
                        **{**sides(k, v), "k_scales": k.scales.astype("float32")})

    def test_every_kind_of_length(self):
        k, v = Quantised(8, 64, seed=1), Quantised(8, 64, seed=2)
        for kv_lens in ([150, 0], [1, 77], [0, 0]):
            out = kvonce.attend(query(), k.codes, v.codes, k_format="mlx_int8", kv_lens=kv_lens, **sides(k, v))
            expected, _ = attention(query(), k.values, v.values, kv_lens=kv_lens)
            numpy.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)

    def test_errors(self):
        k, v = Quantised(8, 64, seed=1), Quantised(8, 64, seed=2)
        q = query()
        good = {"k_format": "mlx_int8", **sides(k, v)}

        def refused(message, codes=k.codes, **changes):
            with self.assertRaisesRegex(ValueError, message):
                kvonce.attend(q, codes, v.codes, **{**good, **changes})

        refused(r"k_scales: got None, allowed: an array, as k_format mlx_int8 has it", k_scales=None)
        refused(r"v_biases: got None, allowed: an array, as v_format mlx_int8 has it", v_biases=None)
        refused(r"k_biases: got shape \[2, 2, 150, 1\], allowed: \[2, 2, 150, 2\]", k_biases=k.biases[..., :1])
        refused(r"v_scales: got dtype f16, allowed: f32", v_scales=v.scales.astype("float16"))
        refused(r"k_scales: got shape \[2, 2, 150, 3\], allowed: .*128 / group size", k_scales=numpy.zeros((2, 2, 150, 3)
                                                                                                    , "float32"))
        refused(r"quant_group: got 16, allowed: 32, 64 or 128", k_scales=numpy.zeros((2, 2, 150, 8), "float32"))
        refused(r"k: got shape \[2, 2, 150, 256\], allowed: \[2, 2, 150, 128\]", k_format="mlx_int4")
        refused(r"k: got dtype float32, allowed: codes of 8 bits packed in uint32, int32 or uint8",
                codes=k.codes.view("float32"))
        refused(r"k: got a last dim of stride 2", codes=numpy.repeat(k.codes, 2, -1)[..., ::2])
        refused(r"k_format: got 'mlx_int3'", k_format="mlx_int3")
        with self.assertRaisesRegex(ValueError, r"k_scales: got an array, allowed: None with k_format f32"):
            kvonce.attend(q, k.values.astype("float32"), v.values.astype("float32"), k_scales=k.scales)
        with self.assertRaisesRegex(NotImplementedError, r"k: format q8_0 is not taken from arrays yet"):
            kvonce.attend(q, k.codes, v.codes, k_format="q8_0")
        with self.assertRaisesRegex(ValueError, r"uint32"):
            kvonce.attend(q, k.codes, v.codes)


if __name__ == "__main__":
    unittest.main()

"""kvonce.attend on NumPy arrays is attention, whatever the geometry, the lengths and the options."""
import os
import threading
import time
import unittest
import unittest.mock

import kvonce
import numpy
from oracle import TOLERANCE, attention, error, values


def tensors(num_seqs=1, num_q_heads=8, num_kv_heads=2, q_len=1, kv_len=333, head_dim=64, head_dim_v=None,
            dtype="float32"):
    return (values((num_seqs, num_q_heads, q_len, head_dim), 1, dtype),
            values((num_seqs, num_kv_heads, kv_len, head_dim), 2, dtype),
            values((num_seqs, num_kv_heads, kv_len, head_dim_v or head_dim), 3, dtype))


class AttendTest(unittest.TestCase):
    def check(self, arrays, **options):
        """Compares out and lse with the oracle's; returns out."""
        expected, expected_lse = attention(*arrays, **options)
        out, lse = kvonce.attend(*arrays, return_lse=True, **options)
        self.assertIsInstance(out, numpy.ndarray)
        self.assertEqual((out.shape, out.dtype), (expected.shape, arrays[0].dtype))
        self.assertEqual((lse.shape, lse.dtype), (expected_lse.shape, numpy.float32))
        self.assertLess(error(out, expected), TOLERANCE[out.dtype.name])
        self.assertTrue(numpy.array_equal(numpy.isinf(lse), numpy.isinf(expected_lse)))
        numpy.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
        return out

    def test_groups_and_heads(self):
        for num_q_heads, num_kv_heads in ((1, 1), (3, 1), (9, 3), (7, 7), (20, 4), (33, 3), (64, 1)):
            with self.subTest(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads):
                self.check(tensors(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads))

    def test_dtypes(self):
        for dtype in ("float32", "float16", "bfloat16"):
            for head_dim, head_dim_v in ((64, 64), (128, 128), (40, 24), (1, 1)):
                with self.subTest(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v):
                    self.check(tensors(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v))

    def test_mixed_dtypes(self):
        q, k, v = tensors(dtype="bfloat16")
        mixed = q.astype("float32"), k, values(v.shape, 4, "float16")
        self.check(mixed)
        for out_dtype in ("float32", numpy.float16, numpy.dtype("float32"), q.dtype, q.dtype.type, "f16", "bf16"):
            out = kvonce.attend(*mixed, out_dtype=out_dtype)
            self.assertLess(error(out, attention(*mixed)[0]), TOLERANCE[out.dtype.name])

    def test_several_query_tokens(self):
        for q_len in (2, 5, 64):
            for causal in (True, False):
                with self.subTest(q_len=q_len, causal=causal):
                    self.check(tensors(q_len=q_len), causal=causal)

    def test_lengths(self):
        arrays = tensors(num_seqs=5, q_len=3)
        lens, starts = [333, 0, 1, 2, 200], [0, 0, 0, 1, 77]
        for kind in (list, tuple, numpy.int32, numpy.int64):
            convert = kind if kind in (list, tuple) else lambda items, kind=kind: numpy.array(items, kind)
            with self.subTest(kind=kind):
                out = self.check(arrays, kv_lens=convert(lens), kv_starts=convert(starts))
                self.assertFalse(out[1].any())

    def test_lengths_with_strides(self):
        lens = numpy.array([300, 9, 4, 9, 0, 9], "int32")[::2]
        self.check(tensors(num_seqs=3), kv_lens=lens)

    def test_windows_and_scales(self):
        for options in ({"window": 1}, {"window": 100}, {"window": 5000}, {"scale": 0.3}, {"window": 17, "scale": 1.0},
                        {"softcap": 2.0, "scale": 1.0}):
            with self.subTest(**options):
                self.check(tensors(q_len=4, num_seqs=2), kv_lens=[333, 90], **options)
        arrays = tensors()
        self.assertTrue(numpy.array_equal(kvonce.attend(*arrays, window=None), kvonce.attend(*arrays)))

    def test_sinks(self):
        sinks = numpy.linspace(-3, 6, 8)
        for given in (sinks, sinks.astype("float32"), sinks.tolist()):
            self.check(tensors(num_seqs=2), kv_lens=[333, 0], sinks=given)

    def test_sinks_without_keys(self):
        q, k, v = tensors(kv_len=0)
        out, lse = kvonce.attend(q, k, v, sinks=[2.5] * 8, return_lse=True)
        self.assertFalse(out.any())
        self.assertTrue((lse == 2.5).all())

    def test_empty_batches(self):
        for shape in ({"num_seqs": 0}, {"q_len": 0}):
            arrays = tensors(**shape)
            self.assertEqual(kvonce.attend(*arrays).shape, arrays[0].shape)

    def test_values_that_are_the_first_dims_of_keys(self):
        q, k, _ = tensors(num_q_heads=16, num_kv_heads=1, head_dim=576, dtype="bfloat16")
        v = k[..., :512]
        out = kvonce.attend(q, k, v, v_is_k_prefix=True)
        self.assertLess(error(out, attention(q, k, v)[0]), TOLERANCE["bfloat16"])

    def test_tokens_before_heads(self):
        """The same memory in the other order gives the same bits, by a call and by a plan."""
        q, k, v = tensors(num_seqs=2, head_dim_v=40)
        turned = [numpy.ascontiguousarray(one.swapaxes(1, 2)) for one in (k, v)]
        expected = self.check((q, k, v))
        views = [one.swapaxes(1, 2) for one in turned]
        self.assertTrue(numpy.array_equal(kvonce.attend(q, *turned, kv_layout="BSHD"), kvonce.attend(q, *views)))
        self.assertLess(error(kvonce.attend(q, *turned, kv_layout="BSHD"), expected.astype("float64")), TOLERANCE["float32"])
        plan = kvonce.plan(8, 2, 64, 400, num_seqs=2, head_dim_v=40)
        self.assertTrue(numpy.array_equal(plan.attend(q, *turned, kv_layout="BSHD"), plan.attend(q, *views)))

    def test_a_growing_cache(self):
        q, k, v = tensors(num_seqs=2, kv_len=700)
        for kv_len in (*range(1, 40), *range(600, 701, 9)):
            out, lse = kvonce.attend(q, k[:, :, :kv_len], v[:, :, :kv_len], return_lse=True)
            expected, expected_lse = attention(q, k[:, :, :kv_len], v[:, :, :kv_len])
            self.assertLess(error(out, expected), TOLERANCE["float32"])
            numpy.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)

    def test_the_environment_counts_at_every_call(self):
        arrays = tensors()
        kvonce.attend(*arrays)
        for name in ("KVONCE_CPU_TARGET", "KVONCE_NUM_THREADS"):
            with unittest.mock.patch.dict(os.environ, {name: "none"}):
                with self.assertRaisesRegex(ValueError, f"^{name}: got"):
                    kvonce.attend(*arrays)
        kvonce.attend(*arrays)

    def test_threads_change_no_bit(self):
        arrays = tensors(kv_len=5000, num_q_heads=12, num_kv_heads=3)
        one = kvonce.attend(*arrays, threads=1)
        for threads in (2, 5):
            self.assertTrue(numpy.array_equal(kvonce.attend(*arrays, threads=threads), one))

    def test_every_target_of_this_machine(self):
        arrays = tensors(dtype="float16")
        usable = [device.target for device in kvonce.devices() if device.backend == "cpu" and not device.unavailable]
        self.assertIn("portable", usable)
        for target in usable:
            with self.subTest(target=target):
                out = kvonce.attend(*arrays, target=target)
                self.assertLess(error(out, attention(*arrays)[0]), TOLERANCE["float16"])

    def test_other_threads_of_python_run_meanwhile(self):
        arrays = tensors(num_q_heads=64, num_kv_heads=8, kv_len=20000, q_len=16)
        span = []

        def work():
            begin = time.perf_counter()
            kvonce.attend(*arrays, threads=1, target="portable")
            span.extend((begin, time.perf_counter()))

        worker = threading.Thread(target=work)
        worker.start()
        stamps = []
        while worker.is_alive():
            stamps.append(time.perf_counter())
            time.sleep(0.001)
        inside = [stamp for stamp in stamps if span[0] < stamp < span[1]]
        self.assertGreater(span[1] - span[0], 0.05, "too short to tell")
        gaps = [after - before for before, after in zip([span[0], *inside], [*inside, span[1]])]
        self.assertLess(max(gaps), 0.5 * (span[1] - span[0]))


if __name__ == "__main__":
    unittest.main()

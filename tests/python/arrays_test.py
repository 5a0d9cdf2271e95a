"""Arrays are used where they are, whatever their strides and whoever made them."""
import unittest

import kvonce
import numpy
from oracle import TOLERANCE, attention, error, values


class Exported:
    """An array that can do nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldExported(Exported):
    """A producer from before DLPack 1.0, which knows no max_version."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class NamespaceExported(Exported):
    """One that follows the array API standard."""

    def __array_namespace__(self):
        return numpy


class StridesTest(unittest.TestCase):
    def check(self, q, k, v, **options):
        out = kvonce.attend(q, k, v, **options)
        self.assertLess(error(out, attention(q, k, v)[0]), TOLERANCE[out.dtype.name])

    def test_tokens_before_heads(self):
        for dtype in ("float32", "bfloat16"):
            q = values((2, 3, 6, 64), 1, dtype).swapaxes(1, 2)
            k = values((2, 90, 3, 64), 2, dtype).swapaxes(1, 2)
            v = values((2, 90, 3, 64), 3, dtype).swapaxes(1, 2)
            self.check(q, k, v)

    def test_slices_of_a_longer_cache(self):
        cache = values((2, 2, 4, 500, 96), 2, "float16")
        self.check(values((2, 8, 1, 64), 1, "float16"), cache[0, :, :, 11:411, :64], cache[1, :, :, 11:411, 32:])

    def test_negative_strides(self):
        cache = values((2, 4, 100, 64), 2)
        self.check(values((2, 8, 1, 64), 1)[::-1], cache[:, :, ::-1], cache[:, ::-1])

    def test_expanded_heads(self):
        one = values((2, 1, 70, 64), 2)
        expanded = numpy.broadcast_to(one, (2, 4, 70, 64))
        self.check(values((2, 8, 1, 64), 1), expanded, expanded)

    def test_read_only_inputs(self):
        arrays = [values(shape, seed, dtype) for dtype in ("float32", "bfloat16")
                  for shape, seed in (((1, 4, 1, 64), 1), ((1, 2, 50, 64), 2), ((1, 2, 50, 64), 3))]
        for array in arrays:
            array.flags.writeable = False
        self.check(*arrays[:3])
        self.check(*arrays[3:])

    def test_a_cache_that_no_memory_could_copy(self):
        token = values((1, 1, 1, 64), 2)
        cache = numpy.broadcast_to(token, (1, 1, 1 << 30, 64))  # 256 GiB, were it copied
        out = kvonce.attend(values((1, 4, 1, 64), 1), cache, cache, kv_lens=[100], chunk_tokens=1 << 16)
        numpy.testing.assert_allclose(out, numpy.broadcast_to(token, out.shape), rtol=1e-5)


class OutTest(unittest.TestCase):
    def setUp(self):
        self.arrays = values((2, 8, 3, 64), 1), values((2, 2, 100, 64), 2), values((2, 2, 100, 40), 3)
        self.expected = attention(*self.arrays)[0]

    def test_out_is_filled_and_returned(self):
        out = numpy.full((2, 8, 3, 40), numpy.nan, "float32")
        address = out.ctypes.data
        self.assertIs(kvonce.attend(*self.arrays, out=out), out)
        self.assertEqual(out.ctypes.data, address)
        self.assertLess(error(out, self.expected), TOLERANCE["float32"])

    def test_every_element_is_written_when_no_key_is_seen(self):
        out = numpy.full((2, 8, 3, 40), numpy.nan, "float32")
        kvonce.attend(*self.arrays, kv_lens=[0, 0], out=out)
        self.assertFalse(out.any())

    def test_nothing_beside_a_strided_out_is_written(self):
        whole = numpy.full((2, 3, 9, 50), numpy.nan, "float16")
        out = whole[:, :, 1:, 5:45].swapaxes(1, 2)
        self.assertIs(kvonce.attend(*self.arrays, out=out), out)
        self.assertLess(error(out, self.expected), TOLERANCE["float16"])
        out[:] = numpy.nan
        self.assertTrue(numpy.isnan(whole).all())

    def test_out_in_bfloat16(self):
        out = numpy.zeros((2, 8, 3, 40), values((1,), 0, "bfloat16").dtype)
        self.assertIs(kvonce.attend(*self.arrays, out=out, out_dtype="bfloat16"), out)
        self.assertLess(error(out, self.expected), TOLERANCE["bfloat16"])


class DlpackTest(unittest.TestCase):
    def setUp(self):
        self.arrays = values((1, 4, 1, 64), 1), values((1, 2, 50, 64), 2), values((1, 2, 50, 64), 3)
        self.expected = kvonce.attend(*self.arrays)

    def test_a_plain_producer_gets_a_plain_producer(self):
        for kind in (Exported, OldExported):
            out, lse = kvonce.attend(*map(kind, self.arrays), return_lse=True)
            self.assertTrue(numpy.array_equal(numpy.from_dlpack(out), self.expected))
            self.assertEqual(numpy.from_dlpack(lse).shape, (1, 4, 1))

    def test_an_array_namespace_makes_the_result(self):
        out = kvonce.attend(*map(NamespaceExported, self.arrays))
        self.assertIsInstance(out, numpy.ndarray)
        self.assertTrue(numpy.array_equal(out, self.expected))

    def test_out_of_another_kind(self):
        out = numpy.full_like(self.expected, numpy.nan)
        given = Exported(out)
        self.assertIs(kvonce.attend(*map(Exported, self.arrays), out=given), given)
        self.assertTrue(numpy.array_equal(out, self.expected))

    def test_lengths_and_sinks(self):
        lens, sinks = numpy.array([20], "int64"), numpy.array([0.5, 1, 1.5, 2])
        out = kvonce.attend(*self.arrays, kv_lens=Exported(lens), sinks=Exported(sinks))
        self.assertTrue(numpy.array_equal(out, kvonce.attend(*self.arrays, kv_lens=lens, sinks=sinks)))


if __name__ == "__main__":
    unittest.main()

"""Masks and ALiBi of kvonce.attend and Plan.attend, against the oracle."""
import unittest

import kvonce
import ml_dtypes
import numpy

from oracle import TOLERANCE, attention, error, values

SHAPE = {"q": (2, 6, 3, 64), "kv": (2, 2, 150, 64)}


def tensors(dtype="float32"):
    return (values(SHAPE["q"], 1, dtype), values(SHAPE["kv"], 2, dtype), values(SHAPE["kv"], 3, dtype))


def additive(shape, dtype="float32", seed=4):
    """Every third key hidden, small numbers elsewhere."""
    mask = values(shape, seed)
    mask[..., ::3] = -numpy.inf
    return mask.astype(dtype)


class MaskTest(unittest.TestCase):
    def check(self, dtype="float32", **options):
        q, k, v = tensors(dtype)
        out, lse = kvonce.attend(q, k, v, return_lse=True, **options)
        expected, expected_lse = attention(q, k, v, **options)
        self.assertLess(error(out, expected), TOLERANCE[dtype])
        numpy.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)

    def test_every_broadcast(self):
        for shape in ((2, 6, 3, 150), (2, 1, 3, 150), (1, 6, 1, 150), (6, 3, 150), (3, 150), (150,), (2, 1, 1, 1), (1,)):
            with self.subTest(shape=shape):
                self.check(mask=values(shape, 5) > -0.5)
                self.check(mask=values(shape, 6))

    def test_kinds_and_dtypes(self):
        shown = values((3, 150), 7) > 0
        self.check(mask=shown)
        self.check(mask=shown.astype("uint8") * 255)
        for dtype in ("float32", "float16", ml_dtypes.bfloat16):
            self.check(mask=additive((2, 1, 3, 150), dtype))
        for dtype in ("float16", "bfloat16"):
            self.check(dtype, mask=additive((3, 150), "float16"))

    def test_strided_masks_are_read_where_they_are(self):
        wide = additive((3, 400))
        self.check(mask=wide[:, 50:200])
        self.check(mask=wide[:, 1:301:2])
        self.check(mask=additive((150, 3)).T)

    def test_causal_defaults_to_no_with_a_mask(self):
        q, k, v = tensors()
        everything = numpy.ones((3, 150), bool)
        numpy.testing.assert_array_equal(kvonce.attend(q, k, v, mask=everything), kvonce.attend(q, k, v, causal=False))
        numpy.testing.assert_array_equal(kvonce.attend(q, k, v, mask=everything, causal=True), kvonce.attend(q, k, v))

    def test_with_everything_else(self):
        self.check(mask=additive((2, 1, 3, 150)), causal=True, window=40, softcap=5.0, kv_lens=[150, 77],
                   kv_starts=[0, 20], sinks=numpy.linspace(-1, 1, 6), alibi_slopes=numpy.linspace(0.01, 0.3, 6))

    def test_alibi_and_mask_slopes(self):
        self.check(alibi_slopes=numpy.linspace(0.01, 0.5, 6))
        self.check(mask=additive((3, 150)), mask_slopes=numpy.linspace(0.1, 2, 6))

    def test_a_hidden_key_has_no_effect(self):
        q, k, v = tensors()
        shown = values((150,), 8) > 0
        expected = kvonce.attend(q, k, v, mask=shown)
        k[:, :, ~shown] = numpy.nan
        v[:, :, ~shown] = numpy.inf
        numpy.testing.assert_array_equal(kvonce.attend(q, k, v, mask=shown), expected)

    def test_a_row_that_sees_no_key(self):
        q, k, v = tensors()
        mask = numpy.ones((3, 150), bool)
        mask[1] = False
        out, lse = kvonce.attend(q, k, v, mask=mask, return_lse=True)
        self.assertTrue((out[:, :, 1] == 0).all() and numpy.isneginf(lse[:, :, 1]).all())
        self.assertTrue((out[:, :, 0] != 0).any())

    def test_a_plan_with_a_mask(self):
        q, k, v = tensors()
        plan = kvonce.plan(6, 2, 64, 200, num_seqs=2, q_len=3, mask="additive", mask_dtype="float16", has_alibi=True)
        mask, slopes = additive((3, 150), "float16"), numpy.linspace(0.01, 0.1, 6)
        out = plan.attend(q, k, v, mask=mask, alibi_slopes=slopes)
        self.assertLess(error(out, attention(q, k, v, mask=mask, alibi_slopes=slopes)[0]), TOLERANCE["float32"])
        with self.assertRaisesRegex(ValueError, "^mask: got additive f32, allowed: additive f16, as the plan says"):
            plan.attend(q, k, v, mask=mask.astype("float32"), alibi_slopes=slopes)
        with self.assertRaisesRegex(ValueError, "^mask"):
            plan.attend(q, k, v, alibi_slopes=slopes)
        with self.assertRaisesRegex(ValueError, "^alibi_slopes"):
            plan.attend(q, k, v, mask=mask)

    def test_what_is_refused(self):
        q, k, v = tensors()
        for given, message in ((numpy.ones((4, 150), bool), r"^mask: got shape \[4, 150\], allowed: one that broadcasts"),
                               (numpy.ones((1, 1, 1, 1, 150), bool), "^mask: got shape"),
                               (numpy.ones((3, 150), "int32"), "^mask: got dtype int32"),
                               ("causal", "^mask: got an object of type str")):
            with self.assertRaisesRegex(ValueError, message):
                kvonce.attend(q, k, v, mask=given)
        with self.assertRaisesRegex(ValueError, "mask_slopes"):
            kvonce.attend(q, k, v, mask_slopes=[1.0] * 6)
        with self.assertRaisesRegex(ValueError, "^alibi_slopes: got 5 values, allowed: 6"):
            kvonce.attend(q, k, v, alibi_slopes=[1.0] * 5)
        with self.assertRaisesRegex(ValueError, "^mask: got 'tree', allowed: boolean, additive"):
            kvonce.plan(6, 2, 64, 200, mask="tree")


if __name__ == "__main__":
    unittest.main()

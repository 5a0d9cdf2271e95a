"""Every attention node that the device claims is attention in float64, and what it does not claim is left to ggml."""
import ctypes
import itertools
import mmap
import os
import pathlib
import unittest
import unittest.mock

import numpy
from ggml_ops import BF16, F16, F32, LIBC, Q4_0, Q8_0, TYPE_NAMES, Case, error
from host import DEVICE, GGML, kvonce_ggml

# Relative RMS against float64 of the same stored bytes; the figure for f16 at 32K tokens.
TOLERANCE = 1e-5
NIGHTLY = bool(os.environ.get("KVONCE_NIGHTLY"))


def causal(q_len, n_kv, seen=None):
    """Row i of the newest q_len of `seen` cells sees the cells up to its own; cells past `seen` are padding."""
    seen = n_kv if seen is None else seen
    positions = numpy.arange(n_kv)
    return (positions <= (seen - q_len + numpy.arange(q_len))[:, None])[None, None]


def on_huge_pages():
    """Kilobytes of this process."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("AnonHugePages")).split()[1])


def linux_collapses():
    """Whether this kernel moves memory to huge pages on request (MADV_COLLAPSE, Linux 6.1)."""
    size = 1 << 21
    memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"1" * 2 * size)
    address = numpy.frombuffer(memory, dtype="uint8").ctypes.data
    return LIBC.madvise(ctypes.c_void_p(-(-address // size) * size), ctypes.c_size_t(size), 25) == 0


class AttentionOpsTest(unittest.TestCase):
    def check(self, tolerance=TOLERANCE, unread=None, **options):
        case = Case(GGML, **options)
        before = kvonce_ggml.statistics()
        got = case.run(DEVICE, unread=unread)
        self.assertIsNotNone(got, "not claimed: " + kvonce_ggml.statistics_text())
        self.assertEqual(kvonce_ggml.statistics()["ops_served"], before["ops_served"] + 1)
        self.assertLess(error(got, case.expected()), tolerance)
        return got

    def test_groups(self):
        for group in range(1, 13):
            for num_kv_heads in (1, 3):
                with self.subTest(group=group, num_kv_heads=num_kv_heads):
                    self.check(num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, dim_qk=64, n_kv=333,
                               mask=causal(1, 333, 300), seed=group)

    def test_head_dims(self):
        for dim_qk, dim_v in ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128),
                              (576, 512), (40, 40)):
            for q_len in (1, 3):
                with self.subTest(dim_qk=dim_qk, dim_v=dim_v, q_len=q_len):
                    self.check(num_q_heads=8, num_kv_heads=2, dim_qk=dim_qk, dim_v=dim_v, n_kv=300, q_len=q_len,
                               mask=causal(q_len, 300, 290))

    def test_lengths(self):
        lengths = [*range(1, 601), 4096] if NIGHTLY else [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256,
                                                          257, 383, 511, 512, 513, 599, 600, 4096]
        for n_kv in lengths:
            for q_len in (1, 2, 16):
                with self.subTest(n_kv=n_kv, q_len=q_len):
                    self.check(num_q_heads=6, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=q_len,
                               mask=causal(q_len, n_kv, max(1, n_kv - n_kv // 5)))

    def test_types_of_k_and_v(self):
        for k_type, v_type in itertools.product((F32, F16, BF16, Q8_0, Q4_0), repeat=2):
            for dim in (64, 128):
                with self.subTest(k=TYPE_NAMES[k_type], v=TYPE_NAMES[v_type], dim=dim):
                    self.check(num_q_heads=9, num_kv_heads=3, dim_qk=dim, n_kv=777, k_type=k_type, v_type=v_type, q_len=2,
                               mask=causal(2, 777, 700))

    def test_long_f16_cache(self):
        self.check(num_q_heads=8, num_kv_heads=1, dim_qk=128, n_kv=32768, mask=causal(1, 32768))

    def test_without_mask(self):
        self.check(num_q_heads=4, num_kv_heads=4, dim_qk=128, n_kv=200)

    def test_masks_with_holes(self):
        rng = numpy.random.default_rng(5)
        for n_kv, q_len, share in itertools.product((5, 300, 2048), (1, 4, 16), (0.02, 0.5, 0.98)):
            with self.subTest(n_kv=n_kv, q_len=q_len, share=share):
                mask = rng.random((1, 1, q_len, n_kv)) < share
                self.check(num_q_heads=6, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=q_len, mask=mask)

    def test_long_holes(self):
        for n_kv, begin, end in ((4096, 100, 3900), (4096, 0, 4000), (4096, 64, 4096), (9000, 4095, 8193)):
            with self.subTest(n_kv=n_kv, begin=begin, end=end):
                mask = numpy.ones((1, 1, 2, n_kv), dtype=bool)
                mask[..., begin:end] = False
                self.check(num_q_heads=6, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=2, mask=mask, poison=True)

    def test_hidden_blocks_are_not_read(self):
        """A block is a step of at most 1024 tokens; at either end it is a cell."""
        positions = numpy.arange(8192)
        for kind in (F16, Q8_0, Q4_0):
            for name, hidden, unread in (("padding", positions >= 5001, (5001, 8192)), ("window", positions < 6003, (0, 6003)),
                                         ("hole", (positions >= 1000) & (positions < 7000), (2048, 6144))):
                with self.subTest(kind=TYPE_NAMES[kind], name=name):
                    self.check(num_q_heads=6, num_kv_heads=2, dim_qk=64, n_kv=8192, k_type=kind, v_type=kind,
                               mask=~hidden[None, None, None], unread=unread)

    def test_rows_that_see_nothing(self):
        for n_kv in (1, 64, 700):
            mask = causal(4, n_kv).copy()
            mask[..., 2, :] = False
            got = self.check(num_q_heads=4, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=4, mask=mask)
            self.assertTrue((got[:, 2] == 0).all())
            mask[:] = False
            got = self.check(num_q_heads=4, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=4, mask=mask)
            self.assertTrue((got == 0).all())

    def test_sliding_window(self):
        for q_len, window in ((1, 128), (3, 128), (16, 1000), (1, 1)):
            positions = numpy.arange(3000)
            rows = (2900 - q_len + numpy.arange(q_len))[:, None]
            mask = ((positions <= rows) & (positions > rows - window))[None, None]
            with self.subTest(q_len=q_len, window=window):
                self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=3000, q_len=q_len, mask=mask, poison=True)

    def test_sinks(self):
        sinks = numpy.random.default_rng(1).standard_normal(8) * 3
        for n_kv in (1, 300, 2000):
            with self.subTest(n_kv=n_kv):
                self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=n_kv, q_len=2, sinks=sinks, mask=causal(2, n_kv))
        window = causal(1, 2000) & ~causal(1, 2000, 1872)
        self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=2000, sinks=sinks, mask=window, poison=True)
        got = self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=64, sinks=sinks,
                         mask=numpy.zeros((1, 1, 1, 64), dtype=bool))
        self.assertTrue((got == 0).all())

    def test_softcap(self):
        for softcap, scale in ((30.0, None), (2.0, 0.5), (50.0, 1.0)):
            with self.subTest(softcap=softcap, scale=scale):
                self.check(num_q_heads=8, num_kv_heads=4, dim_qk=256, n_kv=500, softcap=softcap, scale=scale, q_len=2,
                           mask=causal(2, 500, 480))

    def test_max_bias(self):
        for num_q_heads, num_kv_heads in ((8, 8), (12, 4), (71, 1), (6, 2), (1, 1)):
            positions = numpy.arange(600)
            distance = numpy.abs(positions - 590)[None, None, None].astype("float64")
            mask = numpy.where(causal(1, 600, 591), -distance, -numpy.inf)
            with self.subTest(num_q_heads=num_q_heads):
                self.check(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, dim_qk=64, n_kv=600, max_bias=8.0, mask=mask)

    def test_additive_values(self):
        mask = numpy.random.default_rng(3).standard_normal((1, 1, 5, 400)) * 4
        mask[..., 7] = -65504
        self.check(num_q_heads=6, num_kv_heads=3, dim_qk=128, n_kv=400, q_len=5, mask=mask)

    def test_mask_per_head_and_per_sequence(self):
        rng = numpy.random.default_rng(4)
        for shape in ((1, 6), (3, 1), (3, 6)):
            with self.subTest(shape=shape):
                self.check(num_q_heads=6, num_kv_heads=3, dim_qk=64, n_kv=300, q_len=2, num_seqs=3,
                           mask=rng.random((*shape, 2, 300)) < 0.6)

    def test_sequences_in_one_cache(self):
        """llama.cpp's unified cache: the sequences' tokens are rows of one node and see their own cells."""
        owner = numpy.random.default_rng(6).integers(0, 4, 900)
        mask = (owner[None, :] == numpy.arange(4)[:, None])[None, None]
        self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=900, q_len=4, mask=mask)
        owner = numpy.arange(2048) // 512
        mask = (owner[None, :] == numpy.arange(4)[:, None])[None, None]
        self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=2048, q_len=4, mask=mask)

    def test_streams(self):
        lengths = numpy.array([1, 500, 733, 260])
        mask = (numpy.arange(768)[None, :] < lengths[:, None])[:, None, None]
        self.check(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=768, num_seqs=4, mask=mask, poison=True)

    def test_nan_in_hidden_cells(self):
        for k_type in (F32, F16, BF16, Q8_0, Q4_0):
            for q_len in (1, 2):
                with self.subTest(k=TYPE_NAMES[k_type], q_len=q_len):
                    holes = causal(q_len, 1024, 801) & (numpy.arange(1024) % 7 != 3)
                    self.check(num_q_heads=9, num_kv_heads=3, dim_qk=64, n_kv=1024, q_len=q_len, k_type=k_type, v_type=k_type,
                               mask=holes, poison=True)

    def test_results_do_not_depend_on_threads(self):
        case = Case(GGML, num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=5000, mask=causal(1, 5000))
        one = case.run(DEVICE, num_threads=1)
        for num_threads in (2, 3, 7):
            self.assertTrue((case.run(DEVICE, num_threads=num_threads) == one).all())

    def test_caches_move_to_huge_pages_unless_told_not_to(self):
        case = Case(GGML, num_q_heads=8, num_kv_heads=8, dim_qk=128, n_kv=6000, mask=causal(1, 6000))
        kilobytes = {}
        for setting in ("0", "1"):
            with unittest.mock.patch.dict(os.environ, KVONCE_GGML_HUGE_PAGES=setting):
                got = case.run(DEVICE, when_computed=lambda: kilobytes.update({setting: on_huge_pages()}))
                self.assertLess(error(got, case.expected()), TOLERANCE)
        moved = kilobytes["1"] - kilobytes["0"]
        self.assertGreaterEqual(moved, 2048) if linux_collapses() else self.assertEqual(moved, 0)

    def test_not_claimed(self):
        declined = {
            "more than 16 query tokens": dict(q_len=17, mask=causal(17, 64)),
            "cache type other than": dict(k_type=3, v_type=3),  # q4_1
            "mask repeats over some of the heads": dict(mask=numpy.ones((1, 2, 1, 64), dtype=bool)),
        }
        for reason, options in declined.items():
            with self.subTest(reason=reason):
                before = kvonce_ggml.statistics()["times_declined"]
                case = Case(GGML, **{**dict(num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=64), **options})
                self.assertIsNone(case.run(DEVICE))
                self.assertEqual(kvonce_ggml.statistics()["times_declined"], before + 1)
                self.assertIn(reason, kvonce_ggml.statistics_text())

    def test_ggml_itself_agrees(self):
        """The oracle is what ggml computes too, within the f16 sums of ggml's own kernel."""
        from host import CPU
        case = Case(GGML, num_q_heads=8, num_kv_heads=2, dim_qk=64, n_kv=300, q_len=2, softcap=20.0, max_bias=8.0,
                    mask=numpy.where(causal(2, 300, 280), -1.0, -numpy.inf), sinks=numpy.arange(8) / 4)
        self.assertLess(error(case.run(CPU), case.expected()), 1e-2)


if __name__ == "__main__":
    unittest.main()

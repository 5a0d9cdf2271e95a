"""Plans that are kept, merge, explain and devices."""
import concurrent.futures
import importlib.metadata
import importlib.resources
import inspect
import os
import subprocess
import sys
import sysconfig
import pathlib
import unittest

import kvonce
import numpy
from oracle import TOLERANCE, attention, error, values


class PlanTest(unittest.TestCase):
    def test_one_plan_serves_every_length(self):
        plan = kvonce.plan(8, 2, 64, 1000, num_seqs=2, q_dtype="float16", out_dtype="float32")
        q = values((2, 8, 1, 64), 1, "float16")
        for kv_len in (0, 1, 999, 1000):
            k, v = (values((2, 2, kv_len, 64), seed, "float16") for seed in (2, 3))
            out, lse = plan.attend(q, k, v, return_lse=True)
            expected, expected_lse = attention(q, k, v)
            self.assertLess(error(out, expected), TOLERANCE["float32"])
            numpy.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)

    def test_a_cache_longer_than_the_plan_needs_lengths(self):
        plan = kvonce.plan(4, 2, 64, 100)
        q, k, v = values((1, 4, 1, 64), 1), values((1, 2, 500, 64), 2), values((1, 2, 500, 64), 3)
        out = plan.attend(q, k, v, kv_lens=[100])
        self.assertTrue(numpy.array_equal(out, plan.attend(q, k[:, :, :100], v[:, :, :100])))
        with self.assertRaisesRegex(ValueError, "^k: got kv_len 500 without kv_lens, allowed: 0 to max_kv_len = 100$"):
            plan.attend(q, k, v)
        with self.assertRaisesRegex(ValueError, r"^kv_lens\[0\]: got 101, allowed: 0 to max_kv_len = 100$"):
            plan.attend(q, k, v, kv_lens=[101])

    def test_options_of_the_plan(self):
        q, k, v = values((1, 4, 3, 64), 1), values((1, 2, 90, 64), 2), values((1, 2, 90, 32), 3)
        sinks = [0.1, 0.2, 0.3, 4.0]
        plan = kvonce.plan(4, 2, 64, 90, q_len=3, head_dim_v=32, scale=0.2, causal=False, window=40, has_sinks=True)
        out = numpy.full((1, 4, 3, 32), numpy.nan, "float32")
        self.assertIs(plan.attend(q, k, v, kv_lens=[80], kv_starts=[50], sinks=sinks, out=out), out)
        expected, _ = attention(q, k, v, scale=0.2, causal=False, window=40, kv_lens=[80], kv_starts=[50], sinks=sinks)
        self.assertLess(error(out, expected), TOLERANCE["float32"])
        with self.assertRaisesRegex(ValueError, "^sinks: got null"):
            plan.attend(q, k, v)

    def test_arrays_that_are_not_the_plans(self):
        plan = kvonce.plan(4, 2, 64, 90)
        q, k, v = values((1, 4, 1, 64), 1), values((1, 2, 90, 64), 2), values((1, 2, 90, 64), 3)
        for arrays, pattern in (((q[:, :2], k, v), r"^q: got shape \[1, 2, 1, 64\], allowed: \[1, 4, 1, 64\]$"),
                                ((q, k[0], v), r"^k: got shape \[2, 90, 64\]"),
                                ((q, k, v[0]), r"^v: got shape \[2, 90, 64\]"),
                                ((q, k.astype("float16"), v), "^k: got dtype f16, allowed: f32, as the plan says$")):
            with self.assertRaisesRegex(ValueError, pattern):
                plan.attend(*arrays)
        with self.assertRaisesRegex(ValueError, "^sinks: got a pointer"):
            plan.attend(q, k, v, sinks=[0.0] * 4)
        with self.assertRaisesRegex(ValueError, "^stream: got 0, allowed: None for CPU memory$"):
            plan.attend(q, k, v, stream=0)

    def test_several_threads_use_one_plan(self):
        plan = kvonce.plan(8, 2, 64, 3000, threads=1)
        cases = []
        for seed in range(8):
            k, v = values((1, 2, 3000, 64), seed + 10), values((1, 2, 3000, 64), seed + 20)
            arrays = values((1, 8, 1, 64), seed), k, v
            cases.append((arrays, plan.attend(*arrays)))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                results = pool.map(lambda case: plan.attend(*case[0]), cases)
                for got, (_, expected) in zip(results, cases):
                    self.assertTrue(numpy.array_equal(got, expected))

    def test_what_a_plan_tells(self):
        plan = kvonce.plan(32, 4, 128, 8192, q_dtype="float16", threads=2, policy="row_tile=4", chunk_tokens=512)
        self.assertEqual((plan.read_factor, plan.max_chunks, plan.num_threads), (1, 16, 2))
        self.assertEqual(plan.max_kv_bytes, 2 * 4 * 8192 * 128 * 2)
        self.assertGreater(plan.workspace_bytes, 0)
        self.assertIn("_r4", plan.kernel_id)
        self.assertIn(plan.target, plan.kernel_id)
        self.assertIn("row_tile=4", plan.policy)
        self.assertIn(plan.kernel_id, repr(plan))

    def test_explain(self):
        text = kvonce.explain(32, 4, 128, 8192, k_format="float16")
        self.assertEqual(text, kvonce.plan(32, 4, 128, 8192, k_format="float16").explain())
        self.assertIn("read factor", text)

    def test_devices_that_are_not_there(self):
        for name in ("cuda:x", "gpu", "cuda:", "cuda:-1", "cud"):
            with self.assertRaisesRegex(ValueError, f"^device: got '{name}', allowed: cpu, cuda, cuda:0"):
                kvonce.plan(4, 2, 64, 90, device=name)
        self.assertEqual(kvonce.plan(4, 2, 64, 90, device="cpu").device, "cpu")
        with self.assertRaisesRegex(RuntimeError, "backend cuda|ordinal: got 999"):
            kvonce.explain(4, 2, 64, 90, device="cuda:999")
        with self.assertRaisesRegex(ValueError, "^threads: got 2, allowed: None on cuda:0$"):
            kvonce.plan(4, 2, 64, 90, device="cuda", threads=2)

    def test_formats_that_are_not_served(self):
        with self.assertRaisesRegex(NotImplementedError, "f8_e4m3"):
            kvonce.plan(32, 4, 128, 8192, k_format="f8_e4m3")
        with self.assertRaisesRegex(ValueError, "^v_format: got 'q9', allowed: float32, float16, bfloat16$"):
            kvonce.plan(32, 4, 128, 8192, v_format="q9")


class MergeTest(unittest.TestCase):
    def setUp(self):
        self.q, self.k, self.v = values((2, 8, 3, 64), 1), values((2, 2, 500, 64), 2), values((2, 2, 500, 64), 3)
        parts = [kvonce.attend(self.q, self.k[:, :, begin:end], self.v[:, :, begin:end], causal=False, return_lse=True)
                 for begin, end in ((0, 100), (100, 100), (100, 350), (350, 500))]
        self.outs, self.lses = map(list, zip(*parts))
        self.expected = attention(self.q, self.k, self.v, causal=False)

    def check(self, outs, lses):
        out, lse = kvonce.merge(outs, lses)
        self.assertLess(error(out, self.expected[0]), TOLERANCE["float32"])
        numpy.testing.assert_allclose(lse, self.expected[1], rtol=1e-5, atol=1e-5)
        return out, lse

    def test_lists_and_stacked_arrays_are_the_same(self):
        out, lse = self.check(self.outs, tuple(self.lses))
        stacked = self.check(numpy.stack(self.outs), numpy.stack(self.lses))
        strided = self.check(numpy.stack(self.outs, axis=3).transpose(3, 0, 1, 2, 4), self.lses)
        for other in (stacked, strided):
            self.assertTrue(numpy.array_equal(other[0], out) and numpy.array_equal(other[1], lse))

    def test_parts_without_keys_change_nothing(self):
        out, lse = kvonce.merge(self.outs[1:2], self.lses[1:2])
        self.assertFalse(out.any())
        self.assertTrue((lse == -numpy.inf).all())

    def test_refusals(self):
        outs, lses = self.outs, self.lses
        half = outs[0].astype("float16")
        for outs, lses, pattern in (([], [], "^outs: got no part"),
                                    (outs, lses[1:], r"^lses: got 3 parts of shape \[2, 8, 3\], allowed: 4"),
                                    ([outs[0], outs[0][:1]], lses[:2], r"^outs\[1\]: got shape \[1, 8, 3, 64\]"),
                                    ([half], lses[:1], r"^outs\[0\]: got dtype f16, allowed: float32")):
            with self.assertRaisesRegex(ValueError, pattern):
                kvonce.merge(outs, lses)


class PackageTest(unittest.TestCase):
    def skip_unless_installed(self):
        if os.environ.get("KVONCE_PYTHON_PACKAGE"):
            self.skipTest("the package is that of a build folder, KVONCE_PYTHON_PACKAGE")

    def test_version(self):
        self.skip_unless_installed()
        self.assertEqual(kvonce.__version__, importlib.metadata.version("kvonce"))

    def test_devices(self):
        devices = kvonce.devices()
        self.assertIn("cpu", {device.backend for device in devices})
        usable = [device for device in devices if not device.unavailable]
        self.assertTrue(usable[0].target and usable[0].name and usable[0].num_threads > 0)
        self.assertIn(usable[0].target, repr(usable[0]))

    def test_the_command_is_installed(self):
        self.skip_unless_installed()
        command = pathlib.Path(sysconfig.get_path("scripts")) / "kvonce"
        case = "8q/2kv d64 kv=100 q=1 seqs=1"
        run = subprocess.run([command, "explain", case], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("read factor", run.stdout)

    def test_importing_needs_no_other_package(self):
        code = ("import sys; sys.modules.update(numpy=None, torch=None, ml_dtypes=None); import kvonce; "
                "print(kvonce.plan(8, 2, 64, 100).kernel_id)")
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_kernel_text_for_metal_is_in_the_package(self):
        sources = importlib.resources.files(kvonce) / "sources"
        self.assertIn("kKvLen", (sources / "metal" / "params.h").read_text())
        self.assertTrue((sources / "shared" / "partial.h").is_file())

    def test_types_and_docstrings(self):
        files = importlib.resources.files(kvonce)
        for name in ("py.typed", "__init__.pyi", "_core.pyi"):
            self.assertTrue((files / name).is_file(), name)
        stub = (files / "__init__.pyi").read_text()
        for name in kvonce.__all__:
            self.assertTrue(getattr(kvonce, name).__doc__, name)
            self.assertIn(name, stub)
        for function in (kvonce.attend, kvonce.plan):
            for parameter in inspect.signature(function).parameters:
                self.assertIn(f"{parameter}: ", stub)


if __name__ == "__main__":
    unittest.main()

"""python -m kvonce.mlx check, on the CPU and on the emulation of Metal: what it finds and what it writes."""
import contextlib
import io
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

try:
    import mlx.core as mx
except ModuleNotFoundError:
    mx = None
else:
    import emulated_metal
    from kvonce import (_mlx_calls, _mlx_check, _mlx_check_conformance, _mlx_check_models, _mlx_check_table, _mlx_cpu, _mlx_cuda,
                        _mlx_metal)
    from kvonce import mlx as kvonce_mlx

ALL_CASES = None if mx is None else _mlx_check_conformance._cases


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxCheckTest(unittest.TestCase):
    def check(self, *arguments):
        """(exit code, the JSON file, what was printed)"""
        text = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            out = pathlib.Path(folder) / "check.json"
            status = _mlx_check.main(["check", "--quick", "--out", str(out), *arguments])
            self.assertEqual([file.name for file in out.parent.iterdir()], [out.name])
            return status, json.loads(out.read_text(encoding="utf-8")), text.getvalue()

    def test_command_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-m", "kvonce.mlx", "check", "--quick", "--lens", "32"], cwd=folder,
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            result = json.loads((pathlib.Path(folder) / "kvonce-mlx-check.json").read_text(encoding="utf-8"))
        self.assertEqual((result["schema"], result["backend"], result["models"]), ("kvonce.mlx_check/1", "cpu", []))
        self.assertEqual(result["conformance"]["failed"], [])
        self.assertGreater(result["conformance"]["cases"], 50)
        self.assertEqual(result["conformance"]["stats"]["fallbacks"], {})
        self.assertEqual(result["failed"], [])
        self.assertGreaterEqual(result["finished"], result["when"])
        for name in ("os", "processor", "device", "python", "kvonce"):
            self.assertTrue(result["system"][name], name)
        self.assertNotIn("metal", json.dumps({name: part for name, part in result.items() if name != "system"}).lower())
        self.assertEqual([row["case"] for row in result["table"]], [
            "32q/4kv d128 kv=32 q=1 seqs=1 dtype=f16", "64q/8kv d64 kv=32 q=1 seqs=1 dtype=f16"])
        for row in result["table"]:
            self.assertEqual(set(row["arms"]), {"kvonce", "mx.fast", "gemv", "qmv"})
            self.assertEqual(row["stats"], {"served": 8, "kernels": {"cpu": 8}, "fallbacks": {}})  # 2 calls, 3 repeats and a first
            for arm in row["arms"].values():
                self.assertAlmostEqual(arm["gbps"], row["kv_bytes"] / arm["us_median"] / 1e3)

    def test_command_on_emulated_metal(self):
        """Every body, few of the cases."""
        host = emulated_metal.Host()

        def few(quick):
            return itertools.islice(ALL_CASES(quick), 3, 7)

        with host.in_use(), unittest.mock.patch.object(_mlx_check_conformance, "_cases", few), \
                unittest.mock.patch.object(_mlx_check_table, "GEOMETRIES", [(8, 2, 64)] * 3):
            status, result, text = self.check("--lens", "32")
        self.assertEqual(status, 0, text)
        self.assertEqual(result["backend"], "metal")
        self.assertEqual(result["conformance"]["cases"], 4 * 4 + 12)
        for row in result["table"]:
            self.assertEqual(set(row["arms"]), {"kvonce", "mx.fast", "gemv", "qmv", "vector", "matrix", "per_head"})
            self.assertEqual(row["plan"]["read_factor"], 1)

    def test_wrong_results_are_found(self):
        right = kvonce_mlx.scaled_dot_product_attention

        def wrong(q, k, v, **options):
            return right(q, k[:, :, :-1], v[:, :, :-1], scale=options["scale"]) if k.shape[2] == 33 else right(q, k, v, **options)

        with unittest.mock.patch.object(kvonce_mlx, "scaled_dot_product_attention", wrong):
            status, result, text = self.check("--lens", "16")
        self.assertEqual(status, 1)
        self.assertEqual(len(result["conformance"]["failed"]), 1)
        self.assertIn("kv=33", result["conformance"]["failed"][0])
        self.assertIn("failed: kvonce, lengths", text)

    def test_calls_of_the_table_that_went_to_mlx(self):
        """They are MLX's, whatever the arm's name."""
        def falls_back(*_arguments, **_options):
            raise _mlx_calls.Fallback("a test")

        with unittest.mock.patch.object(_mlx_check_conformance, "run", lambda *_: {"cases": 0, "failed": []}), \
                unittest.mock.patch.object(_mlx_cpu, "attend", falls_back):
            status, result, text = self.check("--lens", "16")
        self.assertEqual(status, 1)
        self.assertEqual(len(result["failed"]), 2)
        self.assertIn("8 calls went to MLX: a test", text)

    def test_the_name_of_the_backend(self):
        self.assertEqual(_mlx_check.backend_name(), "cpu")
        for module, name in ((_mlx_metal, "metal"), (_mlx_cuda, "cuda")):
            with unittest.mock.patch.object(_mlx_calls, "backend_of", lambda stream, module=module: module):
                self.assertEqual(_mlx_check.backend_name(), name)

    def test_a_model_that_breaks(self):
        with unittest.mock.patch.object(_mlx_check_models, "_measure", side_effect=RuntimeError("out of memory")):
            status, result, _ = self.check("--lens", "16", "--models", "some/model")
        self.assertEqual(status, 1)
        self.assertEqual(result["models"], [{"model": "some/model", "error": "RuntimeError: out of memory"}])
        self.assertEqual(result["failed"], ["some/model: RuntimeError: out of memory"])

    def test_a_model_that_is_not_there(self):
        status, result, text = self.check("--lens", "16", "--models", "/no/such/model")
        self.assertEqual(status, 1)
        self.assertIn("error", result["models"][0])
        self.assertIn("/no/such/model", text)


if __name__ == "__main__":
    unittest.main()

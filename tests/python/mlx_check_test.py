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
    from kvonce import _mlx_check, _mlx_check_conformance, _mlx_check_table
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
        self.assertEqual([row["case"] for row in result["table"]], [
            "32q/4kv d128 kv=32 q=1 seqs=1 dtype=f16", "64q/8kv d64 kv=32 q=1 seqs=1 dtype=f16"])
        for row in result["table"]:
            self.assertEqual(set(row["arms"]), {"kvonce", "mx.fast", "gemv", "qmv"})
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

    def test_a_model_that_is_not_there(self):
        status, result, text = self.check("--lens", "16", "--models", "/no/such/model")
        self.assertEqual(status, 1)
        self.assertIn("error", result["models"][0])
        self.assertIn("/no/such/model", text)


if __name__ == "__main__":
    unittest.main()

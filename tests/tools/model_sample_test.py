"""A real model's attention (tests/data) through the command, against the oracle and the model's own output.

Usage: model_sample_test.py KVONCE REPOSITORY
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from kvonce_command import kvonce

REPOSITORY = pathlib.Path(sys.argv.pop(1))
SAMPLES = sorted((REPOSITORY / "tests" / "data").glob("smollm2_layer*.safetensors"))
# K and V of the samples are rounded to f16, the model's own are not.
MAX_MODEL_ERROR = 2e-3


class ModelSampleTest(unittest.TestCase):
    def test_samples_are_there_and_small(self):
        self.assertGreaterEqual(len(SAMPLES), 1)
        self.assertLess(sum(path.stat().st_size for path in SAMPLES), 1_000_000)

    def test_oracle_and_model_agree_on_every_usable_target(self):
        devices = json.loads(kvonce("devices", "--format", "json").stdout)["devices"]
        targets = [device["target"] for device in devices if device["backend"] == "cpu" and device["usable"]]
        self.assertIn("portable", targets)
        for sample in SAMPLES:
            for target in targets:
                with self.subTest(sample=sample.name, target=target), tempfile.TemporaryDirectory() as folder:
                    out = pathlib.Path(folder) / "out.safetensors"
                    result = kvonce("run", "--input", sample, "--out", out, "--lse", "--check", "--target", target,
                                    "--format", "json")
                    self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
                    (row,) = json.loads(result.stdout)
                    self.assertLessEqual(row["rel_rms_error"], 1e-5)
                    self.assertIn(target, row["kernel"])
                    compared = subprocess.run(
                        [sys.executable, REPOSITORY / "examples" / "capture_model_kv.py", "--compare", sample, out,
                         "--max-error", str(MAX_MODEL_ERROR)], text=True, capture_output=True)
                    self.assertEqual(compared.returncode, 0, compared.stdout + compared.stderr)


if __name__ == "__main__":
    unittest.main()

"""kvonce explain --backend metal from outside: plans for an Apple GPU that is not here.

Usage: explain_apple_test.py KVONCE [unittest arguments]
"""

import json
import unittest

from kvonce_command import kvonce

CASE = "32q/4kv d128 kv=32768 dtype=f16"


class ExplainMetalTest(unittest.TestCase):
    def explain(self, *arguments):
        result = kvonce("explain", CASE, "--backend", "metal", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def assert_error(self, result, exit_code, *named):
        self.assertEqual((result.returncode, result.stdout), (exit_code, ""), result.stderr)
        for word in named:
            self.assertIn(word, result.stderr)

    def test_a_described_gpu_is_planned_for(self):
        text = self.explain("--target", "apple10", "--cores", 20)
        for pattern in (r"device +metal apple10, 20 cores\n", r"kernel +attend_metal_matrix_f16_d128x128_r8\n",
                        r"read factor +1\n", r"chunks +up to \d+ of \d+ tokens", r"workspace +[0-9.]+ KB\n",
                        r"rejected +attend_metal_vector_f16_d128x128_r4: estimated cost",
                        r"rejected +attend_metal_per_head_f16_d128x128_r1: the baseline"):
            self.assertRegex(text, pattern)

    def test_the_time_is_labelled_a_prediction(self):
        self.assertRegex(self.explain(), r"prediction +[0-9.]+ us; a model .* never measured")
        self.assertNotIn("time at read", self.explain())

    def test_the_policy_reaches_the_plan(self):
        self.assertRegex(self.explain("--policy", "body=3"), r"read factor +8\n")
        self.assertRegex(self.explain("--policy", "splits=7"), r"chunks +up to 7 of 4682 tokens")

    def test_refusals(self):
        for arguments, words in ((("--target", "M5"), ("target", "'M5'", "apple7")), (("--threads", 2), ("--threads",)),
                                 (("--cores", 0), ("--cores",)), (("--policy", "row_tile=3"), ("policy.row_tile: got 3",)),
                                 (("--policy", "cluster=1"), ("policy.cluster", "metal"))):
            self.assert_error(kvonce("explain", CASE, "--backend", "metal", *arguments), 2, *words)
        self.assert_error(kvonce("explain", CASE, "--cores", 20), 2, "--cores")
        self.assert_error(kvonce("explain", "8q/8kv d576x512 kv=9", "--backend", "metal"), 3, "head_dim_qk 576")
        self.assert_error(kvonce("explain", CASE + " layout=nhd", "--backend", "metal", "--dtype", "f32", "--q-dtype", "f32"),
                          3, "q_dtype f32 with k_format f16")

    def test_devices_says_who_launches(self):
        devices = json.loads(kvonce("devices", "--format", "json").stdout)["devices"]
        (metal,) = (device for device in devices if device["backend"] == "metal")
        self.assertFalse(metal["usable"])
        self.assertIn("no Metal runtime", metal["why_missing"])
        self.assertIn("kvonce.mlx", metal["why_missing"])


if __name__ == "__main__":
    unittest.main()

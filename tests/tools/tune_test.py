"""kvonce tune and policy files from outside: the table, the file it writes, what loads it, and every refusal.

Usage: tune_test.py KVONCE [unittest arguments]
"""

import json
import pathlib
import re
import tempfile
import unittest

from kvonce_command import kvonce

CASES = ("4q/2kv d64 kv=96", "4q/2kv d64 kv=200 q=2", "6q/6kv d48 kv=64 dtype=bf16")


class TuneTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        cls.policy = cls.root / "tiny.policy"
        cases = [word for case in CASES for word in ("--case", case)]
        # A file that would make every candidate equal to the built-in choice, were it not left out of the comparison.
        (cls.root / "other").write_text("kvonce.policy/1\nany: chunk_tokens=64\n", encoding="utf-8")
        cls.result = kvonce("tune", "--seconds", "0.3", "--dtype", "f16", "--threads", "2", *cases, "--out", cls.policy,
                            "--format", "json", KVONCE_POLICY=str(cls.root / "other"))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def rows(self):
        self.assertEqual(self.result.returncode, 0, self.result.stderr)
        return json.loads(self.result.stdout)

    def test_every_tunable_is_measured_alone(self):
        rows = self.rows()
        titles = {row["cases"] for row in rows}
        self.assertEqual(titles, {"f16 4q/2kv d64 kv=96 q=1 seqs=1; 4q/2kv d64 kv=200 q=2 seqs=1",
                                  "bf16 6q/6kv d48 kv=64 q=1 seqs=1"})
        for title in titles:
            alone = [row for row in rows if row["cases"] == title and row["measured"] == "alone"]
            tunables = {row["candidate"].split("=")[0] for row in alone}
            self.assertLessEqual({"chunk_tokens", "step_tokens", "prefetch_tokens", "prefetch_lines",
                                  "prefetch_level"}, tunables)
            self.assertEqual("row_tile" in tunables, title.startswith("f16"), "one row has one tile")
            self.assertNotIn("chunk_tokens=128", {row["candidate"] for row in alone}, "twice 64, of KVONCE_POLICY")
            for row in alone:
                self.assertGreater(row["ratio"], 0.01)
                self.assertEqual(len(row["quarters"].split()), 4)

    def test_a_kept_candidate_won_twice(self):
        for row in self.rows():
            quarters = [float(quarter) for quarter in row["quarters"].split()]
            if row["verdict"] in ("kept", "measured again"):
                self.assertGreaterEqual(row["ratio"], 1.03)
                self.assertGreaterEqual(sum(quarter >= 1.025 for quarter in quarters), 3)

    def test_the_file_says_how_it_came_about(self):
        self.rows()
        lines = self.policy.read_text(encoding="utf-8").splitlines()
        self.assertEqual(lines[0], "kvonce.policy/1")
        self.assertRegex(lines[1], r"kvonce \d+\.\d+\.\d+ on \d{4}-\d\d-\d\d \d\d:\d\d UTC: kvonce tune --seconds 0.3 .*"
                                   r'--case "4q/2kv d64 kv=96"')
        self.assertIn("2 threads", lines[2])
        kept = sum(row["verdict"] == "kept" for row in self.rows())
        rules = [line for line in lines[1:] if line and not line.startswith("#")]
        self.assertEqual(len(rules), kept)
        for rule in rules:
            self.assertRegex(rule, r"^target=\w+ (q=\w+ )?k=(f16 v=f16 rows=2..4 dims=64|bf16 v=bf16 rows=1 dims=48): \w+=")
        self.assertEqual(sum(bool(re.search(r"built-in choice stays", line)) for line in lines), 2 - kept)

    def test_the_file_loads(self):
        self.rows()
        case = "4q/2kv d64 kv=96 dtype=f16"
        for arguments, environment in ((["--policy", self.policy], {}), ([], {"KVONCE_POLICY": str(self.policy)})):
            result = kvonce("explain", case, *arguments, **environment)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(str(self.policy), result.stdout)
        result = kvonce("bench", "--case", case, "--rounds", "1", "--arms", "kvonce", "--policy", self.policy)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_refusals(self):
        for arguments, named in ((["--dtype", "q8_0"], "--dtype"), (["--case", "4q/2kv d64 kv=x"], "kv=x"),
                                 (["--case", "4q/2kv d64 kv=0"], "kv="), (["--seconds", "0"], "--seconds"),
                                 (["--quick", "--seconds", "1"], "--seconds"), (["--threads", "0"], "--threads"),
                                 (["--out", self.root], "--out"), (["--policy", "row_tile=1"], "--policy")):
            result = kvonce("tune", *arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(named, result.stderr)
            self.assertEqual(result.stderr.count("\n"), 1)


class PolicyFileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def assert_error(self, result, exit_code, *parts):
        self.assertEqual(result.returncode, exit_code, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def explain_policy(self, *arguments, **environment):
        """The policy line of `kvonce explain` as a dict, and the whole text."""
        result = kvonce("explain", "32q/4kv d128 kv=32768 dtype=bf16", "--target", "portable", *arguments, **environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        line = next(line for line in result.stdout.splitlines() if line.startswith("policy "))
        return dict(item.split("=") for item in line.split()[1].split(",")), result.stdout

    def test_policy_from_text_from_a_file_and_from_the_environment(self):
        policy = self.root / "policy"
        policy.write_text("kvonce.policy/1\n# two rows\nk=f16: row_tile=1\nk=bf16 rows=8: row_tile=2,chunk_tokens=640\n")
        for arguments, environment in ((["--policy", "row_tile=2,chunk_tokens=640"], {}), (["--policy", policy], {}),
                                       (["--policy", f"@{policy}"], {}), ([], {"KVONCE_POLICY": str(policy)})):
            chosen, text = self.explain_policy(*arguments, **environment)
            self.assertEqual((chosen["row_tile"], chosen["chunk_tokens"]), ("2", "640"))
            self.assertIn("_d128x128_r2", text)
            self.assertEqual(f"{policy}:4: row_tile, chunk_tokens" in text, arguments[1:] != ["row_tile=2,chunk_tokens=640"])
        chosen, text = self.explain_policy("--policy", "row_tile=3", KVONCE_POLICY=str(policy))
        self.assertEqual((chosen["row_tile"], chosen["chunk_tokens"]), ("3", "640"))
        self.assertIn("the caller: row_tile;", text)
        other = self.root / "other"
        other.write_text("kvonce.policy/1\n")
        chosen, text = self.explain_policy("--policy", other, KVONCE_POLICY=str(policy))
        self.assertNotEqual(chosen["chunk_tokens"], "640")
        self.assertIn(f"no rule of {other} applies", text)

    def test_bad_policy_files_name_file_and_line(self):
        policy = self.root / "policy"
        policy.write_text("kvonce.policy/1\nk=f17: row_tile=2\n")
        case = "32q/4kv d128 kv=8"
        self.assert_error(kvonce("explain", case, "--policy", policy), 2, "--policy", f"{policy}:2", "k=f17", "q8_0")
        self.assert_error(kvonce("explain", case, KVONCE_POLICY=str(policy)), 2, "KVONCE_POLICY", f"{policy}:2")
        self.assert_error(kvonce("explain", case, "--policy", f"{policy}="), 2, "--policy")
        self.assert_error(kvonce("check", "--quick", "--policy", policy), 2, "--policy", f"{policy}:2")
        self.assert_error(kvonce("check", "--quick", "--policy", "row_tile=4"), 2, "--policy", "row_tile=4")
        policy.write_text("kvonce.policy/1\nany: row_tile=100\n")
        self.assert_error(kvonce("explain", case, "--policy", policy), 2, f"{policy}:2", "row_tile", "100")


if __name__ == "__main__":
    unittest.main()

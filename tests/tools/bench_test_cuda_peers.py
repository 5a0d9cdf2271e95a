"""bench/peers/cuda_peers.py on a machine without torch or a device, and the tables of its files.

Usage: bench_test_cuda_peers.py KVONCE [unittest arguments] (the command is not used)
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
SCRIPT = BENCH / "peers" / "cuda_peers.py"
WITHOUT_TORCH = """
import runpy, sys
sys.modules['torch'] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def run_script(*arguments):
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, SCRIPT, *arguments], capture_output=True, text=True,
                          check=False)


class CommandTest(unittest.TestCase):
    def test_help_needs_no_torch(self):
        run = run_script("--help")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertIn("--chain", run.stdout)

    def test_without_torch_the_exit_code_is_3(self):
        run = run_script("--out", "unused.json")
        self.assertEqual(run.returncode, 3)
        self.assertIn("torch", run.stderr)

    def test_a_case_that_is_not_served_is_named(self):
        run = run_script("--out", "unused.json", "--case", "8q/2kv d64 kv=256 seqs=8")
        self.assertEqual(run.returncode, 2)
        self.assertIn("seqs=8", run.stderr)


def row(arm, us, kv_len=2048, mode="isolated", **more):
    return {"case": f"kv={kv_len}", "num_q_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "kv_len": kv_len, "mode": mode,
            "arm": arm, "us_median": us, "kv_bytes": 4096 * kv_len, **more}


def added(arm, plain, late, early, **more):
    return [row(arm, us, mode="chain", neighbours=form, isolated_us_median=8.0, **more)
            for form, us in (("plain", plain), ("late", late), ("early", early)) if us]


def table(rows, failed=()):
    device = {"name": "gpu", "cuda_target": "sm_90", "num_sms": 132}
    result = {"device": device, "versions": {"torch": "2"}, "rows": rows, "failed": list(failed)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "peers.json"
        path.write_text(json.dumps(result), encoding="utf-8")
        run = subprocess.run([sys.executable, BENCH / "table.py", "--cuda-peers", path], capture_output=True, text=True,
                             check=False)
    if run.returncode != 0:
        raise AssertionError(run.stderr)
    return run.stdout.splitlines()


class TableTest(unittest.TestCase):
    def test_the_best_peer_is_compared_with_kvonce(self):
        lines = table([row("read", 3), row("kvonce", 4), row("a 1", 6), row("b 1", 5),
                       row("kvonce", 8, 8192), row("b 1", 6, 8192)])
        self.assertIn("| 32q/8kv d128 | 2048 | 3.00 | 4.00 | 6.00 | 5.00 | b 1 | 1.25x |", lines)
        self.assertIn("| 32q/8kv d128 | 8192 | - | 8.00 | - | 6.00 | b 1 | **0.75x** |", lines)
        self.assertEqual(lines[-1], "peer leads on 1 of 2 rows")

    def test_failures_of_a_kind_are_one_line(self):
        failed = [{"case": f"kv={n}", "arm": "a 1", "kernel": "x", "message": f"ArithmeticError: wrong by {n}"} for n in (1, 2)]
        self.assertIn("failed: a 1 x: ArithmeticError: wrong by 1 (kv=1; 2 in all)", table([row("kvonce", 4)], failed))
        self.assertEqual(table([row("kvonce", 4)], failed)[-1], "peer leads on 0 of 0 rows")

    def test_in_a_chain_early_is_held_against_a_peers_best_neighbours(self):
        rows = added("kvonce", 8, 7, 6) + added("a 1", 9, 5, 7)  # 8.4 MB: at least 60 % under
        lines = table(rows + added("kvonce_early", 8.1, 8.2, 2))
        self.assertIn("| 32q/8kv d128 | 2048 | 8.4 | 8.00 | 6.00 | 2.00 | 5.00 | a 1 | 60 % | 60 % | 1.02 |", lines)
        self.assertEqual(lines[-1], "kvonce_early short of its goal on 0 of 1 rows; peer leads on 0 of 1 rows")
        lines = table(rows + added("kvonce_early", 8.1, 8.2, 5.5))
        self.assertIn("**-10 %** | 60 % |", "\n".join(lines))
        self.assertEqual(lines[-1], "kvonce_early short of its goal on 1 of 1 rows; peer leads on 1 of 1 rows")

    def test_a_chain_may_lack_an_arm(self):
        lines = table(added("kvonce", 8, 7, 6) + added("a 1", None, None, 7))
        self.assertIn("| 32q/8kv d128 | 2048 | 8.4 | 8.00 | 6.00 | - | 7.00 | a 1 | - | 60 % | - |", lines)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.pop(1)
    unittest.main()

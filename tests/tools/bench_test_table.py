"""bench/table.py: --peers, which cells it prints and which it marks as short of the goal; --times.

Usage: bench_test_table.py KVONCE [unittest arguments] (the command is not used)
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TABLE = pathlib.Path(__file__).resolve().parents[2] / "bench" / "table.py"


def rows(num_q_heads, num_kv_heads, **us_of_arm):
    """One case of 1 MB, so that GB/s are 1000 / us; a keyword is an arm, with _ for a blank."""
    return [{"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim_qk": 128, "kv_len": 2048,
             "kv_dtype": "f16", "arm": arm.replace("_", " "), "us_median": us, "gbps": 1000 / us}
            for arm, us in us_of_arm.items()]


def table(*cases, option="--peers", device=None):
    device = device or {"name": "cpu", "cpu_target": "avx2", "threads": 2}
    result = {"device": device, "rows": [row for case in cases for row in case]}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "peers.json"
        path.write_text(json.dumps(result), encoding="utf-8")
        run = subprocess.run([sys.executable, TABLE, option, path], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(run.stderr)
    return run.stdout


class PeersTableTest(unittest.TestCase):
    def test_ratio_is_the_peers_time_over_kvonces(self):
        self.assertIn("| 8q/4kv d128 | 2048 | 12.5 | 10.0 | 4.0 (2.50x) |",
                      table(rows(8, 4, read=80, kvonce=100, torch_1=250)))

    def test_a_peer_may_lack_a_case(self):
        text = table(rows(8, 4, read=80, kvonce=100, torch=200), rows(8, 2, read=80, kvonce=100))
        self.assertIn("| 8q/2kv d128 | 2048 | 12.5 | 10.0 | - |", text)
        self.assertIn("0 of 1 comparisons short", text)

    def test_group_1_may_be_three_percent_behind(self):
        text = table(rows(8, 8, read=80, kvonce=100, torch_1=97, ggml_2=96))
        self.assertIn("| 10.3 (0.97x) | **10.4 (0.96x)** |", text)
        self.assertIn("1 of 2 comparisons short", text)

    def test_llama_cpp_must_be_beaten_twice_over_from_group_4(self):
        for us, num_kv_heads, short in ((199, 2, 1), (200, 2, 0), (199, 4, 0), (99, 4, 1)):
            case = rows(8, num_kv_heads, **{"read": 80, "kvonce": 100, "llama.cpp_1": us})
            self.assertIn(f"{short} of 1 comparisons short", table(case))


class TimesTableTest(unittest.TestCase):
    def test_kvonce_is_compared_with_read_and_floor(self):
        device = {"name": "gpu", "cuda_target": "sm_90", "num_sms": 132}
        text = table(rows(8, 4, kvonce=3, read=2, floor=2.5), rows(8, 2, kvonce=4, read=2), option="--times", device=device)
        self.assertIn("gpu, sm_90, 132 SMs, f16, us", text)
        self.assertIn("| geometry | kv_len | read | floor | kvonce | kvonce / read | kvonce / floor |", text)
        self.assertIn("| 8q/4kv d128 | 2048 | 2.00 | 2.50 | 3.00 | 1.50 | 1.20 |", text)
        self.assertIn("| 8q/2kv d128 | 2048 | 2.00 | - | 4.00 | 2.00 | - |", text)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.pop(1)
    unittest.main()

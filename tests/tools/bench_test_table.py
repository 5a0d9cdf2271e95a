"""bench/table.py: --peers, which cells it prints and which it marks as short of the goal; --times; --chain.

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


    def test_a_plan_for_longer_caches_is_compared_with_one_for_the_length(self):
        device = {"name": "gpu", "cuda_target": "sm_90", "num_sms": 132}
        (row,) = rows(8, 4, kvonce=3)
        case = [row, {**row, "arm": "kvonce_lens", "us_median": 4}, {**row, "arm": "kvonce_planned", "us_median": 4.4}]
        text = table(case, option="--times", device=device)
        self.assertIn("| kvonce / read | kvonce / floor | kvonce_planned / kvonce_lens |", text)
        self.assertIn("| 3.00 | 4.00 | 4.40 | - | - | 1.10 |", text)


class ChainTableTest(unittest.TestCase):
    def test_arms_and_forms_are_columns_and_rows_of_other_modes_are_left_out(self):
        device = {"name": "gpu", "cuda_target": "sm_90", "num_sms": 132}
        (isolated,) = rows(8, 4, kvonce=9)
        base = {**isolated, "mode": "chain", "kv_bytes": 4 << 20}
        case = [{**isolated, "mode": "isolated"},
                {**base, "neighbours": "plain", "us_median": 5, "isolated_us_median": 4},
                {**base, "arm": "kvonce_early", "neighbours": "early", "us_median": 3, "isolated_us_median": 4}]
        peer = [{**base, "arm": "torch 2", "num_kv_heads": 2, "neighbours": "plain", "us_median": 8}]
        text = table(case, peer, option="--chain", device=device)
        self.assertIn("| geometry | kv_len | dtype | KV MB | kvonce plain | kvonce_early early | torch 2 plain |", text)
        self.assertIn("| 8q/4kv d128 | 2048 | f16 | 4.2 | 5.00 (1.25x) | 3.00 (0.75x) | - |", text)
        self.assertIn("| 8q/2kv d128 | 2048 | f16 | 4.2 | - | - | 8.00 |", text)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.pop(1)
    unittest.main()

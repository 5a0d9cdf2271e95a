#!/usr/bin/env python3
"""Markdown tables from `kvonce bench --out FILE` results.

usage: bench/table.py [--arms] FILE...

Default: one row per case, one column per file, kvonce's ratio_to_roof (and its GB/s).
--arms:  one row per case of one file, GB/s of every arm and kvonce's speed-up over per_head.
"""
import argparse
import json
import pathlib


def load(path):
    result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    cases = {}
    for row in result["rows"]:
        name = "{num_q_heads}q/{num_kv_heads}kv d{head_dim_qk}".format(**row)
        cases.setdefault((name, row["kv_len"]), {})[row["arm"]] = row
    return result["device"], cases


def print_row(cells):
    print("| " + " | ".join(cells) + " |")


def print_arms(path):
    _, cases = load(path)
    print_row(["geometry", "kv_len", "read", "qmv", "per_head", "kvonce", "kvonce / per_head", "of the roof"])
    print("|---|---" + "|---:" * 6 + "|")
    for (name, kv_len), arms in cases.items():
        speed_up = arms["per_head"]["us_median"] / arms["kvonce"]["us_median"]
        print_row([name, str(kv_len)] + [f"{arms[arm]['gbps']:.1f}" for arm in ("read", "qmv", "per_head")] +
                  [f"**{arms['kvonce']['gbps']:.1f}**", f"{speed_up:.2f}x", f"{arms['kvonce']['ratio_to_roof']:.2f}"])


def print_ratios(paths):
    loaded = [load(path) for path in paths]
    heads = []
    for device, cases in loaded:
        dtype = next(iter(cases.values()))["kvonce"]["kv_dtype"]
        heads.append(f"{device['cpu_target']} {dtype} x{device['threads']}")
    print_row(["geometry", "kv_len"] + heads)
    print("|---|---" + "|---:" * len(loaded) + "|")
    for name, kv_len in loaded[0][1]:
        cells = []
        for _, cases in loaded:
            row = cases[(name, kv_len)]["kvonce"]
            cells.append(f"{row['ratio_to_roof']:.2f} ({row['gbps']:.0f})")
        print_row([name, str(kv_len)] + cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="store_true", help="GB/s of every arm of one result")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    if options.arms:
        for path in options.files:
            print_arms(path)
    else:
        print_ratios(options.files)


if __name__ == "__main__":
    main()

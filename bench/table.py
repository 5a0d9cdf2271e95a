#!/usr/bin/env python3
"""Markdown tables from `kvonce bench --out FILE` results.

usage: bench/table.py [--arms | --times | --peers] FILE...

Default: one row per case, one column per file, kvonce's ratio_to_roof (and its GB/s).
--arms:  one row per case of one file, GB/s of every arm and kvonce's speed-up over per_head.
--times: one row per case of each file, microseconds of every arm and kvonce's time over that of read and of floor: for CUDA.
--peers: for results of bench/peers: one row per case of each file, GB/s of read and kvonce, then for each peer its GB/s
         and how many times as fast kvonce is; bold where that is short of the goal.
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


def describe(device):
    if "cuda_target" in device:
        return f"{device['name']}, {device['cuda_target']}, {device['num_sms']} SMs"
    return f"{device['name']}, {device['cpu_target']}, {device['threads']} threads"


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


def print_times(path):
    device, cases = load(path)
    dtype = next(iter(next(iter(cases.values())).values()))["kv_dtype"]
    names = [arm for arm in ("read", "floor", "kvonce", "per_head", "qmv") if any(arm in arms for arms in cases.values())]
    print(f"{describe(device)}, {dtype}, us\n")
    print_row(["geometry", "kv_len"] + names + ["kvonce / read", "kvonce / floor"])
    print("|---|---" + "|---:" * (len(names) + 2) + "|")
    for (name, kv_len), arms in cases.items():
        cells = [f"{arms[arm]['us_median']:.2f}" if arm in arms else "-" for arm in names]
        for other in ("read", "floor"):
            both = other in arms and "kvonce" in arms
            cells.append(f"{arms['kvonce']['us_median'] / arms[other]['us_median']:.2f}" if both else "-")
        print_row([name, str(kv_len)] + cells)
    print()


def print_ratios(paths):
    loaded = [load(path) for path in paths]
    heads = []
    for device, cases in loaded:
        dtype = next(iter(cases.values()))["kvonce"]["kv_dtype"]
        heads.append(f"{device['cuda_target']} {dtype}" if "cuda_target" in device
                     else f"{device['cpu_target']} {dtype} x{device['threads']}")
    print_row(["geometry", "kv_len"] + heads)
    print("|---|---" + "|---:" * len(loaded) + "|")
    for name, kv_len in loaded[0][1]:
        cells = []
        for _, cases in loaded:
            row = cases[(name, kv_len)]["kvonce"]
            cells.append(f"{row['ratio_to_roof']:.2f} ({row['gbps']:.0f})")
        print_row([name, str(kv_len)] + cells)


def goal(row, arm):
    """What kvonce's speed divided by the peer's must reach: parity within noise at group 1, ahead elsewhere."""
    group_size = row["num_q_heads"] // row["num_kv_heads"]
    if group_size == 1:
        return 0.97
    return 2.0 if group_size >= 4 and arm.startswith("llama.cpp") else 1.0


def print_peers(path):
    device, cases = load(path)
    peers = []
    for arms in cases.values():
        peers += [arm for arm in arms if arm not in ("kvonce", "read") and arm not in peers]
    dtype = next(iter(cases.values()))["kvonce"]["kv_dtype"]
    print(f"{device['name']}, {device['cpu_target']}, {dtype}, {device['threads']} threads\n")
    print_row(["geometry", "kv_len", "read", "kvonce"] + peers)
    print("|---|---" + "|---:" * (2 + len(peers)) + "|")
    short = []
    for (name, kv_len), arms in cases.items():
        cells = [f"{arms[arm]['gbps']:.1f}" for arm in ("read", "kvonce")]
        for peer in peers:
            if peer not in arms:
                cells.append("-")
                continue
            ratio = arms[peer]["us_median"] / arms["kvonce"]["us_median"]
            text = f"{arms[peer]['gbps']:.1f} ({ratio:.2f}x)"
            if ratio < goal(arms[peer], peer):
                short.append((name, kv_len, peer))
                text = f"**{text}**"
            cells.append(text)
        print_row([name, str(kv_len)] + cells)
    print(f"\n{len(short)} of {sum(len(arms) - 2 for arms in cases.values())} comparisons short of the goal.\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="store_true", help="GB/s of every arm of one result")
    parser.add_argument("--times", action="store_true", help="microseconds of every arm, for CUDA")
    parser.add_argument("--peers", action="store_true", help="kvonce beside other libraries")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    if options.peers:
        for path in options.files:
            print_peers(path)
    elif options.times:
        for path in options.files:
            print_times(path)
    elif options.arms:
        for path in options.files:
            print_arms(path)
    else:
        print_ratios(options.files)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Markdown tables from `kvonce bench --out FILE` results.

usage: bench/table.py [--arms | --times | --chain | --peers | --cuda-peers] FILE...

Default: one row per case, one column per file, kvonce's ratio_to_roof (and its GB/s).
--arms:  one row per case of one file, GB/s of every arm and kvonce's speed-up over per_head.
--times: one row per case of each file, microseconds of every arm and kvonce's time over that of read and of floor: for CUDA.
--chain: for results of `kvonce bench --chain` and of scripts that give peers the same chain: one row per case, a column per
         arm and form of the neighbours, the microseconds that attention adds and that over its isolated time.
--peers: for results of bench/peers: one row per case of each file, GB/s of read and kvonce, then for each peer its GB/s
         and how many times as fast kvonce is; bold where that is short of the goal.
--cuda-peers: for results of bench/peers/cuda_peers.py: one row per case of each file, microseconds of every arm and the best
         peer's time over kvonce's; of a chain the microseconds that an arm adds to it, with the neighbours that suit it best.
         Bold: a peer leads, or kvonce_early is short of its goal.
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
    names = [arm for arm in ("read", "floor", "kvonce", "kvonce_lens", "kvonce_planned", "per_head", "qmv")
             if any(arm in arms for arms in cases.values())]
    print(f"{describe(device)}, {dtype}, us\n")
    pairs = [("kvonce", "read"), ("kvonce", "floor")]
    if "kvonce_planned" in names:
        pairs.append(("kvonce_planned", "kvonce_lens"))
    print_row(["geometry", "kv_len"] + names + [" / ".join(pair) for pair in pairs])
    print("|---|---" + "|---:" * (len(names) + len(pairs)) + "|")
    for (name, kv_len), arms in cases.items():
        cells = [f"{arms[arm]['us_median']:.2f}" if arm in arms else "-" for arm in names]
        for arm, other in pairs:
            both = arm in arms and other in arms
            cells.append(f"{arms[arm]['us_median'] / arms[other]['us_median']:.2f}" if both else "-")
        print_row([name, str(kv_len)] + cells)
    print()


def print_chain(paths):
    results = [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in paths]
    columns = []
    cases = {}
    for row in (row for result in results for row in result["rows"] if row["mode"] == "chain"):
        column = f"{row['arm']} {row['neighbours']}"
        if column not in columns:
            columns.append(column)
        case = "{num_q_heads}q/{num_kv_heads}kv d{head_dim_qk}".format(**row), row["kv_len"], row["kv_dtype"]
        text = f"{row['us_median']:.2f}"
        isolated = row.get("isolated_us_median")
        if isolated:
            text += f" ({row['us_median'] / isolated:.2f}x)"
        cases.setdefault(case, {"kv_bytes": row["kv_bytes"]})[column] = text
    print(f"{describe(results[0]['device'])}, us\n")
    print_row(["geometry", "kv_len", "dtype", "KV MB"] + columns)
    print("|---|---|---" + "|---:" * (len(columns) + 1) + "|")
    for (name, kv_len, dtype), cells in cases.items():
        print_row([name, str(kv_len), dtype, f"{cells['kv_bytes'] / 1e6:.1f}"] + [cells.get(column, "-") for column in columns])


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


KVONCE_ARMS = ("kvonce", "kvonce_early")
CHAIN_GOALS = ((4, 9, 60), (9, 18, 45), (18, 36, 35), (36, 70, 25))  # MB from, MB below, percent under the best peer


def print_cuda_peers(path):
    result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    cases, peers = {}, []
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
        if row["arm"] not in (*KVONCE_ARMS, "read", *peers):
            peers.append(row["arm"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{describe(result['device'])}; {versions}; us\n")
    in_chain = any(row["mode"] == "chain" for row in result["rows"])
    verdict = (print_peers_chain if in_chain else print_peers_isolated)(cases, peers)
    print()
    failures = {}
    for failure in result["failed"]:
        kind = failure["message"].split(":")[0]
        failures.setdefault((failure["arm"], failure["kernel"], kind), []).append(failure)
    for (arm, kernel, _), same in failures.items():
        where = same[0]["case"] or "set-up"
        print(f"failed: {arm} {kernel}".rstrip() + f": {same[0]['message']} ({where}; {len(same)} in all)")
    print(verdict)


def case_cells(row):
    return ["{num_q_heads}q/{num_kv_heads}kv d{head_dim_qk}".format(**row), str(row["kv_len"])]


def us_cell(us):
    return "-" if us is None else f"{us:.2f}"


def print_peers_isolated(cases, peers):
    print_row(["geometry", "kv_len", "read", "kvonce"] + peers + ["best peer", "best peer / kvonce"])
    print("|---|---" + "|---:" * (2 + len(peers)) + "|---|---:|")
    leads = compared = 0
    for rows in cases.values():
        us = {row["arm"]: row["us_median"] for row in rows}
        best = min((peer for peer in peers if peer in us), key=us.get, default=None)
        ratio = us[best] / us["kvonce"] if best and "kvonce" in us else None
        compared += ratio is not None
        leads += ratio is not None and ratio < 1
        text = us_cell(ratio) + ("x" if ratio else "")
        print_row(case_cells(rows[0]) + [us_cell(us.get(arm)) for arm in ["read", "kvonce"] + peers] +
                  [best or "-", f"**{text}**" if ratio and ratio < 1 else text])
    return f"peer leads on {leads} of {compared} rows"


def print_peers_chain(cases, peers):
    """kvonce_early's column is its time between neighbours that trigger early, every other arm's the least of all neighbours."""
    print_row(["geometry", "kv_len", "KV MB", "kvonce isolated", "kvonce", "kvonce_early"] + peers +
              ["best peer", "kvonce_early under it", "goal", "kvonce_early, not early / isolated"])
    print("|---|---" + "|---:" * (4 + len(peers)) + "|---|---:|---:|---:|")
    leads = compared = short = with_goal = 0
    for rows in cases.values():
        added = {(row["arm"], row["neighbours"]): row["us_median"] for row in rows if row["mode"] == "chain"}
        least = {}
        for (arm, _), us in added.items():
            least[arm] = min(us, least.get(arm, us))
        last = rows[-1]
        best = min((peer for peer in peers if peer in least), key=least.get, default=None)
        ours = [least[arm] for arm in KVONCE_ARMS if arm in least]
        early = added.get(("kvonce_early", "early"))
        under = 100 * (1 - early / least[best]) if best and early is not None else None
        megabytes = last["kv_bytes"] * 1e-6
        goal = next((percent for low, high, percent in CHAIN_GOALS if low <= megabytes < high), None)
        compared += bool(best and ours)
        leads += bool(best and ours) and least[best] < min(ours)
        with_goal += None not in (goal, under)
        misses = None not in (goal, under) and under < goal
        short += misses
        isolated = last["isolated_us_median"]
        late = [added[key] for key in (("kvonce_early", "plain"), ("kvonce_early", "late")) if key in added]
        text = "-" if under is None else f"{under:.0f} %"
        print_row(case_cells(last) + [f"{megabytes:.1f}", us_cell(isolated), us_cell(least.get("kvonce")), us_cell(early)] +
                  [us_cell(least.get(peer)) for peer in peers] +
                  [best or "-", f"**{text}**" if misses else text, f"{goal} %" if goal else "-",
                   us_cell(max(late) / isolated if late and isolated else None)])
    return f"kvonce_early short of its goal on {short} of {with_goal} rows; peer leads on {leads} of {compared} rows"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="store_true", help="GB/s of every arm of one result")
    parser.add_argument("--times", action="store_true", help="microseconds of every arm, for CUDA")
    parser.add_argument("--chain", action="store_true", help="what attention adds to a chain of kernels, on CUDA")
    parser.add_argument("--peers", action="store_true", help="kvonce beside other libraries")
    parser.add_argument("--cuda-peers", action="store_true", help="kvonce beside other libraries on a CUDA device")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    if options.peers:
        for path in options.files:
            print_peers(path)
    elif options.chain:
        print_chain(options.files)
    elif options.cuda_peers:
        for path in options.files:
            print_cuda_peers(path)
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

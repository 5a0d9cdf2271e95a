#!/usr/bin/env python3
"""Whether shapes beside the default cases keep their pace: other groups, several query tokens, other head dims, batches, layouts.

usage: bench/pace.py [--out FILE] [--runs N] [--only TEXT] COMMAND...
example: bench/pace.py --out pace.json build/release/tools/kvonce bench --dtype f16 --threads 2

Runs COMMAND once per run with every shape as a case. A case's cost is its time over that of its own `read` arm, which took turns
with it: cases are measured seconds apart, and a shared machine changes its speed in between. A shape's cost is compared with
those of shapes like it in the same run (the median of the runs' ratios): allowed is theirs, scaled by multiply-adds per byte but
never below the cost at group 1, times the factor beside it. Exit status 1 when a shape is over.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

KV = 8192


def case(q_heads, kv_heads, dims, kv_len=KV, q_len=1, seqs=1, layout=""):
    text = f"{q_heads}q/{kv_heads}kv d{dims} kv={kv_len} q={q_len} seqs={seqs}"
    return text + (f" layout={layout}" if layout else "")


def group(size, dims="128", kv_heads=4, **more):
    return case(size * kv_heads, kv_heads, dims, **more)


def shapes():
    """(what, case, cases it is compared with, factor)."""
    for size, neighbours in {2: (1, 4), 3: (2, 4), 5: (4, 8), 6: (4, 8), 7: (6, 8), 12: (8, 16), 16: (8, 12)}.items():
        yield f"group {size}", group(size), [group(n) for n in neighbours], 1.15
    yield "q_len 4", group(8, q_len=4), [group(8)], 4.2 / 4
    for dims in ("64", "80", "96", "192", "256", "192x128", "576x512"):
        for size in (1, 4, 8):
            yield f"d{dims} group {size}", group(size, dims), [group(size)], 1.2
    for size in (1, 4, 8):
        yield f"batch 8 group {size}", group(size, kv_len=1024, seqs=8), [group(size)], 1.2
        yield f"NHD group {size}", group(size, layout="nhd"), [group(size)], 1.1


def work(row):
    pairs = row["num_q_heads"] * row["q_len"] * row["num_seqs"] * row["kv_len"]
    return pairs * (row["head_dim_qk"] + row["head_dim_v"])


def timed(command, cases):
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder) / "cases.txt"
        listed.write_text("".join(f"{text}\n" for text in cases), encoding="utf-8")
        out = pathlib.Path(folder) / "run.json"
        options = ["--cases", str(listed), "--arms", "kvonce,read", "--out", str(out)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        run = json.loads(out.read_text(encoding="utf-8"))
    rows = {}
    for row in run["rows"]:
        rows.setdefault(row["case"], {})[row["arm"]] = row
    return run, rows


def cost(arms):
    return arms["kvonce"]["us_median"] / arms["read"]["us_median"]


def ratio(rows, text, peers):
    """Cost of the shape over what the best of its peers allows."""
    allowed = []
    for peer in peers:
        intensity = [work(rows[name]["kvonce"]) / rows[name]["kvonce"]["kv_bytes"] for name in (text, peer)]
        allowed.append(max(cost(rows[group(1)]), cost(rows[peer]) * intensity[0] / intensity[1]))
    return cost(rows[text]) / min(allowed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args()
    chosen = [shape for shape in shapes() if options.only in shape[0]]
    cases = list(dict.fromkeys([group(1)] + [text for _, own, peers, _ in chosen for text in [*peers, own]]))
    runs = [timed(options.command, cases) for _ in range(options.runs)]
    table = []
    for name, text, peers, factor in chosen:
        ratios = [ratio(rows, text, peers) for _, rows in runs]
        took = statistics.median(ratios)
        row = sorted((rows[text]["kvonce"] for _, rows in runs), key=lambda r: r["us_median"])[len(runs) // 2]
        table.append({"shape": name, "case": text, "kernel": row["kernel"], "read_factor": row["read_factor"],
                      "us_median": row["us_median"], "gbps": row["gbps"], "over_peer": round(took, 3),
                      "over_peer_runs": [round(r, 3) for r in sorted(ratios)], "allowed": round(factor, 2)})
    print("| shape | read factor | us | GB/s | over its peers | allowed |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in table:
        late = "" if row["over_peer"] <= row["allowed"] else " **over**"
        print(f"| {row['shape']} | {row['read_factor']} | {row['us_median']:.0f} | {row['gbps']:.1f} "
              f"| {row['over_peer']:.2f}{late} | {row['allowed']:.2f} |")
    if options.out:
        result = {"device": runs[-1][0]["device"], "runs": options.runs, "shapes": table}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(row["over_peer"] > row["allowed"] for row in table))


if __name__ == "__main__":
    main()

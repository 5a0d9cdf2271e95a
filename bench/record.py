#!/usr/bin/env python3
"""Runs `kvonce bench` several times and keeps the median run of every row.

usage: bench/record.py [--runs N] --out FILE COMMAND...
example: bench/record.py --out f16.json build/release/tools/kvonce bench --dtype f16 --threads 2

Shared machines change speed within minutes. Of each row's N runs the one with the median ratio_to_roof (rows without one:
the median time) is kept whole, so a row's figures belong together; `runs` in the file says how many there were.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile


def one_run(command):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        subprocess.run([*command, "--out", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))


def median_rows(runs):
    for rows in zip(*(run["rows"] for run in runs), strict=True):
        names = {(row["case"], row["arm"]) for row in rows}
        if len(names) != 1:
            sys.exit(f"record: the runs differ in their rows: {sorted(names)}")
        yield sorted(rows, key=lambda row: row["ratio_to_roof"] or -row["us_median"])[len(rows) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args()
    runs = [one_run(options.command) for _ in range(options.runs)]
    result = {**runs[-1], "runs": options.runs, "rows": list(median_rows(runs))}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

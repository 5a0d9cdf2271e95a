#!/usr/bin/env python3
"""Runs `kvonce bench` several times and keeps the median run of every case.

usage: bench/record.py [--runs N] --out FILE COMMAND...
example: bench/record.py --out f16.json build/release/tools/kvonce bench --dtype f16 --threads 2

Shared machines change speed within minutes. Of each case's N runs the one with kvonce's median ratio_to_roof is kept whole, so
all arms of a case come from one run; `runs` in the file says how many there were.
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


def cases_of(run):
    cases = {}
    for row in run["rows"]:
        cases.setdefault(row["case"], {})[row["arm"]] = row
    return cases


def median_rows(runs):
    all_cases = [cases_of(run) for run in runs]
    for case in all_cases[0]:
        same_case = [cases[case] for cases in all_cases]
        if "kvonce" not in same_case[0]:
            sys.exit("record: the median is that of arm kvonce; name it in --arms")
        yield from sorted(same_case, key=lambda arms: arms["kvonce"]["ratio_to_roof"])[len(runs) // 2].values()


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

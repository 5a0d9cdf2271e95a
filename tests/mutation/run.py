#!/usr/bin/env python3
"""Plants one fault at a time and asks the tests: every fault must make a test fail.

usage: tests/mutation/run.py [--jobs N] [--only TEXT ...]
A copy of the repository under build/mutation is changed, built and tested, so the working tree stays as it is. Tests, in this
order until one fails: `kvonce check --quick`, then ctest without the tests of the build, the sources and the benchmark. Faults of
the Metal bodies: the tests with the label metal_emulation, the quick ones first.
Prints a table; exit status 1 when a fault was not noticed or its text is no longer there. 47 faults took 73 minutes on two busy cores.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

from faults import FAULTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutation" / "tree"
BUILD = ROOT / "build" / "mutation" / "build"
NOT_ABOUT_FAULTS = "source_|abidiff|installed|isa_symbols|exported|bench|tools.cli|fuzz|check_quick"
TIMEOUT_S = 900  # of the tests: a fault may hang them
FAILED_TEST = re.compile(r"^\s*\d+ - (\S+)(?:  # GetParam\(\) = .*?)? \((?!Skipped|Not Run|Disabled)", re.MULTILINE)  # ctest's list
COMPILER = "the compiler: not a fault that tests could notice"


def run(command, timeout=TIMEOUT_S):
    """Whether the command ended with 0 in time, and what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        return False, ""
    return done.returncode == 0, done.stdout


def is_metal(path):
    return path.startswith("src/metal/")


def succeeds(command, timeout=TIMEOUT_S):
    return run(command, timeout)[0]


def copy_tree():
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        target = TREE / name
        if not (ROOT / name).exists():
            continue
        if target.exists() and target.read_bytes() == (ROOT / name).read_bytes():
            continue  # an unchanged time keeps its objects
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def build(jobs, target):
    return succeeds(["cmake", "--build", str(BUILD), "-j", str(jobs), "--target", target], timeout=None)


def failed_of(ctest_options, jobs):
    """Names of tests that failed, None where all passed."""
    passed, report = run(["ctest", "--test-dir", str(BUILD), "-j", str(jobs), "--stop-on-failure", "--no-tests=error", *ctest_options])
    return None if passed else ", ".join(FAILED_TEST.findall(report)) or f"ctest: not done in {TIMEOUT_S} s"


def noticed_by_emulation(jobs):
    if not all(build(jobs, f"metal_{name}_test") for name in ("read_factor", "lanes", "invariance", "grid")):
        return COMPILER
    slow = "MetalGridTest|MetalExactTest"
    return failed_of(["-L", "metal_emulation", "-E", slow], jobs) or failed_of(["-L", "metal_emulation", "-R", slow], jobs)


def noticed_by(jobs, path):
    if is_metal(path):
        return noticed_by_emulation(jobs)
    if not build(jobs, "kvonce_tool"):
        return COMPILER
    if not succeeds([str(BUILD / "tools" / "kvonce"), "check", "--quick"]):
        return "kvonce check --quick"
    if not build(jobs, "all"):
        return COMPILER
    return failed_of(["-E", NOT_ABOUT_FAULTS], jobs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="faults whose name contains a TEXT")
    options = parser.parse_args()
    copy_tree()
    subprocess.run(["cmake", "-G", "Ninja", "-S", str(TREE), "-B", str(BUILD), "-D", "CMAKE_BUILD_TYPE=Release",
                    "-D", "KVONCE_CUDA=OFF"], check=True, stdout=subprocess.DEVNULL)  # nvcc would take minutes a fault
    faults = [fault for fault in FAULTS if any(text in fault[0] for text in options.only)]
    # The unchanged tree first, by the tests that the faults need: one fault's path stands for all of its kind.
    for path in {is_metal(fault[1]): fault[1] for fault in faults}.values():
        noticed = noticed_by(options.jobs, path)
        if noticed is not None:
            sys.exit(f"mutation: the unchanged tree does not build or does not pass: {noticed}")
    missed = 0
    print("| fault | file | noticed by |\n|---|---|---|")
    for name, path, old, new in faults:
        source = TREE / path
        text = source.read_text(encoding="utf-8")
        if text.count(old) != 1:
            noticed = f"NOT PLANTED: the text stands there {text.count(old)} times"
            missed += 1
        else:
            source.write_text(text.replace(old, new), encoding="utf-8")
            noticed = noticed_by(options.jobs, path)
            source.write_text(text, encoding="utf-8")
            if noticed is None or noticed == COMPILER:
                missed += 1
        print(f"| {name} | {path} | {noticed or 'NOTHING'} |", flush=True)
    print(f"\n{len(faults) - missed} of {len(faults)} faults noticed by a test")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

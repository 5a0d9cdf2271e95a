#!/usr/bin/env python3
"""Checks that objects compiled for one instruction set share no symbol with the rest of the program.

The linker keeps one copy of each weak (inline or template) function. If an AVX-512 object holds a weak
std::vector<int>::push_back, the whole program may get that copy and die on an older processor. So a weak symbol of such
an object must belong to the namespace of its target, kvonce::cpu::<name>.

usage: check_isa_symbols.py OBJECT...   those named target_<name>.* are checked, target_portable.* apart
"""

import pathlib
import re
import subprocess
import sys


def weak_symbols(path):
    listing = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    return [row[2] for row in rows if len(row) == 3 and row[1] in "WwVvu"]


def main():
    problems = 0
    num_checked = 0
    for name in sys.argv[1:]:
        match = re.match(r"target_(\w+?)\.", pathlib.Path(name).name)
        if not match or match[1] in ("portable", "kernels"):
            continue
        num_checked += 1
        owner = f"{match[1]}::"
        for symbol in weak_symbols(name):
            if owner not in symbol:
                problems += 1
                print(f"{name}: weak symbol outside {owner}: {symbol}")
    print(f"isa symbols: {num_checked} objects, {problems} problems")
    return 1 if problems or num_checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

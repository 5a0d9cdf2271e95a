#!/usr/bin/env python3
"""Checks that a shared library exports kvonce:: and kvonce_ symbols only, and both kinds of them.

usage: check_exports.py LIBRARY
"""

import re
import subprocess
import sys

ALLOWED = re.compile(r"(kvonce_|kvonce::|(typeinfo|typeinfo name|vtable) for kvonce::)")


def exported_symbols(library):
    listing = subprocess.run(["nm", "-D", "-C", "--defined-only", library], capture_output=True, text=True, check=True)
    # "address type name"; a name may hold spaces. Absolute symbols (A) are version names.
    rows = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    return [row[2] for row in rows if len(row) == 3 and row[1] != "A"]


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    names = exported_symbols(sys.argv[1])
    foreign = [name for name in names if not ALLOWED.match(name)]
    num_c = sum(name.startswith("kvonce_") for name in names)
    for name in foreign:
        print(f"exported but not kvonce's: {name}")
    print(f"exports: {num_c} kvonce_ functions, {len(names) - num_c} of namespace kvonce, {len(foreign)} foreign")
    return 1 if foreign or num_c == 0 or num_c == len(names) else 0


if __name__ == "__main__":
    sys.exit(main())

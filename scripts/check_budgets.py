#!/usr/bin/env python3
"""Checks the line budgets: kernel files 400, public headers 300, every other source and script 500."""

import sys

from source_files import CODE_SUFFIXES, ROOT, SCRIPT_SUFFIXES, source_files

EXTENSIONLESS = ["dev", ".ci/run"]


def budget(path):
    text = str(path)
    if text.startswith("include/"):
        return 300
    if text.startswith("src/cpu/simd/") or (text.startswith("src/cpu/") and path.suffix == ".hpp"):
        return 400
    if path.suffix in {".cu", ".cuh", ".metal"}:
        return 400
    return 500


def main():
    paths = source_files(CODE_SUFFIXES | SCRIPT_SUFFIXES)
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths}
    over = [(path, size) for path, size in sizes.items() if size > budget(path)]
    for path, size in over:
        print(f"{path}: {size} lines, budget {budget(path)}; split it by step")
    for name in EXTENSIONLESS:
        size = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        if size > 500:
            over.append((name, size))
            print(f"{name}: {size} lines, budget 500")
    print(f"budgets: {len(paths) + len(EXTENSIONLESS)} files, {len(over)} over")
    return 1 if over or not paths else 0


if __name__ == "__main__":
    sys.exit(main())

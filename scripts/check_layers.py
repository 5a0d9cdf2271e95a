#!/usr/bin/env python3
"""Checks which folder includes which. The tables below are the rules; the first matching prefix names a file's layer."""

import posixpath
import re
import sys

from source_files import CODE_SUFFIXES, ROOT, source_files

LAYER_OF_PREFIX = [
    ("include/", "include"),
    ("src/core/", "core"),
    ("src/shared/", "shared"),
    ("src/cpu/simd/", "cpu_simd"),
    ("src/cpu/pool.hpp", "cpu_pool"),
    ("src/cpu/", "cpu"),
    ("src/cuda/instances.def", "shared"),  # the conformance grid reads which kernels there must be
    ("src/cuda/", "cuda"),
    ("src/metal/", "metal"),
    ("src/scaleout/", "scaleout"),
    ("src/kvonce.cpp", "registry"),
    ("src/c_abi.cpp", "c_abi"),
    ("bench/baselines/cuda/", "baselines_cuda"),
    ("bench/baselines/", "baselines"),
    ("bench/", "bench"),
    ("tools/", "tools"),
    ("tests/build/consumer", "consumer"),
    ("tests/cpu/", "tests_cpu"),
    ("tests/cuda/", "tests_cuda"),
    ("tests/metal/", "tests_metal"),
    ("tests/metal_emulation/", "tests_metal"),
    ("tests/mlx/", "mlx"),
    ("tests/", "tests"),
    ("examples/", "consumer"),
    ("integrations/mlx/", "mlx"),
    ("integrations/", "consumer"),
    ("python/", "consumer"),
]

# A layer may always include itself. Backends never include each other; only the registry sees them all.
ALLOWED = {
    "include": set(),
    "shared": set(),
    "core": {"include", "shared"},
    "cpu_simd": {"include", "shared", "core", "cpu"},
    "cpu_pool": {"include", "shared", "core"},
    "cpu": {"include", "shared", "core", "cpu_simd", "cpu_pool"},
    "cuda": {"include", "shared", "core"},
    "metal": {"include", "shared", "core"},
    "scaleout": {"include", "shared", "core"},
    "registry": {"include", "shared", "core", "cpu", "cuda", "metal", "scaleout"},
    "c_abi": {"include", "core"},
    "bench": {"include", "shared", "core", "baselines"},
    # The per-head baseline uses kvonce's own vectors and threads, so that only the order of reads differs.
    "baselines": {"include", "shared", "core", "bench", "cpu_simd", "cpu_pool"},
    "baselines_cuda": {"include", "shared"},
    "tools": {"include", "shared", "core", "bench", "baselines", "baselines_cuda"},  # the command measures the baselines
    "tests": {"include", "shared", "core", "tools"},  # the conformance library is part of the command
    "tests_cpu": {"include", "shared", "core", "tools", "tests", "cpu", "cpu_simd", "cpu_pool"},
    "tests_cuda": {"include", "shared", "core", "tools", "tests", "cuda"},
    "tests_metal": {"include", "shared", "core", "tools", "tests", "metal"},
    "mlx": {"include", "metal"},  # launches the Metal kernels, which no public function can
    "consumer": {"include"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<(kvonce/[^>]+)>)')


def layer_of(path):
    return next((layer for prefix, layer in LAYER_OF_PREFIX if path.startswith(prefix)), None)


def resolve(included, includer, known):
    """The repository path that an include line means, or None."""
    folders = [posixpath.dirname(includer), "integrations/mlx", "include", "src", "", "tools", "tools/conformance", "tests", "tests/read_factor", "bench"]
    candidates = (posixpath.normpath(posixpath.join(folder, included)) for folder in folders)
    return next((path for path in candidates if path in known), None)


def main():
    sources = {str(path) for path in source_files(CODE_SUFFIXES)}
    known = sources | {str(path.with_suffix("")) for path in source_files({".in"})}  # x.hpp is made from x.hpp.in
    problems = []
    num_includes = 0
    for path in sorted(sources):
        layer = layer_of(path)
        if layer is None:
            problems.append(f"{path}: in no layer; add its folder to scripts/check_layers.py")
            continue
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            num_includes += 1
            included = match[1] or match[2]
            target = resolve(included, path, known)
            if target is None:
                if layer != "consumer":
                    problems.append(f'{path}:{number}: "{included}" is no file of this repository; use <...>')
                continue
            target_layer = layer_of(target)
            if target_layer != layer and target_layer not in ALLOWED[layer]:
                problems.append(f"{path}:{number}: layer '{layer}' may not include {target} (layer '{target_layer}')")
    for problem in problems:
        print(problem)
    print(f"layers: {len(sources)} files, {num_includes} includes of the repository's files, {len(problems)} problems")
    return 1 if problems or not num_includes else 0


if __name__ == "__main__":
    sys.exit(main())

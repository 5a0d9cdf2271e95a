#!/usr/bin/env python3
"""What a C++ compiler accepts in a kernel body and Metal's, or CUDA's, does not: found in the text."""

import pathlib
import re
import sys

METAL = pathlib.Path(__file__).resolve().parents[2] / "src/metal"
BODIES = ["params.h", "dialect.h", *sorted(path.name for path in METAL.glob("*.metal.h"))]
MAX_LINES = 400

# Outside of comments. In params.h the host compiles too, so some words are its own.
FORBIDDEN = [
    (re.compile(r"(?<![\w.])(\d+\.\d*|\.\d+|\d+e[+-]?\d+)(e[+-]?\d+)?(?![\w.])", re.I), "a float literal without f is a double"),
    (re.compile(r"\b(double|long|size_t|float16_t)\b"), "no such type in every dialect"),
    (re.compile(r"\bstd::|\btemplate\s*<\s*auto|\bif constexpr\b|\binline\s+constexpr\b|\bnamespace\s+\w+::"), "not in C++14 or MSL"),
    (re.compile(r"\b(new|delete|goto|throw|dynamic_cast|virtual|static\s+(?!KV_FN|_assert)\w)\b"), "not in MSL"),
    (re.compile(r"\b(__shfl|__global__|__shared__|threadIdx|simd_\w+|metal::)"), "belongs in a dialect"),
]
ADDRESS_SPACES = re.compile(r"(?<!KV_)\b(device|constant|threadgroup|thread)\b")


def problems_of(name):
    text = (METAL / name).read_bytes()
    lines = text.decode("ascii", errors="replace").splitlines()
    if not text.isascii():
        yield f"{name}: not ASCII"
    if len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}"
    for number, line in enumerate(lines, 1):
        code = line.split("//")[0]
        if name == "dialect.h":
            continue
        for pattern, reason in FORBIDDEN:
            match = pattern.search(code)
            if match and not (name == "params.h" and code.lstrip().startswith("#")):
                yield f"{name}:{number}: {match[0].strip()!r}: {reason}"
        match = ADDRESS_SPACES.search(code)
        if match:
            yield f"{name}:{number}: bare {match[0]!r}: address spaces are written as macros"


def self_test():
    """The patterns find what they are for."""
    bad = ["x = 1.0;", "x = 2.;", "x = 1e-3 * y;", "double x;", "std::max(a, b)", "metal::fma(a)", "if constexpr (k)"]
    good = ["x = 1.0f;", "x = 3.402823466e38f;", "q[1][2]", "row.x + e.y1", "KV_DEVICE const T* x", "static KV_FN int dim()"]
    for text in bad:
        assert any(pattern.search(text) for pattern, _ in FORBIDDEN), text
    for text in good:
        assert not any(pattern.search(text) for pattern, _ in FORBIDDEN), text
    assert ADDRESS_SPACES.search("device const T* x") and not ADDRESS_SPACES.search("KV_DEVICE const T* device_rows()")


def main():
    self_test()
    problems = [problem for name in BODIES for problem in problems_of(name)]
    for problem in problems:
        print(problem)
    print(f"bodies: {len(BODIES)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

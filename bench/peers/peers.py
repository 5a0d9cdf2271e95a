#!/usr/bin/env python3
"""Times kvonce and other libraries side by side in one process, on the same rotating buffers.

usage: bench/peers/peers.py --build DIR [--dtype f16] [--arms kvonce,torch,...] [--out FILE]
example: bench/peers/run.sh --dtype f16

Run it with the Python of the virtual environment that setup.sh makes; run.sh does. Method and traps: README.md here.
"""
import argparse
import gc
import importlib
import json
import math
import mmap
import os
import pathlib
import re
import statistics
import sys
import time

# OpenMP's idle workers spin for milliseconds by default and would run beside the next arm.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np  # noqa: E402

import kvonce_abi  # noqa: E402
from arms import KvSet, Problem, f32_to_bf16, kvonce_arms, to_float  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
MODULES = {"torch": "torch_arms", "llama.cpp": "ggml_arms", "ik_llama.cpp": "ggml_arms",
           "onnxruntime": "onnxruntime_arms", "openvino": "openvino_arms"}
HUGE_PAGE = 2 * 1024 * 1024
PAUSE_S = 0.02  # longer than any peer's workers spin after a call
CALLS_S = 0.01  # timed calls of one arm in one round go on for about this long
# Relative RMS against double precision. kvonce's are those of `kvonce bench`; a peer's tell a wrong layout from
# rounding.
MAX_ERROR = {"f32": 2e-5, "f16": 2e-5, "bf16": 5e-3}
MAX_PEER_ERROR = {"f32": 1e-4, "f16": 5e-2, "bf16": 5e-2}


def fail(message):
    sys.exit("peers: " + message)


def parse_case(line):
    match = re.fullmatch(r"(\d+)q/(\d+)kv d(\d+) kv=(\d+)(?: q=1)?(?: seqs=1)?", line)
    if match is None:
        fail(f"case '{line}': must read like '32q/4kv d128 kv=32768', with q=1 and seqs=1 at most")
    return tuple(int(number) for number in match.groups())


def read_cases(options):
    if options.case:
        return [parse_case(line) for line in options.case]
    lines = (line.split("#")[0].strip() for line in pathlib.Path(options.cases).read_text("utf-8").splitlines())
    return [parse_case(line) for line in lines if line]


class Buffer:
    """Huge-page memory of `num_bytes`, filled with values that repeat at a distance that is no multiple of anything."""

    def __init__(self, num_bytes, dtype):
        self.memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.memory, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        stored = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
        self.values = whole[start:start + num_bytes].view(stored)
        rng = np.random.default_rng(7)
        block = (rng.uniform(0.5, 2.0, 4_194_301) * rng.choice([-1.0, 1.0], 4_194_301)).astype(np.float32)
        block = f32_to_bf16(block) if dtype == "bf16" else block.astype(stored)
        for begin in range(0, self.values.size, block.size):
            part = self.values[begin:begin + block.size]
            part[:] = block[:part.size]
        self.block = block

    def sets(self, problem, buffer_bytes):
        """An odd number of sets, at least buffer_bytes together (one set when it alone is as large)."""
        count = max(1, math.ceil(buffer_bytes / problem.kv_bytes)) | 1
        half = math.prod(problem.kv_shape)
        num_q = problem.num_q_heads * problem.head_dim
        kv = self.values[:2 * half * count].reshape(count, 2, *problem.kv_shape)
        q = self.block[-num_q:].reshape(problem.num_q_heads, problem.head_dim)
        return [KvSet(q, one[0], one[1]) for one in kv]


def reference(problem, kv_set):
    """[num_q_heads, head_dim] in double precision."""
    q = to_float(kv_set.q, problem.dtype).astype(np.float64) * problem.head_dim ** -0.5
    out = np.empty(q.shape)
    for head in range(problem.num_kv_heads):
        rows = slice(head * problem.group_size, (head + 1) * problem.group_size)
        scores = q[rows] @ to_float(kv_set.k[head], problem.dtype).astype(np.float64).T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[rows] = weights @ to_float(kv_set.v[head], problem.dtype).astype(np.float64)
        out[rows] /= weights.sum(axis=1, keepdims=True)
    return out


def rel_rms(got, expected):
    return float(np.sqrt(np.mean((got.astype(np.float64) - expected) ** 2) / np.mean(expected ** 2)))


def timed(arm, prepared):
    begin = time.perf_counter_ns()
    arm.run(prepared)
    return (time.perf_counter_ns() - begin) / 1e3


def best_read(loops, sets):
    """The read loop that is fastest on this case, as `kvonce bench` chooses it."""
    prepared = loops[0].prepare
    for arm in loops:
        arm.run(prepared(sets[0]))
    best = {arm.kernel: min(timed(arm, prepared(sets[i % len(sets)])) for i in range(1, 6)) for arm in loops}
    return min(loops, key=lambda arm: best[arm.kernel])


def load_peers(options):
    """The modules of the peers asked for. Without --arms: of those that are set up; the others are named on stderr."""
    loaded = {}
    for peer in options.arms or MODULES:
        try:
            loaded[peer] = importlib.import_module("arms." + MODULES[peer])
            loaded[peer].check_installed(options, peer)
        except (ImportError, OSError) as error:
            if options.arms:
                fail(f"{peer} is not set up, run bench/peers/setup.sh {peer}: {error}")
            loaded.pop(peer, None)
            print(f"peers: {peer} is not set up and left out", file=sys.stderr)
    return loaded


def make_arms(problem, options, library, peers):
    arms = [kvonce_arms.kvonce_arm(problem, options, library)]
    for peer, module in peers.items():
        arms += module.arms(problem, options, peer)
    return arms


class Rotation:
    """Hands out the sets in turn, whichever arm asks, so that no call meets what the one before it read."""

    def __init__(self, num_sets):
        self.num_sets, self.next = num_sets, 0

    def __call__(self):
        self.next = (self.next + 1) % self.num_sets
        return self.next


def measure(arms, prepared, num_sets, options):
    """Microseconds of every timed call, per arm. Each turn of an arm: a pause in which the last arm's idle workers go
    to sleep, one call that wakes the arm's own, then the timed ones."""
    turn = Rotation(num_sets)
    samples = [[] for _ in arms]
    calls = [1 for _ in arms]
    gc.disable()
    for round_idx in range(options.rounds):
        for step in range(len(arms)):
            idx = (round_idx + step) % len(arms)
            arm, sets = arms[idx], prepared[idx]
            time.sleep(PAUSE_S)
            waking = timed(arm, sets[turn()])
            if round_idx == 0:
                calls[idx] = max(1, min(16, round(CALLS_S * 1e6 / waking)))
            samples[idx] += [timed(arm, sets[turn()]) for _ in range(calls[idx])]
    gc.enable()
    return samples


def rows_of(problem, arms, samples, errors):
    read_us = next(statistics.median(us) for arm, us in zip(arms, samples) if arm.name == "read")
    for arm, us, error in zip(arms, samples, errors):
        median = statistics.median(us)
        yield {
            "case": problem.case, "num_q_heads": problem.num_q_heads, "num_kv_heads": problem.num_kv_heads,
            "head_dim_qk": problem.head_dim, "head_dim_v": problem.head_dim, "kv_len": problem.kv_len, "q_len": 1,
            "num_seqs": 1, "kv_dtype": problem.dtype, "backend": "cpu", "q_dtype": arm.q_dtype or problem.dtype,
            "mode": "isolated", "arm": arm.name, "kernel": arm.kernel, "read_factor": arm.read_factor,
            "us_median": median, "us_min": min(us), "kv_bytes": problem.kv_bytes,
            "gbps": problem.kv_bytes / median / 1e3, "ratio_to_read": read_us / median, "roof_us": None,
            "ratio_to_roof": None, "rel_rms_error": error, "num_calls": len(us),
        }


def run_case(problem, buffer, options, library, target, peers):
    sets = buffer.sets(problem, options.buffer_bytes)
    arms = make_arms(problem, options, library, peers)
    expected = reference(problem, sets[0])
    prepared, errors, ok = [], [], True
    for arm in arms:
        prepared.append([arm.prepare(kv_set) for kv_set in sets])
        arm.run(prepared[-1][0])
        errors.append(rel_rms(arm.result(prepared[-1][0]), expected))
        allowed = (MAX_ERROR if arm.name == "kvonce" else MAX_PEER_ERROR)[problem.dtype]
        if not errors[-1] <= allowed:
            ok = False
            print(f"peers: {problem.case} {problem.dtype} {arm.name}: relative RMS error {errors[-1]:.1e}, "
                  f"allowed {allowed:.1e}", file=sys.stderr)
    read = best_read(kvonce_arms.read_arms(options, library, target), sets)
    arms.append(read)
    prepared.append([read.prepare(kv_set) for kv_set in sets])
    errors.append(None)
    samples = measure(arms, prepared, len(sets), options)
    rows = list(rows_of(problem, arms, samples, errors))
    del prepared
    for arm in arms:
        arm.close()
    for row in rows:
        error = "" if row["rel_rms_error"] is None else f"  rms {row['rel_rms_error']:.0e}"
        print(f"{row['case'][:-11]:26} {row['kv_dtype']:5} {row['arm']:26} {row['us_median']:10.1f} us  "
              f"{row['gbps']:6.2f} GB/s  kvonce is {row['us_median'] / rows[0]['us_median']:5.2f}x{error}", flush=True)
    return rows, ok


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="build folder with kvonce and kvonce_peers_read")
    parser.add_argument("--work", default=str(pathlib.Path.home() / ".cache/kvonce-peers"), help="setup.sh's folder")
    parser.add_argument("--dtype", choices=list(MAX_ERROR), default="f16")
    parser.add_argument("--arms", help=f"peers beside kvonce and read, of {','.join(MODULES)}; all that are set up")
    parser.add_argument("--cases", default=str(HERE.parent / "cases" / "seed.txt"), help="file of case strings")
    parser.add_argument("--case", action="append", help="one case string, may be repeated; instead of --cases")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", help="kvonce's CPU target; the best one without")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--buffer-mib", type=int, default=512, help="what the sets of a case cover at least")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    options.arms = options.arms.split(",") if options.arms else []
    unknown = set(options.arms) - set(MODULES)
    if unknown:
        fail(f"--arms: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(MODULES)}")
    options.buffer_bytes = options.buffer_mib * 1024 * 1024
    return options


def main():
    options = parse_options()
    library = kvonce_abi.Library(pathlib.Path(options.build) / "src" / "libkvonce.so")
    device = library.device(options.target)
    peers = load_peers(options)
    problems = [Problem(*case, options.dtype) for case in read_cases(options)]
    total = max((max(1, math.ceil(options.buffer_bytes / p.kv_bytes)) | 1) * p.kv_bytes for p in problems)
    buffer = Buffer(total, options.dtype)
    rows, ok = [], True
    for problem in problems:
        case_rows, case_ok = run_case(problem, buffer, options, library, device.target.decode(), peers)
        rows += case_rows
        ok = ok and case_ok
    reads = [row for row in rows if row["arm"] == "read"]
    fastest = max(reads, key=lambda row: row["gbps"])
    result = {
        "schema": "kvonce.bench/1", "kvonce_version": library.version,
        "device": {"name": device.name.decode(), "cpu_target": device.target.decode(), "threads": options.threads,
                   "l1_bytes": device.l1_bytes, "l2_bytes": device.l2_bytes, "l3_bytes": device.l3_bytes,
                   "read_gbps": fastest["gbps"], "read_loop": fastest["kernel"], "buffer_bytes": options.buffer_bytes},
        "rounds": options.rounds, "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()

"""The seed's table: GB/s of K and V, each byte counted once, q_len 1, float16, arms taking turns.

Buffers are cycled, so that no cache holds them, and an evaluation has many calls, so that its start does not count.
"""
import dataclasses
import statistics
import time

import mlx.core as mx

from kvonce import _mlx_metal
from kvonce import mlx as kvonce_mlx
from kvonce._mlx_transforms import originals

GEOMETRIES = ((32, 32, 128), (32, 8, 128), (32, 4, 128), (64, 8, 64), (16, 2, 128))
CYCLED_BYTES = 1 << 30
CALLS_PER_EVALUATION, REPEATS = 32, 15
CPU_CALLS_PER_EVALUATION, CPU_REPEATS = 2, 3  # MLX's own arms take seconds a call there


def _buffers(num_q_heads, num_kv_heads, head_dim, kv_len, cycled_bytes):
    kv_bytes = 2 * num_kv_heads * kv_len * head_dim * 2
    count = max(2, -(-cycled_bytes // kv_bytes))
    sets = []
    for i in range(count):
        shape = (1, num_kv_heads, kv_len, head_dim)
        sets.append(tuple(mx.random.normal(s, key=mx.random.key(3 * i + j)).astype(mx.float16) for j, s in
                          enumerate(((1, num_q_heads, 1, head_dim), shape, shape))))
        mx.eval(sets[-1])
    return kv_bytes, sets


def _body_arm(number, first, scale):
    """One body of the Metal kernels, or None where the policy refuses it for this geometry."""
    try:
        plan = _mlx_metal.plan_of(*first, asked=(("body", number),))
    except ValueError:
        return None
    return lambda q, k, v: _mlx_metal.launch(plan, q, k, v, None, None, scale, False, q.dtype)[0]


def _arms(on_metal, first, scale):
    """{name: function of (q, k, v)}"""
    arms = {
        "kvonce": lambda q, k, v: kvonce_mlx.scaled_dot_product_attention(q, k, v, scale=scale),
        "mx.fast": lambda q, k, v: originals["attend"](q, k, v, scale=scale),
        # A matrix-vector product reads the same bytes and does nothing else.
        "gemv": lambda q, k, v: [cache.reshape(-1, 1024) @ mx.ones((1024, 1), dtype=cache.dtype) for cache in (k, v)],
    }
    if on_metal:
        for number, name in ((1, "vector"), (2, "matrix"), (3, "per_head")):
            arm = _body_arm(number, first, scale)
            if arm is not None:
                arms[name] = arm
    return arms


def _qmv_arm(sets):
    """MLX's quantised matrix-vector product, 8 bits, as the seed has it: codes of the size of K and V."""
    matrices = []
    for _, k, v in sets:
        weights = mx.concatenate([k.reshape(-1, 1024), v.reshape(-1, 1024)]).reshape(-1, 1024)
        matrices.append(mx.quantize(mx.concatenate([weights, weights]), group_size=64, bits=8))
        mx.eval(matrices[-1])
    x = mx.ones((1, 1024), dtype=mx.float16)
    return lambda i: mx.quantized_matmul(x, *matrices[i], group_size=64, bits=8)


def _time(on_metal, call, first, count):
    """(us per call of the evaluation, us with Python's part) of `count` calls in one evaluation.

    On Metal a call adds to a graph, which is timed when it runs; on the CPU kvonce's calls have run before it does.
    """
    begin = time.perf_counter()
    results = [call(first + i) for i in range(count)]
    built = time.perf_counter()
    mx.eval(results)
    end = time.perf_counter()
    return (end - (built if on_metal else begin)) / count * 1e6, (end - begin) / count * 1e6


def run(on_metal, lens, quick):
    calls, repeats = (CALLS_PER_EVALUATION, REPEATS) if on_metal and not quick else (CPU_CALLS_PER_EVALUATION, CPU_REPEATS)
    cycled = 1 << 20 if quick else CYCLED_BYTES
    rows = []
    for num_q_heads, num_kv_heads, head_dim in GEOMETRIES[2:4] if quick else GEOMETRIES:
        for kv_len in lens:
            kv_bytes, sets = _buffers(num_q_heads, num_kv_heads, head_dim, kv_len, cycled)
            arms = {name: lambda i, arm=arm: arm(*sets[i % len(sets)])
                    for name, arm in _arms(on_metal, sets[0], head_dim ** -0.5).items()}
            qmv = _qmv_arm(sets)
            arms["qmv"] = lambda i: qmv(i % len(sets))
            times = {name: [] for name in arms}
            kvonce_mlx.reset_stats()
            done = 0
            for repeat in range(repeats + 1):  # the first compiles and warms up
                for name, call in arms.items():
                    us = _time(on_metal, call, done, calls)
                    if repeat:
                        times[name].append(us)
                done += calls
            row = {"case": f"{num_q_heads}q/{num_kv_heads}kv d{head_dim} kv={kv_len} q=1 seqs=1 dtype=f16",
                   "kv_bytes": kv_bytes, "num_buffers": len(sets), "calls_per_evaluation": calls, "repeats": repeats,
                   "stats": kvonce_mlx.stats(), "arms": {}}
            for name, pairs in times.items():
                us, with_python = zip(*pairs)
                median = statistics.median(us)
                row["arms"][name] = {"us_median": median, "us_min": min(us), "us_max": max(us), "gbps": kv_bytes / median / 1e3,
                                     "us_median_with_python": statistics.median(with_python)}
            if on_metal:
                plan = dataclasses.asdict(_mlx_metal.plan_of(*sets[0]))
                row["plan"] = {name: value for name, value in plan.items() if name != "rejected"}
            rows.append(row)
            del sets, arms, qmv
            mx.clear_cache()
            print(f"{row['case']}: " + ", ".join(f"{name} {arm['gbps']:.1f}" for name, arm in row["arms"].items()) + " GB/s",
                  flush=True)
    return rows

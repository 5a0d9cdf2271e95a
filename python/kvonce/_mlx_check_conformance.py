"""Results of kvonce.mlx against MLX's own attention in float32, for every body of the kernels where there are several."""
import mlx.core as mx

from kvonce import _metal_policy, _mlx_metal
from kvonce import mlx as kvonce_mlx
from kvonce._mlx_arguments import dtype_name
from kvonce._mlx_transforms import originals

MAX_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # relative RMS
_FAST_MATH_ERROR = 1e-4  # of float32 on a GPU, whose exponentials are approximations


def _normal(shape, seed, dtype):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _cases(quick):
    """(name, num_seqs, heads, q_len, kv_len, dims, dtype, mask, has_sinks, layout)"""
    every = (1, 31, 32, 33, 130) if quick else (*range(1, 131), 1000, 4097)
    for kv_len in every:
        yield ("lengths", 1, (8, 2), 1, kv_len, (64, 64), "float16", None, False, "BHSD")
    for dtype in MAX_ERROR:
        for heads in ((1, 1), (9, 3), (32, 4)) if quick else ((1, 1), (9, 3), (14, 2), (16, 2), (32, 4), (64, 8), (32, 32), (5, 1)):
            for dims in ((64, 64), (128, 128)) if quick else ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
                yield ("heads", 2, heads, 1, 300, dims, dtype, None, False, "BHSD")
    for q_len in (2, 5, 17) if quick else (2, 3, 4, 5, 8, 16, 17, 33, 64):
        for mask in ("causal", "boolean", "additive", None):
            for heads in ((8, 2), (9, 3)):
                yield ("rows", 2, heads, q_len, 200, (128, 128), "float16", mask, False, "BHSD")
    for layout in ("BSHD", "slice", "expanded"):
        yield ("layouts", 2, (8, 2), 1, 500, (128, 128), "float16", None, False, layout)
    for q_len in (1, 4):
        yield ("sinks", 2, (8, 2), q_len, 200, (64, 64), "bfloat16", "causal", True, "BHSD")


def _cache(num_seqs, num_kv_heads, kv_len, dim, seed, dtype, layout):
    if layout == "BSHD":
        return _normal((num_seqs, kv_len, num_kv_heads, dim), seed, dtype).transpose(0, 2, 1, 3)
    if layout == "slice":
        return _normal((num_seqs, num_kv_heads, kv_len + 70, dim), seed, dtype)[:, :, 3:3 + kv_len]
    if layout == "expanded":
        return mx.broadcast_to(_normal((1, num_kv_heads, kv_len, dim), seed, dtype), (num_seqs, num_kv_heads, kv_len, dim))
    return _normal((num_seqs, num_kv_heads, kv_len, dim), seed, dtype)


def _mask(kind, q_len, kv_len, dtype):
    if kind == "boolean":
        return (_normal((q_len, kv_len), 4, mx.float32) > 0) | (mx.arange(kv_len) == 0)
    return _normal((q_len, kv_len), 4, dtype) if kind == "additive" else kind


def relative_rms(got, expected):
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    return (((got - expected) ** 2).mean() / mx.maximum((expected ** 2).mean(), 1e-30)).sqrt().item()


def _expected(q, k, v, scale, mask, sinks):
    q, k, v = (array.astype(mx.float32) for array in (q, k, v))
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        mask = mask.astype(mx.float32)
    return originals["attend"](q, k, v, scale=scale, mask=mask, sinks=None if sinks is None else sinks.astype(mx.float32))


def _of_body(number, q, k, v, scale, mask, sinks):
    """A body of the Metal kernels that the policy need not have chosen; None where it cannot be."""
    try:
        plan = _mlx_metal.plan_of(q, k, v, asked=(("body", number),))
    except ValueError:
        return None
    causal = isinstance(mask, str)
    return _mlx_metal.launch(plan, q, k, v, None if causal else mask, sinks, scale, causal, q.dtype)[0]


class _Results:
    """Counts results, keeps the worst errors and what exceeds MAX_ERROR."""

    def __init__(self, on_metal):
        self.allowed = {**MAX_ERROR, "float32": _FAST_MATH_ERROR} if on_metal else MAX_ERROR
        self.failed, self.worst, self.count = [], {}, 0

    def add(self, arm, text, got, expected):
        self.count += 1
        name = dtype_name(got.dtype)
        error = relative_rms(got, expected)
        error = error if error == error else 1e30  # JSON has no NaN
        self.worst[f"{arm} {name}"] = max(self.worst.get(f"{arm} {name}", 0.0), error)
        if error > self.allowed[name]:
            self.failed.append(f"{arm}, {text}: relative RMS {error}, allowed {self.allowed[name]}")


def _run_quantized(results, quick):
    for bits in (8, 4):
        for kv_len in (33, 130) if quick else (20, 31, 32, 33, 130, 1000, 4097):
            for dtype in (mx.float32, mx.float16, mx.bfloat16):
                q = _normal((2, 8, 1, 128), 1, dtype)
                keys, values = (mx.quantize(_normal((2, 2, kv_len + 9, 128), seed, dtype), group_size=64, bits=bits) for seed in (2, 3))
                keys, values = ([part[..., :kv_len, :] for part in cache] for cache in (keys, values))
                got = kvonce_mlx.quantized_scaled_dot_product_attention(q, keys, values, 0.125, None, 64, bits)
                unpacked = (mx.dequantize(codes, *(part.astype(mx.float32) for part in parts), group_size=64, bits=bits)
                            for codes, *parts in (keys, values))
                results.add(f"kvonce int{bits}", f"quantized: 8q/2kv d128 kv={kv_len} q=1 seqs=2 dtype={dtype_name(dtype)}", got,
                            originals["attend"](q.astype(mx.float32), *unpacked, scale=0.125))


def run(on_metal, quick):
    bodies = _metal_policy.BODIES if on_metal else {}
    results = _Results(on_metal)
    kvonce_mlx.reset_stats()
    for name, num_seqs, heads, q_len, kv_len, dims, dtype, mask, has_sinks, layout in _cases(quick):
        dtype = getattr(mx, dtype)
        q = _normal((num_seqs, heads[0], q_len, dims[0]), 1, dtype)
        k = _cache(num_seqs, heads[1], kv_len, dims[0], 2, dtype, layout)
        v = _cache(num_seqs, heads[1], kv_len, dims[1], 3, dtype, layout)
        text = (f"{name}: {heads[0]}q/{heads[1]}kv d{dims[0]}x{dims[1]} kv={kv_len} q={q_len} seqs={num_seqs} "
                f"dtype={dtype_name(dtype)} mask={mask} sinks={has_sinks} layout={layout}")
        mask = _mask(mask, q_len, kv_len, dtype)
        sinks = _normal((heads[0],), 5, dtype) if has_sinks else None
        expected = _expected(q, k, v, 0.125, mask, sinks)
        results.add("kvonce", text, kvonce_mlx.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask, sinks=sinks), expected)
        for number, body in bodies.items():
            got = _of_body(number, q, k, v, 0.125, mask, sinks)
            if got is not None:
                results.add(body, text, got, expected)
    _run_quantized(results, quick)
    counted = kvonce_mlx.stats()
    results.failed += [f"{calls} calls went to MLX: {reason}" for reason, calls in counted["fallbacks"].items()]
    print(f"conformance: {results.count} results, {len(results.failed)} failed", flush=True)
    return {"cases": results.count, "failed": results.failed, "worst_relative_rms": results.worst, "stats": counted}

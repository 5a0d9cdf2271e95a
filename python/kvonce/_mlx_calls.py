"""The calls of kvonce.mlx: which backend serves them, and what goes to MLX."""
import mlx.core as mx

from . import _mlx_arguments as arguments
from . import _mlx_cpu, _mlx_cuda, _mlx_metal
from ._mlx_arguments import BadArgument, Fallback
from ._mlx_statistics import count_fallback, count_served
from ._mlx_transforms import originals

MAX_Q_LEN = 64


def backend_of(stream):
    """The module that serves calls on a stream, device or type of device of MLX, or on the default one."""
    device = mx.default_device() if stream is None else stream
    device = getattr(device, "device", device)  # of a stream
    if getattr(device, "type", device) == mx.cpu:
        return _mlx_cpu
    if mx.metal.is_available():
        return _mlx_metal
    return _mlx_cuda


def _require_serveable(q_shape, kv_len, causal):
    if q_shape[2] > MAX_Q_LEN:
        raise Fallback(f"prefill: more than {MAX_Q_LEN} query tokens")
    if not all(q_shape) or not kv_len:
        raise Fallback("an empty array")
    if causal and q_shape[2] > kv_len:
        raise Fallback("a row that sees no key")


def _serve(q, k, v, scale, mask, sinks, stream):
    dtype = arguments.check_qkv(q, k, v)
    scale = arguments.check_scale(scale)
    causal = arguments.check_mask(mask, (*q.shape[:3], k.shape[2]), dtype)
    arguments.check_sinks(sinks, q.shape[1], dtype)
    _require_serveable(q.shape, k.shape[2], causal)
    backend = backend_of(stream)
    out, kernel = backend.attend(q, k, v, scale, causal, None if isinstance(mask, str) else mask, sinks, dtype,
                                 stream)
    count_served(kernel)
    return out


def attend(q, k, v, scale, mask, sinks, force_fused, stream):
    """kvonce.mlx.scaled_dot_product_attention."""
    try:
        return _serve(q, k, v, scale, mask, sinks, stream)
    except Fallback as fallback:
        count_fallback(fallback.reason)
    return originals["attend"](q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)


def patched_attend(q, k, v, *, scale, mask=None, sinks=None, stream=None, **others):
    """What patch() installs: what kvonce does not take is MLX's business, errors included."""
    try:
        if not others.keys() <= {"force_fused"}:  # of a newer MLX
            raise Fallback(f"arguments that kvonce does not know: {', '.join(sorted(others))}")
        return _serve(q, k, v, scale, mask, sinks, stream)
    except (BadArgument, Fallback) as refusal:
        count_fallback(refusal.reason)
    return originals["attend"](q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream, **others)


def _serve_quantized(queries, q_keys, q_values, scale, mask, group_size, bits):
    if len(q_keys) != 3 or len(q_values) != 3:
        raise Fallback("a quantised cache without biases")
    dtype = arguments.check_quantized(queries, q_keys, q_values, group_size, bits)
    scale = arguments.check_scale(scale)
    shape = (*queries.shape[:3], q_keys[0].shape[2])
    causal = arguments.check_mask(mask, shape, dtype)
    mask = None if isinstance(mask, str) else mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        raise Fallback("a quantised cache and a mask that differs by head")
    _require_serveable(queries.shape, shape[3], causal)
    backend = backend_of(None)
    if backend is _mlx_cuda:
        raise Fallback("CUDA: a quantised cache")
    out, kernel = backend.attend_quantized(queries, q_keys, q_values, scale, causal, mask, group_size, bits, dtype)
    count_served(kernel)
    return out


def attend_quantized(queries, q_keys, q_values, scale, mask, group_size, bits):
    """kvonce.mlx.quantized_scaled_dot_product_attention."""
    try:
        return _serve_quantized(queries, q_keys, q_values, scale, mask, group_size, bits)
    except Fallback as fallback:
        count_fallback(fallback.reason)
    # mlx_lm's function scales queries in place.
    return originals["attend_quantized"](queries + 0, q_keys, q_values, scale, mask, group_size, bits)


def patched_attend_quantized(queries, q_keys, q_values, scale, mask, group_size=64, bits=8):
    """What patch() installs in mlx_lm."""
    try:
        return _serve_quantized(queries, q_keys, q_values, scale, mask, group_size, bits)
    except (BadArgument, Fallback) as refusal:
        count_fallback(refusal.reason)
    return originals["attend_quantized"](queries, q_keys, q_values, scale, mask, group_size, bits)

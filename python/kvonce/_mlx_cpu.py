"""kvonce.mlx on the CPU: MLX's memory, read where it is by kvonce.attend."""
import functools

import mlx.core as mx

from ._mlx_arguments import BadArgument, Fallback, dtype_name
from ._mlx_transforms import attend_by_mlx, attend_unpacked, split, transformable


def evaluate(arrays):
    """Raises Fallback where they have no values."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        if not str(error).startswith("[eval]"):  # what the graph itself raises
            raise
        raise Fallback("inside mx.compile, mx.vmap or mx.export_function, where arrays have no values") from None


def call_attend(q, k, v, mask, **options):
    """kvonce.attend. Its errors as kvonce.mlx has them; rows that see no key are MLX's."""
    from kvonce import attend  # not before it is needed: a package without the native module has Metal alone

    try:
        out = attend(q, k, v, mask=mask, return_lse=mask is not None, **options)
    except (NotImplementedError, RuntimeError) as error:
        raise Fallback(str(error)) from None
    except ValueError as error:
        argument, _, text = str(error).partition(": got ")
        given, _, allowed = text.partition(", allowed: ")
        if argument[:2] in ("q", "k", "v", "k_", "v_") or argument == "mask":  # what only it sees, such as strides
            raise BadArgument(argument, given, allowed) from None
        raise Fallback(str(error)) from None  # a limit that MLX has not, such as that of head dims
    if mask is None:
        return out
    out, lse = out
    if mx.any(mx.isneginf(lse)).item():
        raise Fallback("a row that sees no key")
    return out


@functools.lru_cache(maxsize=256)
def _function(scale, causal, has_mask, has_sinks, out_dtype):
    def run(*arrays):
        q, k, v, mask, sinks = split(arrays, has_mask, has_sinks)
        return call_attend(q, k, v, mask, scale=scale, causal=causal, out_dtype=out_dtype,
                       sinks=None if sinks is None else sinks.astype(mx.float32))

    return transformable(run, attend_by_mlx(scale, causal, has_mask, has_sinks))


def attend(q, k, v, scale, causal, mask, sinks, dtype, _stream):
    """(out, kernel) of checked arguments. Raises Fallback or BadArgument. Results are there, so that no stream matters."""
    arrays = [array for array in (q, k, v, mask, sinks) if array is not None]
    evaluate(arrays)
    return _function(scale, causal, mask is not None, sinks is not None, dtype_name(dtype))(*arrays), "cpu"


@functools.lru_cache(maxsize=256)
def _quantized_function(scale, causal, has_mask, group_size, bits, out_dtype):
    def run(q, k, k_scales, k_biases, v, v_scales, v_biases, mask=None):
        return call_attend(q, k, v, mask, scale=scale, causal=causal, out_dtype=out_dtype, k_format=f"mlx_int{bits}",
                       k_scales=k_scales, k_biases=k_biases, v_scales=v_scales, v_biases=v_biases)

    def by_mlx(q, *arrays):
        mask = arrays[6] if has_mask else "causal" if causal else None
        return attend_unpacked(q, arrays[:3], arrays[3:6], scale, mask, group_size, bits)

    return transformable(run, by_mlx)


def attend_quantized(q, keys, values, scale, causal, mask, group_size, bits, dtype):
    """As attend; keys and values: (codes, scales, biases)."""
    arrays = [q, *keys, *values] + ([] if mask is None else [mask])
    evaluate(arrays)
    function = _quantized_function(scale, causal, mask is not None, group_size, bits, dtype_name(dtype))
    return function(*arrays), f"cpu mlx_int{bits}"

"""kvonce.mlx on the CPU: MLX's memory, read where it is by kvonce.attend."""
import mlx.core as mx

from ._mlx_arguments import BadArgument, Fallback, dtype_name
from ._mlx_transforms import differentiable

KERNEL = "cpu"


def _evaluate(arrays):
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        raise Fallback("inside mx.compile, mx.vmap or mx.export_function, where arrays have no values") from None


def _call(*arrays, **options):
    """kvonce.attend; its errors as kvonce.mlx has them."""
    from kvonce import attend  # not before it is needed: a package without the native module has Metal alone

    try:
        return attend(*arrays, **options)
    except (NotImplementedError, RuntimeError) as error:
        raise Fallback(str(error)) from None
    except ValueError as error:
        argument, _, text = str(error).partition(": got ")
        given, _, allowed = text.partition(", allowed: ")
        if argument in ("q", "k", "v", "mask"):  # what cannot be seen from outside, such as strides
            raise BadArgument(argument, given, allowed) from None
        raise Fallback(str(error)) from None  # a limit that MLX has not, such as that of head dims


def _run(q, k, v, mask, sinks, scale, causal, out_dtype):
    sinks = None if sinks is None else sinks.astype(mx.float32)
    if mask is None:
        return _call(q, k, v, scale=scale, causal=causal, sinks=sinks, out_dtype=out_dtype)
    out, lse = _call(q, k, v, scale=scale, mask=mask, sinks=sinks, out_dtype=out_dtype, return_lse=True)
    if mx.any(mx.isneginf(lse)).item():
        raise Fallback("a row that sees no key")
    return out


def attend(q, k, v, scale, causal, mask, sinks, dtype):
    """(out, kernel) of checked arguments. Raises Fallback or BadArgument."""
    arrays = [array for array in (q, k, v, mask, sinks) if array is not None]
    _evaluate(arrays)
    function = differentiable(_run, scale, causal, mask is not None, sinks is not None, dtype_name(dtype))
    return function(*arrays), KERNEL

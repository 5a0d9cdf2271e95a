"""kvonce's kernels as functions that MLX's transformations can go through."""
import functools

import mlx.core as mx

from ._mlx_statistics import count_fallback

# What calls go to when kvonce does not serve them; patch() may find others in their place.
originals = {"attend": mx.fast.scaled_dot_product_attention, "attend_quantized": None}


def split(arrays, has_mask, has_sinks):
    """(q, k, v, mask, sinks) of the arrays that there are."""
    return (*arrays[:3], arrays[3] if has_mask else None, arrays[-1] if has_sinks else None)


@functools.lru_cache(maxsize=256)
def differentiable(run, scale, causal, has_mask, has_sinks, out_dtype):
    """run(q, k, v, mask, sinks, scale, causal, out_dtype) as a function of the arrays that there are.

    mx.grad, mx.vjp, mx.jvp and, where arrays need no values, mx.vmap get what MLX's own function gives: to them the
    result of a kernel would be a constant.
    """
    def by_mlx(*arrays):
        q, k, v, mask, sinks = split(arrays, has_mask, has_sinks)
        return originals["attend"](q, k, v, scale=scale, mask="causal" if causal else mask, sinks=sinks)

    @mx.custom_function
    def function(*arrays):
        return run(*split(arrays, has_mask, has_sinks), scale, causal, out_dtype)

    @function.vjp
    def _(primals, cotangent, _):
        count_fallback("gradients are wanted")
        return tuple(mx.vjp(by_mlx, list(primals), [cotangent])[1])

    @function.jvp
    def _(primals, tangents):
        count_fallback("gradients are wanted")
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def of_moving(*arrays):
            given = dict(zip(moving, arrays))
            return by_mlx(*(given.get(i, primal) for i, primal in enumerate(primals)))

        return mx.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1][0]

    @function.vmap
    def _(arrays, axes):
        count_fallback("inside mx.vmap")
        return mx.vmap(by_mlx, in_axes=tuple(axes))(*arrays), 0

    return function

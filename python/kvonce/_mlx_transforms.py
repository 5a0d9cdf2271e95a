"""kvonce's kernels as functions that MLX's transformations can go through, and the functions of MLX's that they stand for."""
import mlx.core as mx

from ._mlx_statistics import count_fallback


def attend_unpacked(queries, q_keys, q_values, scale, mask, group_size=64, bits=8):
    """What mlx_lm's quantized_scaled_dot_product_attention gives."""
    keys, values = (mx.dequantize(*cache, group_size=group_size, bits=bits) for cache in (q_keys, q_values))
    return originals["attend"](queries, keys, values, scale=scale, mask=mask)


# What calls go to when kvonce does not serve them. patch() puts here what it finds in place: of mlx_lm, or of others.
originals = {"attend": mx.fast.scaled_dot_product_attention, "attend_quantized": attend_unpacked}
defaults = dict(originals)


def split(arrays, has_mask, has_sinks):
    """(q, k, v, mask, sinks) of the arrays that there are."""
    return (*arrays[:3], arrays[3] if has_mask else None, arrays[-1] if has_sinks else None)


def attend_by_mlx(scale, causal, has_mask, has_sinks):
    """MLX's function of the arrays that there are."""
    def by_mlx(*arrays):
        q, k, v, mask, sinks = split(arrays, has_mask, has_sinks)
        return originals["attend"](q, k, v, scale=scale, mask="causal" if causal else mask, sinks=sinks)

    return by_mlx


def transformable(run, by_mlx):
    """run(*arrays) for mx.grad, mx.vjp and mx.jvp, which get what by_mlx(*arrays) gives: to them the result of a kernel
    would be a constant. On Metal only vjp helps: jvp and vmap go into the function whatever its own rules say, and find a
    kernel, for which MLX has none.
    """
    function = mx.custom_function(run)

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

    return function

"""kvonce.mlx on an MLX that is built for CUDA: the compiled CUDA kernels, on MLX's memory by DLPack. Has not run anywhere yet.

Not by mx.fast.cuda_kernel, which compiles a kernel's source: kvonce's kernels start as clusters and with programmatic
launches, and keep a workspace between calls, none of which it offers. DLPack has a price: MLX shows nobody its CUDA
streams, so that a call waits for MLX's work before it and for its own at the end. The package torch has to be installed.
"""
import functools

import mlx.core as mx

from ._mlx_arguments import BadArgument, Fallback, dtype_name
from ._mlx_cpu import call_attend, evaluate
from ._mlx_transforms import attend_by_mlx, split, transformable


@functools.lru_cache(maxsize=256)
def _function(scale, causal, has_sinks, out_dtype):
    def run(*arrays):
        q, k, v, _, sinks = split(arrays, False, has_sinks)
        sinks = None if sinks is None else sinks.astype(mx.float32)
        try:
            import torch
            evaluate([array for array in (q, k, v, sinks) if array is not None])
            out = call_attend(q, k, v, None, scale=scale, causal=causal, out_dtype=out_dtype, sinks=sinks)
            torch.cuda.synchronize()
        except (BadArgument, ImportError) as error:
            raise Fallback(f"CUDA: {error}") from None
        return out

    return transformable(run, attend_by_mlx(scale, causal, False, has_sinks))


def attend(q, k, v, scale, causal, mask, sinks, dtype, _stream):
    """As _mlx_cpu.attend."""
    if mask is not None:
        raise Fallback("CUDA: a mask")
    arrays = [array for array in (q, k, v, sinks) if array is not None]
    evaluate(arrays)
    return _function(scale, causal, sinks is not None, dtype_name(dtype))(*arrays), "cuda"

"""Attention for MLX with the arguments and the results of mlx.core.fast.scaled_dot_product_attention.

    import kvonce.mlx
    with kvonce.mlx.patch():                    # or patch() ... unpatch()
        mlx_lm.generate(model, tokenizer, ...)
    print(kvonce.mlx.stats())                   # {"served": 3810, "kernels": {"cpu": 3810}, "fallbacks": {...}}

Calls with 1 to 64 query tokens go to kvonce, everything else to MLX's own function; stats() says how often and why.

On the CPU: through kvonce.attend, on MLX's own memory. MLX is lazy, kvonce is not: a call evaluates its arguments and
returns what has been computed. Inside mx.compile, mx.vmap and mx.export_function arrays have no values, so that such
calls go to MLX. mx.grad, mx.vjp and mx.jvp get their derivatives from MLX's function.

On an Apple GPU: the kernel bodies of src/metal, which MLX compiles; lazy as everything in MLX. mx.grad and mx.vjp work;
mx.jvp, mx.vmap and mx.export_function raise ValueError, as MLX has no rules for custom kernels. On CUDA: _mlx_cuda.py.
"""
from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import _mlx_calls as _calls
from . import _mlx_patch as _patch
from ._mlx_calls import MAX_Q_LEN
from ._mlx_statistics import reset_stats, stats

__all__ = ["MAX_Q_LEN", "patch", "quantized_scaled_dot_product_attention", "reset_stats", "scaled_dot_product_attention",
           "stats", "unpatch"]


def scaled_dot_product_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float,
                                 mask: None | str | mx.array = None, sinks: mx.array | None = None,
                                 force_fused: bool = False,
                                 stream: mx.Stream | mx.Device | mx.DeviceType | None = None) -> mx.array:
    """softmax(scale * q k^T + mask) v, each byte of K and V read once for all query heads that need it.

    q: [num_seqs, num_q_heads, q_len, head_dim_qk]; float32, float16 or bfloat16.
    k: [num_seqs, num_kv_heads, kv_len, head_dim_qk]; num_q_heads is a multiple of num_kv_heads. Not repeated, not copied:
        any strides as long as the elements of the last dim lie side by side.
    v: [num_seqs, num_kv_heads, kv_len, head_dim_v]; as k.
    scale: of q.k.
    mask: None: every query token sees every key. "causal": the newest query token sees every key, the one before it a key
        less. An array of at most 4 dims that broadcasts to [num_seqs, num_q_heads, q_len, kv_len]: of bools, where False
        hides a key, or of floats that are added to the scores.
    sinks: [num_q_heads], one extra logit per query head without a value.
    force_fused: of MLX's function, for calls that go there. kvonce's kernels are fused.
    stream: of MLX: a stream or device, whose backend serves the call. Default: that of mx.default_device().

    Returns [num_seqs, num_q_heads, q_len, head_dim_v] in the dtype that q, k and v promote to. ValueError for arguments
    that no backend of kvonce takes; what MLX alone can do (prefill, transformations, rows without keys) goes to MLX.
    """
    return _calls.attend(q, k, v, scale, mask, sinks, force_fused, stream)


def quantized_scaled_dot_product_attention(queries: mx.array, q_keys: Sequence[mx.array], q_values: Sequence[mx.array],
                                           scale: float, mask: None | str | mx.array = None, group_size: int = 64,
                                           bits: int = 8) -> mx.array:
    """mlx_lm's function of that name: K and V as (codes, scales, biases) of mx.quantize, read once and never unpacked.

    queries: [num_seqs, num_q_heads, q_len, head_dim_qk]; float32, float16 or bfloat16.
    q_keys, q_values: uint32 [num_seqs, num_kv_heads, kv_len, head_dim * bits / 32], and scales and biases
        [num_seqs, num_kv_heads, kv_len, head_dim / group_size].
    scale, mask: as in scaled_dot_product_attention.

    What kvonce has no kernel for goes to mlx_lm's function. Returns an array of queries' dtype.
    """
    return _calls.attend_quantized(queries, q_keys, q_values, scale, mask, group_size, bits)


def patch() -> _patch.Patch:
    """Puts kvonce's functions in the place of MLX's and mlx_lm's, until unpatch() or the end of a with block.

    Replaced are mlx.core.fast.scaled_dot_product_attention, mlx_lm.models.base.quantized_scaled_dot_product_attention,
    and every name in already imported modules of mlx and mlx_lm that means one of them: import mlx_lm first. Arguments
    that kvonce does not take go to MLX's function, whose errors they get. May be called again; the inner one of two with
    blocks leaves the functions where they are.
    """
    return _patch.patch()


def unpatch() -> None:
    """Puts back what patch() found. A name that others have changed since stays as it is."""
    _patch.unpatch()


def _main() -> int:
    import sys

    from kvonce import _mlx_check
    return _mlx_check.main(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(_main())

"""Decode attention that streams each byte of the KV cache once.

Arrays are NumPy's, torch's or those of anything else with DLPack, in CPU or CUDA memory: float32, float16 or bfloat16
(NumPy's by the package ml_dtypes), of any strides as long as the elements of the last dim lie side by side. q, K and V
are read where they are. Errors: ValueError (an argument that can never be right, named in the message),
NotImplementedError (right, but not served here), RuntimeError (a target or device that is not on this machine).

In CUDA memory a call enqueues its work on a stream and returns: nothing is copied or waited for, and a CUDA graph may
capture it. torch's tensors are the direct way; others (CuPy, JAX) go through torch, which has to be installed, without
copies either.

Installed with KVONCE_NATIVE=0 the package is Python alone: kvonce.mlx serves Apple GPUs, every function here raises
RuntimeError and says what is missing.
"""
try:
    import kvonce._core as _core
    from kvonce._core import Device, Plan
except ModuleNotFoundError as error:
    if error.name != "kvonce._core":
        raise
    from ._missing import MissingCore

    _core = MissingCore()

__version__ = _core.version()
__all__ = ["Device", "Plan", "attend", "devices", "explain", "merge", "plan"]


def _dtype_name(dtype):
    """"float16" of "float16", numpy.float16, numpy.dtype("float16"), ml_dtypes.bfloat16 or torch.float16."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def attend(q, k, v, *, scale=None, causal=None, window=0, softcap=0.0, sinks=None, alibi_slopes=None, mask=None,
           mask_slopes=None, kv_lens=None, kv_starts=None, kv_layout="BHSD", block_table=None, segments=None,
           v_is_k_prefix=False, k_format=None, v_format=None, k_scales=None, k_biases=None, v_scales=None,
           v_biases=None, chunk_tokens=None, out=None, out_dtype=None, return_lse=False, threads=None, target=None,
           policy=None, stream=None):
    """Attention of a few query tokens to a long KV cache, each K and V byte read once.

    q: [num_seqs, num_q_heads, q_len, head_dim_qk], q_len 0 to 64.
    k: [num_seqs, num_kv_heads, kv_len, head_dim_qk]; num_q_heads is a multiple of num_kv_heads.
    v: [num_seqs, num_kv_heads, kv_len, head_dim_v].
    scale: of q.k; default head_dim_qk ** -0.5.
    causal: the newest query token sees the newest key (bottom-right aligned), the one before it a key less. False: all
        see every key. Default: True without a mask, False with one.
    window: newest keys that a query token sees, itself included; 0: all.
    softcap: above 0, a score becomes softcap * tanh(score / softcap); not on CUDA yet (NotImplementedError).
    sinks: [num_q_heads], one extra logit per query head without a value; float32 or float64, in CUDA memory float32.
    alibi_slopes: [num_q_heads], times (key position - query position), added to the score; not on CUDA yet.
    mask: broadcastable to [num_seqs, num_q_heads, q_len, kv_len]; bool or uint8, where 0 hides a key, or float32, float16
        or bfloat16, added to the score, where -inf hides. A hidden key's K and V have no effect, NaN included. Not on
        CUDA yet.
    mask_slopes: [num_q_heads], what an additive mask is multiplied by.
    kv_lens: [num_seqs] tokens that count, 0 to kv_len; int32, int64 or a list. Default: all of k. With q in CUDA memory
        an int32 array beside it, which is read when the work runs; what exceeds kv_len counts as kv_len.
    kv_starts: [num_seqs] tokens of left padding that are skipped; as kv_lens.
    kv_layout: "BHSD", or "BSHD": k and v, and their scales and biases, are [num_seqs, kv_len, num_kv_heads, ...], read where
        they are; messages give their shapes in the order of "BHSD". "NHD" and "HND", the pages of a block_table, are not
        served yet (NotImplementedError), nor are segments, which rows read which token range.
    v_is_k_prefix: v is k[..., :head_dim_v], whose bytes then are read once.
    k_format: how K is stored; default: k's dtype. "mlx_int8" and "mlx_int4": k is what mlx.core.quantize makes of K with bits 8
        or 4 and group_size 32, 64 or 128, [num_seqs, num_kv_heads, kv_len, head_dim_qk * bits / 32] of uint32 (or int32,
        or four times as many uint8), and a value is scale * code + bias. Not on CUDA yet.
    v_format: the same of V; default: k_format, else v's dtype.
    k_scales, k_biases: of K in an MLX format, [num_seqs, num_kv_heads, kv_len, head_dim_qk / group_size] of float32, float16
        or bfloat16, of any strides as long as those of a token lie side by side. v_scales, v_biases: of V, of the same dtype.
    chunk_tokens: fixes how tokens are split, so that a row's bits depend neither on the batch nor on kv_len.
    out: [num_seqs, num_q_heads, q_len, head_dim_v] to write to, not overlapping the inputs. Default: a new array.
    out_dtype: "float32", "float16", "bfloat16" or a dtype object; default: that of out, else of q.
    threads: CPU; default: KVONCE_NUM_THREADS, or the CPUs of this process. Results do not depend on it.
    target: CPU; a name of kvonce.devices(); default: KVONCE_CPU_TARGET, or the best.
    policy: tunables, "row_tile=4,chunk_tokens=2048", or the path of a policy file (docs/tuning.md).
    stream: CUDA; the cudaStream_t as an int. Default: torch's current stream of q's device. Where it is given, ordering
        it with the streams of torch's tensors, results included, is up to the caller; for other arrays it is done.

    Returns out, an array of q's kind; with return_lse (out, lse), lse float32 [num_seqs, num_q_heads, q_len], the
    natural logarithm of the sum of exponentials. A row that sees no key has out 0 and lse -inf. Other threads of Python
    run meanwhile. The plan of an earlier call is used again, also for a cache that has grown a little.
    """
    if block_table is not None:
        raise NotImplementedError("block_table is not served yet; gather the pages into k and v of [num_seqs, ...]")
    if segments is not None:
        raise NotImplementedError(
            "segments is not served yet; attend to each token range with return_lse and merge the results")
    causal = mask is None if causal is None else causal
    return _core.attend(q, k, v, scale, causal, window, softcap, sinks, kv_lens, kv_starts, v_is_k_prefix, out,
                        _dtype_name(out_dtype), return_lse, stream,
                        _core.Choices(chunk_tokens, threads, target, policy), alibi_slopes, mask, mask_slopes,
                        _dtype_name(k_format), _dtype_name(v_format), k_scales, k_biases, v_scales, v_biases, kv_layout)


def merge(outs, lses):
    """Joins the results of attend over disjoint token ranges of the same rows into that over their union, exactly.

    outs: [num_parts, ..., head_dim_v] or a list of [..., head_dim_v], float32.
    lses: [num_parts, ...] or a list of [...], float32, natural logarithms; -inf is a part without keys.

    Returns (out, lse) of one part's shape. Parts join in order: the same parts give the same bits. Only one part of a
    row may have had the row's sink.
    """
    return _core.merge(outs, lses)


def plan(num_q_heads, num_kv_heads, head_dim_qk, max_kv_len, *, num_seqs=1, q_len=1, head_dim_v=None,
         q_dtype="float32", k_format=None, v_format=None, out_dtype=None, scale=None, causal=None, window=0,
         softcap=0.0, has_sinks=False, has_alibi=False, mask=None, mask_dtype=None, has_mask_slopes=False,
         v_is_k_prefix=False, quant_group=None, scales_dtype=None, device="cpu", chunk_tokens=None, threads=None,
         target=None, policy=None):
    """Decides once what will run, for calls of one shape and any kv_len up to max_kv_len: Plan.attend(q, k, v, ...).

    k_format: of K as in attend, default q_dtype; v_format: default k_format; out_dtype: default q_dtype.
    quant_group, scales_dtype: of the MLX formats, values per scale (32, 64 or 128) and dtype of scales and biases, default
        float32; Plan.attend gets k_scales, k_biases, v_scales and v_biases.
    has_sinks, has_alibi, has_mask_slopes: Plan.attend gets sinks, alibi_slopes, mask_slopes.
    mask: "boolean" or "additive", what Plan.attend gets as mask; mask_dtype: of an additive one, default float32.
    device: where the arrays will be, "cpu", "cuda" (the first), "cuda:1" or a torch.device. The rest as in attend.
    """
    return _core.plan(num_q_heads, num_kv_heads, head_dim_qk, max_kv_len, num_seqs, q_len, head_dim_v,
                      _dtype_name(q_dtype), _dtype_name(k_format), _dtype_name(v_format), _dtype_name(out_dtype), scale,
                      mask is None if causal is None else causal, window, softcap, has_sinks, v_is_k_prefix,
                      str(device), _core.Choices(chunk_tokens, threads, target, policy), has_alibi, mask,
                      _dtype_name(mask_dtype), has_mask_slopes, quant_group, _dtype_name(scales_dtype))


def explain(num_q_heads, num_kv_heads, head_dim_qk, max_kv_len, **options):
    """What plan(...) of the same arguments decides, as text of several lines, and why it rejected other kernels."""
    return plan(num_q_heads, num_kv_heads, head_dim_qk, max_kv_len, **options).explain()


def __getattr__(name):
    if name in ("Device", "Plan"):  # of a package of Python alone: says so
        return getattr(_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def devices():
    """Every backend, target and CUDA device this build knows, best CPU target first; what cannot run here says why."""
    return _core.devices()

"""Attention in float64, written from the definition, and arrays to try it on."""
import numpy

# Relative RMS error that is allowed, by the dtype of out.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def values(shape, seed, dtype="float32"):
    """Normally distributed, rounded to dtype."""
    if dtype == "bfloat16":
        import ml_dtypes
        dtype = ml_dtypes.bfloat16
    return numpy.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def attention(q, k, v, *, scale=None, causal=None, window=0, softcap=0.0, kv_lens=None, kv_starts=None, sinks=None,
              alibi_slopes=None, mask=None, mask_slopes=None):
    """(out, lse) in float64 of arrays shaped as kvonce.attend's."""
    q, k, v = (numpy.asarray(array).astype("float64") for array in (q, k, v))
    num_seqs, num_q_heads, q_len, head_dim = q.shape
    causal = mask is None if causal is None else causal
    if mask is not None:
        mask = numpy.broadcast_to(mask, (num_seqs, num_q_heads, q_len, k.shape[2]))
        if mask.dtype in (bool, numpy.uint8):
            mask = numpy.where(mask, 0.0, -numpy.inf)
        mask = mask.astype("float64")
    group_size = num_q_heads // k.shape[1]
    out = numpy.zeros((num_seqs, num_q_heads, q_len, v.shape[3]))
    lse = numpy.full((num_seqs, num_q_heads, q_len), -numpy.inf)
    for seq, head, row in numpy.ndindex(num_seqs, num_q_heads, q_len):
        kv_len = k.shape[2] if kv_lens is None else int(kv_lens[seq])
        begin = 0 if kv_starts is None else int(kv_starts[seq])
        position = kv_len - q_len + row
        end = min(position + 1, kv_len) if causal else kv_len
        if window:
            begin = max(begin, position - window + 1)
        end = max(begin, end)
        factor = head_dim ** -0.5 if scale is None else scale
        scores = k[seq, head // group_size, begin:end] @ q[seq, head, row] * factor
        if softcap:
            scores = softcap * numpy.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + float(alibi_slopes[head]) * (numpy.arange(begin, end) - position)
        values = v[seq, head // group_size, begin:end]
        if mask is not None:
            added = mask[seq, head, row, begin:end]
            shown = ~numpy.isneginf(added)
            scores = (scores + (1.0 if mask_slopes is None else float(mask_slopes[head])) * added)[shown]
            values = values[shown]
        logits = scores if sinks is None else numpy.append(scores, float(sinks[head]))
        if not logits.size:
            continue
        most = logits.max()
        total = numpy.exp(logits - most).sum()
        lse[seq, head, row] = most + numpy.log(total)
        weights = numpy.exp(scores - most) / total
        out[seq, head, row] = weights @ values
    return out, lse


def error(got, expected):
    """Relative RMS, in float64."""
    got = numpy.asarray(got).astype("float64")
    return numpy.sqrt(((got - expected) ** 2).mean() / max((expected ** 2).mean(), 1e-300))

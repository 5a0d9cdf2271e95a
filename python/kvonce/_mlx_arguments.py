"""What kvonce.mlx takes: the rules, and the errors of calls that break them."""
import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_DTYPE_NAMES = "float32, float16, bfloat16"


class BadArgument(ValueError):
    """The argument, what was given and what is allowed, in the form of MLX's own messages."""

    def __init__(self, argument, given, allowed):
        self.reason = f"{argument}: got {given}, allowed: {allowed}"
        super().__init__(f"[kvonce.mlx.scaled_dot_product_attention] {self.reason}.")


class BadType(BadArgument, TypeError):
    """MLX raises TypeError for these."""


class Fallback(Exception):
    """The call is right, but not one that kvonce serves."""

    def __init__(self, reason):
        self.reason = reason
        super().__init__(reason)


def shape_text(shape):
    return "(" + ",".join(map(str, shape)) + ")"


def dtype_name(dtype):
    return str(dtype).rpartition(".")[2]


def require_array(name, array):
    if not isinstance(array, mx.array):
        raise BadType(name, f"an object of type {type(array).__name__}", "an mlx.core.array")


def check_qkv(q, k, v):
    """The dtype of out. Raises BadArgument, or TypeError for what is no array."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        require_array(name, array)
        if array.ndim != 4:
            raise BadArgument(name, f"shape {shape_text(array.shape)}", "rank 4, [num_seqs, heads, tokens, head_dim]")
        if array.dtype not in DTYPES:
            raise BadArgument(name, f"dtype {dtype_name(array.dtype)}", _DTYPE_NAMES)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if k_shape[0] != q_shape[0]:
        raise BadArgument("k", f"shape {shape_text(k_shape)}", f"a first dim of {q_shape[0]}, as q {shape_text(q_shape)}")
    if k_shape[3] != q_shape[3]:
        raise BadArgument("k", f"shape {shape_text(k_shape)}", f"a last dim of {q_shape[3]}, as q {shape_text(q_shape)}")
    if v_shape[:3] != k_shape[:3]:
        raise BadArgument("v", f"shape {shape_text(v_shape)}", f"the first three dims of k {shape_text(k_shape)}")
    if not k_shape[1] or q_shape[1] % k_shape[1]:
        raise BadArgument("k", f"{k_shape[1]} heads", f"a number that divides the {q_shape[1]} heads of q")
    if q.dtype == k.dtype == v.dtype:
        return q.dtype
    return mx.result_type(mx.result_type(q.dtype, k.dtype), v.dtype)


def check_quantized(queries, q_keys, q_values, group_size, bits):
    """The dtype of out."""
    require_array("queries", queries)
    if queries.ndim != 4 or queries.dtype not in DTYPES:
        raise BadArgument("queries", f"shape {shape_text(queries.shape)}, dtype {dtype_name(queries.dtype)}",
                          f"rank 4 and one of {_DTYPE_NAMES}")
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise Fallback(f"a quantised cache of {bits} bits in groups of {group_size}")
    num_seqs, num_q_heads, _, head_dim = queries.shape
    for name, cache in (("q_keys", q_keys), ("q_values", q_values)):
        for part in cache:
            require_array(name, part)
        shapes = [tuple(part.shape) for part in cache]
        codes = shapes[0]
        if len(codes) != 4 or codes[0] != num_seqs or not codes[1] or num_q_heads % codes[1]:
            raise BadArgument(name, f"codes of shape {shape_text(codes)}",
                              f"({num_seqs}, heads that divide the {num_q_heads} of queries, tokens, words)")
        if name == "q_keys" and codes[3] * 32 != head_dim * bits:
            raise BadArgument(name, f"{codes[3]} words of a token", f"{head_dim * bits // 32}, a head_dim of {head_dim}")
        if name == "q_values" and codes[:3] != tuple(q_keys[0].shape[:3]):
            raise BadArgument(name, f"codes of shape {shape_text(codes)}", "the first three dims of q_keys")
        wanted = (*codes[:3], codes[3] * 32 // bits // group_size)
        if shapes[1:] != [wanted, wanted]:
            raise BadArgument(name, f"scales and biases of shape {shape_text(shapes[1])} and {shape_text(shapes[2])}",
                              shape_text(wanted))
    return mx.result_type(queries.dtype, q_keys[1].dtype)


def check_mask(mask, shape, dtype):
    """Whether the mask is "causal". shape: [num_seqs, num_q_heads, q_len, kv_len]; dtype: of out."""
    if mask is None:
        return False
    if isinstance(mask, str):
        if mask != "causal":
            raise BadArgument("mask", repr(mask), '"causal", an array or None')
        return True
    require_array("mask", mask)
    if mask.ndim > 4:
        raise BadArgument("mask", f"shape {shape_text(mask.shape)}", "rank 4 at most")
    for given, wanted in zip(reversed(mask.shape), reversed(shape)):
        if given not in (1, wanted):
            raise BadArgument("mask", f"shape {shape_text(mask.shape)}", f"one that broadcasts to {shape_text(shape)}")
    if mask.dtype != mx.bool_:
        if mx.result_type(mask.dtype, dtype) != dtype:
            raise BadArgument("mask", f"dtype {dtype_name(mask.dtype)}",
                              f"bool_ or what promotes to {dtype_name(dtype)}, the dtype of the result")
        if mask.dtype not in DTYPES:
            raise Fallback(f"a mask of dtype {dtype_name(mask.dtype)}")
    return False


def check_sinks(sinks, num_q_heads, dtype):
    if sinks is None:
        return
    require_array("sinks", sinks)
    if sinks.shape != (num_q_heads,):
        raise BadArgument("sinks", f"shape {shape_text(sinks.shape)}", f"({num_q_heads}), one of each query head")
    if mx.result_type(sinks.dtype, dtype) != dtype:
        raise BadArgument("sinks", f"dtype {dtype_name(sinks.dtype)}",
                          f"what promotes to {dtype_name(dtype)}, the dtype of the result")


def check_scale(scale):
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise BadArgument("scale", repr(scale), "a number") from None

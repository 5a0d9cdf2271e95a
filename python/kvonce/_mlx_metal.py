"""kvonce.mlx on Apple GPUs: the kernel bodies of src/metal, which MLX compiles on the user's machine.

Two kernels per call: attend_* writes partials, merge_partials joins them. src/metal/params.h is the contract.
"""
import functools
import pathlib
import re

import mlx.core as mx

from . import _metal_policy as policy
from ._mlx_arguments import Fallback, dtype_name
from ._mlx_transforms import attend_by_mlx, attend_unpacked, split, transformable

# Files in the order in which dialect.h wants them, before the body's own.
_COMMON = ("params.h", "dialect.h", "work.metal.h", "tokens.metal.h", "join.metal.h")
_BODY_FILES = {"vector": "attend.metal.h", "matrix": "attend_matrix.metal.h", "per_head": "attend_per_head.metal.h"}
_AFFINE_FILES = ("attend.metal.h", "attend_matrix.metal.h", "affine.metal.h")
_MERGE_FILES = ("params.h", "dialect.h", "work.metal.h", "merge.metal.h")

ATTEND_INPUTS = ("q", "k", "v", "kv_lens", "kv_starts", "mask", "alibi_slopes", "params", "scalars")
AFFINE_INPUTS = ("q", "k", "k_scales", "k_biases", "v", "v_scales", "v_biases", *ATTEND_INPUTS[3:])
ATTEND_OUTPUTS = ("partial_o", "partial_sums")
MERGE_INPUTS = ("partial_o", "partial_sums", "sinks", "params")
MERGE_OUTPUTS = ("out", "lse")

_PLACE = """
  kvonce_metal::Place place;
  place.x = int(threadgroup_position_in_grid.x);
  place.y = int(threadgroup_position_in_grid.y);
  place.z = int(threadgroup_position_in_grid.z);
  place.simdgroup = int(simdgroup_index_in_threadgroup);
  place.lane = int(thread_index_in_simdgroup);
"""

_BUFFERS = """
  buffers.kv_lens = kv_lens;
  buffers.kv_starts = kv_starts;
  buffers.mask = (const device unsigned char*)mask;
  buffers.alibi_slopes = alibi_slopes;
  buffers.params = params;
  buffers.scalars = scalars;
  buffers.q_strides = q_strides;
  buffers.mask_strides = mask_strides;
  buffers.partial_o = partial_o;
  buffers.partial_sums = partial_sums;
"""

_ATTEND = """
  threadgroup float shared[kSharedFloats];
  kvonce_metal::AttendBuffers<T> buffers;
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.k_strides = k_strides;
  buffers.v_strides = v_strides;
""" + _BUFFERS + _PLACE + """
  kvonce_metal::attend_BODY<TEMPLATE>(buffers, shared, place);
"""

_AFFINE = """
  threadgroup float shared[kSharedFloats];
  kvonce_metal::AttendBuffers<T> buffers;
  buffers.q = q;
""" + _BUFFERS + "".join(f"""
  kvonce_metal::AffineTensor<T> {x}_affine;
  {x}_affine.codes = (const device unsigned char*){x};
  {x}_affine.scales = {x}_scales;
  {x}_affine.biases = {x}_biases;
  {x}_affine.strides = {x}_strides;
  {x}_affine.scales_strides = {x}_scales_strides;
  {x}_affine.biases_strides = {x}_biases_strides;
""" for x in "kv") + _PLACE + """
  kvonce_metal::attend_affine_BODY<TEMPLATE, kBits, kGroup>(buffers, k_affine, v_affine, shared, place);
"""

_MERGE = """
  threadgroup float shared[kSharedFloats];
  kvonce_metal::MergeBuffers buffers;
  buffers.partial_o = partial_o;
  buffers.partial_sums = partial_sums;
  buffers.sinks = sinks;
  buffers.params = params;
""" + _PLACE + """
  kvonce_metal::merge_partials<T, kDimV>(buffers, out, lse, shared, place);
"""

_TEMPLATES = {"vector": "T, kDimQk, kDimV, kRows", "matrix": "T, kDimQk, kDimV", "per_head": "T, kDimQk, kDimV"}
_MIN_ELEMENTS = 8  # MLX passes smaller arrays in another address space


def source_folder():
    """Of the kernel bodies: in the installed package, or in the repository."""
    here = pathlib.Path(__file__).resolve().parent
    for folder in (here / "sources" / "metal", here.parents[1] / "src" / "metal"):
        if (folder / "params.h").is_file():
            return folder
    raise RuntimeError(f"kvonce.mlx: no kernel sources in {here / 'sources'}; install kvonce again")


def _read(names):
    texts = ((source_folder() / name).read_text(encoding="ascii") for name in names)
    return "\n".join(line for text in texts for line in text.splitlines()
                     if not re.match(r"\s*#\s*(include|pragma once)", line)) + "\n"


@functools.lru_cache(maxsize=None)
def param_indices():
    """{"kNumSeqs": 0, ...}: every constant of params.h by name."""
    text = (source_folder() / "params.h").read_text(encoding="ascii")
    return {name: int(value) for name, value in re.findall(r"^\s*(k\w+) =\s*(\d+),", text, re.MULTILINE)}


@functools.lru_cache(maxsize=None)
def attend_kernel(body):
    source = _ATTEND.replace("BODY", body).replace("TEMPLATE", _TEMPLATES[body])
    return mx.fast.metal_kernel(
        name=f"kvonce_attend_{body}", input_names=list(ATTEND_INPUTS), output_names=list(ATTEND_OUTPUTS), source=source,
        header=_read((*_COMMON, _BODY_FILES[body])), ensure_row_contiguous=False)


@functools.lru_cache(maxsize=None)
def affine_kernel(body):
    source = _AFFINE.replace("BODY", body).replace("TEMPLATE", _TEMPLATES[body])
    return mx.fast.metal_kernel(
        name=f"kvonce_attend_affine_{body}", input_names=list(AFFINE_INPUTS), output_names=list(ATTEND_OUTPUTS), source=source,
        header=_read((*_COMMON, *_AFFINE_FILES)), ensure_row_contiguous=False)


@functools.lru_cache(maxsize=None)
def merge_kernel():
    return mx.fast.metal_kernel(
        name="kvonce_merge", input_names=list(MERGE_INPUTS), output_names=list(MERGE_OUTPUTS), source=_MERGE,
        header=_read(_MERGE_FILES), ensure_row_contiguous=False)


@functools.lru_cache(maxsize=None)
def this_gpu():
    """The policy's description of the GPU that MLX uses."""
    device_info = getattr(mx, "device_info", None) or mx.metal.device_info
    return policy.gpu_of_architecture(device_info()["architecture"])


@functools.lru_cache(maxsize=1024)
def _plan(num_seqs, num_q_heads, num_kv_heads, q_len, head_dim_qk, head_dim_v, max_kv_len, dtype, kv_format, quant_group, gpu,
          asked):
    return policy.choose(num_seqs=num_seqs, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, q_len=q_len,
                         head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, max_kv_len=max_kv_len, dtype=dtype,
                         kv_format=kv_format, quant_group=quant_group, gpu=gpu, policy=dict(asked))


def plan_of(q, k, v, gpu=None, asked=(), affine=None):
    """The plan of a call, the same for all kv_len between two powers of two. asked: (name, value) pairs of a policy.

    affine: (bits, group_size) where k and v are (codes, scales, biases), the latter two of q's dtype.
    """
    keys, dim_v, of_cache = k, v.shape[3] if affine is None else v[0].shape[3] * 32 // affine[0], (None, 64)
    if affine is not None:
        keys, of_cache = k[0], (f"mlx_int{affine[0]}", affine[1])
    max_kv_len = 1 << (keys.shape[2] - 1).bit_length()
    return _plan(*q.shape[:2], keys.shape[1], q.shape[2], q.shape[3], dim_v, max_kv_len, dtype_name(q.dtype), *of_cache,
                 gpu or this_gpu(), tuple(asked))


@functools.lru_cache(maxsize=256)
def _params(plan, num_seqs, num_q_heads, num_kv_heads, q_len, kv_len, causal, mask_kind, has_sinks):
    """int64 [kNumParams]. Layers of one step share it."""
    index = param_indices()
    values = [0] * index["kNumParams"]
    for name, value in (("kNumSeqs", num_seqs), ("kNumQHeads", num_q_heads), ("kNumKvHeads", num_kv_heads),
                        ("kQLen", q_len), ("kKvLen", kv_len), ("kNumChunks", plan.num_chunks),
                        ("kChunkTokens", plan.fixed_chunk_tokens), ("kRowTiles", plan.row_tiles),
                        ("kTokenParts", plan.token_parts), ("kCausal", causal), ("kMaskKind", index[mask_kind]),
                        ("kHasSinks", has_sinks), ("kMergeSimdgroups", plan.merge_simdgroups)):
        values[index[name]] = int(value)
    return mx.array(values, dtype=mx.int64)


@functools.lru_cache(maxsize=256)
def _scalars(scale):
    index = param_indices()
    values = [0.0] * index["kNumScalars"]
    values[index["kScale"]] = scale
    return mx.array(values, dtype=mx.float32)


# Kept arrays are made of values, not of operations: those belong to a thread's stream, and to a trace if one is on.
@functools.lru_cache(maxsize=None)
def _unused(dtype):
    """What stands for an array that the params do not announce."""
    return mx.array([0] * _MIN_ELEMENTS, dtype=dtype)


@functools.lru_cache(maxsize=None)
def _no_mask():
    return mx.array([[[[False] * _MIN_ELEMENTS]]])


def _mask_of(mask, shape, dtype):
    """(the mask in 4 dims, the name of its kind). Broadcast dims get stride 0, nothing is repeated in memory."""
    if mask is None:
        return _no_mask(), "kMaskNone"
    if mask.dtype == mx.bool_:
        kind = "kMaskBoolean"
    elif mask.dtype == mx.float32:
        kind = "kMaskAdditiveF32"
    else:
        mask, kind = mask.astype(dtype), "kMaskAdditive"
    mask = mx.broadcast_to(mask, shape)
    if mask.size < _MIN_ELEMENTS:
        mask = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, _MIN_ELEMENTS)])
    return mask, kind


def _sinks_of(sinks):
    if sinks is None:
        return _unused(mx.float32)
    return mx.pad(sinks.astype(mx.float32), (0, _MIN_ELEMENTS))  # packed, whatever its stride was


def launch(plan, q, k, v, mask, sinks, scale, causal, out_dtype, stream=None, verbose=False, affine=None):
    """(out, lse): the two kernels of a plan. q, k and v are of one dtype; out_dtype: of out; affine: as plan_of()."""
    num_seqs, num_q_heads, q_len, dim_qk = q.shape
    if affine is None:
        kernel, tensors, dim_v = attend_kernel(plan.body), [q, k, v], v.shape[3]
    else:
        kernel, tensors, dim_v = affine_kernel(plan.body), [q, *k, *v], v[0].shape[3] * 32 // affine[0]
    num_kv_heads, kv_len = tensors[1].shape[1:3]
    mask, mask_kind = _mask_of(mask, (num_seqs, num_q_heads, q_len, kv_len), q.dtype)
    params = _params(plan, num_seqs, num_q_heads, num_kv_heads, q_len, kv_len, causal, mask_kind, sinks is not None)
    rows = num_seqs * num_q_heads * q_len
    partials = rows * plan.num_chunks
    template = [("T", q.dtype), ("kDimQk", dim_qk), ("kDimV", dim_v)]
    if plan.body == "vector":
        template.append(("kRows", plan.row_tile))
    if affine is not None:
        template += [("kBits", affine[0]), ("kGroup", affine[1])]
    partial_o, partial_sums = kernel(
        inputs=[*tensors, _unused(mx.int32), _unused(mx.int32), mask, _unused(mx.float32), params, _scalars(scale)],
        template=[*template, ("kSharedFloats", plan.threadgroup_bytes // 4)],
        grid=(plan.threads * plan.threadgroups[0], plan.threadgroups[1], plan.threadgroups[2]),
        threadgroup=(plan.threads, 1, 1), output_shapes=[(partials * dim_v,), (max(2 * partials, _MIN_ELEMENTS),)],
        output_dtypes=[mx.float32, mx.float32], stream=stream, verbose=verbose)
    merge_threads = policy.LANES * plan.merge_simdgroups
    out, lse = merge_kernel()(
        inputs=[partial_o, partial_sums, _sinks_of(sinks), params],
        template=[("T", out_dtype), ("kDimV", dim_v), ("kSharedFloats", plan.merge_threadgroup_bytes // 4)],
        grid=(merge_threads * plan.merge_threadgroups[0], 1, 1), threadgroup=(merge_threads, 1, 1),
        output_shapes=[(num_seqs, num_q_heads, q_len, dim_v), (num_seqs, num_q_heads, q_len)],
        output_dtypes=[out_dtype, mx.float32], stream=stream, verbose=verbose)
    return out, lse


@functools.lru_cache(maxsize=256)
def _function(scale, causal, has_mask, has_sinks, out_dtype, stream):
    def run(*arrays):
        q, k, v, mask, sinks = split(arrays, has_mask, has_sinks)
        return launch(plan_of(q, k, v), q, k, v, mask, sinks, scale, causal, out_dtype, stream)[0]

    return transformable(run, attend_by_mlx(scale, causal, has_mask, has_sinks))


def attend(q, k, v, scale, causal, mask, sinks, dtype, stream):
    """(out, kernel) of checked arguments. Raises Fallback."""
    if min(q.size, k.size, v.size) < _MIN_ELEMENTS:
        raise Fallback(f"fewer than {_MIN_ELEMENTS} elements of q, K or V")
    if k.dtype != v.dtype or k.dtype != dtype:
        raise Fallback("K and V of other dtypes than the result")
    q = q.astype(dtype)
    try:
        plan = plan_of(q, k, v)
    except NotImplementedError as error:
        raise Fallback(str(error)) from None
    arrays = [array for array in (q, k, v, mask, sinks) if array is not None]
    function = _function(scale, causal, mask is not None, sinks is not None, dtype, stream)
    return function(*arrays), f"metal {plan.body}"


@functools.lru_cache(maxsize=256)
def _quantized_function(scale, causal, has_mask, group_size, bits, out_dtype):
    affine = bits, group_size

    def run(q, *arrays):
        k, v, mask = arrays[:3], arrays[3:6], arrays[6] if has_mask else None
        return launch(plan_of(q, k, v, affine=affine), q, k, v, mask, None, scale, causal, out_dtype, affine=affine)[0]

    def by_mlx(q, *arrays):
        mask = arrays[6] if has_mask else "causal" if causal else None
        return attend_unpacked(q, arrays[:3], arrays[3:6], scale, mask, group_size, bits)

    return transformable(run, by_mlx)


def attend_quantized(q, keys, values, scale, causal, mask, group_size, bits, dtype):
    """As attend; keys and values: (codes, scales, biases)."""
    if any(part.dtype != dtype for part in (*keys[1:], *values[1:])):
        raise Fallback("scales or biases of another dtype than the result")
    head_dims = q.shape[3], values[0].shape[3] * 32 // bits
    if any(head_dim % 64 for head_dim in head_dims):
        raise Fallback(f"a quantised cache of head dims {head_dims[0]} and {head_dims[1]}, no multiples of 64")
    if min(part.size for part in (*keys, *values)) < _MIN_ELEMENTS:
        raise Fallback(f"fewer than {_MIN_ELEMENTS} codes, scales or biases")
    q = q.astype(dtype)
    try:
        plan = plan_of(q, keys, values, affine=(bits, group_size))
    except NotImplementedError as error:
        raise Fallback(str(error)) from None
    arrays = [q, *keys, *values] + ([] if mask is None else [mask])
    function = _quantized_function(scale, causal, mask is not None, group_size, bits, dtype)
    return function(*arrays), f"metal {plan.body} {plan.kv_format}"

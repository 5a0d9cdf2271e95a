"""ggml's FLASH_ATTN_EXT through the libraries that setup.sh makes: llama.cpp's and ik_llama.cpp's."""
import ctypes
import os
import pathlib

import numpy as np

from arms import Arm, to_float

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
LIBRARY = "libkvonce_peer_ggml.so"
c_void, c_int64 = ctypes.c_void_p, ctypes.c_int64


def load(path):
    """Its symbols stay its own, so that a second ggml in the process is not mixed with it."""
    lib = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    lib.kvonce_ggml_create.restype = c_void
    return lib


def check_installed(options, peer):
    load(pathlib.Path(options.work) / peer / LIBRARY)


def serves(problem, peer):
    """ik_llama.cpp ends the process when its kernels lack a type, and falls back to a loop over heads when kv_len is no
    multiple of 32: neither may happen here."""
    if peer == "llama.cpp":
        return True
    has_bf16 = " avx512_bf16 " in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return problem.kv_len % 32 == 0 and (problem.dtype == "f16" or (problem.dtype == "bf16" and has_bf16))


def arms(problem, options, peer):
    if not serves(problem, peer):
        return []
    folder = pathlib.Path(options.work) / peer
    lib = load(folder / LIBRARY)
    version = (folder / "version").read_text(encoding="utf-8").strip()
    handle = c_void(lib.kvonce_ggml_create(DTYPES[problem.dtype], c_int64(problem.num_q_heads),
                                           c_int64(problem.num_kv_heads), c_int64(problem.head_dim),
                                           c_int64(problem.kv_len), options.threads))
    if not handle:
        raise RuntimeError(f"{peer}: no memory")
    out = np.zeros((problem.num_q_heads, problem.head_dim), np.float32)

    def prepare(kv_set):
        q = np.ascontiguousarray(to_float(kv_set.q, problem.dtype), dtype=np.float32)
        pointers = [c_void(array.ctypes.data) for array in (q, kv_set.k, kv_set.v, out)]
        return pointers, q  # q lives as long as its pointer

    def run(prepared):
        if lib.kvonce_ggml_run(handle, *prepared[0]) != 0:
            raise RuntimeError(f"{peer}: ggml_graph_compute failed")

    return [Arm(f"{peer} {version}", f"flash_attn_ext_{problem.dtype}", "f32", prepare, run, lambda _: out,
                lambda: lib.kvonce_ggml_destroy(handle))]

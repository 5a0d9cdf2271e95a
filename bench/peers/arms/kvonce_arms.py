"""kvonce through its C ABI, and its `read` ceiling."""
import ctypes
import pathlib

import numpy as np

import kvonce_abi
from arms import Arm, to_float
from kvonce_abi import c_int64, c_size, c_void


def kvonce_arm(problem, options, library):
    out_dtype = "bf16" if problem.dtype == "bf16" else "f32"  # as in kvonce bench
    decode = kvonce_abi.Decode(library, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.kv_len,
                               problem.dtype, out_dtype=out_dtype, target=options.target, threads=options.threads)
    workspace = np.zeros(max(decode.workspace_bytes, 1), np.uint8)
    out = np.zeros((problem.num_q_heads, problem.head_dim), np.uint16 if out_dtype == "bf16" else np.float32)
    outputs = decode.outputs(out.ctypes.data)

    def prepare(kv_set):
        return decode.inputs(*(array.ctypes.data for array in (kv_set.q, kv_set.k, kv_set.v)))

    attend, p_outputs = library.lib.kvonce_attend, ctypes.byref(outputs)
    p_workspace, workspace_bytes = c_void(workspace.ctypes.data), c_size(decode.workspace_bytes)

    def run(inputs, _owner=workspace):  # the array lives as long as this function
        if attend(decode.plan, ctypes.byref(inputs), p_outputs, p_workspace, workspace_bytes, None) != 0:
            library.check(1)

    return Arm("kvonce", decode.kernel, problem.dtype, prepare, run, lambda _: to_float(out, out_dtype), decode.close,
               decode.read_factor)


def read_arms(options, library, target):
    """Every read loop; peers.py keeps the fastest of a case. Their result is none."""
    lib = ctypes.CDLL(str(pathlib.Path(options.build) / "bench" / "libkvonce_peers_read.so"))
    lib.kvonce_peers_read_loop_name.restype = ctypes.c_char_p
    lib.kvonce_peers_read.restype = ctypes.c_uint64

    def arm(loop):
        name = lib.kvonce_peers_read_loop_name(target.encode(), loop).decode()

        def run(kv):
            lib.kvonce_peers_read(target.encode(), loop, c_void(kv[0]), c_int64(kv[1]), options.threads)

        def prepare(kv_set):
            return kv_set.k.ctypes.data, kv_set.k.nbytes + kv_set.v.nbytes  # v follows k

        return Arm("read", "read_" + name, "", prepare, run, lambda _: None, read_factor=1)

    return [arm(loop) for loop in range(lib.kvonce_peers_num_read_loops())]

"""kvonce through its C ABI, and its `read` ceiling."""
import ctypes
import pathlib

import numpy as np

from arms import Arm

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
c_int, c_int64, c_size, c_void = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


class CProblem(ctypes.Structure):
    """kvonce_problem up to KVONCE_PROBLEM_BASIC_SIZE."""

    _fields_ = ([("struct_size", c_size)] +
                [(name, c_int64) for name in ("num_seqs", "q_len", "num_q_heads", "num_kv_heads", "head_dim_qk",
                                              "head_dim_v", "max_kv_len")] +
                [(name, c_int) for name in ("q_dtype", "out_dtype", "k_format", "v_format", "causal", "has_scale")] +
                [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", c_int64)])


class CTensor(ctypes.Structure):
    _fields_ = [("data", c_void), ("seq_stride", c_int64), ("head_stride", c_int64), ("token_stride", c_int64)]


class CInputs(ctypes.Structure):
    """kvonce_inputs up to KVONCE_INPUTS_BASIC_SIZE."""

    _fields_ = [("struct_size", c_size), ("q", CTensor), ("k", CTensor), ("v", CTensor), ("kv_lens", c_void),
                ("kv_starts", c_void)]


class COutputs(ctypes.Structure):
    """kvonce_outputs up to KVONCE_OUTPUTS_BASIC_SIZE."""

    _fields_ = [("struct_size", c_size), ("out", c_void), ("out_seq_stride", c_int64), ("out_head_stride", c_int64),
                ("out_token_stride", c_int64)]


class CDevice(ctypes.Structure):
    _fields_ = [("struct_size", c_size), ("backend", c_int), ("num_threads", c_int), ("l1_bytes", c_int64),
                ("l2_bytes", c_int64), ("l3_bytes", c_int64), ("read_gbps", ctypes.c_double),
                ("target", ctypes.c_char * 32), ("name", ctypes.c_char * 128), ("unavailable", ctypes.c_char * 512)]


class Library:
    """libkvonce.so of a build folder."""

    def __init__(self, build):
        self.lib = ctypes.CDLL(str(pathlib.Path(build) / "src" / "libkvonce.so"))
        self.lib.kvonce_last_error.restype = ctypes.c_char_p
        self.lib.kvonce_version.restype = ctypes.c_char_p
        self.version = self.lib.kvonce_version().decode()

    def check(self, status):
        if status != 0:
            raise RuntimeError("kvonce: " + self.lib.kvonce_last_error().decode())

    def init(self, function, struct):
        self.check(function(ctypes.byref(struct), c_size(ctypes.sizeof(struct))))
        return struct

    def device(self, target):
        """The device of a target's name; without one the best that can run here."""
        count = c_size()
        self.check(self.lib.kvonce_devices(ctypes.byref(count)))
        for idx in range(count.value):
            device = self.init(self.lib.kvonce_device_init, CDevice())
            self.check(self.lib.kvonce_device_query(c_size(idx), ctypes.byref(device)))
            if device.unavailable == b"" and (target is None or device.target.decode() == target):
                return device
        raise RuntimeError(f"kvonce: no usable device with target {target}")


def kvonce_arm(problem, options, library):
    lib = library.lib
    asked = library.init(lib.kvonce_problem_init, CProblem())
    asked.num_q_heads, asked.num_kv_heads = problem.num_q_heads, problem.num_kv_heads
    asked.head_dim_qk, asked.max_kv_len = problem.head_dim, problem.kv_len
    asked.q_dtype = asked.k_format = asked.v_format = DTYPES[problem.dtype]
    plan = c_void()
    target = options.target.encode() if options.target else None
    library.check(lib.kvonce_plan_create(ctypes.byref(asked), target, c_int(options.threads), None, ctypes.byref(plan)))
    workspace_bytes, read_factor, kernel = c_size(), c_int64(), ctypes.c_char_p()
    library.check(lib.kvonce_plan_workspace_bytes(plan, ctypes.byref(workspace_bytes)))
    library.check(lib.kvonce_plan_read_factor(plan, ctypes.byref(read_factor)))
    library.check(lib.kvonce_plan_kernel_id(plan, ctypes.byref(kernel)))
    workspace = np.zeros(max(workspace_bytes.value, 1), np.uint8)
    out = np.zeros((problem.num_q_heads, problem.head_dim), np.float32)
    outputs = library.init(lib.kvonce_outputs_init, COutputs())
    outputs.out = out.ctypes.data
    outputs.out_seq_stride = outputs.out_token_stride = out.size
    outputs.out_head_stride = problem.head_dim

    def prepare(kv_set):
        inputs = library.init(lib.kvonce_inputs_init, CInputs())
        inputs.q = CTensor(kv_set.q.ctypes.data, kv_set.q.size, problem.head_dim, kv_set.q.size)
        for name in ("k", "v"):
            data = getattr(kv_set, name)
            setattr(inputs, name, CTensor(data.ctypes.data, data.size, problem.kv_len * problem.head_dim,
                                          problem.head_dim))
        return inputs

    attend, p_outputs = lib.kvonce_attend, ctypes.byref(outputs)
    p_workspace, workspace_size = c_void(workspace.ctypes.data), c_size(workspace.size)

    def run(inputs, _owner=workspace):  # the array lives as long as this function
        if attend(plan, ctypes.byref(inputs), p_outputs, p_workspace, workspace_size, None) != 0:
            library.check(1)

    return Arm("kvonce", kernel.value.decode(), problem.dtype, prepare, run, lambda _: out,
               lambda: lib.kvonce_plan_destroy(plan), read_factor.value)


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

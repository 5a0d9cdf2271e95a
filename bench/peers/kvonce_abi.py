"""kvonce's C ABI (include/kvonce/kvonce.h) by ctypes: the structs that the peers' processes need, and nothing but Python's own
modules. tests/c_abi/ctypes_test.py compares every struct here with the header and runs attend through it.
"""
import ctypes
import pathlib
import weakref

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
c_int, c_int64, c_size, c_void = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


class CProblem(ctypes.Structure):
    """kvonce_problem up to KVONCE_PROBLEM_BASIC_SIZE."""

    _fields_ = ([("struct_size", c_size)] +
                [(name, c_int64) for name in ("num_seqs", "q_len", "num_q_heads", "num_kv_heads", "head_dim_qk",
                                              "head_dim_v", "max_kv_len")] +
                [(name, c_int) for name in ("q_dtype", "out_dtype", "k_format", "v_format", "causal", "has_scale")] +
                [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", c_int64)])


class COptions(ctypes.Structure):
    _fields_ = [("struct_size", c_size), ("chunk_tokens", c_int64), ("policy", ctypes.c_char_p),
                ("earlier_kv_ready", c_int), ("reserved", c_int)]


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


class CContext(ctypes.Structure):
    _fields_ = [("struct_size", c_size), ("parallel_for", c_void), ("parallel_for_host", c_void), ("num_threads", c_int),
                ("reserved", c_int), ("cuda_stream", c_void)]


class CDevice(ctypes.Structure):
    _fields_ = [("struct_size", c_size), ("backend", c_int), ("num_threads", c_int), ("l1_bytes", c_int64),
                ("l2_bytes", c_int64), ("l3_bytes", c_int64), ("read_gbps", ctypes.c_double),
                ("target", ctypes.c_char * 32), ("name", ctypes.c_char * 128), ("unavailable", ctypes.c_char * 512)]


# (struct, its name in C, what its size is in C)
STRUCTS = [(CProblem, "kvonce_problem", "KVONCE_PROBLEM_BASIC_SIZE"),
           (COptions, "kvonce_options", "sizeof(kvonce_options)"),
           (CTensor, "kvonce_tensor", "sizeof(kvonce_tensor)"),
           (CInputs, "kvonce_inputs", "KVONCE_INPUTS_BASIC_SIZE"),
           (COutputs, "kvonce_outputs", "KVONCE_OUTPUTS_BASIC_SIZE"),
           (CContext, "kvonce_context", "sizeof(kvonce_context)"),
           (CDevice, "kvonce_device", "sizeof(kvonce_device)")]

ARGUMENTS = {  # of the functions that get plain numbers or addresses, which ctypes would otherwise pass as int
    "kvonce_plan_create": [c_void, ctypes.c_char_p, c_int, c_void, c_void],
    "kvonce_plan_destroy": [c_void],
    "kvonce_plan_workspace_bytes": [c_void, c_void],
    "kvonce_plan_read_factor": [c_void, c_void],
    "kvonce_plan_kernel_id": [c_void, c_void],
    "kvonce_attend": [c_void, c_void, c_void, c_void, c_size, c_void],
    "kvonce_prepare_workspace": [c_void, c_void, c_size, c_void],
    "kvonce_device_query": [c_size, c_void],
}


class Library:
    """A libkvonce.so."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.lib = ctypes.CDLL(str(path))
        for name, arguments in ARGUMENTS.items():
            getattr(self.lib, name).argtypes = arguments
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
            self.check(self.lib.kvonce_device_query(idx, ctypes.byref(device)))
            if device.unavailable == b"" and (target is None or device.target.decode() == target):
                return device
        raise RuntimeError(f"kvonce: no usable device with target {target}")


class Decode:
    """The plan of one decode step, one sequence and one new token, over packed q [num_q_heads, head_dim] and
    K, V [num_kv_heads, kv_len, head_dim]; and the calls that run it."""

    def __init__(self, library, num_q_heads, num_kv_heads, head_dim, kv_len, dtype, *, out_dtype="f32", target=None,
                 threads=0, earlier_kv_ready=False):
        lib = library.lib
        self.kvonce, self.num_q_heads, self.head_dim, self.kv_len = library, num_q_heads, head_dim, kv_len
        problem = library.init(lib.kvonce_problem_init, CProblem())
        problem.num_q_heads, problem.num_kv_heads = num_q_heads, num_kv_heads
        problem.head_dim_qk, problem.max_kv_len = head_dim, kv_len
        problem.q_dtype = problem.k_format = problem.v_format = DTYPES[dtype]
        problem.out_dtype = DTYPES[out_dtype]
        options = library.init(lib.kvonce_options_init, COptions())
        options.earlier_kv_ready = int(earlier_kv_ready)
        plan, workspace_bytes, read_factor, kernel = c_void(), c_size(), c_int64(), ctypes.c_char_p()
        library.check(lib.kvonce_plan_create(ctypes.byref(problem), target.encode() if target else None, threads,
                                             ctypes.byref(options), ctypes.byref(plan)))
        self.plan = plan
        self.close = weakref.finalize(self, lib.kvonce_plan_destroy, plan)
        library.check(lib.kvonce_plan_workspace_bytes(plan, ctypes.byref(workspace_bytes)))
        library.check(lib.kvonce_plan_read_factor(plan, ctypes.byref(read_factor)))
        library.check(lib.kvonce_plan_kernel_id(plan, ctypes.byref(kernel)))
        self.workspace_bytes, self.read_factor = workspace_bytes.value, read_factor.value
        self.kernel = kernel.value.decode()

    def inputs(self, q, k, v):
        """Of the addresses of q, K and V, whose memory the caller keeps."""
        inputs = self.kvonce.init(self.kvonce.lib.kvonce_inputs_init, CInputs())
        inputs.q = CTensor(q, self.num_q_heads * self.head_dim, self.head_dim, self.num_q_heads * self.head_dim)
        for name, data in (("k", k), ("v", v)):
            setattr(inputs, name, CTensor(data, 0, self.kv_len * self.head_dim, self.head_dim))
        return inputs

    def outputs(self, out):
        """Of the address of [num_q_heads, head_dim]."""
        outputs = self.kvonce.init(self.kvonce.lib.kvonce_outputs_init, COutputs())
        outputs.out = out
        outputs.out_seq_stride = outputs.out_token_stride = self.num_q_heads * self.head_dim
        outputs.out_head_stride = self.head_dim
        return outputs

    def context(self, cuda_stream):
        context = self.kvonce.init(self.kvonce.lib.kvonce_context_init, CContext())
        context.cuda_stream = cuda_stream
        return context

    def prepare_workspace(self, workspace, context):
        self.kvonce.check(self.kvonce.lib.kvonce_prepare_workspace(self.plan, workspace, self.workspace_bytes,
                                                                     ctypes.byref(context)))

    def attend(self, inputs, outputs, workspace, context=None):
        """workspace: the address of workspace_bytes."""
        self.kvonce.check(self.kvonce.lib.kvonce_attend(
            self.plan, ctypes.byref(inputs), ctypes.byref(outputs), workspace, self.workspace_bytes,
            None if context is None else ctypes.byref(context)))

"""ONNX Runtime's GroupQueryAttention (com.microsoft) on the CPU provider, past and present in the same buffers."""
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from arms import Arm

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}


def model(problem):
    """One node. The step's own token is written to the last place of the cache, where it already stands."""
    dtype = TYPES[problem.dtype]
    hidden, hidden_kv = problem.num_q_heads * problem.head_dim, problem.num_kv_heads * problem.head_dim
    cache = [1, problem.num_kv_heads, problem.kv_len, problem.head_dim]
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"],
        ["out", "present_k", "present_v"],
        domain="com.microsoft", num_heads=problem.num_q_heads, kv_num_heads=problem.num_kv_heads)
    inputs = [("q", dtype, [1, 1, hidden]), ("k", dtype, [1, 1, hidden_kv]), ("v", dtype, [1, 1, hidden_kv]),
              ("past_k", dtype, cache), ("past_v", dtype, cache), ("seqlens_k", TensorProto.INT32, [1]),
              ("total", TensorProto.INT32, [1])]
    outputs = [("out", dtype, [1, 1, hidden]), ("present_k", dtype, cache), ("present_v", dtype, cache)]
    graph = helper.make_graph([node], "step", [helper.make_tensor_value_info(*one) for one in inputs],
                              [helper.make_tensor_value_info(*one) for one in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def check_installed(_options, _peer):
    """The import above was the check."""


def arms(problem, options, _peer):
    if problem.dtype not in TYPES:
        return []  # the CPU provider has no bf16 GroupQueryAttention
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = options.threads
    session_options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model(problem), session_options, providers=["CPUExecutionProvider"])
    stored = np.float32 if problem.dtype == "f32" else np.float16
    out = np.zeros((1, 1, problem.num_q_heads * problem.head_dim), stored)
    wrap = onnxruntime.OrtValue.ortvalue_from_numpy  # no copy: the value stands on the array's memory
    lens, total = np.array([problem.kv_len - 1], np.int32), np.array([problem.kv_len], np.int32)

    def prepare(kv_set):
        binding = session.io_binding()
        token = [np.ascontiguousarray(cache[:, -1]).reshape(1, 1, -1) for cache in (kv_set.k, kv_set.v)]
        arrays = {"q": kv_set.q.reshape(1, 1, -1), "k": token[0], "v": token[1], "past_k": kv_set.k[None],
                  "past_v": kv_set.v[None], "seqlens_k": lens, "total": total}
        values = {name: wrap(array) for name, array in arrays.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("present_k", values["past_k"])
        binding.bind_ortvalue_output("present_v", values["past_v"])
        values["out"] = wrap(out)
        binding.bind_ortvalue_output("out", values["out"])
        return binding, values, arrays

    def run(prepared):
        session.run_with_iobinding(prepared[0])

    return [Arm(f"onnxruntime {onnxruntime.__version__}", f"group_query_attention_{problem.dtype}", problem.dtype,
                prepare, run, lambda _: out.reshape(problem.num_q_heads, problem.head_dim))]

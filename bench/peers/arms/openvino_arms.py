"""OpenVINO's stateful ScaledDotProductAttention on the CPU plugin, the form its exported language models have.

The cache is a state of an inference request in the plugin's own layout, so every set of buffers is copied into a
request of its own. A step appends its token: the cache of a set grows by one token a call, which adds less than 1 % to
the bytes.
"""
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from arms import Arm, to_float

PRECISIONS = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}


def model(problem):
    """The plugin fuses state, append and attention into one operation only when the graph has exactly this form."""
    heads, kv_heads, dim, group = problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.group_size
    q = ops.parameter([1, heads, 1, dim], np.float32, name="q")
    beam_idx = ops.parameter([1], np.int32, name="beam_idx")
    inputs, sinks, present = [q, beam_idx], [], []
    for name in ("k", "v"):
        token = ops.parameter([1, kv_heads, 1, dim], np.float32, name=name)
        empty = ops.constant(np.zeros((1, kv_heads, 0, dim), np.float32))
        past = ops.read_value(empty, "past_" + name, np.float32, ov.PartialShape([1, kv_heads, -1, dim]))
        cache = ops.concat([ops.gather(past, beam_idx, np.int64(0)), token], 2)
        sinks.append(ops.assign(cache, "past_" + name))
        if group > 1:
            ones = ops.constant(np.ones((1, 1, group, 1, 1), np.float32))
            repeated = ops.multiply(ops.unsqueeze(cache, np.int64(2)), ones)
            cache = ops.reshape(repeated, np.array([1, heads, -1, dim], np.int64), False)
        inputs.append(token)
        present.append(cache)
    out = ops.scaled_dot_product_attention(q, present[0], present[1])
    return ov.Model([ops.result(out)], sinks, inputs, "step")


def check_installed(_options, _peer):
    """The import above was the check."""


def arms(problem, options, _peer):
    config = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": options.threads,
              "INFERENCE_PRECISION_HINT": ov.Type.f32, "KV_CACHE_PRECISION": PRECISIONS[problem.dtype]}
    compiled = ov.Core().compile_model(model(problem), "CPU", config)
    operations = {node.get_rt_info()["layerType"].value for node in compiled.get_runtime_model().get_ops()}
    if not any("ScaledDotProductAttention" in name for name in operations):
        raise RuntimeError(f"openvino: the attention was not fused; the plugin runs {sorted(operations)}")
    beam_idx = np.zeros(1, np.int32)

    def token_of(cache, idx):
        return np.ascontiguousarray(to_float(cache[:, idx], problem.dtype), np.float32)[None, :, None, :]

    def step(request, q, k, v):
        for name, array in (("q", q), ("beam_idx", beam_idx), ("k", k), ("v", v)):
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer()

    def prepare(kv_set):
        """All tokens but the last two become the state; the next one is appended here, which makes the state grow to
        its capacity before anything is timed."""
        request = compiled.create_infer_request()
        for state in request.query_state():
            cache = kv_set.k if state.name.startswith("past_k") else kv_set.v
            state.state = ov.Tensor(np.ascontiguousarray(to_float(cache[:, :-2], problem.dtype), np.float32)[None])
        q = np.ascontiguousarray(to_float(kv_set.q, problem.dtype), np.float32)[None, :, None, :]
        step(request, q, token_of(kv_set.k, -2), token_of(kv_set.v, -2))
        last = q, token_of(kv_set.k, -1), token_of(kv_set.v, -1)
        for name, array in zip(("q", "k", "v"), last):
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        return request, last

    def run(prepared):
        prepared[0].infer()

    def result(prepared):
        return prepared[0].get_output_tensor(0).data.reshape(problem.num_q_heads, problem.head_dim)

    return [Arm(f"openvino {ov.get_version().split('-')[0]}", f"stateful_sdpa_{problem.dtype}", "f32", prepare, run,
                result)]

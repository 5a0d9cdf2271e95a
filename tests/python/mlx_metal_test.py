"""kvonce.mlx on Metal, without a GPU: the text that MLX would compile, and its results on the host's emulation of it."""
import functools
import pathlib
import re
import subprocess
import tempfile
import unittest
import unittest.mock

try:
    import mlx.core as mx
except ModuleNotFoundError:
    mx = None
else:
    import emulated_metal
    import kvonce.mlx as km
    from kvonce import _metal_policy, _mlx_calls, _mlx_metal
    from mlx_test import normal, qkv, relative_rms
    mlx_attention = mx.fast.scaled_dot_product_attention

HERE = pathlib.Path(__file__).resolve().parent
MAX_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
ATTEND_SIGNATURE = """
  const device {T}* q [[buffer(0)]],
  const constant int64_t* q_strides [[buffer(1)]],
  const device {T}* k [[buffer(2)]],
  const constant int64_t* k_strides [[buffer(3)]],
  const device {T}* v [[buffer(4)]],
  const constant int64_t* v_strides [[buffer(5)]],
  const device int32_t* kv_lens [[buffer(6)]],
  const device int32_t* kv_starts [[buffer(7)]],
  const device {mask}* mask [[buffer(8)]],
  const constant int64_t* mask_strides [[buffer(9)]],
  const device float* alibi_slopes [[buffer(10)]],
  const device int64_t* params [[buffer(11)]],
  const device float* scalars [[buffer(12)]],
  device float* partial_o [[buffer(13)]],
  device float* partial_sums [[buffer(14)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {{
"""
AFFINE_BUFFERS = """q q_strides k k_strides k_scales k_scales_strides k_biases k_biases_strides v v_strides v_scales
v_scales_strides v_biases v_biases_strides kv_lens kv_starts mask mask_strides alibi_slopes params scalars partial_o partial_sums"""
MERGE_SIGNATURE = """
  const device float* partial_o [[buffer(0)]],
  const device float* partial_sums [[buffer(1)]],
  const device float* sinks [[buffer(2)]],
  const device int64_t* params [[buffer(3)]],
  device {T}* out [[buffer(4)]],
  device float* lse [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {{
"""
# A pointer or reference to a type that begins like one, and what may stand before it.
POINTER = re.compile(r"\b(?:float|int|bool|T|int64_t|unsigned char|[A-Z]\w+(?:<[^<>()]*>)?)(?: const)?\s*[&*]\s*(?:\(&|\w)")
ADDRESS_SPACE = re.compile(r"\b(?:KV_\w+|device|constant|threadgroup|thread)(?: const)?\s+$")
METAL_TYPES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}
BODIES = {"vector": 1, "matrix": 2, "per_head": 3}
MAX_BYTES = 64 * 1024  # of one kernel's text


def traced(dtype="float16", dims=(128, 128), heads=(32, 4), q_len=1, mask=None, asked=(), affine=None):
    """(plan, {kernel: text}) of a call. affine: (bits, group_size) of a quantised cache."""
    q, k, v = qkv(1, *heads, q_len, 300, *dims, dtype=dtype)
    if affine is not None:
        k, v = (mx.quantize(cache, group_size=affine[1], bits=affine[0]) for cache in (k, v))
    plan = _mlx_metal.plan_of(q, k, v, _metal_policy.Gpu(family=8), asked, affine)

    def attend(q):
        return _mlx_metal.launch(plan, q, k, v, mask, None, 0.1, False, q.dtype, verbose=True, affine=affine)

    return plan, emulated_metal.sources_of(attend, q)


def without_comments(source):
    return re.sub(r"//[^\n]*", "", source)


def variants():
    """What traced() takes: every body in every dtype with the head dims that fit it, every row tile, every kind of mask."""
    for dtype in METAL_TYPES:
        for body in BODIES.values():
            for dims in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
                if body != 2 or max(dims) < (192 if dtype == "float32" else 256):
                    yield dict(dtype=dtype, dims=dims, asked=(("body", body),))
    for row_tile in (1, 2, 4):
        yield dict(asked=(("body", 1), ("row_tile", row_tile)), q_len=3)
    yield dict(dims=(64, 64), asked=(("body", 1), ("row_tile", 8)), q_len=3)
    yield dict(dims=(512, 512), dtype="float32")
    yield dict(dims=(512, 512))  # steps in pieces
    for mask in (mx.zeros((1, 300), dtype=mx.bool_), mx.zeros((1, 300), dtype=mx.float16), mx.zeros((1, 300))):
        yield dict(mask=mask)
    for affine in ((8, 64), (4, 64), (4, 32), (8, 128)):
        for body in (1, 2):
            yield dict(affine=affine, dtype="bfloat16", asked=(("body", body),))


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxMetalSourceTest(unittest.TestCase):
    """MLX writes the kernels; nothing here has been seen by Apple's compiler."""

    def test_text(self):
        names = set()
        for variant in variants():
            with self.subTest(**{name: str(value) for name, value in variant.items()}):
                plan, sources = traced(**variant)
                affine = variant.get("affine")
                self.assertEqual(list(sources), [f"kvonce_attend_{'affine_' if affine else ''}{plan.body}", "kvonce_merge"])
                attend, merge = sources.values()
                metal_type = METAL_TYPES[variant.get("dtype", "float16")]
                mask = variant.get("mask")
                mask_type = "bool" if mask is None or mask.dtype == mx.bool_ else METAL_TYPES[str(mask.dtype).rpartition(".")[2]]
                if affine:
                    self.assertEqual(emulated_metal.buffers_of(attend), AFFINE_BUFFERS.split())
                    self.assertEqual(re.findall(r"const device uint32_t\* (\w+)", attend), ["k", "v"])
                else:
                    self.assertIn(ATTEND_SIGNATURE.format(T=metal_type, mask=mask_type), attend)
                self.assertIn(MERGE_SIGNATURE.format(T=metal_type), merge)
                for source in (attend, merge):
                    source.encode("ascii")
                    self.assertLess(len(source), MAX_BYTES)
                    code = without_comments(source)
                    self.assertEqual(re.findall(r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])", code), [])
                    self.assertEqual(re.findall(r"\b(?:double|long long|std::\w+)\b", code), [])
                    self.assertNotIn("#include", code)
                    [(host_name, function)] = re.findall(r'^template \[\[host_name\("(\w+)"\)\]\] .*\) (\w+)<', code, re.MULTILINE)
                    self.assertEqual(host_name.split("__")[0], function.split("__")[0])
                    self.assertTrue(host_name.startswith("custom_kernel_kvonce_"))
                    names.add(host_name)
                dims = f"{plan.kernel_id.split('_d')[1].split('_')[0]}"
                tile = f", {plan.row_tile}" if plan.body == "vector" else ""
                shared = plan.threadgroup_bytes // 4
                format_text = f", {affine[0]}, {affine[1]}" if affine else ""
                self.assertIn(f"<{metal_type}, {dims.replace('x', ', ')}{tile}{format_text}, {shared}>", attend)
                self.assertLessEqual(plan.threadgroup_bytes, 32768)
        self.assertGreater(len(names), 60)

    def test_one_text_per_name(self):
        """MLX caches libraries by the kernel's name."""
        seen = {}
        for variant in variants():
            for source in traced(**variant)[1].values():
                [name] = re.findall(r'host_name\("(\w+)"\)', source)
                self.assertEqual(seen.setdefault(name, source), source)

    def test_the_cpp_form_has_the_same_text(self):
        launcher = (HERE.parents[1] / "integrations" / "mlx" / "launch.cpp").read_text(encoding="utf-8")
        for part in (_mlx_metal._PLACE, _mlx_metal._BUFFERS, _mlx_metal._ATTEND.partition(_mlx_metal._BUFFERS)[0],
                     _mlx_metal._MERGE.partition(_mlx_metal._PLACE)[0]):
            self.assertIn(part, launcher)
        for body, template in _mlx_metal._TEMPLATES.items():
            self.assertRegex(launcher, rf'make_attend\("{body}", \w+, "{template}"\)')

    def test_compiled_function_keeps_the_kernels(self):
        q, k, v = qkv(1, 8, 2, 1, 100)
        plan = _mlx_metal.plan_of(q, k, v, _metal_policy.Gpu(family=8))

        def attend(q, k, v):
            return mx.compile(lambda q, k, v: _mlx_metal.launch(
                plan, q, k, v, None, None, 0.1, False, q.dtype, verbose=True)[0])(q, k, v)

        self.assertEqual(len(emulated_metal.sources_of(attend, q, k, v)), 2)

    def test_transformations(self):
        """What MLX has no rule for with any kernel is an error, not a wrong result; gradients are in the emulation's tests."""
        q, k, v = qkv(3, 8, 2, 1, 50)

        def attend(q, k, v):
            return km.scaled_dot_product_attention(q, k, v, scale=0.125)

        def trace(function, *arrays):
            mx.export_function(lambda part: None, function, *arrays)

        plan_of = functools.partial(_mlx_metal.plan_of, gpu=_metal_policy.Gpu(family=8))
        with unittest.mock.patch.object(_mlx_metal, "plan_of", plan_of), \
                unittest.mock.patch.object(_mlx_calls, "backend_of", lambda stream: _mlx_metal):
            with self.assertRaisesRegex(ValueError, "vmap"):
                trace(mx.vmap(attend), *(array[:, None] for array in (q, k, v)))
            with self.assertRaisesRegex(ValueError, "jvp"):
                trace(lambda *arrays: mx.jvp(attend, list(arrays), list(arrays))[1][0], q, k, v)
            with self.assertRaisesRegex(ValueError, "CustomTransforms"):
                trace(attend, q, k, v)
            trace(mx.grad(lambda *arrays: attend(*arrays).sum()), q, k, v)

    def test_every_pointer_names_its_address_space(self):
        for variant in (*(dict(asked=(("body", body),)) for body in BODIES.values()), dict(affine=(4, 64))):
            for source in traced(**variant)[1].values():
                found = 0
                for line in without_comments(source).splitlines():
                    for match in POINTER.finditer(line):
                        found += 1
                        self.assertRegex(line[:match.start()], ADDRESS_SPACE, line)
                self.assertGreater(found, 20)

    def test_address_spaces_and_types(self):
        """No tool of Debian, PyPI or npm reads Metal. clang's OpenCL C++ has the same address spaces, and templates."""
        prelude = HERE.parent / "metal_emulation" / "msl_opencl.h"
        with tempfile.TemporaryDirectory() as folder:
            for i, variant in enumerate((dict(asked=(("body", 1), ("row_tile", 4)), q_len=2), dict(asked=(("body", 2),)),
                                         dict(asked=(("body", 3),)), dict(dtype="bfloat16", q_len=8), dict(dims=(512, 512)),
                                         dict(dtype="float32", dims=(80, 80)), dict(asked=(("body", 1),), affine=(4, 64)),
                                         dict(asked=(("body", 2),), affine=(8, 32)))):
                for name, source in traced(**variant)[1].items():
                    # To OpenCL an element of a local array is of another type than T: it must not deduce T from one.
                    source = re.sub(r"(load_token\(KV_THREAD const Rows<T, Pointer>& [^)]*?)KV_THREAD T \(&x\)",
                                    r"\1KV_THREAD typename Rows<T, Pointer>::Element (&x)", source)
                    # OpenCL wants memory of the threadgroup in kernels alone, which have no templates there.
                    source = re.sub(r"  threadgroup float shared\[\w+\];", "  threadgroup float* shared = nullptr;", source)
                    source = re.sub(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\]", "template", source, flags=re.MULTILINE)
                    file = pathlib.Path(folder) / f"{name}_{i}.cl"
                    file.write_text(f'#include "{prelude}"\n{source}', encoding="utf-8")
                    command = ["clang-14", "-x", "cl", "-cl-std=clc++1.0", "-target", "spir64", "-Wno-everything",
                               "-fsyntax-only", file]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    self.assertEqual(done.returncode, 0, done.stderr[:4000])
                    file.write_text(file.read_text(encoding="utf-8").replace("buffers.q = q;", "buffers.q = q_strides;").replace(
                        "buffers.sinks = sinks;", "buffers.sinks = lse_of;"), encoding="utf-8")
                    self.assertNotEqual(subprocess.run(command, capture_output=True, check=False).returncode, 0)


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxMetalEmulationTest(unittest.TestCase):
    """kvonce.mlx's Metal form on the host: the generated text, the launch, the strides that MLX passes, the results."""

    @classmethod
    def setUpClass(cls):
        cls.host = emulated_metal.Host()

    def compare(self, q, k, v, mask=None, sinks=None, **options):
        """options: of in_use()."""
        km.reset_stats()
        with self.host.in_use(**options):
            got = km.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask, sinks=sinks)
        [kernel] = km.stats()["kernels"]
        self.assertEqual(km.stats(), {"served": 1, "kernels": {kernel: 1}, "fallbacks": {}})
        self.assertTrue(kernel.startswith("metal "))
        wide = [array if array is None or isinstance(array, str) or array.dtype == mx.bool_ else array.astype(mx.float32)
                for array in (q, k, v, mask, sinks)]
        expected = mlx_attention(*wide[:3], scale=0.125, mask=wide[3], sinks=wide[4])
        self.assertEqual((got.shape, got.dtype), (expected.shape, q.dtype))
        self.assertLess(relative_rms(got, expected), MAX_ERROR[str(got.dtype).rpartition(".")[2]])
        return kernel.removeprefix("metal ")

    def test_bodies_and_dtypes(self):
        for dtype in METAL_TYPES:
            for body, number in BODIES.items():
                with self.subTest(dtype=dtype, body=body):
                    arrays = qkv(2, 9, 3, 1, 150, 64, dtype=dtype)
                    self.assertEqual(self.compare(*arrays, asked=(("body", number),)), body)

    def test_head_dims(self):
        for dims in ((80, 80), (40, 24), (192, 128)):
            self.compare(*qkv(1, 6, 2, 2, 90, *dims, dtype="float16"), mask="causal")
        self.compare(*qkv(1, 8, 1, 1, 90, 512, dtype="float16"))

    def test_quantized_caches(self):
        """mlx_lm's QuantizedKVCache: slices of longer ones."""
        for body in ("vector", "matrix"):
            for bits, group_size, dim, dtype, q_len, mask in ((8, 64, 64, "float32", 1, None), (4, 64, 128, "float16", 1, None),
                                                               (4, 32, 64, "bfloat16", 3, "causal"),
                                                               (8, 128, 128, "float16", 2, normal(2, 70) > 0)):
                with self.subTest(body=body, bits=bits, group_size=group_size):
                    q, k, v = qkv(2, 6, 2, q_len, 90, dim, dtype=dtype)
                    keys, values = ([part[..., :70, :] for part in mx.quantize(cache, group_size=group_size, bits=bits)]
                                    for cache in (k, v))
                    km.reset_stats()
                    with self.host.in_use(asked=(("body", BODIES[body]),)):
                        got = km.quantized_scaled_dot_product_attention(q, keys, values, 0.125, mask, group_size, bits)
                    self.assertEqual(km.stats(), {"served": 1, "kernels": {f"metal {body} mlx_int{bits}": 1}, "fallbacks": {}})
                    unpacked = (mx.dequantize(codes, *(part.astype(mx.float32) for part in parts), group_size=group_size, bits=bits)
                                for codes, *parts in (keys, values))
                    expected = mlx_attention(q.astype(mx.float32), *unpacked, scale=0.125, mask=mask)
                    self.assertEqual(got.dtype, q.dtype)
                    self.assertLess(relative_rms(got, expected), MAX_ERROR[dtype])

    def test_quantized_caches_are_planned_as_such(self):
        """The dtype of q and of the scales, the format and the groups of the cache: each changes what the policy estimates."""
        gpu = _metal_policy.Gpu(family=8, read_gbps=50.0)
        found = set()
        for dtype in METAL_TYPES:
            for bits, group_size in ((8, 32), (8, 64), (4, 64), (4, 128)):
                q, k, v = qkv(1, 8, 8, 1, 1024, 128, dtype=dtype)
                k, v = (mx.quantize(cache, group_size=group_size, bits=bits) for cache in (k, v))
                plan = _mlx_metal.plan_of(q, k, v, gpu, affine=(bits, group_size))
                self.assertEqual(plan, _metal_policy.choose(
                    num_q_heads=8, num_kv_heads=8, head_dim_qk=128, max_kv_len=1024, dtype=dtype, kv_format=f"mlx_int{bits}",
                    quant_group=group_size, gpu=gpu))
                self.assertEqual(plan.kv_format, f"mlx_int{bits}")
                self.assertTrue(all(f"_mlx_int{bits}_" in line for line in plan.rejected), plan.rejected)
                found.add(plan.predicted_us)
        self.assertEqual(len(found), 6)  # as many sizes of a token
        plain = _mlx_metal.plan_of(*qkv(1, 8, 2, 1, 100, 128, dtype="float16"), gpu)
        self.assertEqual(plain.kv_format, "f16")

    def test_many_chunks(self):
        self.compare(*qkv(1, 16, 2, 1, 3000, 128, dtype="float16"), gpu=_metal_policy.Gpu(family=9, num_cores=40))

    def test_causal_query_tokens(self):
        for q_len in (1, 2, 5, 17):
            self.compare(*qkv(2, 9, 3, q_len, 50, 64), mask="causal")

    def test_masks(self):
        q, k, v = qkv(2, 8, 2, 4, 70, 128, dtype="float16")
        for mask in (normal(4, 70) > 0, normal(2, 1, 1, 70) > 0, normal(8, 4, 1), normal(2, 8, 4, 70, dtype="float16"),
                     normal(70, 4).T):
            mask = mask.astype(mx.float16) if mask.dtype == mx.float32 else mask
            self.compare(q, k, v, mask=mask)
        self.compare(*(array.astype(mx.float32) for array in (q, k, v)), mask=normal(4, 70))
        self.compare(*qkv(1, 1, 1, 1, 5, 64), mask=normal(5))  # fewer than 8 elements

    def test_sinks(self):
        self.compare(*qkv(2, 8, 2, 1, 70, 64), sinks=normal(8))
        self.compare(*qkv(1, 3, 1, 1, 70, 64), sinks=normal(3))

    def test_strided_caches(self):
        q, k, v = qkv(2, 8, 2, 1, 256, 128)
        by_token = [mx.contiguous(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[:, :, 10:90] for array in (k, v)]
        by_dim = [mx.contiguous(array.swapaxes(2, 3)).swapaxes(2, 3)[:, :, 10:90] for array in (k, v)]
        for keys, values in ((k[:, :, 10:90], v[:, :, 10:90]), by_token, by_dim, (mx.broadcast_to(k[:1], k.shape), v)):
            self.compare(q, keys, values)

    def test_a_model_of_mlx_lm(self):
        """A tiny Llama with random weights: the same tokens, every layer of every decode step served, quantised caches too."""
        try:
            from mlx_lm.generate import generate_step
            from mlx_lm.models import llama
        except ModuleNotFoundError:
            self.skipTest("mlx-lm is not installed")
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs(
            model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=64, num_attention_heads=6,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, vocab_size=97))
        for options in ({}, dict(kv_bits=8, kv_group_size=64, quantized_kv_start=0)):
            def generate():
                steps = generate_step(mx.arange(80), model, max_tokens=4, **options)
                return [int(token) for token, _ in steps]

            expected = generate()
            with self.host.in_use(), km.patch():
                km.reset_stats()
                tokens = generate()
                counted = km.stats()
            self.assertEqual(tokens, expected)
            self.assertEqual(counted["served"], 2 * 5)
            self.assertEqual(counted["fallbacks"], {"prefill: more than 64 query tokens": 2})
            self.assertTrue(all(kernel.startswith("metal ") for kernel in counted["kernels"]))

    def test_rows_without_keys_are_zero(self):
        q, k, v = qkv(1, 8, 2, 3, 20, 64)
        shown = mx.ones((3, 20), dtype=mx.bool_)
        shown[1] = False
        with self.host.in_use():
            got = km.scaled_dot_product_attention(q, k, v, scale=0.125, mask=shown)
        self.assertEqual(mx.abs(got[:, :, 1]).max().item(), 0)
        self.assertTrue(mx.isfinite(got).all().item())

    def test_fallbacks(self):
        for reason, arrays in (("prefill: more than 64 query tokens", qkv(q_len=65)),
                               ("K and V of other dtypes than the result", [qkv()[0], *qkv(dtype="float16")[1:]]),
                               ("fewer than 8 elements of q, K or V", qkv(1, 1, 1, 1, 3, 4)),
                               ("512", qkv(head_dim=576, kv_len=5))):
            km.reset_stats()
            with self.host.in_use():
                got = km.scaled_dot_product_attention(*arrays, scale=0.125)
            self.assertEqual(km.stats()["served"], 0)
            self.assertIn(reason, *km.stats()["fallbacks"])
            self.assertTrue(mx.array_equal(got, mlx_attention(*arrays, scale=0.125)))

    def test_derivatives(self):
        q, k, v = qkv(1, 8, 2, 1, 20, 64)
        with self.host.in_use():
            ours = mx.grad(lambda q: (km.scaled_dot_product_attention(q, k, v, scale=0.125) ** 2).sum())(q)
        mlx = mx.grad(lambda q: (mlx_attention(q, k, v, scale=0.125) ** 2).sum())(q)
        self.assertLess(relative_rms(ours, mlx), 1e-5)


if __name__ == "__main__":
    unittest.main()

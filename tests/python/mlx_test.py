"""kvonce.mlx against mlx.core.fast on the CPU: results, errors, transformations, patch() and what it counts."""
import sys
import threading
import types
import unittest

try:
    import mlx.core as mx
except ModuleNotFoundError:
    mx = None
else:
    import kvonce.mlx as km
    mlx_attention = mx.fast.scaled_dot_product_attention  # before any patch()

MAX_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # relative RMS, against MLX in float32
PREFILL = "prefill: more than 64 query tokens"
NO_VALUES = "inside mx.compile, mx.vmap or mx.export_function, where arrays have no values"


def normal(*shape, dtype="float32", seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed + sum(shape))).astype(getattr(mx, dtype))


def qkv(num_seqs=1, num_q_heads=9, num_kv_heads=3, q_len=1, kv_len=100, head_dim=64, head_dim_v=None, dtype="float32"):
    shape = (num_seqs, num_kv_heads, kv_len)
    return (normal(num_seqs, num_q_heads, q_len, head_dim, dtype=dtype, seed=1),
            normal(*shape, head_dim, dtype=dtype, seed=2), normal(*shape, head_dim_v or head_dim, dtype=dtype, seed=3))


def float_name(array):
    return str(array.dtype).rpartition(".")[2]


def relative_rms(got, expected):
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    return (((got - expected) ** 2).mean() / mx.maximum((expected ** 2).mean(), 1e-30)).sqrt().item()


class MlxCase(unittest.TestCase):
    def setUp(self):
        km.reset_stats()

    def compare(self, q, k, v, *, mask=None, sinks=None, scale=0.125):
        """kvonce serves the call; the result is MLX's own of the same values in float32, in MLX's dtype."""
        served = km.stats()["served"]
        got = km.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        self.assertEqual(km.stats(), {"served": served + 1, "kernels": {"cpu": served + 1}, "fallbacks": {}})
        wide = [array if array is None or isinstance(array, str) or array.dtype == mx.bool_ else array.astype(mx.float32)
                for array in (q, k, v, mask, sinks)]
        expected = mlx_attention(*wide[:3], scale=scale, mask=wide[3], sinks=wide[4])
        like = mlx_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        self.assertEqual((got.shape, got.dtype), (like.shape, like.dtype))
        self.assertLess(relative_rms(got, expected), MAX_ERROR[float_name(got)])

    def assert_falls_back(self, reason, q, k, v, **options):
        """kvonce counts `reason`, and the result is MLX's own, NaN included."""
        options = {"scale": 0.125, **options}
        got = km.scaled_dot_product_attention(q, k, v, **options)
        self.assertEqual(km.stats(), {"served": 0, "kernels": {}, "fallbacks": {reason: 1}})
        expected = mlx_attention(q, k, v, **options)
        self.assertEqual((got.shape, got.dtype), (expected.shape, expected.dtype))
        self.assertTrue(mx.array_equal(got, expected, equal_nan=True))


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxResultsTest(MlxCase):
    def test_heads_and_dims(self):
        for heads in ((1, 1), (9, 3), (16, 2), (14, 2), (5, 1), (32, 4)):
            for dims in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24)):
                with self.subTest(heads=heads, dims=dims):
                    self.compare(*qkv(2, *heads, 1, 77, *dims))

    def test_causal_query_tokens(self):
        for q_len in (1, 2, 3, 8, 33, 64):
            for mask in (None, "causal"):
                with self.subTest(q_len=q_len, mask=mask):
                    self.compare(*qkv(2, q_len=q_len, kv_len=64), mask=mask)
                    self.compare(*qkv(1, 8, 1, q_len=q_len, kv_len=201), mask=mask)

    def test_dtypes(self):
        for dtype in ("float16", "bfloat16"):
            self.compare(*qkv(kv_len=500, dtype=dtype))
        q, k, v = qkv()
        for dtypes in (("float16", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16"),
                       ("bfloat16", "float32", "float16")):
            with self.subTest(dtypes=dtypes):
                self.compare(*(array.astype(getattr(mx, dtype)) for array, dtype in zip((q, k, v), dtypes)))

    def test_masks(self):
        q, k, v = qkv(2, 6, 2, 4, 50)
        shapes = ((50,), (4, 50), (4, 1), (1, 4, 50), (6, 4, 50), (6, 1, 50), (2, 1, 4, 50), (2, 6, 4, 50), (2, 1, 1, 50),
                  (1, 1, 1, 1), (2, 6, 1, 1))
        for shape in shapes:
            with self.subTest(shape=shape):
                shown = normal(*shape) > -0.5
                shown = shown | (mx.arange(shape[-1]) == 0)  # so that every row sees a key
                self.compare(q, k, v, mask=shown)
                self.compare(q, k, v, mask=normal(*shape))
                self.compare(q, k, v, mask=mx.where(shown, normal(*shape), -mx.inf))
        self.compare(q, k, v, mask=normal(4, 50, dtype="float16"))
        self.compare(*(array.astype(mx.bfloat16) for array in (q, k, v)), mask=normal(4, 50, dtype="bfloat16"))
        self.compare(q, k, v, mask=normal(50, 4).T)

    def test_sinks(self):
        q, k, v = qkv(2, 8, 2, 3, 40)
        for sinks in (normal(8), 5 * normal(8), normal(8, dtype="float16")):
            for mask in (None, "causal", normal(3, 40) > 0, mx.zeros((3, 40), dtype=mx.bool_)):
                self.compare(q, k, v, sinks=sinks, mask=mask)
        self.compare(*qkv(dtype="bfloat16"), sinks=normal(9, dtype="bfloat16"))

    def test_strided_caches(self):
        q, k, v = qkv(2, 8, 2, 1, 256)
        packed = k[:, :, 10:90] + 0, v[:, :, 10:90] + 0
        expected = km.scaled_dot_product_attention(q, *packed, scale=0.125)
        by_token = [mx.contiguous(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[:, :, 10:90] for array in (k, v)]
        both = mx.concatenate([k, v], axis=3)[:, :, 10:90]
        for keys, values in ((k[:, :, 10:90], v[:, :, 10:90]), by_token, (both[..., :64], both[..., 64:])):
            got = km.scaled_dot_product_attention(q, keys, values, scale=0.125)
            self.assertTrue(mx.array_equal(got, expected))
        one = mx.broadcast_to(k[:1], k.shape)
        self.compare(q, one, v)

    def test_nothing_is_copied(self):
        q, k, v = qkv(1, 8, 2, 1, 40000)
        k, v = k[:, :, :39001], v[:, :, :39001]
        mx.eval(q, k, v)
        km.scaled_dot_product_attention(q, k, v, scale=0.125)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        km.scaled_dot_product_attention(q, k, v, scale=0.125)
        self.assertLess(mx.get_peak_memory() - before, k.nbytes / 100)

    def test_lazy_arguments_are_evaluated(self):
        q, k, v = qkv()
        self.compare(q * 2, (k + 1)[:, :, 3:], mx.concatenate([v, v], axis=2)[:, :, 103:])

    def test_growing_cache(self):
        """Written in place as mlx_lm's KVCache does."""
        cache_k, cache_v = mx.zeros((1, 3, 64, 64)), mx.zeros((1, 3, 64, 64))
        q, k, v = qkv(kv_len=64)
        for i in range(64):
            cache_k[..., i:i + 1, :] = k[..., i:i + 1, :]
            cache_v[..., i:i + 1, :] = v[..., i:i + 1, :]
            self.compare(q, cache_k[..., :i + 1, :], cache_v[..., :i + 1, :])

    def test_streams(self):
        q, k, v = qkv()
        expected = km.scaled_dot_product_attention(q, k, v, scale=0.125)
        for stream in (mx.cpu, mx.Device(mx.cpu), mx.new_stream(mx.cpu)):
            self.assertTrue(mx.array_equal(km.scaled_dot_product_attention(q, k, v, scale=0.125, stream=stream), expected))
        with mx.stream(mx.new_stream(mx.cpu)):
            self.assertTrue(mx.array_equal(km.scaled_dot_product_attention(q, k, v, scale=0.125), expected))
        self.assertEqual(km.stats()["served"], 5)


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxQuantizedTest(MlxCase):
    def compare(self, q, k, v, bits=8, group_size=64, mask=None):
        """Against MLX's attention to the unpacked cache in float32."""
        keys, values = (mx.quantize(cache, group_size=group_size, bits=bits) for cache in (k, v))
        km.reset_stats()
        got = km.quantized_scaled_dot_product_attention(q, keys, values, 0.125, mask, group_size, bits)
        self.assertEqual(km.stats(), {"served": 1, "kernels": {f"cpu mlx_int{bits}": 1}, "fallbacks": {}})
        unpacked = (mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits)
                    for codes, scales, biases in (keys, values))
        expected = mlx_attention(q.astype(mx.float32), *unpacked, scale=0.125, mask=mask)
        self.assertEqual((got.shape, got.dtype), (expected.shape, q.dtype))
        self.assertLess(relative_rms(got, expected), MAX_ERROR[float_name(got)])

    def test_bits_groups_and_dtypes(self):
        for bits in (8, 4):
            for group_size in (32, 64, 128):
                self.compare(*qkv(2, 6, 2, 3, 70, 128), bits=bits, group_size=group_size)
            for dtype in ("float16", "bfloat16"):
                self.compare(*qkv(2, 9, 3, 1, 70, 64, dtype=dtype), bits=bits)

    def test_masks(self):
        for mask in (None, "causal", normal(4, 50) > -1, normal(4, 50), normal(2, 1, 4, 50)):
            self.compare(*qkv(2, 6, 2, 4, 50), mask=mask)

    def test_growing_cache(self):
        """Slices of a longer cache, as mlx_lm's QuantizedKVCache gives them."""
        q, k, v = qkv(kv_len=96)
        keys, values = ([part[..., :50, :] for part in mx.quantize(cache, bits=8)] for cache in (k, v))
        packed = ([mx.contiguous(part) for part in cache] for cache in (keys, values))
        got, expected = (km.quantized_scaled_dot_product_attention(q, *caches, 0.125)
                         for caches in ((keys, values), packed))
        self.assertTrue(mx.array_equal(got, expected))
        self.assertEqual(km.stats()["served"], 2)

    def test_fallbacks(self):
        q, k, v = qkv(kv_len=20)
        for reason, bits, mask in (("a quantised cache of 6 bits in groups of 64", 6, None),
                                   ("a quantised cache and a mask that differs by head", 8, normal(1, 9, 1, 20))):
            keys, values = (mx.quantize(cache, group_size=64, bits=bits) for cache in (k, v))
            km.reset_stats()
            got = km.quantized_scaled_dot_product_attention(q, keys, values, 0.125, mask, 64, bits)
            self.assertEqual(km.stats(), {"served": 0, "kernels": {}, "fallbacks": {reason: 1}})
            unpacked = (mx.dequantize(*cache, group_size=64, bits=bits) for cache in (keys, values))
            self.assertLess(relative_rms(got, mlx_attention(q, *unpacked, scale=0.125, mask=mask)), 1e-5)

    def test_gradients_of_queries(self):
        q, k, v = qkv(kv_len=20)
        keys, values = mx.quantize(k, bits=8), mx.quantize(v, bits=8)
        ours, mlx = (mx.grad(lambda q: (f(q) ** 2).sum())(q) for f in (
            lambda q: km.quantized_scaled_dot_product_attention(q, keys, values, 0.125),
            lambda q: mlx_attention(q, mx.dequantize(*keys, bits=8), mx.dequantize(*values, bits=8), scale=0.125)))
        self.assertLess(relative_rms(ours, mlx), 1e-5)
        self.assertGreater(mx.abs(mlx).max().item(), 0)

    def test_errors(self):
        q, k, v = qkv(kv_len=20)
        keys, values = mx.quantize(k, bits=8), mx.quantize(v, bits=8)
        for argument, call in (("queries", (q[0], keys, values)), ("q_keys", (q, [part[0] for part in keys], values)),
                               ("q_keys", (q, (keys[0][..., :8], *keys[1:]), values)),
                               ("q_values", (q, keys, (values[0], values[1][:, :2], values[2]))),
                               ("q_values", (q, keys, [part[:, :, :10] for part in values]))):
            with self.assertRaisesRegex(ValueError, rf"^\[kvonce[.]mlx[.]\w+\] {argument}: got .*, allowed: "):
                km.quantized_scaled_dot_product_attention(*call, 0.125)


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxFallbacksTest(MlxCase):
    def test_prefill(self):
        self.assert_falls_back(PREFILL, *qkv(q_len=65, kv_len=65), mask="causal")

    def test_rows_that_see_no_key(self):
        q, k, v = qkv(q_len=3, kv_len=10)
        reason = "a row that sees no key"
        hidden = mx.ones((3, 10), dtype=mx.bool_)
        hidden[1] = False
        self.assert_falls_back(reason, q, k, v, mask=hidden)
        km.reset_stats()
        self.assert_falls_back(reason, q, k, v, mask=mx.where(hidden, 0.0, -mx.inf))
        km.reset_stats()
        self.assert_falls_back(reason, q, k[:, :, :2], v[:, :, :2], mask="causal")

    def test_empty_arrays(self):
        q, k, v = qkv(q_len=2)
        for arrays in ((q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])):
            km.reset_stats()
            self.assert_falls_back("an empty array", *arrays)

    def test_integer_masks(self):
        self.assert_falls_back("a mask of dtype int32", *qkv(), mask=mx.arange(100))

    def test_head_dims_beyond_any_kernel(self):
        q, k, v = qkv(kv_len=5, head_dim=1088)
        got = km.scaled_dot_product_attention(q, k, v, scale=0.03)
        self.assertEqual(km.stats()["served"], 0)
        self.assertIn("1024", *km.stats()["fallbacks"])
        self.assertTrue(mx.array_equal(got, mlx_attention(q, k, v, scale=0.03)))

    def test_force_fused(self):
        q, k, v = qkv()
        km.scaled_dot_product_attention(q, k, v, scale=0.125, force_fused=True)
        self.assertEqual(km.stats()["served"], 1)
        with self.assertRaisesRegex(ValueError, "no fused kernel is available in CPU"):
            km.scaled_dot_product_attention(*qkv(q_len=65), scale=0.125, force_fused=True)

    def test_compile_vmap_and_export(self):
        q, k, v = qkv(2)
        expected = mlx_attention(q, k, v, scale=0.125)

        def attend(q, k, v):
            return km.scaled_dot_product_attention(q, k, v, scale=0.125)

        self.assertTrue(mx.array_equal(mx.compile(attend)(q, k, v), expected))
        self.assertTrue(mx.array_equal(mx.vmap(attend)(q[:, None], k[:, None], v[:, None])[:, 0], expected))
        self.assertEqual(km.stats()["fallbacks"], {NO_VALUES: 2})

    def test_derivatives(self):
        """Those of MLX, also through what needs no gradient itself."""
        q, k, v = qkv(2, 6, 2, 3, 20)
        masks = (None, "causal", normal(3, 20) > 0, normal(3, 20))
        for mask in masks:
            for sinks in (None, normal(6)):
                arrays = [q, k, v] + [array for array in (mask, sinks) if isinstance(array, mx.array)]

                def loss(attention, *arrays):
                    rest = iter(arrays[3:])
                    return (attention(*arrays[:3], scale=0.125, mask=next(rest) if isinstance(mask, mx.array) else mask,
                                      sinks=None if sinks is None else next(rest)) ** 2).sum()

                wanted = [i for i, array in enumerate(arrays) if array.dtype != mx.bool_]
                ours = mx.grad(lambda *a: loss(km.scaled_dot_product_attention, *a), wanted)(*arrays)
                mlx = mx.grad(lambda *a: loss(mlx_attention, *a), wanted)(*arrays)
                for got, expected in zip(ours, mlx):
                    self.assertLess(relative_rms(got, expected), 1e-5)
                    self.assertGreater(mx.abs(expected).max().item(), 0)
                ours, mlx = (mx.jvp(lambda q, k: loss(f, q, k, *arrays[2:]), [q, k], [k[:, :1, :3] + 0 * q, k])[1][0]
                             for f in (km.scaled_dot_product_attention, mlx_attention))
                self.assertAlmostEqual(ours.item() / mlx.item(), 1, places=4)
        self.assertEqual(km.stats()["fallbacks"], {"gradients are wanted": 4 * len(masks)})


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxErrorsTest(MlxCase):
    def check(self, argument, error=ValueError, **changes):
        """kvonce names the argument; patched, MLX raises what it raises or serves the call."""
        km.reset_stats()
        q, k, v = qkv()
        call = {"q": q, "k": k, "v": v, "scale": 0.125, **changes}
        with self.assertRaisesRegex(error, rf"^\[kvonce[.]mlx[.]scaled_dot_product_attention\] {argument}: got .*, allowed: "):
            km.scaled_dot_product_attention(**call)
        try:
            expected = mlx_attention(**call)
        except (ValueError, TypeError) as failure:
            expected = failure
        with km.patch():
            if isinstance(expected, Exception):
                with self.assertRaises(type(expected)) as context:
                    mx.fast.scaled_dot_product_attention(**call)
                self.assertEqual(str(context.exception).splitlines()[0], str(expected).splitlines()[0])
            else:
                self.assertTrue(mx.array_equal(mx.fast.scaled_dot_product_attention(**call), expected))
        counted = km.stats()
        self.assertEqual(counted["served"], 0)
        self.assertEqual([reason.partition(": got ")[0] for reason in counted["fallbacks"]], [argument])

    def test_shapes(self):
        q, k, v = qkv()
        self.check("q", q=q[0])
        self.check("k", k=k[0])
        self.check("v", v=v[:, :, :, 0])
        self.check("k", k=k[..., :32])
        self.check("k", k=k[:, :2], v=v[:, :2])
        self.check("v", v=v[:, :1])
        self.check("v", v=v[:, :, :50])
        self.check("k", k=mx.concatenate([k, k]), v=mx.concatenate([v, v]))

    def test_dtypes(self):
        q, k, v = qkv()
        with mx.stream(mx.cpu):
            self.check("q", q=q.astype(mx.float64))
        self.check("q", q=q.astype(mx.int32))
        self.check("k", k=k.astype(mx.complex64))
        self.check("v", v=v.astype(mx.uint8))

    def test_strides(self):
        _, k, v = qkv()
        self.check("k", k=mx.contiguous(k.swapaxes(2, 3)).swapaxes(2, 3))
        self.check("v", v=mx.concatenate([v, v], axis=3)[..., ::2])

    def test_masks(self):
        self.check("mask", mask="causal_lower")
        self.check("mask", mask=mx.zeros((3, 2)))
        self.check("mask", mask=mx.zeros((1, 1, 1, 1, 100)))
        self.check("mask", mask=mx.zeros((2, 1, 1, 100)))
        self.check("mask", q=normal(1, 9, 1, 64, dtype="float16"), k=normal(1, 3, 100, 64, dtype="float16"),
                   v=normal(1, 3, 100, 64, dtype="float16"), mask=mx.zeros((1, 100)))
        self.check("mask", mask=[True], error=TypeError)

    def test_sinks_and_scale(self):
        self.check("sinks", sinks=mx.zeros((3,)))
        self.check("sinks", sinks=mx.zeros((9, 1)))
        self.check("sinks", sinks=mx.zeros((9,), dtype=mx.complex64))
        self.check("scale", scale="one")
        self.check("q", q=[1.0], error=TypeError)


@unittest.skipIf(mx is None, "mlx is not installed")
class MlxPatchTest(MlxCase):
    def test_names(self):
        """In mlx.core.fast and in modules of mlx_lm that hold the function by another name."""
        module = types.ModuleType("mlx_lm.models.of_this_test")
        module.sdpa, module.other = mlx_attention, len
        sys.modules[module.__name__] = module
        try:
            km.patch()
            self.assertIsNot(mx.fast.scaled_dot_product_attention, mlx_attention)
            self.assertIs(module.sdpa, mx.fast.scaled_dot_product_attention)
            km.patch()
            km.unpatch()
            for attention in (mx.fast.scaled_dot_product_attention, module.sdpa):
                self.assertIs(attention, mlx_attention)
            self.assertIs(module.other, len)
            km.unpatch()
        finally:
            del sys.modules[module.__name__]
            km.unpatch()

    def test_with_blocks(self):
        q, k, v = qkv()
        with km.patch():
            ours = mx.fast.scaled_dot_product_attention
            with km.patch():
                self.assertIs(mx.fast.scaled_dot_product_attention, ours)
            self.assertIs(mx.fast.scaled_dot_product_attention, ours)
            mx.fast.scaled_dot_product_attention(q=q, k=k, v=v, scale=0.125, mask=None)
        self.assertIs(mx.fast.scaled_dot_product_attention, mlx_attention)
        self.assertEqual(km.stats()["served"], 1)
        with self.assertRaises(ZeroDivisionError), km.patch():
            1 // 0
        self.assertIs(mx.fast.scaled_dot_product_attention, mlx_attention)

    def test_other_patches_are_left_alone(self):
        def of_others(*arguments, **options):
            return mlx_attention(*arguments, **options)

        mx.fast.scaled_dot_product_attention = of_others
        try:
            with km.patch():
                km.reset_stats()
                mx.fast.scaled_dot_product_attention(*qkv(q_len=65), scale=1.0)
                self.assertEqual(km.stats()["fallbacks"], {PREFILL: 1})
            self.assertIs(mx.fast.scaled_dot_product_attention, of_others)
            with km.patch():
                mx.fast.scaled_dot_product_attention = len
            self.assertIs(mx.fast.scaled_dot_product_attention, len)
        finally:
            mx.fast.scaled_dot_product_attention = mlx_attention

    def test_arguments_of_a_newer_mlx(self):
        with km.patch(), self.assertRaises(TypeError):
            mx.fast.scaled_dot_product_attention(*qkv(), scale=1.0, dropout=0.5)
        self.assertEqual(km.stats()["fallbacks"], {"arguments that kvonce does not know: dropout": 1})

    def test_nn_layers(self):
        import mlx.nn as nn
        layer = nn.MultiHeadAttention(64, 4)
        x = normal(2, 5, 64)
        expected = layer(x, x, x)
        with km.patch():
            got = layer(x, x, x)
        self.assertLess(relative_rms(got, expected), 1e-5)
        self.assertEqual(km.stats()["served"], 1)

    def test_threads(self):
        """Calls, patch() and unpatch() at once: every call has the right result, and is counted once."""
        arrays = [qkv(kv_len=50 + i) for i in range(4)]
        expected = [mlx_attention(*each, scale=0.125) for each in arrays]
        mx.eval(arrays, expected)
        failures, calls = [], 200

        def attend(i):
            # A stream of MLX belongs to a thread.
            with mx.stream(mx.new_stream(mx.cpu)):
                for _ in range(calls):
                    got = km.scaled_dot_product_attention(*arrays[i], scale=0.125)
                    if relative_rms(got, expected[i]) > 1e-5:
                        failures.append(i)

        def install():
            for _ in range(calls):
                with km.patch():
                    pass

        threads = [threading.Thread(target=attend, args=(i,)) for i in range(4)] + [threading.Thread(target=install)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(km.stats(), {"served": 4 * calls, "kernels": {"cpu": 4 * calls}, "fallbacks": {}})
        self.assertIs(mx.fast.scaled_dot_product_attention, mlx_attention)


if __name__ == "__main__":
    unittest.main()

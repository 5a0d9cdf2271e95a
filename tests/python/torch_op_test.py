"""kvonce.torch: the operator is attention, keeps torch's contracts, compiles. Skipped where torch is not installed."""
import subprocess
import sys
import unittest
import unittest.mock

import numpy
from oracle import TOLERANCE, attention, error

try:
    import torch
    import torch._dynamo.testing
    import kvonce.torch
    from kvonce.torch import scaled_dot_product_attention
except ModuleNotFoundError:
    torch = None

DTYPES = ("float32", "float16", "bfloat16")


def tensors(dtype="float32", num_seqs=2, num_q_heads=6, num_kv_heads=2, q_len=1, kv_len=150, head_dim=64,
            head_dim_v=None):
    generator = torch.Generator().manual_seed(1)
    shapes = ((num_seqs, num_q_heads, q_len, head_dim), (num_seqs, num_kv_heads, kv_len, head_dim),
              (num_seqs, num_kv_heads, kv_len, head_dim_v or head_dim))
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


def wide(tensor):
    return tensor.double().numpy()


@unittest.skipIf(torch is None, "torch is not installed")
class TorchOpTest(unittest.TestCase):
    def check(self, arrays, is_causal=False, kv_lens=None, kv_starts=None, sinks=None, attn_mask=None, function=None,
              **options):
        """Compares out and lse with the oracle's; returns out."""
        mask = attn_mask
        if mask is not None:
            mask = (mask if mask.dtype == torch.bool else mask.float()).numpy()
        numbers = {name: None if tensor is None else tensor.numpy()
                   for name, tensor in (("kv_lens", kv_lens), ("kv_starts", kv_starts), ("sinks", sinks))}
        expected, expected_lse = attention(*map(wide, arrays), causal=is_causal, mask=mask, **numbers,
                                            **options)
        out, lse = (function or scaled_dot_product_attention)(
            *arrays, attn_mask, is_causal=is_causal, kv_lens=kv_lens, kv_starts=kv_starts, sinks=sinks, return_lse=True,
            **options)
        self.assertEqual((out.dtype, lse.dtype), (arrays[0].dtype, torch.float32))
        self.assertTrue(out.is_contiguous() and lse.is_contiguous())
        self.assertLess(error(wide(out), expected), TOLERANCE[str(out.dtype).rpartition(".")[2]])
        numpy.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-4, atol=1e-4)
        return out

    def test_dtypes_and_dims(self):
        for dtype in DTYPES:
            for head_dim, head_dim_v in ((64, 64), (128, 128), (40, 24)):
                with self.subTest(dtype=dtype, head_dim=head_dim):
                    self.check(tensors(dtype, head_dim=head_dim, head_dim_v=head_dim_v))

    def test_small_calls_wake_no_thread(self):
        """K and V of less than 1 MB are read by one thread, with the same bits."""
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(2)
        limit = kvonce.torch._ONE_THREAD_BYTES
        for q_len, kv_len, threads in ((1, 1023, 1), (1, 1024, 2), (2, 511, 1), (2, 512, 2)):
            q, k, v = tensors(num_seqs=1, q_len=q_len, kv_len=kv_len)
            self.assertEqual((k.nbytes + v.nbytes) * q_len < limit, threads == 1)
            outs = []
            for bytes_of_one in (limit, 0, 1 << 40):
                with unittest.mock.patch.multiple(kvonce.torch, _ONE_THREAD_BYTES=bytes_of_one, _choices_of_threads={}):
                    outs.append(torch.ops.kvonce.attend.default(q, k, v))
                    used = {limit: threads, 0: 2, 1 << 40: 1}[bytes_of_one]
                    self.assertEqual(list(kvonce.torch._choices_of_threads), [used])
            self.assertTrue(torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]))

    def test_options(self):
        arrays = tensors(q_len=3)
        lens, starts = torch.tensor([150, 20], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
        for options in ({"kv_lens": lens}, {"kv_lens": lens.long(), "kv_starts": starts}, {"scale": 0.3},
                        {"is_causal": True, "window": 17}, {"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, 6)},
                        {"kv_lens": torch.tensor([0, 150], dtype=torch.int32)}):
            with self.subTest(**options):
                self.check(arrays, **options)

    def test_every_query_token_sees_every_key_by_default(self):
        arrays = tensors(q_len=4)
        expected = torch.nn.functional.scaled_dot_product_attention(*arrays, enable_gqa=True)
        self.assertTrue(torch.allclose(scaled_dot_product_attention(*arrays), expected, rtol=1e-4, atol=1e-5))
        causal = scaled_dot_product_attention(*arrays, is_causal=True)
        self.assertFalse(torch.allclose(causal, expected, rtol=1e-2, atol=1e-3))

    def test_causal_is_aligned_bottom_right(self):
        q, k, v = tensors(q_len=4, kv_len=30)
        out = self.check((q, k, v), is_causal=True)
        bottom_right = torch.ones(4, 30, dtype=torch.bool).tril(diagonal=30 - 4)
        top_left = torch.ones(4, 30, dtype=torch.bool).tril()

        def torchs(**options):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

        self.assertTrue(torch.allclose(out, torchs(attn_mask=bottom_right), rtol=1e-4, atol=1e-5))
        self.assertTrue(torch.allclose(torchs(is_causal=True), torchs(attn_mask=top_left), rtol=1e-4, atol=1e-5))
        self.assertFalse(torch.allclose(out, torchs(is_causal=True), rtol=1e-2, atol=1e-3))

    def masks(self, shape):
        """A boolean mask that hides two keys of three or none, and additive ones of three dtypes."""
        generator = torch.Generator().manual_seed(2)
        scores = torch.randn(shape, generator=generator)
        shown = scores > -0.4
        added = torch.where(shown, scores, -torch.inf)
        return shown, added, added.half(), added.bfloat16()

    def test_masks_are_torchs(self):
        for dtype in DTYPES:
            arrays = tensors(dtype, q_len=3)
            for shape in ((2, 6, 3, 150), (2, 1, 3, 150), (1, 6, 1, 150), (6, 3, 150), (3, 150), (1, 150), (1, 1)):
                for mask in self.masks(shape):
                    with self.subTest(dtype=dtype, shape=shape, mask=mask.dtype):
                        out = self.check(arrays, attn_mask=mask)
                        torchs = torch.nn.functional.scaled_dot_product_attention(
                            *(array.float() for array in arrays), mask if mask.dtype == torch.bool else mask.float(),
                            enable_gqa=True)
                        self.assertLess(error(wide(out), wide(torchs)), TOLERANCE[dtype])

    def test_masks_with_other_options(self):
        arrays = tensors(q_len=3)
        lens, starts = torch.tensor([150, 20], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
        for mask in self.masks((2, 1, 3, 150)):
            with self.subTest(mask=mask.dtype):
                self.check(arrays, attn_mask=mask, kv_lens=lens, kv_starts=starts, window=60, softcap=3.0, scale=0.2,
                           sinks=torch.linspace(-2, 3, 6))

    def test_masks_of_any_strides(self):
        arrays = tensors(q_len=3)
        shown, added, _, _ = self.masks((3, 400))
        for mask in (shown[:, 50:200], added[:, 1:301:2], added[:1, :150].expand(2, 6, 3, 150),
                     self.masks((150, 3))[1].T):
            self.check(arrays, attn_mask=mask)

    def test_a_row_that_is_masked_altogether(self):
        arrays = tensors(q_len=3)
        shown = torch.ones(3, 150, dtype=torch.bool)
        shown[1] = False
        out = self.check(arrays, attn_mask=shown)
        self.assertTrue((out[:, :, 1] == 0).all() and (out[:, :, 0] != 0).any())

    def test_a_hidden_key_has_no_effect(self):
        q, k, v = tensors(q_len=3)
        shown = self.masks((150,))[0]
        expected = scaled_dot_product_attention(q, k, v, shown)
        k[:, :, ~shown] = torch.nan
        v[:, :, ~shown] = torch.inf
        self.assertTrue(torch.equal(scaled_dot_product_attention(q, k, v, shown), expected))

    def test_masks_compiled_without_a_graph_break(self):
        def step(q, k, v, mask):
            # The mask is made inside, where inductor could choose its layout.
            return scaled_dot_product_attention(q * 2, k, v, mask.T[None, None].contiguous())

        for dtype in ("float32", "bfloat16"):
            torch._dynamo.reset()
            compiled = torch.compile(step, fullgraph=True)
            arrays = tensors(dtype, q_len=3)
            for mask in self.masks((150, 3))[:2]:
                with self.subTest(dtype=dtype, mask=mask.dtype):
                    self.assertTrue(torch.equal(compiled(*arrays, mask), step(*arrays, mask)))

    def test_the_operator_keeps_torchs_contracts(self):
        lens = torch.tensor([150, 20], dtype=torch.int32)
        for operator in (torch.ops.kvonce.attend.default, torch.ops.kvonce.attend.lse):
            for dtype in DTYPES:
                options = {"kv_lens": lens, "kv_starts": lens // 2, "sinks": torch.ones(6), "window": 30}
                arrays = tensors(dtype, q_len=2, head_dim_v=32)
                torch.library.opcheck(operator, arrays, options)
                for mask in self.masks((2, 1, 2, 150))[:2]:
                    torch.library.opcheck(operator, arrays, options | {"causal": False, "mask": mask})
            q, k, v = tensors()
            tokens_first = v.transpose(1, 2).contiguous().transpose(1, 2)
            torch.library.opcheck(operator, (q, k[:, :, ::2], tokens_first[:, :, ::2]))

    def test_compiled_without_a_graph_break(self):
        torch._dynamo.reset()

        def step(q, k, v, **options):
            out, lse = scaled_dot_product_attention(q * 2, k, v, **options)
            return out.transpose(1, 2).contiguous().transpose(1, 2), lse

        compiled = torch.compile(step, fullgraph=True)
        for dtype in DTYPES:
            arrays = tensors(dtype)
            lens = torch.tensor([150, 20], dtype=torch.int32)
            options = {"kv_lens": lens, "is_causal": True, "return_lse": True}
            for got, expected in zip(compiled(*arrays, **options), step(*arrays, **options)):
                self.assertTrue(torch.equal(got, expected))

    def test_a_growing_cache_compiles_once_or_twice(self):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=counter)
        for kv_len in range(100, 110):
            arrays = tensors(kv_len=kv_len)
            self.assertTrue(torch.equal(compiled(*arrays), scaled_dot_product_attention(*arrays)))
        self.assertLessEqual(counter.frame_count, 2)

    def test_strides_reach_the_operator_as_they_are(self):
        torch._dynamo.reset()
        q, k, v = tensors()
        cache = torch.stack((k, v), dim=3).expand(2, 2, 150, 2, 64)  # [num_seqs, num_kv_heads, kv_len, 2, head_dim]

        def step(q, cache):
            return scaled_dot_product_attention(q, cache[:, :, 3:, 0], cache[:, :, 3:, 1])

        expected = scaled_dot_product_attention(q, k[:, :, 3:], v[:, :, 3:])
        got = torch.compile(step, fullgraph=True)(q, cache)
        self.assertTrue(torch.allclose(got, expected, rtol=1e-4, atol=1e-6))

    def test_a_parameter_is_used_where_no_gradient_is_asked_for(self):
        arrays = tensors()
        sinks = torch.nn.Parameter(torch.ones(6))
        with torch.no_grad():
            got = scaled_dot_product_attention(*arrays, sinks=sinks)
        self.assertTrue(torch.equal(got, scaled_dot_product_attention(*arrays, sinks=sinks.detach())))
        with torch.inference_mode():
            self.assertTrue(torch.equal(got, scaled_dot_product_attention(*arrays, sinks=sinks)))

    def test_refusals(self):
        q, k, v = tensors()
        lens = torch.tensor([150, 20], dtype=torch.int32)
        for arrays, options, pattern in (
                ((q, k, v), {"dropout_p": 0.1}, r"^dropout_p: got 0.1, allowed: 0.0$"),
                ((q, k[0], v), {}, r"^key: got 3 dims, allowed: 4: \[num_seqs, heads, tokens, head_dim\]$"),
                ((q, k.numpy(), v), {}, "^key: got an object of type ndarray, allowed: a tensor on cpu"),
                ((q, k, v.to("meta")), {}, "^value: got a tensor on meta, allowed: one on cpu, query's device$"),
                ((q, k, v), {"kv_lens": [150, 20]}, "^kv_lens: got an object of type list, allowed: a tensor on cpu"),
                ((q, k, v), {"kv_lens": lens.to("meta")}, "^kv_lens: got a tensor on meta"),
                ((q, k, v), {"kv_lens": lens + 1}, r"^kv_lens\[0\]: got 151, allowed: 0 to kv_len = 150$"),
                ((q, k, v), {"enable_gqa": False}, "^enable_gqa: got False for 6 query heads and 2 KV heads"),
                ((q.clone().requires_grad_(), k, v), {}, "^query: got a tensor with requires_grad, .*no_grad"),
                ((q, k, v), {"sinks": torch.ones(6, requires_grad=True)}, "^sinks: got a tensor with requires_grad"),
                ((q.double(), k, v), {}, "^q: got dtype float64, allowed: float32, float16, bfloat16$")):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(ValueError, pattern):
                scaled_dot_product_attention(*arrays, **options)
        shown = torch.ones(1, 150, dtype=torch.bool)
        for mask, options, pattern in (
                (shown, {"is_causal": True}, "^attn_mask: got a tensor with is_causal=True, allowed: one with"),
                (shown.int(), {}, "^attn_mask: got dtype torch.int32, allowed: torch.bool, torch.float32, "),
                (shown.byte(), {}, "^attn_mask: got dtype torch.uint8"),
                (shown.to("meta"), {}, "^attn_mask: got a tensor on meta, allowed: one on cpu, query's device$"),
                (shown.tolist(), {}, "^attn_mask: got an object of type list, allowed: a tensor on cpu"),
                (shown.float().requires_grad_(), {}, "^attn_mask: got a tensor with requires_grad, .*no_grad"),
                (shown[:, :149], {}, r"^mask: got shape \[1, 149\], allowed: one that broadcasts to \[2, 6, 1, 150\]$"),
                (shown[None, None, None], {}, r"^mask: got shape \[1, 1, 1, 1, 150\]")):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(ValueError, pattern):
                scaled_dot_product_attention(q, k, v, mask, **options)
        with self.assertRaisesRegex(ValueError, "^q: got a tensor with requires_grad"):
            torch.ops.kvonce.attend(q.clone().requires_grad_(), k, v)

    def test_heads_that_are_equal_need_no_enable_gqa(self):
        self.check(tensors(num_q_heads=2), function=lambda *arrays, **options: scaled_dot_product_attention(
            *arrays, enable_gqa=False, **options))

    def test_importing_kvonce_imports_no_torch(self):
        code = "import sys, kvonce; sys.exit('torch' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], check=False).returncode, 0)


if __name__ == "__main__":
    unittest.main()

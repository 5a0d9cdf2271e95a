"""torch tensors in, torch tensors out. Skipped where torch is not installed."""
import unittest
import unittest.mock

import kvonce
from oracle import TOLERANCE, attention, error

try:
    import torch
except ModuleNotFoundError:
    torch = None


@unittest.skipIf(torch is None, "torch is not installed")
class TorchTest(unittest.TestCase):
    def tensors(self, dtype, q_len=1):
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator).to(dtype)
                for shape in ((2, 9, q_len, 64), (2, 3, 200, 64), (2, 3, 200, 64))]

    def test_dtypes(self):
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
            arrays = self.tensors(dtype, q_len=3)
            out, lse = kvonce.attend(*arrays, return_lse=True, kv_lens=torch.tensor([200, 20]))
            expected, _ = attention(*(array.float().numpy() for array in arrays), kv_lens=[200, 20])
            self.assertIsInstance(out, torch.Tensor)
            self.assertEqual((out.dtype, lse.dtype), (dtype, torch.float32))
            self.assertLess(error(out.float().numpy(), expected), TOLERANCE[name])

    def test_out_and_out_dtype(self):
        arrays = self.tensors(torch.bfloat16)
        out = torch.full((2, 9, 1, 64), float("nan"))
        self.assertIs(kvonce.attend(*arrays, out=out, out_dtype=torch.float32), out)
        self.assertTrue(torch.equal(kvonce.attend(*arrays, out_dtype=torch.float32), out))
        self.assertFalse(out.isnan().any())

    def test_strides(self):
        q, k, v = self.tensors(torch.float32)
        packed = torch.stack((k, v)).transpose(2, 3).contiguous().transpose(2, 3)
        out = kvonce.attend(q, packed[0], packed[1])
        self.assertTrue(torch.allclose(out, kvonce.attend(q, k, v), rtol=1e-4, atol=1e-6))

    def test_tensors_cross_by_the_c_exchange_api(self):
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            self.skipTest(f"torch {torch.__version__} does not offer it")
        arrays = self.tensors(torch.bfloat16)
        expected = kvonce.attend(*arrays)
        with unittest.mock.patch.object(torch.Tensor, "__dlpack__", side_effect=AssertionError("called")):
            self.assertTrue(torch.equal(kvonce.attend(*arrays), expected))

    def test_tensors_cross_without_the_c_exchange_api(self):
        arrays = self.tensors(torch.bfloat16)
        expected = kvonce.attend(*arrays, kv_lens=[200, 20])
        with unittest.mock.patch.object(torch.Tensor, "__dlpack_c_exchange_api__", None, create=True):
            got = kvonce.attend(*arrays, kv_lens=torch.tensor([200, 20]), out=torch.empty_like(expected))
            with self.assertRaisesRegex(ValueError, "^k: got an object of type Tensor"):
                kvonce.attend(arrays[0], arrays[1].to("meta"), arrays[2])
        self.assertTrue(torch.equal(got, expected))

    def test_merge_and_plan(self):
        q, k, v = self.tensors(torch.float32)
        plan = kvonce.plan(9, 3, 64, 200, num_seqs=2, causal=False)
        parts = [plan.attend(q, k[:, :, tokens], v[:, :, tokens], return_lse=True)
                 for tokens in (slice(0, 70), slice(70, 200))]
        out, _ = kvonce.merge(*zip(*parts))
        self.assertIsInstance(out, torch.Tensor)
        self.assertTrue(torch.allclose(out, kvonce.attend(q, k, v), rtol=1e-4, atol=1e-6))

    def test_gradients_are_refused(self):
        q, k, v = self.tensors(torch.float32)
        with self.assertRaisesRegex(ValueError, "^q: got a tensor with requires_grad, .*detach"):
            kvonce.attend(q.requires_grad_(), k, v)
        kvonce.attend(q.detach(), torch.nn.Parameter(k, requires_grad=False), v)

    def test_other_devices_are_refused(self):
        q, k, v = self.tensors(torch.float32)
        with self.assertRaisesRegex(ValueError, "^k: got an object of type Tensor"):
            kvonce.attend(q, k.to("meta"), v)


if __name__ == "__main__":
    unittest.main()

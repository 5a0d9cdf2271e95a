"""CUDA memory: attention on streams and in graphs, and what is refused. Skipped, with the reason, without a device."""
import gc
import time
import unittest
import unittest.mock

import kvonce
from kvonce import _workspaces
from oracle import TOLERANCE

try:
    import torch
    import torch._dynamo.utils
    import torch._inductor.config
    from kvonce.torch import scaled_dot_product_attention
except ModuleNotFoundError:
    torch = None

DTYPES = ("bfloat16", "float16", "float32")


def setUpModule():
    found = [device for device in kvonce.devices() if device.backend == "cuda"]
    reasons = [device.unavailable for device in found if device.unavailable]
    if torch is None:
        raise unittest.SkipTest("torch is not installed")
    if reasons:
        raise unittest.SkipTest(reasons[0])
    if not torch.cuda.is_available():
        raise unittest.SkipTest(f"torch {torch.__version__} sees no CUDA device")


def attention(q, k, v, *, scale=None, causal=True, window=0, kv_lens=None, kv_starts=None, sinks=None):
    """(out, lse) in float64 on the device of q, written from the definition."""
    num_seqs, num_q_heads, q_len, head_dim = q.shape
    kv_len, group_size = k.shape[2], num_q_heads // k.shape[1]
    lens = torch.full((num_seqs,), kv_len, device=q.device) if kv_lens is None else kv_lens.long()
    starts = torch.zeros_like(lens) if kv_starts is None else kv_starts.long()
    token = torch.arange(kv_len, device=q.device)
    counts = (token < lens[:, None])[:, None, :, None]  # what lies behind a length may be NaN
    k, v = (torch.where(counts, array.double(), 0).repeat_interleave(group_size, 1) for array in (k, v))
    row = lens[:, None] - q_len + torch.arange(q_len, device=q.device)
    seen = (token < lens[:, None, None]) & (token >= starts[:, None, None])
    if causal:
        seen = seen & (token <= row[:, :, None])
    if window:
        seen = seen & (token > row[:, :, None] - window)
    scores = q.double() @ k.transpose(2, 3) * (head_dim ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None].expand_as(scores), -torch.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(num_seqs, -1, q_len, 1)), 3)
    lse = logits.logsumexp(3)
    weights = torch.where(scores.isinf(), 0, (scores - lse[..., None]).exp())
    return weights @ v, lse


def tensors(dtype="bfloat16", num_seqs=2, num_q_heads=8, num_kv_heads=2, q_len=1, kv_len=777, head_dim=128,
            head_dim_v=None, seed=1):
    torch.manual_seed(seed)
    shapes = ((num_seqs, num_q_heads, q_len, head_dim), (num_seqs, num_kv_heads, kv_len, head_dim),
              (num_seqs, num_kv_heads, kv_len, head_dim_v or head_dim))
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class CudaTest(unittest.TestCase):
    def check_result(self, out, lse, arrays, options):
        expected, expected_lse = attention(*arrays, **options)
        error = ((out.double() - expected).square().mean() / expected.square().mean().clamp_min(1e-300)).sqrt()
        self.assertLess(error.item(), TOLERANCE[str(out.dtype).rpartition(".")[2]])
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)

    def check(self, arrays, call=kvonce.attend, **options):
        """Compares out and lse of a call with the oracle's; returns out."""
        out, lse = call(*arrays, return_lse=True, **options)
        self.assertEqual((out.dtype, lse.dtype, out.device), (arrays[0].dtype, torch.float32, arrays[0].device))
        self.check_result(out, lse, arrays, options)
        return out


class AttendTest(CudaTest):
    def test_dtypes_groups_and_dims(self):
        for dtype in DTYPES:
            for num_q_heads, num_kv_heads in ((1, 1), (9, 3), (8, 2), (7, 7), (32, 4), (33, 3), (64, 1)):
                with self.subTest(dtype=dtype, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads):
                    self.check(tensors(dtype, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads))
            for head_dim, head_dim_v in ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (40, 24)):
                with self.subTest(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v):
                    self.check(tensors(dtype, head_dim=head_dim, head_dim_v=head_dim_v))

    def test_lengths_windows_and_sinks(self):
        sinks = torch.linspace(-2, 5, 8, device="cuda")
        lens, starts = lengths(777, 0, 1, 300), lengths(0, 0, 0, 200)
        for dtype in DTYPES:
            for q_len in (1, 4):
                arrays = tensors(dtype, num_seqs=4, q_len=q_len)
                for options in ({}, {"kv_lens": lens}, {"kv_lens": lens, "kv_starts": starts}, {"sinks": sinks},
                                {"window": 100}, {"window": 1}, {"causal": False}, {"scale": 0.3},
                                {"kv_lens": lens, "kv_starts": starts, "sinks": sinks, "window": 150}):
                    with self.subTest(dtype=dtype, q_len=q_len, options=list(options)):
                        self.check(arrays, **options)

    def test_strided_expanded_and_unaligned_tensors(self):
        q, k, v = tensors(kv_len=500)
        tokens_first = [array.transpose(1, 2).contiguous().transpose(1, 2) for array in (q, k, v)]
        cache = torch.randn(2, 2, 600, 300, device="cuda").bfloat16()
        for name, arrays in (
                ("tokens before heads", tokens_first),
                ("expanded", (q, k[:, :1].expand(-1, 2, -1, -1), v)),
                ("a slice of a longer cache", (q, cache[:, :, 50:550, :128], cache[:, :, 50:550, 128:256])),
                ("addresses of two bytes", (q, cache[:, :, 1:501, 1:129], cache[:, :, 1:501, 3:131])),
                ("every second token", (q, cache[:, :, ::2, :128], cache[:, :, ::2, 128:256]))):
            with self.subTest(name):
                self.check(arrays)

    def test_a_growing_cache_needs_no_lengths(self):
        q, k, v = tensors(kv_len=1100)
        for kv_len in (*range(0, 70), *range(1000, 1100, 7)):
            self.check((q, k[:, :, :kv_len], v[:, :, :kv_len]))

    def test_what_lies_behind_a_length_is_not_used(self):
        q, k, v = tensors()
        lens = lengths(500, 63)
        for array in (k, v):
            array[0, :, 500:] = torch.nan
            array[1, :, 63:] = torch.nan
        self.assertFalse(self.check((q, k, v), kv_lens=lens).isnan().any())

    def test_lengths_beyond_the_tensor_are_clamped_to_it(self):
        q, k, v = tensors(kv_len=1024)
        for array in (k, v):
            array[:, :, 1000:] = torch.nan
        got = kvonce.attend(q, k[:, :, :1000], v[:, :, :1000], kv_lens=lengths(1024, -5))
        expected = kvonce.attend(q, k[:, :, :1000], v[:, :, :1000], kv_lens=lengths(1000, 0))
        self.assertTrue(torch.equal(got, expected))

    def test_out_and_out_dtype(self):
        arrays = tensors(q_len=3)
        whole = torch.full((2, 3, 9, 200), torch.nan, device="cuda")
        out = whole[:, :, 1:, 10:138].transpose(1, 2)
        self.assertIs(kvonce.attend(*arrays, out=out), out)
        torch.testing.assert_close(out.double(), attention(*arrays)[0], rtol=1e-3, atol=1e-3)
        out[:] = torch.nan
        self.assertTrue(whole.isnan().all())
        self.assertEqual(kvonce.attend(*arrays, out_dtype="float16").dtype, torch.float16)

    def test_empty_batches(self):
        for shape in ({"num_seqs": 0}, {"q_len": 0}):
            arrays = tensors(**shape)
            self.assertEqual(kvonce.attend(*arrays).shape, arrays[0].shape)

    def test_a_call_with_out_allocates_nothing_and_waits_for_nothing(self):
        arrays = tensors()
        out, lens = torch.empty_like(arrays[0]), lengths(777, 5)
        kvonce.attend(*arrays, out=out, kv_lens=lens)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(50_000_000)  # 25 ms and more
            begin = time.perf_counter()
            for _ in range(10):
                kvonce.attend(*arrays, out=out, kv_lens=lens)
            seconds = time.perf_counter() - begin
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assertEqual(torch.cuda.memory_stats()["allocation.all.allocated"], before)
        self.assertLess(seconds, 0.015)

    def test_the_plan_of_a_cuda_device(self):
        plan = kvonce.plan(8, 2, 128, 1000, num_seqs=2, q_dtype="bfloat16", device=torch.device("cuda", 0))
        self.assertEqual(plan.device, "cuda:0")
        self.assertIn(plan.kernel_id, kvonce.explain(8, 2, 128, 1000, num_seqs=2, q_dtype="bfloat16", device="cuda"))
        for kv_len in (0, 1, 500, 1000):
            self.check(tensors(kv_len=kv_len), call=plan.attend)
        self.check(tensors(kv_len=2000), call=plan.attend, kv_lens=lengths(1000, 3))

    def test_the_current_device_stays(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("one CUDA device")
        arrays = [array.to("cuda:1") for array in tensors()]
        with torch.cuda.device(0):
            self.check(arrays)
            self.assertEqual(torch.cuda.current_device(), 0)
            self.assertEqual(torch.empty(1, device="cuda").device.index, 0)
        with self.assertRaisesRegex(ValueError, "^k: got memory of cuda:0, allowed: cuda:1$"):
            kvonce.attend(arrays[0], arrays[1].to("cuda:0"), arrays[2])


class RefusalTest(CudaTest):
    def test_memory_elsewhere(self):
        q, k, v = tensors()
        for arrays, options, pattern in (
                ((q, k.cpu(), v), {}, "^k: got memory of cpu, allowed: cuda:0$"),
                ((q.cpu(), k, v), {}, "^k: got memory of cuda:0, allowed: cpu$"),
                ((q, k, v), {"out": q.cpu()}, "^out: got memory of cpu, allowed: cuda:0$"),
                ((q, k, v), {"kv_lens": [777, 1]}, "^kv_lens: got an object of type list, allowed: .*int32 on cuda:0"),
                ((q, k, v), {"kv_lens": lengths(777, 1).cpu()}, "^kv_lens: got memory of cpu, allowed: cuda:0$"),
                ((q, k, v), {"kv_lens": lengths(777, 1).long()}, "^kv_lens: got dtype int64, allowed: .*int32"),
                ((q, k, v), {"kv_lens": lengths(777)}, r"^kv_lens: got shape \[1\], allowed: \[2\]$"),
                ((q, k, v), {"kv_starts": lengths(1, 2, 3, 4)[::2]}, "^kv_starts: got a stride of 2"),
                ((q, k, v), {"sinks": torch.ones(8, device="cuda").double()}, "^sinks: got dtype float64, .*float32"),
                ((q, k, v), {"target": "avx2"}, "^target: got 'avx2', allowed: None on cuda:0$"),
                ((q, k, v), {"threads": 2}, "^threads: got 2, allowed: None on cuda:0$"),
                ((q, k, v), {"out": q}, "^out: got the memory of an input")):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(ValueError, pattern):
                kvonce.attend(*arrays, **options)
        plan = kvonce.plan(8, 2, 128, 1000, num_seqs=2, q_dtype="bfloat16", device="cuda")
        with self.assertRaisesRegex(ValueError, "^q: got memory of cpu, allowed: cuda:0$"):
            plan.attend(q.cpu(), k.cpu(), v.cpu())
        with self.assertRaisesRegex(ValueError, r"^outs\[0\]: got memory of cuda:0, allowed: cpu$"):
            kvonce.merge([q.float()], [q[..., 0].float()])

    def test_devices_that_are_not_there(self):
        with self.assertRaisesRegex(RuntimeError, "^ordinal: got 99"):
            kvonce.plan(8, 2, 128, 1000, device="cuda:99")


class StreamTest(CudaTest):
    def late(self, stream, q):
        """Overwrites q on a stream, some milliseconds from now."""
        fresh = torch.randn_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            q.copy_(fresh)

    def test_torchs_current_stream_is_the_default(self):
        arrays = tensors()
        stream = torch.cuda.Stream()
        self.late(stream, arrays[0])
        with torch.cuda.stream(stream):
            out, lse = kvonce.attend(*arrays, return_lse=True)
        torch.cuda.synchronize()
        self.check_result(out, lse, arrays, {})

    def test_a_stream_that_is_named(self):
        arrays = tensors()
        stream = torch.cuda.Stream()
        out = torch.empty_like(arrays[0])
        torch.cuda.synchronize()
        plan = kvonce.plan(8, 2, 128, 1000, num_seqs=2, q_dtype="bfloat16", device="cuda")
        for call in (kvonce.attend, plan.attend):
            self.late(stream, arrays[0])
            _, lse = call(*arrays, out=out, return_lse=True, stream=stream.cuda_stream)
            torch.cuda.synchronize()
            self.check_result(out, lse, arrays, {})

    def test_streams_run_at_once_with_workspaces_of_their_own(self):
        plan = kvonce.plan(8, 2, 128, 20000, q_dtype="bfloat16", device="cuda")
        cases = [(tensors(num_seqs=1, kv_len=20000, seed=seed), torch.cuda.Stream()) for seed in range(3)]
        expected = [plan.attend(*arrays) for arrays, _ in cases]
        outs = [[torch.empty_like(arrays[0]) for _ in range(40)] for arrays, _ in cases]
        torch.cuda.synchronize()
        for i in range(40):
            for (arrays, stream), out in zip(cases, outs):
                plan.attend(*arrays, out=out[i], stream=stream.cuda_stream)
        torch.cuda.synchronize()
        for case, out in enumerate(outs):
            self.assertTrue(all(torch.equal(one, expected[case]) for one in out))


class GraphTest(CudaTest):
    def plan(self, **options):
        """A plan that joins its partials in the workspace, and a list of the workspaces that it allocates."""
        made = []

        def allocate(num_bytes, ordinal, stream, capturing):
            made.append(capturing)
            return real(num_bytes, ordinal, stream, capturing)

        real = _workspaces.allocate
        patch = unittest.mock.patch.object(_workspaces, "allocate", allocate)
        patch.start()
        self.addCleanup(patch.stop)
        return kvonce.plan(8, 2, 128, 4096, num_seqs=2, q_dtype="bfloat16", device="cuda", policy="cluster=0,splits=8",
                           **options), made

    def capture(self, function, stream=None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = function()
        return graph, result

    def test_a_replay_sees_new_lengths_and_data(self):
        plan, made = self.plan()
        arrays = tensors(kv_len=4096)
        lens = lengths(4096, 7)
        plan.attend(*arrays, kv_lens=lens)
        self.assertEqual(made, [False, False])
        graph, (out, lse) = self.capture(lambda: plan.attend(*arrays, kv_lens=lens, return_lse=True))
        self.assertEqual(made, [False, False], "the capture took the spare")
        for step in range(5):
            for array in arrays:
                array.normal_()
            lens.copy_(lengths(*((4096 >> step) - step, 1000 * step)))
            graph.replay()
            plan.attend(*tensors(kv_len=4096, seed=step), kv_lens=lengths(3000, 4000))  # with the other workspace
            self.check_result(out, lse, arrays, {"kv_lens": lens})

    def test_layers_of_one_capture_share_a_workspace(self):
        plan, made = self.plan()
        layers = [tensors(kv_len=4096, seed=seed) for seed in range(4)]
        plan.attend(*layers[0])
        graph, outs = self.capture(lambda: [plan.attend(*arrays, return_lse=True) for arrays in layers])
        graph.replay()
        self.assertEqual(made, [False, False])
        for arrays, (out, lse) in zip(layers, outs):
            self.check_result(out, lse, arrays, {})

    def test_without_a_call_before_it_a_capture_prepares_its_own(self):
        warm, _ = self.plan()
        arrays = tensors(kv_len=4096)
        warm.attend(*arrays)  # the kernels are loaded
        plan, made = self.plan()
        graph, outs = self.capture(lambda: [plan.attend(*arrays, return_lse=True) for _ in range(2)])
        self.assertEqual(made, [True, True])
        for _ in range(3):
            for array in arrays:
                array.normal_()
            graph.replay()
            for out, lse in outs:
                self.check_result(out, lse, arrays, {})

    def test_two_graphs_replay_at_once(self):
        plan, _ = self.plan()
        cases = []
        for seed in range(2):
            arrays, stream = tensors(kv_len=4096, seed=seed), torch.cuda.Stream()
            expected = plan.attend(*arrays)
            graph, outs = self.capture(lambda: [plan.attend(*arrays) for _ in range(20)], stream)
            cases.append((graph, stream, outs, expected, arrays))  # which the graph reads
        torch.cuda.synchronize()
        for _ in range(10):
            for graph, stream, *_ in cases:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, _, outs, expected, _ in cases:
            self.assertTrue(all(torch.equal(out, expected) for out in outs))

    def test_branches_of_a_capture_do_not_share(self):
        plan, made = self.plan()
        first, second = tensors(kv_len=4096, seed=1), tensors(kv_len=4096, seed=2)
        expected = plan.attend(*first), plan.attend(*second)
        side = torch.cuda.Stream()

        def branches():
            side.wait_stream(torch.cuda.current_stream())
            outs = [plan.attend(*first)]
            with torch.cuda.stream(side):
                outs.append(plan.attend(*second))
            torch.cuda.current_stream().wait_stream(side)
            return outs

        graph, outs = self.capture(branches)
        self.assertEqual(made, [False, False, True])
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(all(torch.equal(*pair) for pair in zip(outs, expected)))

    def test_the_workspace_of_a_destroyed_graph_is_used_again(self):
        plan, made = self.plan()
        arrays = tensors(kv_len=4096)
        plan.attend(*arrays)
        for _ in range(3):
            before = set(_workspaces._kept)
            graph, out = self.capture(lambda: plan.attend(*arrays))
            token, = set(_workspaces._kept) - before
            graph.replay()
            torch.cuda.synchronize()
            graph.reset()
            del graph, out
            gc.collect()
            deadline = time.monotonic() + 10
            while token in _workspaces._kept and time.monotonic() < deadline:
                torch.cuda.synchronize()
                _workspaces._collect()
            self.assertNotIn(token, _workspaces._kept, "the driver has not told that the graph is gone")
        self.assertEqual(made, [False, False])


class TorchOpTest(CudaTest):
    def sdpa(self, *arrays, causal=False, **options):
        return scaled_dot_product_attention(*arrays, is_causal=causal, **options)

    def test_the_operator_is_attention(self):
        for dtype in DTYPES:
            for options in ({"causal": True}, {"causal": False}, {"causal": False, "kv_lens": lengths(777, 20)}):
                with self.subTest(dtype=dtype, **options):
                    self.check(tensors(dtype, q_len=3), call=self.sdpa, **options)

    def test_the_operator_keeps_torchs_contracts(self):
        options = {"kv_lens": lengths(777, 20), "sinks": torch.ones(8, device="cuda")}
        for operator in (torch.ops.kvonce.attend.default, torch.ops.kvonce.attend.lse):
            torch.library.opcheck(operator, tensors(), options)

    def test_mixed_devices_are_refused(self):
        q, k, v = tensors()
        with self.assertRaisesRegex(ValueError, "^key: got a tensor on cpu, allowed: one on cuda:0, query's device$"):
            scaled_dot_product_attention(q, k.cpu(), v)
        with self.assertRaisesRegex(ValueError, "^kv_lens: got a tensor on cpu"):
            scaled_dot_product_attention(q, k, v, kv_lens=lengths(777, 20).cpu())

    def test_masks_are_refused(self):
        q, k, v = tensors()
        for mask, name in ((torch.ones(1, 777, dtype=torch.bool), "boolean"), (torch.zeros(1, 777), "additive")):
            with self.assertRaisesRegex(NotImplementedError, f"mask {name} is not served by the cuda backend yet"):
                scaled_dot_product_attention(q, k, v, mask.to(q.device))

    def check_compiled(self, **options):
        torch._dynamo.reset()
        layers = [tensors(kv_len=4096, seed=seed) for seed in range(3)]
        lens = lengths(4096, 9)

        def step(x, lens):
            for q, k, v in layers:
                x = scaled_dot_product_attention(x * 0.5 + q, k, v, kv_lens=lens)
            return x

        compiled = torch.compile(step, fullgraph=True, **options)
        torch._dynamo.utils.counters.clear()
        with torch.no_grad():
            for i in range(6):
                x = tensors(kv_len=1, seed=50 + i)[0]
                lens.copy_(lengths(4096 - i, 100 * i))
                got = compiled(x, lens).clone()
                torch.testing.assert_close(got, step(x, lens), rtol=2e-2, atol=2e-2)
        return torch._dynamo.utils.counters["inductor"]

    def test_compiled_without_a_graph_break(self):
        self.check_compiled()

    def test_compiled_into_cuda_graphs(self):
        counters = self.check_compiled(mode="reduce-overhead")
        self.assertEqual(counters["cudagraph_skips"], 0)

    def test_compiled_into_cuda_graphs_with_torchs_own_checks(self):
        with torch._inductor.config.patch({"triton.slow_path_cudagraph_asserts": True}):
            self.assertEqual(self.check_compiled(mode="reduce-overhead")["cudagraph_skips"], 0)


class OtherArraysTest(CudaTest):
    def check_other(self, namespace, to_torch, dtype):
        arrays = tensors(dtype)
        lens = lengths(777, 20)
        given = [namespace.from_dlpack(array) for array in (*arrays, lens)]
        plan = kvonce.plan(8, 2, 128, 1000, num_seqs=2, q_dtype=dtype, device="cuda")
        for call in (kvonce.attend, plan.attend):
            out, lse = call(*given[:3], kv_lens=given[3], return_lse=True)
            self.assertIs(type(out), type(given[0]))
            self.check_result(to_torch(out), to_torch(lse), arrays, {"kv_lens": lens})

    def test_cupy(self):
        try:
            import cupy
        except ModuleNotFoundError:
            self.skipTest("cupy is not installed")
        self.check_other(cupy, torch.from_dlpack, "float16")

    def test_cupy_on_a_stream(self):
        try:
            import cupy
        except ModuleNotFoundError:
            self.skipTest("cupy is not installed")
        arrays = tensors("float16")
        given = [cupy.from_dlpack(array) for array in arrays]
        stream = cupy.cuda.Stream(non_blocking=True)
        out = cupy.empty_like(given[0])
        cupy.cuda.Device().synchronize()
        self.assertIs(kvonce.attend(*given, out=out, stream=stream.ptr), out)
        stream.synchronize()
        torch.testing.assert_close(torch.from_dlpack(out).double(), attention(*arrays)[0], rtol=1e-2, atol=1e-2)

    def test_jax(self):
        try:
            import jax
        except ModuleNotFoundError:
            self.skipTest("jax is not installed")
        if jax.default_backend() != "gpu":
            self.skipTest(f"jax runs on {jax.default_backend()}")
        self.check_other(jax.numpy, torch.from_dlpack, "bfloat16")


if __name__ == "__main__":
    unittest.main()

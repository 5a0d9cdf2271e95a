"""The arms of cuda_peers.py: kvonce and the attention of other libraries on one decode step on a CUDA device, bf16.

A peer is a class with `versions` and `forms(step, in_chain)`, which yields every way to call it. Forms of the same arm
compete; the fastest of a case stands for the arm. A peer that is not installed raises when it is made.
"""
import dataclasses
import importlib.metadata
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvonce_abi

BF16 = torch.bfloat16
MAX_SETS = 64
MIN_CALLS = 20
WORKSPACE_BYTES = 256 << 20


class Layout(NamedTuple):
    """How K, or V, of a sequence lies in memory."""

    order: str  # HND or NHD: heads (H) outside tokens (N) or inside
    page: int = 0  # tokens per page, pages outermost and in order; 0: no pages

    def __str__(self):
        return f"{self.order} page {self.page}" if self.page else self.order

    def view(self, step, flat):
        tokens = self.page or step.kv_len
        inner = (step.kv_heads, tokens) if self.order == "HND" else (tokens, step.kv_heads)
        pages = (step.kv_len // self.page,) if self.page else ()
        return flat.view(*pages, *inner, step.dim)

    def by_head(self, view):
        """[kv_heads, kv_len, dim]; a copy where pages separate a head's tokens."""
        if self.order == "NHD":
            return (view.flatten(0, 1) if self.page else view).transpose(0, 1)
        return view.transpose(0, 1).flatten(1, 2) if self.page else view

    def newest(self, view):
        """[kv_heads, dim] of the last token, a view."""
        last = view[-1] if self.page else view
        return last[:, -1] if self.order == "HND" else last[-1]


class Step:
    """A decode step: q [q_heads, dim] and sets of K and V, flat, which every layout views in its own way."""

    def __init__(self, pool, q_heads, kv_heads, dim, kv_len):
        self.q_heads, self.kv_heads, self.dim, self.kv_len = q_heads, kv_heads, dim, kv_len
        self.elements = kv_heads * kv_len * dim
        self.kv_bytes = 2 * self.elements * pool.element_size()
        self.num_sets = min(pool.numel() // (2 * self.elements), MAX_SETS)
        if self.num_sets == 0:
            raise ValueError(f"K and V take {self.kv_bytes} bytes, more than the pool")
        self.calls = max(self.num_sets, MIN_CALLS)
        self.checked_set = (self.calls - 1) % self.num_sets  # the one that the last call of a graph reads
        self.pool = pool
        self.q_from, self.k_from, self.v_from = (torch.randn(heads, dim, device=pool.device, dtype=BF16)
                                                 for heads in (q_heads, kv_heads, kv_heads))
        self.q = self.q_from.clone()

    def kv(self, layout):
        """(K, V) of every set."""
        halves = self.pool[:2 * self.elements * self.num_sets].view(self.num_sets, 2, self.elements)
        return [tuple(layout.view(self, half) for half in one) for one in halves]

    def reference(self, layout, k, v):
        """[q_heads, dim] in float32, of views of that layout."""
        q = self.q_from.float().view(self.kv_heads, -1, self.dim)
        scores = q @ layout.by_head(k).float().transpose(1, 2) * self.dim ** -0.5
        return (scores.softmax(-1) @ layout.by_head(v).float()).view(self.q_heads, self.dim)


@dataclasses.dataclass(frozen=True)
class Form:
    arm: str  # with the peer's version
    kernel: str  # which form of it
    layout: Layout
    make: Callable[[], Callable[[int], torch.Tensor]]  # gives attend(set), which enqueues on the current stream


class Kvonce:
    """Through the C ABI. In a chain also with earlier_kv_ready."""

    def __init__(self, path):
        self.kvonce = kvonce_abi.Library(path)
        self.versions = {"kvonce": self.kvonce.version}

    def forms(self, step, in_chain):
        layout = Layout("HND")
        for early in (False, True) if in_chain else (False,):
            decode = kvonce_abi.Decode(self.kvonce, step.q_heads, step.kv_heads, step.dim, step.kv_len, "bf16",
                                       out_dtype="bf16", target="cuda", earlier_kv_ready=early)
            yield Form("kvonce_early" if early else "kvonce", decode.kernel, layout,
                       lambda decode=decode: self.attend(step, layout, decode))

    @staticmethod
    def attend(step, layout, decode):
        out = torch.empty_like(step.q)
        workspace = torch.empty(decode.workspace_bytes + 1, dtype=torch.uint8, device=step.q.device)
        inputs = [decode.inputs(step.q.data_ptr(), k.data_ptr(), v.data_ptr()) for k, v in step.kv(layout)]
        outputs = decode.outputs(out.data_ptr())

        def context():
            return decode.context(torch.cuda.current_stream().cuda_stream)

        def attend(i):
            decode.attend(inputs[i], outputs, workspace.data_ptr(), context())
            return out

        decode.prepare_workspace(workspace.data_ptr(), context())
        return attend


class Torch:
    """scaled_dot_product_attention with enable_gqa."""

    def __init__(self):
        cudnn = torch.backends.cudnn.version() or 0
        self.versions = {"torch": torch.__version__, "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"}

    def forms(self, step, _in_chain):
        layout = Layout("HND")
        for arm, backend in ((f"torch_cudnn {self.versions['cudnn']}", SDPBackend.CUDNN_ATTENTION),
                             (f"torch_flash {torch.__version__.split('+')[0]}", SDPBackend.FLASH_ATTENTION)):
            yield Form(arm, f"sdpa {layout}", layout, lambda backend=backend: self.attend(step, layout, backend))

    @staticmethod
    def attend(step, layout, backend):
        q = step.q.view(1, step.q_heads, 1, step.dim)
        kv = [(k[None], v[None]) for k, v in step.kv(layout)]

        def attend(i):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, *kv[i], enable_gqa=step.q_heads != step.kv_heads)

        return attend


class FlashInfer:
    """Single decode, the paged batch wrapper (both on CUDA cores and on tensor cores) and XQA."""

    def __init__(self):
        import flashinfer
        self.flashinfer = flashinfer
        self.versions = {"flashinfer": flashinfer.__version__}
        # The wrapper keeps nothing in its workspace between calls, XQA does.
        self.workspace, self.xqa_workspace = (torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
                                              for _ in range(2))
        self.semaphores = torch.zeros(2 << 20, dtype=torch.int32, device="cuda").view(torch.uint32)

    def forms(self, step, in_chain):
        version = self.versions["flashinfer"]
        for order in ("HND", "NHD"):
            for cores, tensor_cores in (("cuda_cores", False), ("tensor_cores", True)):
                layout = Layout(order)
                yield Form(f"flashinfer_single {version}", f"{cores} {layout}", layout,
                           lambda layout=layout, tensor_cores=tensor_cores: self.single(step, layout, tensor_cores))
            for kernel, tensor_cores, planned_for_graph in (("cuda_cores", False, True), ("tensor_cores", True, True),
                                                            ("tensor_cores_free_plan", True, False)):
                layout = Layout(order, 16)
                yield Form(f"flashinfer_batch {version}", f"{kernel} {layout}", layout,
                           lambda layout=layout, how=(tensor_cores, planned_for_graph): self.batch(step, layout, *how))
            for page in (16, 128):
                layout = Layout(order, page)
                # With programmatic launch XQA's calls overlap each other: not what an isolated call takes.
                for pdl in (False, True) if in_chain else (False,):
                    yield Form(f"flashinfer_xqa {version}", f"{'pdl' if pdl else 'no_pdl'} {layout}", layout,
                               lambda layout=layout, pdl=pdl: self.xqa(step, layout, pdl))

    def single(self, step, layout, tensor_cores):
        kv = step.kv(layout)
        return lambda i: self.flashinfer.single_decode_with_kv_cache(step.q, *kv[i], kv_layout=layout.order,
                                                                     use_tensor_cores=tensor_cores)

    def batch(self, step, layout, tensor_cores, planned_for_graph):
        num_pages = step.kv_len // layout.page
        first_page, page_ids, last_page_len = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (
            [0, num_pages], range(num_pages), [layout.page]))
        buffers = {"paged_kv_indptr_buffer": first_page.clone(), "paged_kv_indices_buffer": page_ids.clone(),
                   "paged_kv_last_page_len_buffer": last_page_len.clone()} if planned_for_graph else {}
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, layout.order, use_cuda_graph=planned_for_graph, use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto", **buffers)
        wrapper.plan(first_page, page_ids, last_page_len, step.q_heads, step.kv_heads, step.dim, layout.page,
                     q_data_type=BF16, kv_data_type=BF16)
        q, kv = step.q[None], step.kv(layout)
        out = torch.empty_like(q)
        return lambda i: wrapper.run(q, kv[i], out=out)

    def xqa(self, step, layout, pdl):
        from flashinfer.xqa import xqa
        page_ids = torch.arange(step.kv_len // layout.page, dtype=torch.int32, device="cuda")[None]
        kv_lens = torch.tensor([[step.kv_len]], dtype=torch.int32, device="cuda").view(torch.uint32)
        q, kv = step.q[None, None], step.kv(layout)
        out = torch.empty_like(q)

        def attend(i):
            xqa(q, *kv[i], page_ids, kv_lens, out, self.xqa_workspace, self.semaphores, step.kv_heads, layout.page,
                kv_layout=layout.order, enable_pdl=pdl)
            return out

        return attend


class Fa3:
    """FlashAttention-3 (package fa3-fwd): splits, packing and layout as chosen by itself and as given."""

    SPLITS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 128)

    def __init__(self):
        import fa3_fwd_interface
        self.fa3 = fa3_fwd_interface
        self.versions = {"fa3": importlib.metadata.version("fa3-fwd")}

    def forms(self, step, _in_chain):
        arm = f"fa3 {self.versions['fa3']}"
        packs = (None,) if step.q_heads == step.kv_heads else (None, True)
        for layout in (Layout("NHD"), Layout("HND")):
            ways = [(0, pack) for pack in packs] + [(splits, packs[-1]) for splits in self.SPLITS
                                                    if splits * 128 <= step.kv_len]
            for splits, pack in ways:
                yield Form(arm, f"splits={splits or 'auto'} pack_gqa={pack} {layout}", layout,
                           lambda layout=layout, how=(splits, pack): self.attend(step, layout, *how))
        for planned in (False, True):
            layout = Layout("NHD")
            yield Form(arm, f"kvcache{' with metadata' if planned else ''} {layout}", layout,
                       lambda layout=layout, planned=planned: self.attend_cache(step, layout, planned))

    @staticmethod
    def operands(step, layout):
        """q [1, 1, q_heads, dim]; K and V [1, kv_len, kv_heads, dim] whatever the layout."""
        kv = [tuple(layout.by_head(half).transpose(0, 1)[None] for half in one) for one in step.kv(layout)]
        return step.q[None, None], kv

    def attend(self, step, layout, splits, pack):
        q, kv = self.operands(step, layout)
        return lambda i: first(self.fa3.flash_attn_func(q, *kv[i], num_splits=splits, pack_gqa=pack))

    def attend_cache(self, step, layout, planned):
        q, kv = self.operands(step, layout)
        kv_lens = torch.tensor([step.kv_len], dtype=torch.int32, device="cuda")
        metadata = self.fa3.get_scheduler_metadata(1, 1, step.kv_len, step.q_heads, step.kv_heads, step.dim, kv_lens,
                                                   qkv_dtype=BF16, headdim_v=step.dim,
                                                   num_splits=0) if planned else None
        return lambda i: first(self.fa3.flash_attn_with_kvcache(q, *kv[i], cache_seqlens=kv_lens, num_splits=0,
                                                                scheduler_metadata=metadata))


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


PEERS = {"torch": Torch, "flashinfer": FlashInfer, "fa3": Fa3}

#!/usr/bin/env python3
"""The smallest decode loop in torch: one attention layer, 32 query heads on 4 KV heads, compiled as a whole.

Runs on the CPU, or on a CUDA device where torch has one and kvonce was built for it: torch_decode.py cuda
"""
import sys

import torch
from kvonce.torch import scaled_dot_product_attention

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
torch.manual_seed(0)
k_cache, v_cache = (torch.zeros(1, 4, 4096, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
kv_lens = torch.zeros(1, dtype=torch.int32, device=device)  # read where the work runs: no step waits for the host


@torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "eager")
def step(q, k, v):
    k_cache.index_copy_(2, kv_lens.long(), k)
    v_cache.index_copy_(2, kv_lens.long(), v)
    kv_lens.add_(1)
    return scaled_dot_product_attention(q, k_cache, v_cache, kv_lens=kv_lens)


for token in range(300):
    q, k, v = (torch.randn(1, heads, 1, 128, dtype=torch.bfloat16, device=device) for heads in (32, 4, 4))
    with torch.no_grad():
        out = step(q, k, v)

expected = torch.nn.functional.scaled_dot_product_attention(
    q.float(), k_cache[:, :, :300].float(), v_cache[:, :, :300].float(), enable_gqa=True)
error = float((out.float() - expected).norm() / expected.norm())
print(f"{int(kv_lens)} tokens, relative error against torch in float32: {error:.1e}")
sys.exit(error > 1e-2)

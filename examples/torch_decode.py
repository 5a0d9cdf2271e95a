#!/usr/bin/env python3
"""The smallest whole program in torch: a layer with 32 query heads on 4 KV heads decodes from a static cache.

On a CUDA device the step is a CUDA graph; the lengths that it reads are on the device.
"""
import sys

import torch
from kvonce.torch import scaled_dot_product_attention

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
k_cache, v_cache = (torch.randn(2, 4, 4096, 128, device=device).half() for _ in "kv")
q = torch.randn(2, 32, 1, 128, device=device).half()
kv_lens = torch.tensor([1000, 7], dtype=torch.int32, device=device)


def step():
    return scaled_dot_product_attention(q, k_cache, v_cache, kv_lens=kv_lens)


replay = None
for _ in range(3):
    kv_lens += 1  # each step a model would write its newest K and V behind the tokens that are there
    q.normal_()
    if replay is None:
        out = step()  # on CUDA also what the graph's workspace comes from
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graph_out = step()
            replay = graph.replay
    else:
        replay()
        out = graph_out

    hidden = torch.arange(4096, device=device) >= kv_lens[:, None]
    scores = q.double() @ k_cache.double().repeat_interleave(8, 1).transpose(2, 3) * 128 ** -0.5
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(3)
    error = (out - weights @ v_cache.double().repeat_interleave(8, 1)).abs().max().item()
    print(f"{device.type}, kv_lens {kv_lens.tolist()}: largest error {error:.1e}")
    if error > 2e-3:
        sys.exit(1)

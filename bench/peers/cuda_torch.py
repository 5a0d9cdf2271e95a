#!/usr/bin/env python3
"""torch's attention on a CUDA device, for comparison with `kvonce bench --backend cuda` run right before or after it.

usage: bench/peers/cuda_torch.py --out FILE [--cases bench/cases/cuda.txt]

Arms: torch_cudnn and torch_flash (FlashAttention-2), scaled_dot_product_attention with enable_gqa, bf16. Each arm's calls are
one CUDA graph over sets of K and V that cover 3.75 GB (64 sets at most); the figure is the median of 7 replays over the calls.
Exit code 3 without torch or a CUDA device.
"""
import argparse
import json
import pathlib
import re
import sys

POOL_ELEMENTS = 7 << 28
ROUNDS = 7
CASE = re.compile(r"(\d+)q/(\d+)kv d(\d+) kv=(\d+)$")


def time_arm(torch, attend, num_sets):
    calls = max(num_sets, 20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend(0)
        attend(min(1, num_sets - 1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            attend(call % num_sets)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[ROUNDS // 2], min(times)


def run_case(torch, backends, pool, case):
    match = CASE.match(case)
    if not match:
        sys.exit(f"cuda_torch: case '{case}': only 'HQq/HKVkv dD kv=N' is served here")
    q_heads, kv_heads, dim, kv_len = map(int, match.groups())
    elements = 2 * kv_heads * kv_len * dim
    num_sets = max(1, min(POOL_ELEMENTS // elements, 64))
    q = torch.randn(1, q_heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    sets = [pool[i * elements:(i + 1) * elements].view(2, 1, kv_heads, kv_len, dim) for i in range(num_sets)]
    for arm, backend in backends.items():
        with torch.nn.attention.sdpa_kernel(backend):
            def attend(i):
                return torch.nn.functional.scaled_dot_product_attention(q, sets[i][0], sets[i][1],
                                                                        enable_gqa=q_heads != kv_heads)
            median, least = time_arm(torch, attend, num_sets)
        yield {"case": case, "backend": "cuda", "num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim_qk": dim,
               "head_dim_v": dim, "kv_len": kv_len, "kv_dtype": "bf16", "arm": arm, "us_median": median, "us_min": least,
               "kv_bytes": 2 * elements, "gbps": 2 * elements / median * 1e-3}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[1] / "cases" / "cuda.txt")
    options = parser.parse_args()
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        print(f"cuda_torch: {error}", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("cuda_torch: torch sees no CUDA device", file=sys.stderr)
        return 3
    kinds = torch.nn.attention.SDPBackend
    backends = {"torch_cudnn": kinds.CUDNN_ATTENTION, "torch_flash": kinds.FLASH_ATTENTION}
    torch.manual_seed(0)
    pool = torch.randn(POOL_ELEMENTS, device="cuda", dtype=torch.bfloat16)
    rows = []
    for line in options.cases.read_text(encoding="utf-8").splitlines():
        case = line.split("#")[0].strip()
        if case:
            rows.extend(run_case(torch, backends, pool, case))
    report = {"schema": "kvonce.peers/1", "device": {"name": torch.cuda.get_device_name(0)},
              "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

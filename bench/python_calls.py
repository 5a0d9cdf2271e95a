#!/usr/bin/env python3
"""What a call from Python costs beside the kernel: microseconds of the processor's time for one token over 16 keys.

usage: python_calls.py   in an environment with kvonce and NumPy; with torch its rows too
"""
import statistics
import time

import kvonce
import numpy

NUM_CALLS, NUM_ROUNDS = 400, 60


def show(name, call):
    times = []
    for _ in range(NUM_ROUNDS):
        begin = time.process_time()
        for _ in range(NUM_CALLS):
            call()
        times.append((time.process_time() - begin) / NUM_CALLS * 1e6)
    print(f"{name:56} {min(times):6.2f} least {statistics.median(times):6.2f} median")


def show_calls(kind, q, k, v, out):
    plan = kvonce.plan(8, 2, 64, 16, threads=1)
    show(f"{kind}: Plan.attend, out given", lambda: plan.attend(q, k, v, out=out))
    show(f"{kind}: Plan.attend", lambda: plan.attend(q, k, v))
    show(f"{kind}: kvonce.attend, out given", lambda: kvonce.attend(q, k, v, out=out, threads=1))
    show(f"{kind}: kvonce.attend", lambda: kvonce.attend(q, k, v, threads=1))


def main():
    generator = numpy.random.default_rng(1)
    arrays = [generator.standard_normal((1, heads, tokens, 64), dtype="float32")
              for heads, tokens in ((8, 1), (2, 16), (2, 16), (8, 1))]
    show_calls("NumPy", *arrays)
    try:
        import torch
        from kvonce.torch import scaled_dot_product_attention
    except ModuleNotFoundError:
        print("torch is not installed")
        return
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(array) for array in arrays]
    kind = f"torch {torch.__version__}"
    show_calls(kind, *tensors)
    q, k, v, _ = tensors
    show(f"{kind}: torch.ops.kvonce.attend", lambda: torch.ops.kvonce.attend.default(q, k, v))
    show(f"{kind}: kvonce's scaled_dot_product_attention", lambda: scaled_dot_product_attention(q, k, v))
    torchs = torch.nn.functional.scaled_dot_product_attention
    show(f"{kind}: torch's own", lambda: torchs(q, k, v, enable_gqa=True))


if __name__ == "__main__":
    main()

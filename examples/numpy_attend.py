#!/usr/bin/env python3
"""The smallest whole program in Python: a layer with 32 query heads on 4 KV heads decodes from a growing cache."""
import sys

import kvonce
import numpy

rng = numpy.random.default_rng(0)
k_cache, v_cache = (rng.standard_normal((1, 4, 4096, 128), dtype="float32").astype("float16") for _ in "kv")
plan = kvonce.plan(32, 4, 128, max_kv_len=4096, q_dtype="float16", out_dtype="float32")
print(plan.explain())

for kv_len in (1000, 1001, 1002):  # each step a model would write its newest K and V to token kv_len - 1
    q = rng.standard_normal((1, 32, 1, 128), dtype="float32").astype("float16")
    out = plan.attend(q, k_cache, v_cache, kv_lens=[kv_len])  # the same: kvonce.attend(q, k_cache[:, :, :kv_len], ...)

    k, v = (cache[0, :, :kv_len].astype("float64").repeat(8, axis=0) for cache in (k_cache, v_cache))
    scores = numpy.einsum("hd,htd->ht", q[0, :, 0].astype("float64"), k) * 128 ** -0.5
    weights = numpy.exp(scores - scores.max(axis=1, keepdims=True))
    expected = numpy.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    error = numpy.abs(out[0, :, 0] - expected).max()
    print(f"kv_len {kv_len}: largest error {error:.1e}")
    if error > 1e-5:
        sys.exit(1)

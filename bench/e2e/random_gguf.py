#!/usr/bin/env python3
"""Writes a GGUF model of a known shape with random Q4_0 weights and no vocabulary: for timing, where no weights are at hand.

usage: random_gguf.py qwen2.5-0.5b|llama-3.2-1b FILE        (needs the PyPI package gguf)
"""
import argparse
import dataclasses

import gguf
import numpy

BLOCK_VALUES, BLOCK_BYTES = 32, 18


@dataclasses.dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    rope_base: float
    qkv_bias: bool


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 1e6, True),
    "llama-3.2-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 5e5, False),
}


class Writer:
    def __init__(self, path, shape):
        self.rng = numpy.random.default_rng(0)
        self.file = gguf.GGUFWriter(path, shape.arch)

    def matrix(self, name, rows, columns):
        """Q4_0 blocks whose values have a standard deviation of columns ** -0.5; nibbles 0 to 15 stand for -8 to 7."""
        blocks = numpy.empty((rows, columns // BLOCK_VALUES, BLOCK_BYTES), dtype="uint8")
        scale = numpy.float16(columns ** -0.5 / 4.6)  # 4.6: of uniform integers from -8 to 7
        blocks[..., :2] = numpy.frombuffer(scale.tobytes(), dtype="uint8")
        blocks[..., 2:] = self.rng.integers(0, 256, blocks[..., 2:].shape, dtype="uint8")
        self.file.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def vector(self, name, value, size):
        self.file.add_tensor(name, numpy.full(size, value, dtype="float32"))


def write(shape, path):
    out = Writer(path, shape)
    file = out.file
    file.add_block_count(shape.layers)
    file.add_context_length(32768)
    file.add_embedding_length(shape.dim)
    file.add_feed_forward_length(shape.ffn)
    file.add_head_count(shape.q_heads)
    file.add_head_count_kv(shape.kv_heads)
    file.add_rope_dimension_count(shape.head_dim)
    file.add_rope_freq_base(shape.rope_base)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(shape.vocabulary)
    file.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    file.add_tokenizer_model("no_vocab")
    out.matrix("token_embd.weight", shape.vocabulary, shape.dim)  # the output matrix too
    out.vector("output_norm.weight", 1.0, shape.dim)
    q_dim, kv_dim = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        out.vector(f"{block}.attn_norm.weight", 1.0, shape.dim)
        out.vector(f"{block}.ffn_norm.weight", 1.0, shape.dim)
        for name, rows, columns in (("attn_q", q_dim, shape.dim), ("attn_k", kv_dim, shape.dim),
                                    ("attn_v", kv_dim, shape.dim), ("attn_output", shape.dim, q_dim),
                                    ("ffn_gate", shape.ffn, shape.dim), ("ffn_up", shape.ffn, shape.dim),
                                    ("ffn_down", shape.dim, shape.ffn)):
            out.matrix(f"{block}.{name}.weight", rows, columns)
        if shape.qkv_bias:
            for name, rows in (("attn_q", q_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)):
                out.vector(f"{block}.{name}.bias", 0.0, rows)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path")
    options = parser.parse_args()
    write(SHAPES[options.shape], options.path)


if __name__ == "__main__":
    main()

"""A llama-like model in float64 with exact softmax: what every way to compute it is measured against.

Of a GGUF file with float32 weights. K and V are rounded to float16, as a float16 cache has them; nothing else is rounded.
"""
import gguf
import numpy


class Llama:
    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ValueError(f"general.architecture: got {architecture}, allowed: llama")

    def value(self, name):
        return self.reader.get_field(name).contents()

    def weight(self, name):
        tensor = self.tensors[name + ".weight"]
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"{name}: got {tensor.tensor_type.name}, allowed: F32")
        return tensor.data.astype("float64")

    def norm(self, x, name):
        return x / numpy.sqrt(numpy.square(x).mean(-1, keepdims=True) + self.eps) * self.weight(name)

    def rotated(self, x, num_heads):
        """Rows of heads, each pair of neighbouring values turned by its angle."""
        pairs = x.reshape(len(x), num_heads, -1, 2)
        dims = pairs.shape[2]
        angles = numpy.arange(len(x))[:, None, None] * self.rope_base ** (-numpy.arange(dims) / dims)
        cos, sin = numpy.cos(angles), numpy.sin(angles)
        turned = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos
        return numpy.stack(turned, axis=-1).reshape(len(x), num_heads, -1)

    def attention(self, x, block):
        rows, q_heads, kv_heads = len(x), self.value("llama.attention.head_count"), self.value("llama.attention.head_count_kv")
        q = self.rotated(x @ self.weight(block + "attn_q").T, q_heads)
        k = self.rotated(x @ self.weight(block + "attn_k").T, kv_heads)
        v = (x @ self.weight(block + "attn_v").T).reshape(rows, kv_heads, -1)
        k, v = (cache.astype("float16").astype("float64") for cache in (k, v))
        out = numpy.empty_like(q)
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            scores = q[:, head] @ k[:, kv_head].T * q.shape[-1] ** -0.5 + numpy.triu(numpy.full((rows, rows), -numpy.inf), 1)
            weights = numpy.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv_head]
        return out.reshape(rows, -1) @ self.weight(block + "attn_output").T

    def logits(self, tokens):
        """[tokens, vocabulary], a causal pass over all of them."""
        self.eps = self.value("llama.attention.layer_norm_rms_epsilon")
        self.rope_base = self.value("llama.rope.freq_base")
        embeddings = self.weight("token_embd")
        x = embeddings[tokens]
        for layer in range(self.value("llama.block_count")):
            block = f"blk.{layer}."
            x = x + self.attention(self.norm(x, block + "attn_norm"), block)
            y = self.norm(x, block + "ffn_norm")
            gate = y @ self.weight(block + "ffn_gate").T
            y = gate / (1 + numpy.exp(-gate)) * (y @ self.weight(block + "ffn_up").T)
            x = x + y @ self.weight(block + "ffn_down").T
        output = embeddings if "output.weight" not in self.tensors else self.weight("output")
        return self.norm(x, "output_norm") @ output.T

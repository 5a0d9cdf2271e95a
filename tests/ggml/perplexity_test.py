"""SmolLM2 with its weights as float32, one token per call, against the same model in float64 with exact softmax.

Quantised weights round what they are multiplied with to 8 bits, which makes any two ways to sum differ by chance, 30 times as much
as attention does. With float32 weights what is left is attention, and float16 cells that a last bit rounds the other way.
"""
import ctypes
import math
import os
import pathlib
import sys
import tempfile
import unittest

import llama_cpp.llama_cpp as c
import numpy
from decode_test import text
from llama_float64 import Llama

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "e2e"))
from llama_model import Context, Model, smollm2  # noqa: E402

from kvonce import ggml as kvonce_ggml  # noqa: E402

COUNT = 1000 if os.environ.get("KVONCE_NIGHTLY") else 128


def log_softmax(logits):
    logits = logits.astype("float64")
    logits -= logits.max(-1, keepdims=True)
    return logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def QUIET(*_):
    """Conversion reports every tensor."""


def write_float32(path):
    """llama.cpp's own conversion of the Q4_1 file."""
    c.llama_log_set(QUIET, None)
    params = c.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = 0, True, 2  # LLAMA_FTYPE_ALL_F32
    if c.llama_model_quantize(smollm2().encode(), str(path).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError("llama_model_quantize failed")


class PerplexityTest(unittest.TestCase):
    def test_nearer_to_float64_than_llama_cpp(self):
        """Kullback-Leibler divergence from the reference at most a tenth of flash_attn on's and a third of flash_attn off's, a
        token's loss at most a quarter and two thirds as far from the reference's, and the perplexity no farther than the farther of
        the two. What kvonce has is the cells' share, which every way has."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "float32.gguf"
            write_float32(path)
            model = Model(path)
            page = model.tokenize(text())[:COUNT + 1]
            arms = {name: Context(model, n_ctx=COUNT + 1, flash_attn=name == "on") for name in ("on", "off")}
            kvonce_ggml.load()
            arms["kvonce"] = Context(model, n_ctx=COUNT + 1, flash_attn=True)
            expected = log_softmax(Llama(path).logits(page[:-1]))
            probabilities = numpy.exp(expected)
            rows, following = numpy.arange(COUNT), numpy.array(page[1:])
            divergence, loss_error, mean_error = {}, {}, {}
            print(f"\nperplexity of {COUNT} tokens: float64 {math.exp(-expected[rows, following].mean()):.5f}")
            for name, context in arms.items():
                got = log_softmax(numpy.concatenate([context.decode([page[i]], [i]) for i in range(COUNT)]))
                divergence[name] = (probabilities * (expected - got)).sum(-1).mean()
                difference = (expected - got)[rows, following]
                loss_error[name], mean_error[name] = abs(difference).mean(), abs(difference.mean())
                print(f"{name}: {math.exp(-got[rows, following].mean()):.5f}, divergence {divergence[name]:.2e}, a token's loss "
                      f"{loss_error[name]:.2e} away, their mean {mean_error[name]:.2e}")
            self.assertEqual(kvonce_ggml.statistics()["ops_served"], model.num_layers * COUNT)
            for name, of_divergence, of_loss in (("on", 1 / 10, 1 / 4), ("off", 1 / 3, 2 / 3)):
                self.assertLess(divergence["kvonce"], of_divergence * divergence[name])
                self.assertLess(loss_error["kvonce"], of_loss * loss_error[name])
            self.assertLess(mean_error["kvonce"], max(mean_error["on"], mean_error["off"]))


if __name__ == "__main__":
    unittest.main()

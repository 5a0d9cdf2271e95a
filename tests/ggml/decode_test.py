"""SmolLM2 decodes with the device as without it, and every decode step of every layer runs there.

llama.cpp's own contexts are made before the device is loaded: only later ones see it. The caches are filled once, by
llama.cpp, and copied. The rule for equal text: the device's greedy tokens equal those of llama.cpp with flash_attn; at the
first difference of a sequence, if there is one, llama.cpp's two best logits are closer to each other than the logits of its two own
settings, flash_attn on and off, are anywhere in the vocabulary, all on the same tokens.
"""
import math
import os
import pathlib
import sys
import unittest

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "e2e"))
from llama_model import Context, Model, smollm2  # noqa: E402

from kvonce import ggml as kvonce_ggml  # noqa: E402

NIGHTLY = bool(os.environ.get("KVONCE_NIGHTLY"))
N_CTX = 6400
NEW_TOKENS = 128
# llama.cpp has no quantised V without flash_attn: its second setting then keeps V as f16.
OFF_V_TYPE = {"f16": "f16", "q8_0": "f16", "q4_0": "f16"}


def text():
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def greedy(context, first, lengths, count, forced=None):
    """`count` steps of every sequence from the logits of its prompt: its tokens, and the logits that chose each of them."""
    seqs = range(len(lengths))
    tokens, seen = [[] for _ in seqs], [[logits] for logits in first]
    for step in range(count):
        for seq in seqs:
            tokens[seq].append(int(seen[seq][-1].argmax()) if forced is None else forced[seq][step])
        logits = context.decode([tokens[seq][-1] for seq in seqs], [length + step for length in lengths], seqs,
                                [True] * len(lengths))
        for seq in seqs:
            seen[seq].append(logits[seq])
    return tokens, seen


class DecodeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = model = Model(smollm2())
        cls.page = model.tokenize(text())
        cls.on = {kind: Context(model, n_ctx=N_CTX, flash_attn=True, k_type=kind) for kind in OFF_V_TYPE}
        cls.off = {kind: Context(model, n_ctx=N_CTX, flash_attn=False, k_type=kind, v_type=v_type)
                   for kind, v_type in OFF_V_TYPE.items()}
        parallel = dict(n_ctx=2048, flash_attn=True, num_seqs=2)
        cls.on_parallel = {unified: Context(model, unified=unified, **parallel) for unified in (True, False)}
        cls.off_parallel = {unified: Context(model, unified=unified, **{**parallel, "flash_attn": False})
                            for unified in (True, False)}
        kvonce_ggml.load()
        cls.ours = {kind: Context(model, n_ctx=N_CTX, flash_attn=True, k_type=kind) for kind in OFF_V_TYPE}
        cls.ours_off = Context(model, n_ctx=256, flash_attn=False)
        cls.ours_parallel = {unified: Context(model, unified=unified, **parallel) for unified in (True, False)}

    def served(self, before):
        after = kvonce_ggml.statistics()
        self.assertEqual(after["ops_failed"], 0)
        return after["ops_served"] - before["ops_served"], after["tokens_served"] - before["tokens_served"]

    def check_greedy(self, on, off, ours, lengths, count, name):
        """Greedy text of `count` tokens after prompts of the given lengths, a sequence each."""
        prompts = [self.page[300 * seq:300 * seq + length] for seq, length in enumerate(lengths)]
        self.assertEqual([len(prompt) for prompt in prompts], lengths)
        on.clear()
        first = [on.prefill(prompt, seq) for seq, prompt in enumerate(prompts)]
        ours.clear()
        ours.copy_state(on)
        tokens, on_logits = greedy(on, first, lengths, count)
        before = kvonce_ggml.statistics()
        ours_tokens, _ = greedy(ours, first, lengths, count)
        layers = self.model.num_layers
        self.assertEqual(self.served(before), (layers * count, layers * count * len(lengths)))
        if ours_tokens == tokens:
            print(f"{name}: the same {count} tokens")
            return
        differences = [next((i for i in range(count) if ours_tokens[seq][i] != tokens[seq][i]), None)
                       for seq in range(len(lengths))]
        off.clear()
        off_first = [off.prefill(prompt, seq) for seq, prompt in enumerate(prompts)]
        _, off_logits = greedy(off, off_first, lengths, max(i for i in differences if i is not None), forced=tokens)
        for seq, where in enumerate(differences):
            if where is None:
                continue
            best = numpy.sort(on_logits[seq][where])[::-1]
            gap, between = best[0] - best[1], numpy.abs(on_logits[seq][where] - off_logits[seq][where]).max()
            print(f"{name}, sequence {seq}: first difference at {where}: two best {gap:.4f} apart, settings {between:.4f}")
            self.assertLess(gap, between)

    def check_contexts(self, kind, lengths, count=NEW_TOKENS):
        for length in lengths:
            with self.subTest(kind=kind, length=length):
                self.check_greedy(self.on[kind], self.off[kind], self.ours[kind], [length], count, f"{kind} {length}")

    def test_greedy_f16(self):
        self.check_contexts("f16", (64, 1500))

    def test_greedy_q8_0(self):
        self.check_contexts("q8_0", (64, 1500))

    def test_greedy_q4_0(self):
        self.check_contexts("q4_0", (64, 1500))

    def test_greedy_long_context(self):
        for kind in OFF_V_TYPE if NIGHTLY else ("f16",):
            self.check_contexts(kind, (6000,), NEW_TOKENS if NIGHTLY else 32)

    def test_prompt_is_left_to_ggml(self):
        """More query tokens than kMaxQLen are ggml's; the rest of a prompt and what follows is served."""
        on, off, ours = self.on["f16"], self.off["f16"], self.ours["f16"]
        for context in (on, off, ours):
            context.clear()
        before = kvonce_ggml.statistics()
        difference = numpy.abs(ours.prefill(self.page[:100]) - on.prefill(self.page[:100])).max()
        self.assertEqual(self.served(before), (0, 0))
        self.assertEqual(difference, 0)
        off.prefill(self.page[:100])
        rest = self.page[100:116], range(100, 116), [0] * 16, [True] * 16
        ours_logits, on_logits, off_logits = (context.decode(*rest) for context in (ours, on, off))
        self.assertEqual(self.served(before), (self.model.num_layers, 16 * self.model.num_layers))
        self.assertLess(numpy.abs(ours_logits - on_logits).mean(), 2 * numpy.abs(off_logits - on_logits).mean())

    def test_flash_attn_off_is_left_to_ggml(self):
        before = kvonce_ggml.statistics()
        self.ours_off.prefill(self.page[:20])
        self.ours_off.decode([self.page[20]], [20])
        self.assertEqual(self.served(before), (0, 0))

    def test_parallel_sequences(self):
        for unified in (True, False):
            with self.subTest(unified=unified):
                self.check_greedy(self.on_parallel[unified], self.off_parallel[unified], self.ours_parallel[unified],
                                  [200, 37], 64, "one unified cache" if unified else "a stream each")

    def test_perplexity(self):
        """One token per call, so that decode is what runs. Rounding in the quantised weights' activations makes single tokens
        differ by chance between any two ways to sum, so the mean loss is compared: it is no farther from the nearer of
        llama.cpp's two settings than they are from each other, or than two standard errors of their difference."""
        count = 2000 if NIGHTLY else 300
        losses = []
        for context in (self.on["f16"], self.off["f16"], self.ours["f16"]):
            context.clear()
            losses.append(numpy.empty(count))
            for i in range(count):
                logits = context.decode([self.page[i]], [i])[-1].astype("float64")
                most = logits.max()
                losses[-1][i] = most + math.log(numpy.exp(logits - most).sum()) - logits[self.page[i + 1]]
        on, off, ours = losses
        print("perplexity: flash_attn on, off, kvonce:", *(f"{math.exp(loss.mean()):.4f}" for loss in losses))
        print("mean difference of a token's loss: on to off, kvonce to on, kvonce to off:",
              *(f"{numpy.abs(a - b).mean():.4f}" for a, b in ((on, off), (ours, on), (ours, off))))
        allowed = max(abs((on - off).mean()), 2 * (on - off).std() / math.sqrt(count))
        self.assertLessEqual(min(abs((ours - on).mean()), abs((ours - off).mean())), allowed)


if __name__ == "__main__":
    unittest.main()

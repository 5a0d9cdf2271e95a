"""What programs do with contexts: several at once, many sequences, windows, copied, shifted, saved and restored caches.

Small models with float32 weights, so that only attention differs. The rule: logits are no farther from those of llama.cpp's
flash_attn off than those of its own flash_attn on, as RMS over all logits of a scenario. A cell too many or too few is 10 times
that (test_the_rule_sees_one_cell).
"""
import ctypes
import pathlib
import sys
import tempfile
import threading
import unittest

import llama_cpp.llama_cpp as c
import numpy
import small_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "e2e"))
from llama_model import Context, Model  # noqa: E402

from kvonce import ggml as kvonce_ggml  # noqa: E402

TOKENS = [int(token) for token in numpy.random.default_rng(2).integers(0, small_models.VOCABULARY, 700)]
# Of the contexts that the scenarios share: one sequence; 16 in one cache or a stream each, in pieces of at most 16 tokens.
KINDS = {
    "one": dict(n_ctx=512),
    "window": dict(n_ctx=512, swa_full=False),
    "unified": dict(n_ctx=1024, num_seqs=16, n_ubatch=16),
    "streams": dict(n_ctx=16 * 256, num_seqs=16, n_ubatch=16, unified=False),
}


def memory(context):
    return c.llama_get_memory(context.handle)


def rms(values):
    return float(numpy.sqrt(numpy.mean(numpy.square(values, dtype="float64"))))


def decode_from(context, position, count, seq=0):
    """`count` tokens of TOKENS, one per call; their logits."""
    return numpy.concatenate([context.decode([TOKENS[i]], [i], [seq]) for i in range(position, position + count)])


class ContextsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.models = {}
        for arch in small_models.HEADS:
            path = pathlib.Path(cls.folder.name) / f"{arch}.gguf"
            small_models.write(arch, path)
            cls.models[arch] = Model(path)
        cls.theirs = {(arch, kind, flash_attn): Context(model, flash_attn=flash_attn, **options)
                      for arch, model in cls.models.items() for kind, options in KINDS.items() for flash_attn in (False, True)}
        kvonce_ggml.load()
        cls.ours = {(arch, kind): Context(model, flash_attn=True, **options)
                    for arch, model in cls.models.items() for kind, options in KINDS.items()}

    def check(self, kind, scenario, archs=tuple(small_models.HEADS), steps=None):
        """scenario(context): logits. steps: attention ops per layer and their query tokens."""
        for arch in archs:
            with self.subTest(arch=arch, kind=kind):
                ours = self.ours[arch, kind]
                off, on = (self.theirs[arch, kind, flash_attn] for flash_attn in (False, True))
                for context in (ours, off, on):
                    context.clear()
                before = kvonce_ggml.statistics()
                got = scenario(ours)
                after = kvonce_ggml.statistics()
                self.assertEqual(after["ops_failed"], 0)
                if steps:
                    layers = small_models.LAYERS
                    self.assertEqual((after["ops_served"] - before["ops_served"],
                                      after["tokens_served"] - before["tokens_served"]), (layers * steps[0], layers * steps[1]))
                off_logits, on_logits = scenario(off), scenario(on)
                ours_off, on_off = rms(got - off_logits), rms(on_logits - off_logits)
                print(f"{arch} {kind} {self._testMethodName}: {ours_off / rms(off_logits):.2e} to off, flash_attn on "
                      f"{on_off / rms(off_logits):.2e}")
                self.assertLess(ours_off, on_off)

    def test_windows(self):
        """Past the window's length, one token per call and 3; a window's cache that forgets cells, and one that keeps them."""
        def scenario(context):
            context.prefill(TOKENS[:150])
            logits = [decode_from(context, 150, 30)]
            for begin in range(180, 210, 3):
                logits.append(context.decode(TOKENS[begin:begin + 3], range(begin, begin + 3), wanted=[True] * 3))
            return numpy.concatenate(logits)

        self.check("one", scenario, steps=(40, 60))
        self.check("window", scenario, steps=(40, 60))

    def test_the_rule_sees_one_cell(self):
        """What the other tests compare changes by far more than they allow when one of 45 cells is not seen."""
        for arch in small_models.HEADS:
            off, on = (self.theirs[arch, "one", flash_attn] for flash_attn in (False, True))
            logits = []
            for context, forget in ((off, False), (on, False), (off, True)):
                context.clear()
                context.prefill(TOKENS[:45])
                if forget:
                    self.assertTrue(c.llama_memory_seq_rm(memory(context), 0, 10, 11))
                logits.append(decode_from(context, 45, 3))
            with self.subTest(arch=arch):
                self.assertGreater(rms(logits[2] - logits[0]), 10 * rms(logits[1] - logits[0]))

    def test_sixteen_sequences(self):
        """A token of each per call, prompts of different lengths, which are served too: no piece has more than 16 tokens."""
        lengths = [7 * (seq % 5) + seq + 1 for seq in range(16)]
        calls = sum(-(-length // 16) for length in lengths)

        def scenario(context):
            logits = [context.prefill(TOKENS[seq:seq + length], seq)[None] for seq, length in enumerate(lengths)]
            for step in range(10):
                logits.append(context.decode([TOKENS[200 + 16 * step + seq] for seq in range(16)],
                                             [length + step for length in lengths], range(16), [True] * 16))
            return numpy.concatenate(logits)

        for kind in ("unified", "streams"):
            self.check(kind, scenario, steps=(calls + 10, sum(lengths) + 160))

    def test_copied_sequences(self):
        """A prompt computed once and copied; one copy is removed while the others go on."""
        def scenario(context):
            context.prefill(TOKENS[:60])
            for seq in (1, 2, 3):
                c.llama_memory_seq_cp(memory(context), 0, seq, -1, -1)
            logits = []
            seqs = [0, 1, 2, 3]
            for step in range(12):
                if step == 6:
                    self.assertTrue(c.llama_memory_seq_rm(memory(context), 2, -1, -1))
                    seqs.remove(2)
                logits.append(context.decode([TOKENS[100 + 4 * step + seq] for seq in seqs], [60 + step] * len(seqs), seqs,
                                             [True] * len(seqs)))
            return numpy.concatenate(logits)

        for kind in ("unified", "streams"):
            self.check(kind, scenario)

    def test_shifted_cache(self):
        """What llama.cpp does when a context is full: old cells are forgotten and the others moved forward."""
        def scenario(context):
            context.prefill(TOKENS[:120])
            logits = [decode_from(context, 120, 5)]
            self.assertTrue(c.llama_memory_can_shift(memory(context)))
            self.assertTrue(c.llama_memory_seq_rm(memory(context), 0, 4, 64))
            c.llama_memory_seq_add(memory(context), 0, 64, -1, -60)
            logits.append(decode_from(context, 65, 20))
            return numpy.concatenate(logits)

        self.check("one", scenario, steps=(25, 25))

    def test_saved_and_restored(self):
        """A sequence's state is put back into another sequence, and what was decoded before is decoded again the same. With windows
        llama.cpp does not save the cells that they have left behind: sums are split at other cells, and what that changes in a
        last bit grows where the next cells are rounded to f16."""
        for arch in small_models.HEADS:
            with self.subTest(arch=arch):
                context = self.ours[arch, "streams"]
                context.clear()
                context.prefill(TOKENS[:90], 3)
                size = c.llama_state_seq_get_size(context.handle, 3)
                data = (ctypes.c_uint8 * size)()
                self.assertEqual(c.llama_state_seq_get_data(context.handle, data, size, 3), size)
                expected = decode_from(context, 90, 10, 3)
                self.assertEqual(c.llama_state_seq_set_data(context.handle, data, size, 5), size)
                got = decode_from(context, 90, 10, 5)
                if arch == "llama":
                    self.assertTrue((got == expected).all())
                self.assertLess(rms(got[0] - expected[0]), 2e-5 * rms(expected))
                self.assertLess(rms(got - expected), 1e-3 * rms(expected))

    def test_contexts_at_once(self):
        """Two contexts with different numbers of threads decode at the same time as they do alone, and others come and go."""
        model = self.models["llama"]
        contexts = [Context(model, n_ctx=512, flash_attn=True, threads=threads) for threads in (1, 3)]

        def run(context, out):
            context.clear()
            context.prefill(TOKENS[:200])
            out.append(decode_from(context, 200, 200))

        alone, at_once = [[], []], [[], []]
        for context, out in zip(contexts, alone):
            run(context, out)
        self.assertTrue((alone[0][0] == alone[1][0]).all())
        workers = [threading.Thread(target=run, args=arguments) for arguments in zip(contexts, at_once)]
        for worker in workers:
            worker.start()
        others = 0
        while any(worker.is_alive() for worker in workers) or others < 3:
            other = Context(model, n_ctx=256, flash_attn=True, threads=1 + others % 4)
            other.prefill(TOKENS[:20])
            decode_from(other, 20, 3)
            other.close()
            others += 1
        for worker in workers:
            worker.join()
        for before, after in zip(alone, at_once):
            self.assertTrue((before[0] == after[0]).all())
        for context in contexts:
            context.close()

    def test_the_number_of_threads_changes(self):
        context = self.ours["llama", "one"]
        context.clear()
        context.prefill(TOKENS[:100])
        expected = decode_from(context, 100, 12)
        context.truncate(100)
        got = []
        for step, threads in enumerate((1, 2, 3, 1, 4, 2)):
            c.llama_set_n_threads(context.handle, threads, 2)
            got.append(decode_from(context, 100 + 2 * step, 2))
        c.llama_set_n_threads(context.handle, 2, 2)
        self.assertTrue((numpy.concatenate(got) == expected).all())

    def test_flash_attn_auto(self):
        """llama.cpp turns it off, because another device than the layer's would compute it; with a quantised V it must be on."""
        model = self.models["llama"]
        context = Context(model, n_ctx=256, flash_attn="auto")
        off = self.theirs["llama", "one", False]
        off.clear()
        before = kvonce_ggml.statistics()
        for each in (context, off):
            each.prefill(TOKENS[:20])
        self.assertTrue((decode_from(context, 20, 3) == decode_from(off, 20, 3)).all())
        self.assertEqual(kvonce_ggml.statistics()["ops_served"], before["ops_served"])
        context.close()
        context = Context(model, n_ctx=256, flash_attn="auto", k_type="q8_0")
        decode_from(context, 0, 3)
        self.assertEqual(kvonce_ggml.statistics()["ops_served"], before["ops_served"] + 3 * small_models.LAYERS)
        context.close()


if __name__ == "__main__":
    unittest.main()

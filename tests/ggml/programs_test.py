"""llama.cpp's own programs with the library that GGML_BACKEND_PATH names, as docs/integrations.md says to start them.

KVONCE_LLAMA_PROGRAMS is a list of folders, separated by colons. The first has llama-completion, llama-bench, llama-server and
the libraries they load, the second ggml's libraries without OpenMP, the third such programs again with a ggml whose CPU backend
is loaded at run time. `./dev ggml test` builds them at night. SmolLM2's weights are float32 here: texts are then the same but
where two logits are all but level (perplexity_test.py).
"""
import concurrent.futures
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.request

from kvonce import ggml as kvonce_ggml
from perplexity_test import write_float32

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS, NO_OPENMP, RUN_TIME = (pathlib.Path(folder) for folder in os.environ["KVONCE_LLAMA_PROGRAMS"].split(":"))
# Where the program is and where ggml's libraries are; whose threads kvonce then uses.
TEAM, OWN = "on the OpenMP threads of ggml's CPU backend", "on threads of its own"
BUILDS = {"OpenMP": (PROGRAMS, PROGRAMS, TEAM), "no OpenMP": (PROGRAMS, NO_OPENMP, OWN), "at run time": (RUN_TIME, RUN_TIME, TEAM)}
LAYERS, NEW_TOKENS = 30, 48
ON = {"GGML_BACKEND_PATH": kvonce_ggml.library(), "KVONCE_GGML_STATS": "1"}


def environment(libraries, more):
    return {**os.environ, "LD_LIBRARY_PATH": str(libraries), **more}


def served(text):
    """Attention ops and query tokens of the statistics at the end of a process, or None without them."""
    found = re.search(r"served (\d+) attention ops with (\d+) query tokens, failed 0,", text)
    return found and (int(found[1]), int(found[2]))


class ProgramsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.model = pathlib.Path(folder.name) / "float32.gguf"
        write_float32(cls.model)

    def completion(self, build, *options, **more):
        """What llama-completion writes after a page of prompt, and its stderr."""
        prompt = (ROOT / "LICENSE").read_text(encoding="utf-8")[:2000]
        folder, libraries, _ = BUILDS[build]
        done = subprocess.run([folder / "llama-completion", "-m", self.model, "-p", prompt, "-n", str(NEW_TOKENS), "--temp", "0",
                               "-no-cnv", "--no-display-prompt", "-c", "2048", *options], capture_output=True, text=True,
                              timeout=300, stdin=subprocess.DEVNULL, env=environment(libraries, more), check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, done.stderr

    def test_completion(self):
        """The text of one of llama.cpp's two settings, and every step of every layer is served: of NEW_TOKENS the prompt makes the
        first."""
        for build, (_, _, threads_used) in BUILDS.items():
            expected = [self.completion(build, "-fa", flash_attn, "-t", "2")[0] for flash_attn in ("on", "off")]
            for threads in ("1", "2", "3") if threads_used == TEAM else ("1", "2"):  # ggml's own threads spin
                with self.subTest(build=build, threads=threads):
                    got, log = self.completion(build, "-fa", "on", "-ot", "none=CPU", "-t", threads, "--no-warmup", **ON)
                    self.assertIn(got, expected)
                    steps = LAYERS * (NEW_TOKENS - 1)
                    self.assertEqual(served(log), (steps, steps))
                    self.assertIn(threads_used, log)

    def test_completion_by_environment(self):
        _, log = self.completion("OpenMP", "--no-warmup", LLAMA_ARG_FLASH_ATTN="on", LLAMA_ARG_OVERRIDE_TENSOR="none=CPU", **ON)
        self.assertEqual(served(log), (LAYERS * (NEW_TOKENS - 1),) * 2)

    def test_backends_at_run_time(self):
        """Where llama.cpp has no backend linked in it loads all of them, GGML_BACKEND_PATH's too, unasked."""
        _, log = self.completion("at run time", "-fa", "on", "--no-warmup", **ON)
        self.assertEqual(served(log), (LAYERS * (NEW_TOKENS - 1),) * 2)

    def test_flash_attn_not_on(self):
        _, log = self.completion("OpenMP", "-fa", "off", "-ot", "none=CPU", **ON)
        self.assertEqual(served(log), (0, 0))
        _, log = self.completion("OpenMP", "-ot", "none=CPU", **ON)
        self.assertEqual(served(log), (0, 0))
        self.assertIn('is flash attention "auto"? It must be on (-fa on)', log)

    def test_bench(self):
        """It loads the backend without further ado."""
        for build, (folder, libraries, _) in BUILDS.items():
            with self.subTest(build=build):
                done = subprocess.run([folder / "llama-bench", "-m", self.model, "-p", "0", "-n", "8", "-d", "64", "-fa", "1",
                                       "-r", "1", "-t", "2", "--no-warmup", "-o", "json"], capture_output=True, text=True,
                                      timeout=300, env=environment(libraries, ON), check=False)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(json.loads(done.stdout)[0]["n_gen"], 8)
                self.assertEqual(served(done.stderr), (LAYERS * 8,) * 2)

    def serve(self, prompts, flash_attn, more):
        """The server's texts after `prompts`, asked at once of as many slots, and its stderr."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [PROGRAMS / "llama-server", "-m", self.model, "--port", str(port), "-np", str(len(prompts)), "-c", "4096",
                   "-t", "2", "-fa", flash_attn, "-ot", "none=CPU", "--no-warmup"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              env=environment(PROGRAMS, more)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
            log = pool.submit(server.stderr.read)
            try:
                self.wait_for(server, port)

                def ask(prompt):
                    body = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
                    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(),
                                                     {"Content-Type": "application/json"})
                    with urllib.request.urlopen(request, timeout=300) as answer:
                        return json.load(answer)["content"]

                texts = list(pool.map(ask, prompts))
            finally:
                server.terminate()
            return texts, log.result()

    def wait_for(self, server, port):
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except OSError:
                self.assertIsNone(server.poll(), "llama-server has ended")
                time.sleep(0.1)
        self.fail("llama-server does not answer")

    def test_server_with_two_slots(self):
        """A request for each of two slots at once: texts of one of llama.cpp's two settings, and every new token of every layer is
        served."""
        page = (ROOT / "LICENSE").read_text(encoding="utf-8")
        prompts = [page[:2000], page[3000:4000]]
        on, off = (self.serve(prompts, flash_attn, {})[0] for flash_attn in ("on", "off"))
        got, log = self.serve(prompts, "on", ON)
        for texts in zip(got, on, off):
            self.assertIn(texts[0], texts[1:])
        self.assertGreaterEqual(served(log)[1], 2 * LAYERS * (NEW_TOKENS - 1))


if __name__ == "__main__":
    unittest.main()

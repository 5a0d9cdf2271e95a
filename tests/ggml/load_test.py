"""What kvonce.ggml.load() finds and refuses, and which hosts the library refuses, each with a reason."""
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from kvonce import ggml as kvonce_ggml

HERE = pathlib.Path(__file__).resolve().parent


def run(program, **environment):
    """A new process: what is loaded stays loaded."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, check=False)


class LoadTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.library = kvonce_ggml.library()
        kvonce = ctypes.CDLL(cls.library)
        kvonce.kvonce_ggml_error.restype = ctypes.c_char_p
        cls.kvonce = kvonce

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def fake_host(self, name, version, op="FLASH_ATTN_EXT"):
        path = pathlib.Path(self.folder.name) / f"lib{name}.so"
        defines = [f'-DFAKE_OP="{op}"'] + ([f'-DFAKE_VERSION="{version}"'] if version else [])
        subprocess.run(["cc", "-shared", "-fPIC", "-O0", *defines, "-o", path, HERE / "fake_host.c", "-ldl"], check=True)
        host = ctypes.CDLL(str(path))
        host.fake_load.restype = ctypes.c_void_p
        return host

    def refusal_of(self, host):
        self.assertIsNone(host.fake_load(self.library.encode()))
        return self.kvonce.kvonce_ggml_error().decode()

    def test_another_version_is_refused(self):
        reason = self.refusal_of(self.fake_host("older", "0.9.4"))
        self.assertIn("libolder.so is ggml 0.9.4; this libggml-kvonce was built for ggml ", reason)

    def test_no_version_is_refused(self):
        reason = self.refusal_of(self.fake_host("ancient", None))
        self.assertIn("libancient.so, which has no ggml_version()", reason)
        self.assertIn("ggml has to be a shared library there (cmake -D BUILD_SHARED_LIBS=ON)", reason)

    def test_ggml_linked_into_a_program_is_refused(self):
        """It exports nothing, whatever its version."""
        program = pathlib.Path(self.folder.name) / "linked_in"
        subprocess.run(["cc", "-O0", '-DFAKE_OP="FLASH_ATTN_EXT"', '-DFAKE_VERSION="0.25.3"', "-o", program, HERE / "fake_host.c",
                        "-ldl"], check=True)
        done = subprocess.run([program, self.library], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 3)
        self.assertIn("linked_in, which has no ggml_version() that others can call: ggml has to be a shared library", done.stderr)

    def test_other_operations_are_refused(self):
        import llama_cpp.llama_cpp
        version = llama_cpp.llama_cpp._lib.ggml_version
        version.restype = ctypes.c_char_p
        reason = self.refusal_of(self.fake_host("shifted", version().decode(), "CONV_2D"))
        self.assertIn("'CONV_2D', the headers call it FLASH_ATTN_EXT", reason)

    def test_incomplete_host_is_refused(self):
        import llama_cpp.llama_cpp
        version = llama_cpp.llama_cpp._lib.ggml_version
        version.restype = ctypes.c_char_p
        self.assertIn("lacks functions of ggml-backend.h", self.refusal_of(self.fake_host("partial", version().decode())))

    def test_load_twice(self):
        done = run("from kvonce import ggml; a = ggml.load(); assert ggml.load() == a; print(ggml.statistics())")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("'ops_served': 0", done.stdout)

    def test_the_device_is_an_accelerator(self):
        done = run("from kvonce import ggml; ggml.load()\n"
                   "import ctypes, llama_cpp.llama_cpp as c\n"
                   "c._lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p\n"
                   "device = ctypes.c_void_p(c._lib.ggml_backend_dev_by_name(b'kvonce'))\n"
                   "print(device.value is not None, c._lib.ggml_backend_dev_type(device))")
        self.assertEqual(done.stdout.split(), ["True", "3"], done.stderr)

    def test_environment_names_the_library(self):
        done = run("from kvonce import ggml; print(ggml.load())", KVONCE_GGML_LIBRARY=self.library)
        self.assertEqual(done.stdout.strip(), self.library, done.stderr)
        done = run("from kvonce import ggml; ggml.load()", KVONCE_GGML_LIBRARY="/nowhere/libggml-kvonce.so")
        self.assertIn("RuntimeError: KVONCE_GGML_LIBRARY: got '/nowhere/libggml-kvonce.so', which is no file", done.stderr)

    def test_not_a_library(self):
        wrong = pathlib.Path(self.folder.name) / "wrong.so"
        wrong.write_text("not a library")
        done = run(f"from kvonce import ggml; ggml.load({str(wrong)!r})")
        self.assertIn("cannot be loaded", done.stderr)
        self.assertIn("RuntimeError", done.stderr)

    def test_statistics_need_load(self):
        done = run("from kvonce import ggml; ggml.statistics()")
        self.assertIn("RuntimeError: kvonce.ggml.load() was not called", done.stderr)

    def test_no_llama_cpp(self):
        done = run("import sys; sys.modules['llama_cpp'] = None\nfrom kvonce import ggml; ggml.load()")
        self.assertIn("ModuleNotFoundError", done.stderr)

    def test_statistics_at_exit(self):
        program = "from kvonce import ggml; ggml.load()"
        self.assertIn("kvonce for ggml: served 0 attention ops", run(program, KVONCE_GGML_STATS="1").stderr)
        self.assertNotIn("kvonce for ggml", run(program, KVONCE_GGML_STATS="0").stderr)

    def test_claimed_and_not_run(self):
        """What llama.cpp does with flash attention "auto"; the note goes when something runs."""
        program = (f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
                   "from host import DEVICE, GGML, kvonce_ggml\nfrom ggml_ops import Case, InitParams\n"
                   "case = Case(GGML, num_q_heads=4, num_kv_heads=2, dim_qk=64, n_kv=8)\n"
                   "node, _ = case.build(GGML.init(InitParams(1 << 20, None, True)))\n"
                   "print(GGML.backend_dev_supports_op(DEVICE, node), kvonce_ggml.statistics_text())\n"
                   "case.run(DEVICE); print('then', kvonce_ggml.statistics_text())")
        done = run(program)
        before, _, after = done.stdout.partition("then")
        self.assertIn("True", before, done.stderr)
        self.assertIn('is flash attention "auto"? It must be on (-fa on)', before)
        self.assertNotIn("auto", after)
        self.assertIn("on the OpenMP threads of ggml's CPU backend", after)

    def test_load_all_again(self):
        """Programs call it several times; what was found is kept."""
        program = (f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
                   "from host import DEVICE, GGML, kvonce_ggml\nfrom ggml_ops import Case\nimport llama_cpp.llama_cpp as c\n"
                   "case = Case(GGML, num_q_heads=4, num_kv_heads=2, dim_qk=64, n_kv=8)\n"
                   "first = case.run(DEVICE)\nc._lib.ggml_backend_load_all()\n"
                   "print((case.run(DEVICE) == first).all(), GGML.backend_dev_by_name(b'kvonce') == DEVICE)\n"
                   "print(kvonce_ggml.statistics_text())")
        done = run(program, GGML_BACKEND_PATH=self.library)
        self.assertIn("True True", done.stdout, done.stderr)
        self.assertIn("served 2 attention ops", done.stdout)
        self.assertIn("on the OpenMP threads", done.stdout)

    def test_ggml_backend_path(self):
        """What llama.cpp's own programs do: ggml_backend_load_all() loads the library that GGML_BACKEND_PATH names."""
        program = ("import ctypes, llama_cpp.llama_cpp as c\nc._lib.ggml_backend_load_all()\n"
                   "c._lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p\n"
                   "print(c._lib.ggml_backend_dev_by_name(b'kvonce') is not None)")
        self.assertEqual(run(program, GGML_BACKEND_PATH=self.library).stdout.strip(), "True")
        self.assertEqual(run(program).stdout.strip(), "False")


if __name__ == "__main__":
    unittest.main()

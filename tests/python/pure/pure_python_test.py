"""The package as KVONCE_NATIVE=0 installs it: Python and kernel text, no compiler, no other package."""
import importlib.metadata
import importlib.resources
import os
import pathlib
import subprocess
import sys
import unittest

import kvonce
from kvonce import _metal_policy

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Arguments, for each function, that would do with the native module.
CALLS = {"attend": (None, None, None), "merge": ([], []), "plan": (8, 2, 64, 100), "explain": (8, 2, 64, 100),
         "devices": ()}


class PurePythonTest(unittest.TestCase):
    def test_the_wheel_is_for_every_python_and_platform(self):
        wheel = importlib.metadata.distribution("kvonce").read_text("WHEEL")
        self.assertIn("Root-Is-Purelib: true", wheel)
        self.assertIn("Tag: py3-none-any", wheel)
        suffixes = {pathlib.Path(str(file)).suffix for file in importlib.metadata.files("kvonce")
                    if "__pycache__" not in str(file) and ".dist-info" not in str(file)}
        self.assertEqual(suffixes, {".py", ".pyi", ".typed", ".h"})

    def test_every_function_says_in_one_sentence_what_is_missing(self):
        for name in kvonce.__all__:
            needs = "plan" if name == "explain" else name  # which it calls
            with self.subTest(name), self.assertRaisesRegex(
                    RuntimeError, rf"^kvonce: {needs} needs the native module kvonce\._core[^\n]*KVONCE_NATIVE=0") as caught:
                getattr(kvonce, name)(*CALLS.get(name, ()))
            self.assertEqual(str(caught.exception).count("\n"), 0)
        with self.assertRaisesRegex(RuntimeError, "kvonce._core"):
            from kvonce import Plan  # noqa: F401
        with self.assertRaises(AttributeError):
            kvonce.nothing

    def test_version(self):
        self.assertEqual(kvonce.__version__, importlib.metadata.version("kvonce"))

    def test_importing_needs_no_other_package(self):
        code = "import sys; sys.modules.update(numpy=None, torch=None, mlx=None); import kvonce, kvonce._metal_policy"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                             env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_the_kernel_text_is_that_of_the_repository(self):
        sources = importlib.resources.files("kvonce") / "sources"
        for folder in ("metal", "shared"):
            expected = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "src" / folder).glob("*.h")}
            installed = {path.name: path.read_text(encoding="utf-8") for path in (sources / folder).iterdir()}
            self.assertEqual(installed, expected)
        self.assertIn("params.h", {path.name for path in (sources / "metal").iterdir()})

    def test_the_policy_plans(self):
        plan = _metal_policy.choose(num_q_heads=32, num_kv_heads=4, head_dim_qk=128, max_kv_len=8192, dtype="float16")
        self.assertEqual(plan.read_factor, 1)
        self.assertLessEqual(plan.threads, 256)


if __name__ == "__main__":
    unittest.main()

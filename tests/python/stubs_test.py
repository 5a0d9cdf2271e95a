"""The stubs say what the package has: names, order, kinds and defaults of every argument."""
import ast
import importlib.resources
import inspect
import re
import unittest

import kvonce
from kvonce import _core

PACKAGE = importlib.resources.files(kvonce)
# Which have no stubs.
ANNOTATED = ("ggml.py", "torch.py", "transformers.py", "_transformers_cache.py", "mlx.py", "_mlx_statistics.py")


def parse(text):
    return ast.parse(text).body


def arguments(function):
    """Each argument of a parsed function: its kind, its name where a caller may use it, and the text of its default."""
    parsed = function.args
    positional = parsed.posonlyargs + parsed.args
    defaults = [None] * (len(positional) - len(parsed.defaults)) + parsed.defaults
    found = [("positional", None if argument in parsed.posonlyargs else argument.arg, default)
             for argument, default in zip(positional, defaults)]
    found += [("keyword", argument.arg, default) for argument, default in zip(parsed.kwonlyargs, parsed.kw_defaults)]
    return [(kind, name, default is not None and ast.unparse(default)) for kind, name, default in found]


def native(function):
    """The parsed function that nanobind describes."""
    text, _, defaults = function.__nb_signature__[0]
    text = re.sub(r"\\(\d+)", lambda found: repr(defaults[int(found[1])]), text)
    return parse(text + ": ...")[0]


def python(function):
    if function is kvonce.explain:
        function = kvonce.plan  # whose options it takes
    return parse(inspect.cleandoc("\n" + inspect.getsource(function)))[0]


def annotations(function):
    """None where an argument or the result has none."""
    parsed = [argument.annotation for argument in ast.walk(function.args) if isinstance(argument, ast.arg)
              and argument.arg not in ("self", "stream")]
    return parsed + [function.returns]


class StubsTest(unittest.TestCase):
    def check(self, stubs, owner, describe):
        """Every function of the stubs beside the package's."""
        functions = [stub for stub in stubs if isinstance(stub, ast.FunctionDef)]
        self.assertTrue(functions)
        for stub in functions:
            with self.subTest(name=stub.name):
                self.assertNotIn(None, annotations(stub))
                expected = arguments(describe(getattr(owner, stub.name)))
                got = arguments(stub)
                if any(isinstance(line, ast.Name) and line.id == "overload" for line in stub.decorator_list):
                    # An overload for return_lse=True has no default there.
                    expected, got = ([argument if argument[1] != "return_lse" else argument[:2]
                                      for argument in side] for side in (expected, got))
                self.assertEqual(got, expected)
        return {function.name for function in functions}

    def test_the_package(self):
        stubs = parse((PACKAGE / "__init__.pyi").read_text())
        names = self.check(stubs, kvonce, python)
        self.assertEqual(names | {"Device", "Plan"}, set(kvonce.__all__))

    def test_the_native_module(self):
        stubs = parse((PACKAGE / "_core.pyi").read_text())
        names = self.check(stubs, _core, native)
        classes = {stub.name: stub for stub in stubs if isinstance(stub, ast.ClassDef)}
        self.assertEqual(names | set(classes), {name for name in vars(_core) if not name.startswith("_")})
        for name, stub in classes.items():
            owner = getattr(_core, name)
            properties = {member.name for member in stub.body if [ast.unparse(line) for line in member.decorator_list]
                          == ["property"]}
            self.assertEqual(properties, {key for key, member in vars(owner).items() if isinstance(member, property)})
            methods = [member for member in stub.body if member.name not in properties]
            if methods:
                self.check(methods, owner, native)

    def test_modules_without_stubs_are_annotated(self):
        for name in ANNOTATED:
            functions = [function for function in parse((PACKAGE / name).read_text())
                         if isinstance(function, ast.FunctionDef) and not function.name.startswith(("_", "count_"))]
            self.assertTrue(functions)
            for function in functions:
                with self.subTest(file=name, function=function.name):
                    self.assertNotIn(None, annotations(function))


if __name__ == "__main__":
    unittest.main()

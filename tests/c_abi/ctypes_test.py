"""bench/peers/kvonce_abi.py: its structs are those of kvonce.h, and attend, called through it, is attention.

Usage: ctypes_test.py INCLUDE_DIR C_COMPILER [LIBRARY] [unittest arguments]; without LIBRARY only the structs are compared.
"""
import ctypes
import math
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
import kvonce_abi  # noqa: E402

include, compiler, library = None, None, None


class LayoutTest(unittest.TestCase):
    def test_every_field_has_the_headers_place_and_size(self):
        lines = ["#include <kvonce/kvonce.h>"]
        for struct, name, size in kvonce_abi.STRUCTS:
            lines.append(f'_Static_assert({size} == {ctypes.sizeof(struct)}, "{name}");')
            for field, *_ in struct._fields_:
                at = getattr(struct, field)
                lines.append(f'_Static_assert(offsetof({name}, {field}) == {at.offset} && '
                             f'sizeof((({name}*)0)->{field}) == {at.size}, "{name}.{field}");')
        run = subprocess.run([compiler, "-std=c11", "-fsyntax-only", "-I", include, "-x", "c", "-"], text=True,
                             input="\n".join(lines) + "\n", capture_output=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)


def values(count, seed):
    """Between -1 and 1."""
    return [math.sin(seed + 1.7 * i) for i in range(count)]


def attention(q, k, v, num_q_heads, num_kv_heads, head_dim, kv_len):
    out = []
    for head in range(num_q_heads):
        base = head // (num_q_heads // num_kv_heads) * kv_len * head_dim
        rows = [range(base + token * head_dim, base + (token + 1) * head_dim) for token in range(kv_len)]
        weights = [math.exp(sum(q[head * head_dim + i] * k[at] for i, at in enumerate(row)) * head_dim ** -0.5)
                   for row in rows]
        out += [sum(weight * v[row[i]] for weight, row in zip(weights, rows)) / sum(weights) for i in range(head_dim)]
    return out


class CallTest(unittest.TestCase):
    def test_attend_is_attention(self):
        shape = num_q_heads, num_kv_heads, head_dim, kv_len = 4, 2, 16, 37
        decode = kvonce_abi.Decode(library, *shape, "f32")
        kv_count = num_kv_heads * kv_len * head_dim
        lists = [values(num_q_heads * head_dim, 0), values(kv_count, 1), values(kv_count, 2)]
        arrays = [(ctypes.c_float * len(one))(*one) for one in lists]
        out = (ctypes.c_float * (num_q_heads * head_dim))()
        workspace = ctypes.create_string_buffer(decode.workspace_bytes + 1)
        context = decode.context(None)
        decode.prepare_workspace(ctypes.addressof(workspace), context)
        decode.attend(decode.inputs(*map(ctypes.addressof, arrays)), decode.outputs(ctypes.addressof(out)),
                      ctypes.addressof(workspace), context)
        for got, expected in zip(out, attention(*lists, *shape)):
            self.assertAlmostEqual(got, expected, places=5)
        self.assertEqual(decode.read_factor, 1)
        self.assertIn("attend_", decode.kernel)

    def test_earlier_kv_ready_reaches_the_plan(self):
        with self.assertRaisesRegex(RuntimeError, "earlier_kv_ready"):
            kvonce_abi.Decode(library, 4, 2, 16, 37, "f32", target="portable", earlier_kv_ready=True)

    def test_a_refusal_is_the_librarys_sentence(self):
        with self.assertRaisesRegex(RuntimeError, "num_q_heads"):
            kvonce_abi.Decode(library, 3, 2, 16, 37, "f32")


if __name__ == "__main__":
    include, compiler = sys.argv[1:3]
    del sys.argv[1:3]
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        library = kvonce_abi.Library(sys.argv.pop(1))
    unittest.main(defaultTest=None if library else "LayoutTest")

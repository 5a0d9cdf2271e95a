"""The kvonce command from outside: exit codes, one-line errors, malformed input, results, nothing left behind.

Usage: cli_test.py KVONCE [unittest arguments]
"""

import array
import csv
import io
import json
import math
import os
import pathlib
import random
import stat
import struct
import subprocess
import tempfile
import unittest

from kvonce_command import KVONCE, kvonce

OK, FAILED, BAD_USAGE, UNAVAILABLE = 0, 1, 2, 3


def file_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors(tensors, **metadata):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return file_bytes(header, data)


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def pack(dtype, values):
    if dtype == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    return b"".join(struct.pack("<f", value)[2:] for value in values)  # BF16, rounded towards zero


def unpack(dtype, data):
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        dtype = "F32"
    letter, size = {"F32": ("f", 4), "F16": ("e", 2)}[dtype]
    return struct.unpack(f"<{len(data) // size}{letter}", data)


def problem(num_seqs=1, num_q_heads=6, num_kv_heads=2, q_len=1, kv_len=37, dqk=16, dv=16, q="F32", kv="F32", seed=1):
    source = random.Random(seed)
    shapes = {"q": (q, [num_seqs, num_q_heads, q_len, dqk]), "k": (kv, [num_seqs, num_kv_heads, kv_len, dqk]),
              "v": (kv, [num_seqs, num_kv_heads, kv_len, dv])}
    return {name: (dtype, shape, pack(dtype, [source.gauss(0, 1) for _ in range(math.prod(shape))]))
            for name, (dtype, shape) in shapes.items()}


def attention(tensors, causal=True, scale=None, kv_lens=None, rules=lambda head, row, t, score: score, sinks=None):
    """out and lse as nested loops in double precision, for the tests' own answer."""
    (_, (num_seqs, num_q_heads, q_len, dqk), _), (_, (_, num_kv_heads, kv_len, _), _) = tensors["q"], tensors["k"]
    dv = tensors["v"][1][3]
    q, k, v = (unpack(dtype, data) for dtype, _, data in (tensors[name] for name in "qkv"))
    scale = dqk ** -0.5 if scale is None else scale
    outs, lses = [], []
    for seq in range(num_seqs):
        length = kv_lens[seq] if kv_lens else kv_len
        for head in range(num_q_heads):
            stream = seq * num_kv_heads + head // (num_q_heads // num_kv_heads)
            for row in range(q_len):
                end = min(length, length - q_len + row + 1) if causal else length
                q_at = ((seq * num_q_heads + head) * q_len + row) * dqk
                scores = [rules(head, row, t, scale * sum(q[q_at + d] * k[(stream * kv_len + t) * dqk + d]
                                                          for d in range(dqk)))
                          for t in range(max(end, 0))]
                top = max(scores, default=0.0)
                weights = [math.exp(score - top) for score in scores]
                total = sum(weights) + (math.exp(sinks[head] - top) if sinks else 0.0)
                lses.append(top + math.log(total) if total else -math.inf)
                outs += [sum(w * v[(stream * kv_len + t) * dv + d] for t, w in enumerate(weights)) / (total or 1)
                         for d in range(dv)]
    return outs, lses


class CommandTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.input = self.folder / "in.safetensors"
        self.out = self.folder / "out.safetensors"

    def run_file(self, content, *arguments, **environment):
        self.input.write_bytes(content)
        return kvonce("run", "--input", self.input, "--out", self.out, *arguments, **environment)

    def assert_error(self, result, exit_code, *named):
        self.assertEqual(result.returncode, exit_code, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertEqual(result.stdout, "")
        for word in named:
            self.assertIn(word, result.stderr)

    def assert_refused(self, content, *named):
        self.assert_error(self.run_file(content), BAD_USAGE, *named)
        self.assertEqual([path.name for path in self.folder.iterdir()], [self.input.name])


class UsageTest(CommandTest):
    def test_help_of_every_subcommand_has_an_example(self):
        for command in ("bench", "tune", "check", "run", "explain", "devices"):
            result = kvonce(command, "--help")
            self.assertEqual(result.returncode, OK, command)
            self.assertIn("Example", result.stdout)
            self.assertIn(f"kvonce {command}", result.stdout)
        self.assertEqual(kvonce("--help").returncode, OK)
        self.assertRegex(kvonce("--version").stdout, r"^kvonce \d+\.\d+\.\d+\n$")

    def test_wrong_usage_is_one_line_and_exit_2(self):
        self.assert_error(kvonce(), BAD_USAGE, "subcommand", "explain")
        self.assert_error(kvonce("frobnicate"), BAD_USAGE, "subcommand", "frobnicate", "explain")
        self.assert_error(kvonce("--frobnicate"), BAD_USAGE)
        self.assert_error(kvonce("devices", "--format", "xml"), BAD_USAGE, "--format", "xml")
        self.assert_error(kvonce("devices", "--frobnicate"), BAD_USAGE, "--frobnicate")
        self.assert_error(kvonce("run"), BAD_USAGE, "--input")
        self.assert_error(kvonce("check", "--quick", "--full"), BAD_USAGE, "--full")
        self.input.write_bytes(safetensors(problem()))
        for arguments, named in ((["--threads", "0"], "--threads"), (["--threads", "x"], "--threads"),
                                 (["--threads", "1e9"], "--threads"), (["--scale", "x"], "--scale"),
                                 (["--scale", "nan"], "--scale"), (["--scale", "1e39"], "--scale"),
                                 (["--policy", "row_tile=banana"], "--policy"),
                                 (["--policy", "bananas=1"], "bananas"),
                                 (["--policy", "/no/such/file"], "--policy"),
                                 (["--target", "avx9000"], "avx9000")):
            self.assert_error(kvonce("run", "--input", self.input, "--out", self.out, *arguments), BAD_USAGE, named)
        self.assert_error(kvonce("run", "--input", self.input), BAD_USAGE, "--out")
        self.assertFalse(self.out.exists())

    def test_environment_is_checked_like_an_argument(self):
        content = safetensors(problem())
        self.assert_error(self.run_file(content, KVONCE_CPU_TARGET="avx9000"), BAD_USAGE, "avx9000")
        self.assert_error(self.run_file(content, KVONCE_NUM_THREADS="none"), BAD_USAGE, "KVONCE_NUM_THREADS")

    def test_an_output_that_cannot_be_written_is_an_error(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("needs /dev/full")
        with open("/dev/full", "w") as full:
            result = subprocess.run([KVONCE, "devices"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, BAD_USAGE)
        self.assertIn("standard output", result.stderr)


class DevicesTest(CommandTest):
    def test_json_lists_every_target_and_why_one_is_missing(self):
        document = json.loads(kvonce("devices", "--format", "json").stdout)
        devices = document["devices"]
        targets = {device["target"]: device for device in devices if device["backend"] == "cpu"}
        self.assertEqual({"portable", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"}, set(targets))
        self.assertTrue(targets["portable"]["usable"])
        for device in devices:
            self.assertEqual(device["usable"], device["why_missing"] is None, device)
        self.assertEqual(sum(device["default"] for device in devices), 1)
        self.assertIn("d576x512", document["kernels"]["head_dims"])

    def test_a_missing_target_exits_3_and_names_it(self):
        missing = [device for device in json.loads(kvonce("devices", "--format", "json").stdout)["devices"]
                   if device["backend"] == "cpu" and not device["usable"]]
        for device in missing:
            result = kvonce("explain", "8q/2kv d64 kv=128", "--target", device["target"])
            self.assert_error(result, UNAVAILABLE, device["target"])

    def test_csv_and_md_have_the_same_rows(self):
        rows = list(csv.reader(io.StringIO(kvonce("devices", "--format", "csv").stdout)))
        self.assertEqual({len(row) for row in rows}, {len(rows[0])})
        table = [line for line in kvonce("devices").stdout.splitlines() if line.startswith("|")]
        self.assertEqual(len(table), len(rows) + 1)
        self.assertEqual({line.count("|") for line in table}, {len(rows[0]) + 1})

    def test_devices_still_answers_when_the_chosen_target_is_wrong(self):
        self.assertEqual(kvonce("devices", KVONCE_CPU_TARGET="avx9000").returncode, OK)


class ExplainTest(CommandTest):
    def test_plan_is_printed(self):
        result = kvonce("explain", "32q/4kv d128 kv=32768 q=1 seqs=1 dtype=bf16", "--target", "portable", "--threads", 2)
        self.assertEqual(result.returncode, OK, result.stderr)
        self.assertIn("attend_portable_bf16_d128x128_r", result.stdout)
        self.assertRegex(result.stdout, r"time at read +[0-9.]+ us at [0-9.]+ GB/s")
        again = kvonce("explain", "--case", "32q/4kv d128 kv=32768 dtype=bf16", "--target", "portable", "--threads", 2)

        def without_measurement(text):
            return [line for line in text.splitlines() if not line.startswith("time at read")]

        self.assertEqual(without_measurement(result.stdout), without_measurement(again.stdout))

    def test_errors_name_the_token_or_field(self):
        self.assert_error(kvonce("explain"), BAD_USAGE, "case")
        self.assert_error(kvonce("explain", "32q/4kv d128 kv=x"), BAD_USAGE, "kv=x")
        self.assert_error(kvonce("explain", "32q/5kv d128 kv=8"), BAD_USAGE, "num_q_heads")
        self.assert_error(kvonce("explain", "32q/4kv d1025 kv=8"), BAD_USAGE, "head_dim_qk")
        self.assert_error(kvonce("explain", "32q/4kv d128 kv=8", "--dtype", "f17"), BAD_USAGE, "--dtype")
        self.assert_error(kvonce("explain", "32q/4kv d128 kv=8", "--q-dtype", "q8_0"), BAD_USAGE, "--q-dtype")


class RunTest(CommandTest):
    def assert_close(self, got, wanted, tolerance):
        self.assertEqual(len(got), len(wanted))
        for a, b in zip(got, wanted):
            self.assertTrue(a == b or abs(a - b) <= tolerance * max(1.0, abs(b)), (a, b))

    def test_out_and_lse_are_right_for_every_dtype(self):
        tolerance = {"F32": 2e-6, "F16": 2e-3, "BF16": 2e-2}
        for q in tolerance:
            for kv in tolerance:
                tensors = problem(num_seqs=2, q_len=3, dqk=16, dv=8, q=q, kv=kv)
                result = self.run_file(safetensors(tensors), "--lse", "--check")
                self.assertEqual(result.returncode, OK, result.stderr + result.stdout)
                self.assertIn("passed", result.stdout)
                written = read_safetensors(self.out)
                self.assertEqual(set(written), {"out", "lse"})
                self.assertEqual(written["out"][:2], (q, [2, 6, 3, 8]))
                self.assertEqual(written["lse"][:2], ("F32", [2, 6, 3]))
                outs, lses = attention(tensors)
                self.assert_close(unpack(q, written["out"][2]), outs, tolerance[q])
                self.assert_close(unpack("F32", written["lse"][2]), lses, 2e-6)

    def test_options_reach_the_kernel(self):
        tensors = problem(q_len=4, kv_len=6)
        for arguments, options in (([], {}), (["--causal"], {}), (["--no-causal"], {"causal": False}),
                                   (["--scale", "0.5"], {"scale": 0.5}), (["--scale", "-1"], {"scale": -1.0}),
                                   (["--threads", "1"], {}), (["--target", "portable"], {}),
                                   (["--policy", "chunk_tokens=2"], {})):
            result = self.run_file(safetensors(tensors), *arguments, "--check")
            self.assertEqual(result.returncode, OK, result.stderr + result.stdout)
            written = read_safetensors(self.out)
            self.assertEqual(set(written), {"out"})
            self.assert_close(unpack("F32", written["out"][2]), attention(tensors, **options)[0], 2e-6)
        self.assertNotEqual(attention(tensors)[0], attention(tensors, causal=False)[0])

    def test_masks_softcap_alibi_and_sinks(self):
        tensors = problem(q_len=2, kv_len=9)
        slopes, sinks = [0.5, 0.25, 1.0, 0.0, 2.0, 0.125], [0.5, -1.0, 0.0, 2.0, 1.0, -0.5]
        added = [[0.25 * (t - row) if (t + row) % 3 else -math.inf for t in range(9)] for row in range(2)]
        flat = added[0] + added[1]
        shown = bytes(0 if x == -math.inf else 1 for x in flat)
        per_head = {"alibi_slopes": ("F32", [6], pack("F32", slopes)), "sinks": ("F32", [6], pack("F32", sinks))}
        for dtype in ("F32", "F16", "BF16", "BOOL", "U8"):
            content = pack(dtype, flat) if dtype in ("F32", "F16", "BF16") else shown
            boolean = dtype in ("BOOL", "U8")

            def rules(head, row, t, score, boolean=boolean):
                mask = added[row][t]
                if boolean and mask != -math.inf:
                    mask = 0.0
                return 2.0 * math.tanh(score / 2.0) + slopes[head] * (t - (7 + row)) + mask

            ruled = {**tensors, **per_head, "mask": (dtype, [1, 1, 2, 9], content)}
            result = self.run_file(safetensors(ruled), "--softcap", "2", "--lse", "--check")
            self.assertEqual(result.returncode, OK, result.stderr + result.stdout)
            written = read_safetensors(self.out)
            outs, lses = attention(tensors, rules=rules, sinks=sinks)
            self.assert_close(unpack("F32", written["out"][2]), outs, 4e-6)
            self.assert_close(unpack("F32", written["lse"][2]), lses, 4e-6)

    def test_kv_lens_including_0_and_rows_without_keys(self):
        lens = [37, 0, 5]
        tensors = problem(num_seqs=3, q_len=2)
        with_lens = {**tensors, "kv_lens": ("I32", [3], array.array("i", lens).tobytes())}
        result = self.run_file(safetensors(with_lens), "--lse", "--check")
        self.assertEqual(result.returncode, OK, result.stderr)
        written = read_safetensors(self.out)
        outs, lses = attention(tensors, kv_lens=lens)
        self.assert_close(unpack("F32", written["out"][2]), outs, 2e-6)
        self.assert_close(unpack("F32", written["lse"][2]), lses, 2e-6)
        self.assertIn(-math.inf, lses)

    def test_empty_cache_and_no_rows(self):
        result = self.run_file(safetensors(problem(kv_len=0)), "--lse", "--check")
        self.assertEqual(result.returncode, OK, result.stderr)
        written = read_safetensors(self.out)
        self.assertEqual(set(unpack("F32", written["out"][2])), {0.0})
        self.assertEqual(set(unpack("F32", written["lse"][2])), {-math.inf})
        for empty in ({"q_len": 0}, {"num_seqs": 0}):
            result = self.run_file(safetensors(problem(**empty)), "--check")
            self.assertEqual(result.returncode, OK, result.stderr)
            self.assertEqual(read_safetensors(self.out)["out"][2], b"")

    def test_unaligned_data_and_other_tensors_are_fine(self):
        tensors = problem(kv="F16")
        padded = {"note": ("U8", [1], b"x"), **tensors, "e8": ("F8_E4M3", [3], b"abc"), "none": ("F64", [0], b"")}
        for content in (safetensors(padded), safetensors(padded, a="b")):
            self.assertEqual(self.run_file(content, "--check").returncode, OK)
            first = read_safetensors(self.out)["out"]
            self.run_file(safetensors(tensors))
            self.assertEqual(read_safetensors(self.out)["out"], first)

    def test_check_alone_writes_nothing_and_tables_have_the_figures(self):
        self.input.write_bytes(safetensors(problem()))
        result = kvonce("run", "--input", self.input, "--check", "--format", "json")
        self.assertEqual(result.returncode, OK, result.stderr)
        (row,) = json.loads(result.stdout)
        self.assertLessEqual(row["rel_rms_error"], row["tolerance"])
        self.assertEqual(row["tolerance"], 2e-6)
        self.assertTrue(row["kernel"].startswith("attend_"))
        self.assertGreater(row["us_median"], 0)
        rows = list(csv.DictReader(io.StringIO(kvonce("run", "--input", self.input, "--check", "--format", "csv").stdout)))
        self.assertEqual(rows[0]["case"], row["case"])
        self.assertEqual(len(list(self.folder.iterdir())), 1)

    def test_nan_in_a_visible_key_reaches_out_and_the_check_agrees(self):
        tensors = problem()
        dtype, shape, data = tensors["v"]
        tensors["v"] = (dtype, shape, struct.pack("<f", math.nan) + data[4:])
        self.assertEqual(self.run_file(safetensors(tensors), "--check").returncode, OK)
        self.assertTrue(math.isnan(unpack("F32", read_safetensors(self.out)["out"][2])[0]))

    def test_check_fails_with_exit_1_beyond_the_tolerance(self):
        # Scores of about 1e6 that differ by about 1: float32 holds them to 0.06 only, the oracle exactly.
        tensors = problem(kv_len=400, dqk=64, dv=64)
        dtype, shape, _ = tensors["k"]
        source = random.Random(3)
        tensors["k"] = (dtype, shape, pack(dtype, [1 + source.gauss(0, 1e-6) for _ in range(math.prod(shape))]))
        result = self.run_file(safetensors(tensors), "--scale", "1e5", "--check")
        self.assertEqual(result.returncode, FAILED, result.stdout)
        self.assertIn("FAILED", result.stdout)

    def test_input_may_be_overwritten_and_an_old_output_survives_failure(self):
        self.input.write_bytes(safetensors(problem()))
        self.assertEqual(kvonce("run", "--input", self.input, "--out", self.input).returncode, OK)
        self.assertEqual(set(read_safetensors(self.input)), {"out"})
        self.out.write_bytes(b"old")
        self.assert_error(self.run_file(b"bad"), BAD_USAGE, "--input")
        self.assertEqual(self.out.read_bytes(), b"old")

    def test_output_that_cannot_be_written(self):
        self.input.write_bytes(safetensors(problem()))
        for target in (self.folder, self.folder / "missing" / "out", "/dev/null"):
            self.assert_error(kvonce("run", "--input", self.input, "--out", target), BAD_USAGE, "--out", str(target))
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        self.assertEqual(len(list(self.folder.iterdir())), 1)


class MalformedInputTest(CommandTest):
    def test_file_that_cannot_be_read(self):
        for path in (self.folder / "absent", self.folder, "/dev/null"):
            self.assert_error(kvonce("run", "--input", path, "--out", self.out), BAD_USAGE, "--input", str(path))
        self.assertFalse(self.out.exists())

    def test_truncated_anywhere(self):
        whole = safetensors(problem(kv_len=3))
        header = struct.unpack("<Q", whole[:8])[0] + 8
        for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) - 1):
            self.assert_refused(whole[:size], "--input")
        self.assert_refused(whole + b"x", "--input", "cover")

    def test_header_length(self):
        whole = safetensors(problem(kv_len=3))
        for length in (0, 1, 2 ** 20, 100_000_001, 2 ** 31, 2 ** 32, 2 ** 60, 2 ** 63, 2 ** 64 - 8, 2 ** 64 - 1):
            self.assert_refused(struct.pack("<Q", length) + whole[8:], "--input", "header")
        for change in (-1, 1):
            length = struct.unpack("<Q", whole[:8])[0] + change
            self.assert_refused(struct.pack("<Q", length) + whole[8:], "--input")

    def test_header_that_is_not_the_formats_json(self):
        for header in (b"", b"\0" * 64, b"[]", b" {}", b"{", b"{\"q\":}", b"null", b"{\"\xff\":1}", b"{\"q\":[[[[[[",
                       b"{" * 1000, b"{\"a\nb\":1}", b"{\"q\":1e999}"):
            self.assert_refused(file_bytes(header), "--input")

    def changed(self, name, **changes):
        """A good file with fields of one header entry changed; None removes."""
        whole = safetensors(problem(kv_len=3))
        (length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8:8 + length])
        for field, value in changes.items():
            if value is None:
                del header[name][field]
            else:
                header[name][field] = value
        return file_bytes(header, whole[8 + length:])

    def test_offsets(self):
        k_begin, k_end = 384, 768  # of k in the file that `changed` starts from
        self.assertEqual(self.run_file(self.changed("k", data_offsets=[k_begin, k_end])).returncode, OK)
        self.out.unlink()
        for offsets in ([k_begin - 4, k_end - 4], [0, 384], [k_end, k_begin], [k_begin, 2 ** 60], [2 ** 60, 2 ** 60 + 384],
                        [2 ** 64 - 384, 2 ** 64 - 1], [k_begin, k_end + 4], [k_begin, k_end - 4], [-1, k_end],
                        [k_begin], [k_begin, k_end, k_end], [], "0,1", [k_begin, 2 ** 64], [384.0, 768.0]):
            self.assert_refused(self.changed("k", data_offsets=offsets), "--input", "'k'")

    def test_shapes_and_dtypes_in_the_header(self):
        for shape in ([1, 2, 3], [1, 2, 3, 15], [2 ** 62, 4, 1, 16], [2 ** 32, 2 ** 32, 1, 1], [-1, 2, 3, 16], [1.5], "x",
                      [[1]], [2 ** 64, 1, 1, 1], [1] * 100):
            self.assert_refused(self.changed("k", shape=shape), "--input", "'k'")
        for dtype in ("F31", "", "f32", "F16", 7, None):
            self.assert_refused(self.changed("k", dtype=dtype), "--input", "'k'")
        self.assert_refused(self.changed("k", shape=None), "--input", "shape")
        self.assert_refused(self.changed("k", data_offsets=None), "--input", "data_offsets")
        self.assert_refused(self.changed("k", surprise=1), "--input", "surprise")

    def test_the_same_name_twice(self):
        entry = b'"q":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        self.assert_refused(file_bytes(b"{" + entry + b"," + entry + b"}"), "'q'", "twice")

    def test_missing_tensors(self):
        for name in "qkv":
            tensors = problem()
            del tensors[name]
            self.assert_refused(safetensors(tensors), "--input", f"'{name}'")

    def test_tensors_that_do_not_fit_together(self):
        good = problem(num_seqs=2, dqk=16, dv=8)
        for name, other in (("q", {"num_seqs": 3}), ("k", {"num_seqs": 3}), ("k", {"dqk": 12}), ("q", {"dqk": 12}),
                            ("v", {"num_seqs": 1}), ("v", {"num_kv_heads": 3}), ("v", {"kv_len": 36}),
                            ("v", {"kv": "F16"}), ("k", {"kv": "BF16"})):
            self.assert_refused(safetensors({**good, name: problem(**{"num_seqs": 2, "dqk": 16, "dv": 8, **other})[name]}),
                                "--input")
        self.assert_refused(safetensors(problem(num_q_heads=5)), "num_q_heads")
        self.assert_refused(safetensors(problem(dqk=1025, num_kv_heads=1, kv_len=1)), "head_dim_qk")
        self.assert_refused(safetensors(problem(q_len=65, kv_len=70)), "q_len")
        self.assert_refused(safetensors(problem(dv=0)), "head_dim_v")
        self.assert_refused(safetensors(problem(dqk=0)), "head_dim_qk")
        self.assert_refused(safetensors(problem(num_kv_heads=0, num_q_heads=0)), "heads")
        for shape in ([6, 1, 16], [96], [], [1, 6, 1, 16, 1]):
            tensors = problem()
            content = tensors["q"][2] if shape else b"\0" * 4
            tensors["q"] = ("F32", shape, content)
            self.assert_refused(safetensors(tensors), "'q'")

    def test_empty_tensors_with_enormous_axes(self):
        for q, k, v in (([2 ** 60, 1, 0, 64],) * 3, ([2 ** 31, 1, 0, 64],) * 3, ([2 ** 31 - 1, 8, 0, 64],) * 3,
                        ([1, 2 ** 63, 0, 64], [1, 1, 0, 64], [1, 1, 0, 64]),
                        ([1, 1, 0, 64], [1, 1, 0, 64], [1, 1, 0, 2 ** 40])):
            tensors = {"q": ("F32", q, b""), "k": ("F32", k, b""), "v": ("F32", v, b"")}
            result = self.run_file(safetensors(tensors))
            self.assertIn(result.returncode, (OK, BAD_USAGE, UNAVAILABLE), result.stderr)
            self.assertLessEqual(result.stderr.count("\n"), 1)

    def test_dtypes_that_attention_cannot_use(self):
        for dtype, size in (("I32", 4), ("F64", 8), ("F8_E4M3", 1), ("U8", 1), ("BOOL", 1), ("I64", 8)):
            tensors = problem()
            for name in "qkv":
                shape = tensors[name][1]
                self.assert_refused(safetensors({**tensors, name: (dtype, shape, b"\0" * (math.prod(shape) * size))}),
                                    f"'{name}'", dtype)

    def test_kv_lens(self):
        good = problem(num_seqs=2)
        for dtype, shape, values in (("I32", [3], [1, 2, 3]), ("I32", [1], [1]), ("I32", [2, 1], [1, 2]),
                                     ("F32", [2], [1, 2]), ("I32", [2], [38, 1]), ("I32", [2], [-1, 1]),
                                     ("I32", [2], [2 ** 31 - 1, 1]), ("I32", [2], [-2 ** 31, 1])):
            content = pack("F32", values) if dtype == "F32" else array.array("i", values).tobytes()
            self.assert_refused(safetensors({**good, "kv_lens": (dtype, shape, content)}), "kv_lens")

    def test_masks_and_per_head_values(self):
        good = problem(num_seqs=2, kv_len=3)
        for dtype, shape in (("I32", [2, 6, 1, 3]), ("F32", [3, 6, 1, 3]), ("F32", [2, 2, 1, 3]), ("F32", [2, 6, 1, 1]),
                             ("F32", [6, 1, 3]), ("F64", [1, 1, 1, 3])):
            content = b"\0" * (math.prod(shape) * (8 if dtype == "F64" else 4))
            self.assert_refused(safetensors({**good, "mask": (dtype, shape, content)}), "'mask'")
        for name in ("sinks", "alibi_slopes"):
            for dtype, shape, size in (("F32", [5], 20), ("F16", [6], 12), ("F32", [1, 6], 24)):
                self.assert_refused(safetensors({**good, name: (dtype, shape, b"\0" * size)}), f"'{name}'")

    def test_names_with_control_characters_stay_on_one_line(self):
        self.assert_refused(file_bytes({"a\nb\u001b[31m": {"dtype": "F31", "shape": [], "data_offsets": [0, 0]}}), "a\\x0ab")

    def test_random_damage_never_crashes(self):
        whole = bytearray(safetensors(problem(kv_len=3)))
        (length,) = struct.unpack("<Q", whole[:8])
        source = random.Random(7)
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(source.randint(1, 4)):
                damaged[source.randrange(8 + length)] = source.randrange(256)
            result = self.run_file(bytes(damaged))
            self.assertIn(result.returncode, (OK, BAD_USAGE), (result.stderr, bytes(damaged[:8 + length])))
            self.assertEqual(result.returncode == OK, self.out.exists())
            self.out.unlink(missing_ok=True)


if __name__ == "__main__":
    unittest.main()

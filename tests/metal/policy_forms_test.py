#!/usr/bin/env python3
"""Holds python/kvonce/_metal_policy.py equal to src/metal/policy.cpp: every field of the plan, every refusal.

usage: policy_forms_test.py POLICY_DUMP SOURCE_DIR [COUNT [SEED]]
"""
import collections
import importlib.util
import pathlib
import random
import re
import subprocess
import sys

ERROR_CODES = {ValueError: 1, NotImplementedError: 2, RuntimeError: 3}
POLICY_FIELDS = ("body", "row_tile", "rows_per_worker", "chunk_tokens", "step_tokens", "splits", "simdgroups")


def load_policy(source_dir):
    spec = importlib.util.spec_from_file_location("_metal_policy", source_dir / "python/kvonce/_metal_policy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def random_problem(rng, policy):
    kv_heads = rng.choice((1, 1, 2, 3, 4, 4, 8, 8, 8, 16, 32, 32, 1000 if rng.random() < 0.5 else 1 << 14))
    group = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 40, 64))
    dims = rng.choice((64, 64, 80, 96, 112, 128, 128, 128, 192, 256, 32, 320, 352, 384, 512, 72, 40, 7, 1,
                       513 if rng.random() < 0.3 else 128, 1024 if rng.random() < 0.3 else 96))
    problem = {
        "num_seqs": rng.choice((0, 1, 1, 1, 2, 3, 7, 64, 1 << 20 if rng.random() < 0.3 else 1)),
        "q_len": rng.choice((0, 1, 1, 1, 2, 4, 8, 33, 64)),
        "num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim_qk": dims,
        "head_dim_v": 128 if rng.random() < 0.1 else rng.choice((0, dims, dims, rng.randint(1, 512))),
        "max_kv_len": rng.choice((0, 1, 2, 100, 127, 2048, 8192, 32768, 131072, rng.randint(1, 100000), 2147483647)),
        "window": rng.choice((0, 0, 0, 1, 17, 512, 4096)), "dtype": rng.choice(("f32", "f16", "bf16"))}
    if rng.random() < 0.25:
        problem["kv_format"] = rng.choice(("mlx_int8", "mlx_int4"))
        problem["quant_group"] = group = rng.choice((32, 64, 128))
        problem["head_dim_qk"] = max(group, dims // group * group)
        problem["head_dim_v"] = rng.choice((0, 256))
    gpu = policy.Gpu(family=rng.choice((7, 8, 9, 10, 11, 6, 99) if rng.random() < 0.2 else (7, 8, 9, 10)),
                     num_cores=rng.choice((0, 0, 5, 8, 10, 16, 18, 20, 40, 80, -1 if rng.random() < 0.1 else 7)),
                     threadgroup_bytes=rng.choice((0, 0, 0, 32768, 65536, 16384, 20000, 1 if rng.random() < 0.2 else 0)),
                     max_threads=rng.choice((0, 0, 0, 1024, 896, 832, 384, 100, 32, 31 if rng.random() < 0.2 else 64, 4096)),
                     read_gbps=rng.choice((0.0, 0.0, 68.0, 273.5, 546.0, -1.0)))
    asked = {}
    if rng.random() < 0.4:
        choices = {"body": (1, 2, 3, 3, 3, 3, 3, 0, 4), "row_tile": (1, 2, 4, 8, 16, 3, -1),
                   "rows_per_worker": (1, 2, 4, 8, 16, 32, 64, 256, 257, 12), "step_tokens": (16, 4, 8, 32, 1, 2),
                   "chunk_tokens": (1, 64, 100, 1000, 4096, 1 << 30, 1 << 31, -5), "splits": (1, 2, 30, 128, 65535, 65536),
                   "simdgroups": (1, 2, 4, 8, 16, 32, 6, 33)}
        for name in rng.sample(POLICY_FIELDS, rng.choice((1, 1, 2, 3))) + ["body"] * (rng.random() < 0.5):
            asked[name] = rng.choice(choices[name])
    return problem, gpu, asked


def line_of(problem, gpu, asked):
    words = [problem[name] for name in ("num_seqs", "q_len", "num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_v",
                                        "max_kv_len", "window", "dtype")]
    words += [problem.get("kv_format", "plain"), problem.get("quant_group", 0)]
    words += [f"apple{gpu.family}", gpu.num_cores, gpu.threadgroup_bytes, gpu.max_threads, gpu.read_gbps]
    return " ".join(str(word) for word in words + [asked.get(name, 0) for name in POLICY_FIELDS])


def fields_of_dump(line):
    fields = {"rejected": []}
    for item in line.split("\t"):
        name, _, value = item.partition("=")
        if name == "rejected":
            fields[name].append(value)
        else:
            fields[name] = value
    return fields


def fields_of_python(policy, problem, gpu, asked):
    try:
        plan = policy.choose(**problem, gpu=gpu, policy=asked)
    except tuple(ERROR_CODES) as error:
        return {"rejected": [], "error": str(ERROR_CODES[type(error)]), "message": str(error)}
    fields = {name: str(value) for name, value in vars(plan).items()}
    return {**fields, "rejected": list(plan.rejected)}


def differences(python, native):
    names = [name for name in {**python, **native} if python.get(name) != native.get(name)]
    if names == ["predicted_us"] and abs(float(python[names[0]]) / float(native[names[0]]) - 1.0) < 1e-12:
        return []  # a processor that fuses multiply and add rounds once less
    return [f"{name}: Python {python.get(name)!r}, C++ {native.get(name)!r}" for name in names]


def check_constants(policy, source_dir):
    """The constants that the module repeats from the kernels' contract."""
    text = (source_dir / "src/metal/params.h").read_text(encoding="utf-8")
    for name, constant in (("kLanes", "LANES"), ("kMaxHeadDim", "MAX_HEAD_DIM"), ("kMaxTokenParts", "MAX_TOKEN_PARTS"),
                           ("kMaxRowTiles", "MAX_ROW_TILES"), ("kMaxMergeSimdgroups", "MAX_MERGE_SIMDGROUPS"),
                           ("kJoinFloats", "JOIN_FLOATS"), ("kStageBytes", "STAGE_BYTES"),
                           ("kMaxSharedBytes", "MAX_SHARED_BYTES")):
        stated = re.search(rf"\b{name} = (\d+),", text)
        assert stated and int(stated[1]) == getattr(policy, constant), f"{constant} is not params.h's {name}"


def check_generations(policy):
    families = {name: policy.gpu_of_architecture(name).family
                for name in ("applegpu_g13g", "applegpu_g14s", "applegpu_g15d", "applegpu_g16p", "applegpu_g17s", "other")}
    assert list(families.values()) == [7, 8, 9, 9, 10, 7], families
    for size in "gpsd":  # the letter decides nothing
        assert policy.gpu_of_architecture("applegpu_g16" + size, num_cores=20) == policy.Gpu(family=9, num_cores=20)


def main():
    dump, source_dir = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 20000
    rng = random.Random(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    policy = load_policy(source_dir)
    check_constants(policy, source_dir)
    check_generations(policy)
    trials = [random_problem(rng, policy) for _ in range(count)]
    run = subprocess.run([dump], input="\n".join(line_of(*trial) for trial in trials) + "\n", capture_output=True, text=True,
                         check=False)
    lines = run.stdout.splitlines()
    if run.returncode or len(lines) != count:
        print(f"{dump}: exit {run.returncode}, {len(lines)} of {count} lines\n{run.stderr}")
        return 1
    wrong = 0
    outcomes = collections.Counter()
    for trial, line in zip(trials, lines):
        native = fields_of_dump(line)
        outcomes["refused" if "error" in native else native["body"]] += 1
        found = differences(fields_of_python(policy, *trial), native)
        if found:
            wrong += 1
            if wrong <= 10:
                print(f"FAILED: {line_of(*trial)}\n  " + "\n  ".join(found))
    print(f"{count} problems, {dict(outcomes)}: {wrong} differ")
    enough = all(outcomes[name] * 50 > count for name in ("refused", "vector", "matrix", "per_head"))
    if not enough:
        print("FAILED: an outcome was too rare")
    return 0 if wrong == 0 and enough else 1


if __name__ == "__main__":
    sys.exit(main())

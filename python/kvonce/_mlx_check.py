"""python -m kvonce.mlx check: conformance, the seed's table and whole models where MLX runs, into one JSON file to send back."""
import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys

import mlx.core as mx

import kvonce
from kvonce import _mlx_calls, _mlx_check_conformance, _mlx_check_models, _mlx_check_table, _mlx_metal

SCHEMA = "kvonce.mlx_check/1"
MODELS = ("mlx-community/Qwen2.5-3B-Instruct-4bit", "mlx-community/Qwen3-30B-A3B-4bit")


def on_metal():
    return _mlx_calls.backend_of(None) is _mlx_metal


def backend_name():
    """Of what serves the calls: metal, cuda or cpu."""
    return _mlx_calls.backend_of(None).__name__.rpartition("_mlx_")[2]


def _output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor():
    """The processor's name, as the system has it."""
    name = _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    if not name and os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else ""
    return name or platform.processor()


def describe_system():
    device_info = getattr(mx, "device_info", None) or mx.metal.device_info
    gpu_cores = ""
    if platform.system() == "Darwin":
        for line in _output_of("ioreg", "-l", "-w0", "-r", "-c", "AGXAccelerator").splitlines():
            if '"gpu-core-count"' in line:
                gpu_cores = line.rpartition("=")[2].strip()
    return {"os": platform.platform(), "processor": _processor(), "processors": os.cpu_count(), "gpu_cores": gpu_cores,
            "device": str(mx.default_device()),
            "device_info": {name: str(value) for name, value in device_info().items()}, "python": platform.python_version(),
            "versions": {name: _version(name) for name in ("mlx", "mlx-lm", "transformers")}, "kvonce": kvonce.__version__}


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m kvonce.mlx check", description=__doc__)
    parser.add_argument("command", choices=("check",))
    parser.add_argument("--out", default="kvonce-mlx-check.json", help="the JSON file; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes and no models: whether it works at all")
    parser.add_argument("--lens", help="kv_len of the table, comma-separated; default: 2048,8192,32768")
    parser.add_argument("--commit", default="", help="of the clone, for the file")
    parser.add_argument("--models", help="mlx-lm models, folders or names, comma-separated, 'none' for none; "
                        f"default on Metal: {','.join(MODELS)}")
    parser.add_argument("--context", type=int, help="tokens in the models' caches; default: 32768, not on Metal 2048")
    parser.add_argument("--tokens", type=int, help="tokens that the models generate per run; default: 64, not on Metal 16")
    options = parser.parse_args(arguments)
    options.lens = [int(length) for length in (options.lens or ("128" if options.quick else "2048,8192,32768")).split(",")]
    options.context = options.context or (300 if options.quick else 32768 if on_metal() else 2048)
    options.tokens = options.tokens or (8 if options.quick else 64 if on_metal() else 16)
    if options.models is None:
        options.models = list(MODELS) if on_metal() and not options.quick else []
    else:
        options.models = [] if options.models == "none" else options.models.split(",")
    return options


def main(arguments):
    options = parse(arguments)
    result = {"schema": SCHEMA, "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "command": "python -m kvonce.mlx " + " ".join(arguments), "commit": options.commit, "backend": backend_name(),
              "system": describe_system()}

    def save():
        with open(options.out + ".part", "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
        os.replace(options.out + ".part", options.out)

    print(f"kvonce.mlx {kvonce.__version__} on {result['backend']}, {result['system']['processor']}", flush=True)
    # After each part the file is whole: a run that is stopped is worth something too.
    for name, run in (("conformance", lambda: _mlx_check_conformance.run(on_metal(), options.quick)),
                      ("table", lambda: _mlx_check_table.run(on_metal(), options.lens, options.quick)),
                      ("models", lambda: [_mlx_check_models.run(model, options.context, options.tokens)
                                          for model in options.models])):
        result[name] = run()
        save()
    failed = list(result["conformance"]["failed"])
    failed += [f"table, {row['case']}: {calls} calls went to MLX: {reason}" for row in result["table"]
               for reason, calls in row["stats"]["fallbacks"].items()]
    failed += [f"{model['model']}: {model['error']}" for model in result["models"] if "error" in model]
    failed += [f"{model['model']}: no call was served" for model in result["models"] if not model.get("stats", {}).get("served", 1)]
    # A file without these two is of a run that was stopped.
    result["finished"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    result["failed"] = failed
    save()
    print(f"{result['conformance']['cases']} cases, {len(failed)} failed; written to {options.out}")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0

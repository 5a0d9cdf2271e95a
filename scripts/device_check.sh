#!/usr/bin/env bash
# What only a machine with a CUDA device can show; each part runs in under 8 minutes and leaves up to 8 files in the folder given.
# usage: device_check.sh check|sanitize|bench|chain|peers|python|all [OUT]
# OUT: default build/device-check. KVONCE_CUDA_BUILD=DIR takes a build that is there (tools/kvonce, tests/cuda/*; peers:
# src/libkvonce.so, bench/libkvonce_neighbours.so); else build/release is built first, which needs nvcc 12.8 or newer.
# python needs a python3 with torch, Python.h (KVONCE_PYTHON_INCLUDE=DIR: its folder) and nanobind (KVONCE_PYTHON_SITE=DIR: a
# folder of packages that has it), and builds the module in build/device-python; KVONCE_PYTHON_PACKAGE=DIR takes the folder that holds a built package `kvonce`.
# KVONCE_PYTHON_TESTS: names, as for tests/python/run.py.
# all: every part but python, packed into OUT/device-check.tar.xz, as far as it came.
# peers needs a python3 with torch. KVONCE_PEERS_SITE=DIR is a folder of Python packages with FlashInfer and FlashAttention-3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
part=${1:-}
out=${2:-$root/build/device-check}

case $part in
  check | sanitize | bench | chain | peers | python | all) ;;
  *)
    echo "device_check: got '$part'; allowed: check, sanitize, bench, chain, peers, python, all" >&2
    exit 2
    ;;
esac
build=${KVONCE_CUDA_BUILD:-}
if [[ $part == python ]]; then
  build=$root/build/device-python
elif [[ -z $build ]]; then
  build=$root/build/release
  "$root/dev" build release >&2
fi
kvonce=$build/tools/kvonce
[[ $part == python || -x $kvonce ]] || { echo "device_check: no $kvonce; set KVONCE_CUDA_BUILD to a build's folder" >&2; exit 2; }
mkdir -p "$out"

status=0
run() {  # FILE SECONDS COMMAND...
  local file=$out/$1 seconds=$2 result=0
  shift 2
  timeout -k 5 "$seconds" "$@" >"$file" 2>&1 || result=$?
  if ((result == 0)); then
    echo "ok      $(basename "$file")"
  else
    echo "FAILED  $(basename "$file")  (exit $result)"
    tail -n 20 "$file"
    status=1
  fi
}

sanitize() {  # TOOL SEEDS
  # Not the whole grid: every access costs a hundredfold. The seeds name about a tenth of it.
  KVONCE_ONLY="seed=$2" run "sanitize-$1.txt" 150 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$kvonce" check --backend cuda --quick
}

case $part in
  check)
    run conformance.txt 120 "$kvonce" check --backend cuda
    run plans.txt 60 "$build/tests/cuda/cuda_plan_test"
    run device.txt 240 "$build/tests/cuda/cuda_device_test"
    ;;
  sanitize)
    command -v compute-sanitizer >/dev/null || { echo "device_check: compute-sanitizer is not installed" >&2; exit 3; }
    for tool in memcheck racecheck initcheck; do sanitize "$tool" 1000; done
    ;;
  bench)
    run bench-bf16.txt 150 "$kvonce" bench --backend cuda --out "$out/cuda-bf16.json"
    run bench-f16.txt 150 "$kvonce" bench --backend cuda --dtype f16 --out "$out/cuda-f16.json"
    run bench-f32.txt 150 "$kvonce" bench --backend cuda --dtype f32 --out "$out/cuda-f32.json"
    run bench-shapes.txt 90 "$kvonce" bench --backend cuda --cases "$root/bench/cases/cuda-shapes.txt" --arms kvonce,read \
      --out "$out/cuda-shapes-bf16.json"
    ;;
  chain)
    run chain-bf16.txt 240 "$kvonce" bench --backend cuda --chain --out "$out/chain-bf16.json"
    grep -E 'kv=(2048|32768)$' "$root/bench/cases/cuda.txt" >"$out/planned-cases.txt"
    run planned-bf16.txt 120 "$kvonce" bench --backend cuda --cases "$out/planned-cases.txt" --planned-kv-len 131072 \
      --arms kvonce,kvonce_lens,kvonce_planned --out "$out/planned-bf16.json"
    ;;
  peers)
    if [[ -n ${KVONCE_PEERS_SITE:-} ]]; then
      [[ -d $KVONCE_PEERS_SITE ]] || { echo "device_check: KVONCE_PEERS_SITE: no folder $KVONCE_PEERS_SITE" >&2; exit 2; }
      export PYTHONPATH=$KVONCE_PEERS_SITE${PYTHONPATH:+:$PYTHONPATH}
      # FlashInfer takes the kernels that its folder holds and compiles none.
      export FLASHINFER_DISABLE_JIT=1 FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-9.0a}
      export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-${TMPDIR:-/tmp}/kvonce-flashinfer}
    fi
    export PYTHONUNBUFFERED=1
    run bench-bf16.txt 90 "$kvonce" bench --backend cuda --arms kvonce,read --out "$out/cuda-bf16.json"
    peers=(python3 "$root/bench/peers/cuda_peers.py" --kvonce "$build/src/libkvonce.so")
    read_arm=()
    if [[ -s $out/cuda-bf16.json ]]; then read_arm=(--read "$out/cuda-bf16.json"); fi
    run peers-bf16.txt 210 "${peers[@]}" --seconds 180 "${read_arm[@]}" --out "$out/peers-bf16.json"
    run peers-chain-bf16.txt 170 "${peers[@]}" --seconds 145 --chain --lens 2048,8192,32768 --out "$out/peers-chain-bf16.json"
    grep -h "peer leads" "$out/peers-bf16.txt" "$out/peers-chain-bf16.txt" || true
    ;;
  python)
    if [[ -n ${KVONCE_PYTHON_SITE:-} ]]; then export PYTHONPATH=$KVONCE_PYTHON_SITE${PYTHONPATH:+:$PYTHONPATH}; fi
    package=${KVONCE_PYTHON_PACKAGE:-$build/python}
    if [[ -z ${KVONCE_PYTHON_PACKAGE:-} ]]; then
      cmake -S "$root" -B "$build" -D KVONCE_BUILD_PYTHON=ON -D KVONCE_BUILD_TOOLS=OFF -D KVONCE_BUILD_TESTS=OFF \
        -D KVONCE_INSTALL=OFF -D KVONCE_CUDA=ON -D Python_EXECUTABLE="$(command -v python3)" \
        ${KVONCE_PYTHON_INCLUDE:+-D Python_INCLUDE_DIR="$KVONCE_PYTHON_INCLUDE"} >"$out/configure.txt"
      cmake --build "$build" -j "$(nproc)" --target kvonce_python >"$out/build.txt" || { tail -n 40 "$out/build.txt"; exit 1; }
    fi
    # shellcheck disable=SC2086 # one word per name
    KVONCE_PYTHON_PACKAGE=$package PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH} run python.txt 480 python3 "$root/tests/python/run.py" \
      --junit "$out/python.xml" ${KVONCE_PYTHON_TESTS:-}
    ;;
  all)
    parts=$(mktemp -d)
    for each in bench peers chain check sanitize; do
      echo "-- $each"
      KVONCE_CUDA_BUILD=$build "${BASH_SOURCE[0]}" "$each" "$parts/$each" || status=1
      tar -C "$parts" -cJf "$out/device-check.tar.xz" .
    done
    rm -rf "$parts"
    ;;
esac
exit "$status"

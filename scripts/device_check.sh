#!/usr/bin/env bash
# What only a machine with a CUDA device can show; each part runs in under 8 minutes and leaves up to 8 files in the folder given.
# usage: device_check.sh check|sanitize|bench|chain|peers [OUT]
# OUT: default build/device-check. KVONCE_CUDA_BUILD=DIR takes a build that is there (tools/kvonce, tests/cuda/*); else
# build/release is built first, which needs nvcc 12.8 or newer.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
part=${1:-}
out=${2:-$root/build/device-check}

case $part in
  check | sanitize | bench | chain | peers) ;;
  *)
    echo "device_check: got '$part'; allowed: check, sanitize, bench, chain, peers" >&2
    exit 2
    ;;
esac
build=${KVONCE_CUDA_BUILD:-}
if [[ -z $build ]]; then
  build=$root/build/release
  "$root/dev" build release >&2
fi
kvonce=$build/tools/kvonce
[[ -x $kvonce ]] || { echo "device_check: no $kvonce; set KVONCE_CUDA_BUILD to a build's folder" >&2; exit 2; }
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
  # Not the whole grid: every access costs a hundredfold. The seeds name about ten cases of each kind of join.
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
    for tool in memcheck racecheck initcheck; do sanitize "$tool" 10000; done
    ;;
  bench)
    run bench-bf16.txt 150 "$kvonce" bench --backend cuda --out "$out/cuda-bf16.json"
    run bench-f16.txt 150 "$kvonce" bench --backend cuda --dtype f16 --out "$out/cuda-f16.json"
    run bench-f32.txt 150 "$kvonce" bench --backend cuda --dtype f32 --out "$out/cuda-f32.json"
    ;;
  chain)
    run chain-bf16.txt 240 "$kvonce" bench --backend cuda --chain --out "$out/chain-bf16.json"
    grep -E 'kv=(2048|32768)$' "$root/bench/cases/cuda.txt" >"$out/planned-cases.txt"
    run planned-bf16.txt 120 "$kvonce" bench --backend cuda --cases "$out/planned-cases.txt" --planned-kv-len 131072 \
      --arms kvonce,kvonce_lens,kvonce_planned --out "$out/planned-bf16.json"
    ;;
  peers)
    # One after the other on the same device: the kvonce figures to compare with are those of this call.
    run bench-bf16.txt 150 "$kvonce" bench --backend cuda --arms kvonce,read --out "$out/cuda-bf16.json"
    run peers-torch.txt 150 python3 "$root/bench/peers/cuda_torch.py" --out "$out/torch-bf16.json"
    ;;
esac
exit "$status"

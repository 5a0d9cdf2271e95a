#!/usr/bin/env bash
# Records kvonce and every peer that is set up: bench/results/<cpu>/peers-<dtype>-t<threads>.json, one file a dtype.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/peers/run.sh --results DIR [--work DIR] [--build DIR] [--dtypes f16,bf16,f32] [--threads N] [ARGUMENT...]

--results DIR   where the files go, such as bench/results/<cpu name>
ARGUMENT        handed to peers.py: --arms, --case, --rounds, ...
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$HOME/.cache/kvonce-peers
build=$here/../../build/peers
results=''
dtypes=f16,bf16,f32
threads=2
arguments=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --work | --build | --results | --dtypes | --threads)
      [[ $# -ge 2 ]] || { echo "run: $1 needs a value" >&2 && exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    -h | --help) usage && exit 0 ;;
    *) arguments+=("$1") && shift ;;
  esac
done
[[ -d $results ]] || { usage >&2 && echo "run: --results is '$results'; it must be a folder" >&2 && exit 2; }

status=0
for dtype in ${dtypes//,/ }; do
  "$work/venv/bin/python" "$here/peers.py" --work "$work" --build "$build" --dtype "$dtype" --threads "$threads" \
    --out "$results/peers-$dtype-t$threads.json" "${arguments[@]}" || status=1
done
exit "$status"

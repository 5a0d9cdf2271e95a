#!/usr/bin/env bash
# Shows that the shared library's ABI can be recorded and compared: abidw writes it down, abidiff finds no change
# between the library and the record, and does find a removed function.
# usage: abidiff_test.sh LIBRARY INCLUDE_DIR; exit 77 (skipped) without abigail-tools.
set -euo pipefail
library=$1
headers=$2
for tool in abidw abidiff; do
  if ! command -v "$tool" >/dev/null; then
    echo "skipped: $tool is not installed (Debian package abigail-tools)"
    exit 77
  fi
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

abidw --headers-dir "$headers" --out-file "$scratch/kvonce.abi" "$library"
num_functions=$(grep -c "elf-symbol name='kvonce_" "$scratch/kvonce.abi")
echo "abidw: recorded $num_functions kvonce_ functions of $(basename "$library")"

abidiff "$scratch/kvonce.abi" "$library"
echo "abidiff: the library equals its record"

# A record with one function more than the library has: abidiff must report the removal (bit 4 and 8 of its status).
sed "s/\(.*elf-symbol name='kvonce_\)merge\('.*\)/&\n\1unmade\2/" "$scratch/kvonce.abi" >"$scratch/more.abi"
if cmp -s "$scratch/kvonce.abi" "$scratch/more.abi"; then
  echo "the record holds no symbol kvonce_merge"
  exit 1
fi
status=0
abidiff "$scratch/more.abi" "$library" >"$scratch/report" || status=$?
if (((status & 4) == 0)); then
  cat "$scratch/report"
  echo "abidiff did not report the removed function (status $status)"
  exit 1
fi
echo "abidiff: reports a removed function"

#!/usr/bin/env bash
# clang-tidy over the C++ that a C++ compiler alone can read: the checks and the CPU half. Seconds.
#
#   PYTHON=python tools/tidy.sh       needs torch for its headers, and clang-tidy beside PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
tidy="${CLANG_TIDY:-$(dirname "$python")/clang-tidy}"
include="$("$python" -c 'import os, torch; print(os.path.join(torch.__path__[0], "include"))')"
target="$(sed -nE 's/^ABI_TARGET = \(([0-9]+), ([0-9]+)\)/\1 \2/p' setup.py)"
read -r major minor <<< "$target"
status=0
while IFS= read -r source; do
  "$tidy" --quiet "$source" -- -std=c++20 -Icsrc -isystem "$include" -DTORCH_STABLE_ONLY \
    "$(printf -- '-DTORCH_TARGET_VERSION=0x%02x%02x000000000000' "$major" "$minor")" \
    2> >(grep -v 'warnings generated' >&2) || status=1
done < <(find csrc -name '*.cpp' -not -path 'csrc/cuda/*' | sort)
exit "$status"

#!/usr/bin/env bash
# Tests the installed package with the python of PATH, from an empty folder so that no source tree
# can be imported by accident: tools/ci/test_wheel.sh [all | TEST_FILE_STEM ...]
# The default is what a Python or a torch can change: loading, known values, the operators' registration.
set -euo pipefail
source "$(dirname "$0")/env.sh"

files=()
if [[ "${1:-}" == all ]]; then
  files=("$root/tests")
else
  if (($# == 0)); then set -- test_loader test_literals test_operators; fi
  for stem in "$@"; do files+=("$root/tests/$stem.py"); done
fi
mkdir "$scratch/empty"
cd "$scratch/empty"
python -m convt_reduce info
python -m pytest --quiet -c "$root/pyproject.toml" -p no:cacheprovider "${files[@]}"

#!/usr/bin/env bash
# Before cibuildwheel tests, under each Python: the newest CPU torch that has a wheel for it, from
# the nightly builds if no release has. No version is named, for no torch has wheels for all.
#   tools/ci/before_test.sh
set -euo pipefail

index=https://download.pytorch.org/whl
python -m pip install "torch>=2.10" --index-url "$index/cpu" ||
  python -m pip install --pre "torch>=2.10" --index-url "$index/nightly/cpu"

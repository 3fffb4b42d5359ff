#!/usr/bin/env bash
# Before cibuildwheel builds, in its container: the torch to build beside, and what the build needs.
#   CONVT_REDUCE_CUDA=13|12 tools/ci/before_build.sh
# Any torch from 2.10 on gives the same libraries; 2.14.1 is the last with wheels for CUDA 12 and for
# Python 3.10, where cibuildwheel begins.
set -euo pipefail
cd "$(dirname "$0")/../.."

case "${CONVT_REDUCE_CUDA:?set it to 12 or 13}" in
  12) index=cu126 ;;
  13) index=cu130 ;;
  *)
    echo "before_build.sh: CONVT_REDUCE_CUDA must be 12 or 13, got $CONVT_REDUCE_CUDA" >&2
    exit 2
    ;;
esac
python -m pip install --upgrade "pip>=25.1"
python -m pip install "torch==2.14.1" --index-url "https://download.pytorch.org/whl/$index"
python -m pip install --group build

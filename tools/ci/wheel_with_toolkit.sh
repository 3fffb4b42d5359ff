#!/usr/bin/env bash
# Builds, repairs and checks a wheel with an nvcc assembled from PyPI, without a GPU or a toolkit:
#   tools/ci/wheel_with_toolkit.sh 13.0 FOLDER
# VENV names the environment whose torch the build uses. `system` for the version takes the nvcc of
# this machine instead.
set -euo pipefail
source "$(dirname "$0")/env.sh"

version="${1:?give a CUDA version like 13.0, or system}"
folder="${2:?give the folder for the wheel}"
venv="$(cd "${VENV:-$root/.venv}" && pwd)"

if [[ "$version" != system ]]; then
  CUDA_HOME="$(PYTHON="$venv/bin/python" "$root/tools/ci/cuda_toolkit.sh" "$version" "$scratch/toolkit")"
  export CUDA_HOME
fi
copy_tree "$scratch/source"
export PATH="$venv/bin:$PATH" CONVT_REDUCE_BUILD_CUDA=1
started=$SECONDS
(cd "$scratch/source" && quietly python -m pip wheel --no-deps --no-build-isolation --wheel-dir "$scratch/dist" .)
echo "built with CUDA $version in $((SECONDS - started)) s"
"$root/tools/ci/repair_wheel.sh" "$scratch"/dist/*.whl "$folder"

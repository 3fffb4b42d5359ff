#!/usr/bin/env bash
# Gives a wheel the manylinux tag that it has earned, and checks the result:
#   tools/ci/repair_wheel.sh WHEEL FOLDER
# Nothing is grafted in: torch's libraries come with torch, the driver's with the driver.
# MANYLINUX=auto accepts whatever platform it has earned: a new system makes wheels for new systems.
set -euo pipefail
source "$(dirname "$0")/env.sh"

wheel="${1:?give a wheel}"
folder="${2:?give the folder for the repaired wheel}"
platform="${MANYLINUX:-manylinux_2_28}"
machine="$(uname -m)"

tools="$(release_tools)"
export PATH="$tools:$PATH" # auditwheel runs patchelf by name
auditwheel show "$wheel"
mkdir -p "$scratch/repaired"
plat="$platform"
if [[ "$platform" != auto ]]; then plat="${platform}_$machine"; fi
auditwheel repair "$wheel" --plat "$plat" --only-plat \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda.so.*' --exclude 'libcudart.so.*' \
  --wheel-dir "$scratch/repaired"
if [[ "$platform" == auto ]]; then
  platform="$(basename "$scratch"/repaired/*.whl "_$machine.whl")"
  platform="${platform##*-}"
fi
# A CPU-only wheel is no release; it is repaired all the same where that is asked for.
check=(--release "$platform")
if [[ "${CONVT_REDUCE_BUILD_CUDA:-auto}" == 0 ]]; then check=(); fi
python "$root/tools/check_wheel.py" "$scratch"/repaired/*.whl "${check[@]}"
mkdir -p "$folder"
cp "$scratch"/repaired/*.whl "$folder/"

#!/usr/bin/env bash
# Gives a wheel the manylinux tag that it has earned, and checks the result:
#   tools/ci/repair_wheel.sh WHEEL FOLDER
# Nothing is grafted in: torch's libraries come with torch, the driver's with the driver.
# MANYLINUX=manylinux_2_34 accepts a newer platform than a release is for, as on a new system.
set -euo pipefail
source "$(dirname "$0")/env.sh"

wheel="${1:?give a wheel}"
folder="${2:?give the folder for the repaired wheel}"
platform="${MANYLINUX:-manylinux_2_28}"

tools="$(release_tools)"
export PATH="$tools:$PATH" # auditwheel runs patchelf by name
auditwheel show "$wheel"
mkdir -p "$scratch/repaired"
auditwheel repair "$wheel" --plat "${platform}_$(uname -m)" --only-plat \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda.so.*' --exclude 'libcudart.so.*' \
  --wheel-dir "$scratch/repaired"
# A CPU-only wheel is no release; it is repaired all the same where that is asked for.
check=(--release "$platform")
if [[ "${CONVT_REDUCE_BUILD_CUDA:-auto}" == 0 ]]; then check=(); fi
python "$root/tools/check_wheel.py" "$scratch"/repaired/*.whl "${check[@]}"
mkdir -p "$folder"
cp "$scratch"/repaired/*.whl "$folder/"

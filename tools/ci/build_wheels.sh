#!/usr/bin/env bash
# Builds the wheel of a release in a manylinux container and tests it under every Python, into dist/:
#   tools/ci/build_wheels.sh 13|12 [LOCAL_VERSION]
# Needs Docker. LOCAL_VERSION, cu12 or cu13, becomes the version's suffix at build time.
# MANYLINUX_CUDA_TAG pins the image: a date tag or latest; see docs/release.md.
set -euo pipefail
source "$(dirname "$0")/env.sh"

case "${1:?give the CUDA major, 12 or 13}" in
  12) toolkit=cuda12_9 ;;
  13) toolkit=cuda13_1 ;;
  *)
    echo "build_wheels.sh: the CUDA major must be 12 or 13, got $1" >&2
    exit 2
    ;;
esac
for machine in x86_64 aarch64; do
  declare -x "CIBW_MANYLINUX_${machine^^}_IMAGE=quay.io/manylinux_cuda/manylinux_2_28_${machine}_$toolkit:${MANYLINUX_CUDA_TAG:-latest}"
done
export CONVT_REDUCE_CUDA="$1" CONVT_REDUCE_LOCAL_VERSION="${2:-}"
SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --pretty=%ct)"
export SOURCE_DATE_EPOCH
cd "$root"
exec "$(release_tools)/cibuildwheel" --platform linux --output-dir dist

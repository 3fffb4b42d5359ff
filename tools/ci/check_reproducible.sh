#!/usr/bin/env bash
# Builds the same sources twice, in two folders with names of different lengths, and compares the
# wheels byte by byte: tools/ci/check_reproducible.sh. VENV names the environment with torch.
# One architecture is built, since others differ in nothing but time; TORCH_CUDA_ARCH_LIST overrides.
set -euo pipefail
source "$(dirname "$0")/env.sh"

venv="$(cd "${VENV:-$root/.venv}" && pwd)"
export PATH="$venv/bin:$PATH" TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --pretty=%ct 2> /dev/null || echo 1700000000)}"
export SOURCE_DATE_EPOCH

for place in one/source another/rather/longer/source; do
  copy_tree "$scratch/$place"
  (cd "$scratch/$place" && quietly python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .)
done
first=("$scratch"/one/source/dist/*.whl)
second=("$scratch"/another/rather/longer/source/dist/*.whl)
if cmp --silent "${first[0]}" "${second[0]}"; then
  echo "reproducible: $(sha256sum < "${first[0]}" | cut -c1-64) from both folders"
  exit
fi
echo "not reproducible; these files differ:"
for side in first second; do
  declare -n wheel="$side"
  mkdir "$scratch/$side"
  python -m zipfile -e "${wheel[0]}" "$scratch/$side"
done
diff --brief --recursive "$scratch/first" "$scratch/second"
exit 1

#!/usr/bin/env bash
# What a release must pass beyond the test-suite, on one machine: VENV=.venv tools/ci/release_check.sh
# Every step is a script of its own name in this folder and can be run alone. The wheels are left in
# dist/release. The variables below choose less, or torches that are there already:
#   TOOLKITS  the nvccs to build with: `system` for this machine's, a version for PyPI's
#   ROWS      what to try the wheel on, as compat.sh takes it; empty for all of its own
#   SDIST_ROW, INSTALL_ROW  one row each for check_sdist.sh and check_install.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

read -r -a toolkits <<< "${TOOLKITS:-system 13.0 13.5}"
read -r -a rows <<< "${ROWS:-}"
export MANYLINUX="${MANYLINUX:-auto}"

step() {
  printf '\n##### %s\n' "$*"
  local started=$SECONDS
  "$@"
  printf '##### %s: %d s\n' "$(basename "$1")" $((SECONDS - started))
}

step tools/ci/lint_workflows.sh
step tools/ci/check_reproducible.sh
for toolkit in "${toolkits[@]}"; do
  rm -rf "dist/release/$toolkit"
  step tools/ci/wheel_with_toolkit.sh "$toolkit" "dist/release/$toolkit"
done
wheel=("dist/release/${toolkits[0]}"/*.whl)
step tools/ci/compat.sh "${wheel[0]}" "${rows[@]}"
step tools/ci/check_install.sh "${wheel[0]}" "${INSTALL_ROW:-3.12=torch}"
sdists=(dist/*.tar.gz)
step tools/ci/check_sdist.sh "${sdists[0]}" "${SDIST_ROW:-3.12=torch}"
printf '\n##### all of the release check: %d s\n' "$SECONDS"

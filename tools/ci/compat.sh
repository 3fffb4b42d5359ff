#!/usr/bin/env bash
# One wheel under many Pythons and torches, each in an environment of its own:
#   tools/ci/compat.sh WHEEL [PYTHON=TORCH ...]
# for example 3.12=torch==2.11.0, or 3.11=/some/env/lib/python3.11/site-packages to use a torch that
# is there already. Without rows it takes those below, which download some GB each; environments are
# deleted one by one. COMPAT_TESTS goes to test_wheel.sh. Each row's verdict is printed at the end.
set -euo pipefail
source "$(dirname "$0")/env.sh"

wheel="$(realpath "${1:?give a wheel}")"
shift
rows=("$@")
if ((${#rows[@]} == 0)); then
  rows=(
    3.10=torch==2.10.0 3.11=torch==2.11.0 3.12=torch==2.12.1
    3.11=torch==2.13.0+cpu 3.10=torch==2.14.1 3.13=torch==2.14.1 3.13=torch
  )
fi
read -r -a tests <<< "${COMPAT_TESTS:-}" # none: the default of test_wheel.sh

try_row() {
  local python="$1" torch="$2" env="$scratch/env"
  make_env "$env" "$python" "$torch" || return 1
  quietly "$env/bin/python" -m pip install --no-deps --ignore-installed "$wheel" || return 1
  (cd "$root" && quietly "$env/bin/python" -m pip install --group test) || return 1
  PATH="$env/bin:$PATH" "$root/tools/ci/test_wheel.sh" "${tests[@]}"
}

verdicts=()
failed=0
for row in "${rows[@]}"; do
  version="${row%%=*}"
  torch="${row#*=}"
  printf '\n##### Python %s, %s\n' "$version" "$torch"
  if ! python="$(find_python "$version")"; then
    verdicts+=("skipped  Python $version is not here: $torch")
  elif (try_row "$python" "$torch"); then
    verdicts+=("passed   Python $version, $torch")
  else
    verdicts+=("FAILED   Python $version, $torch")
    failed=1
  fi
  rm -rf "$scratch/env"
done
printf '\n'
printf '%s\n' "${verdicts[@]}"
exit "$failed"

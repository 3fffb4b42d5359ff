#!/usr/bin/env bash
# An environment to build in without isolation: tools/ci/build_env.sh FOLDER [TORCH]
set -euo pipefail
source "$(dirname "$0")/env.sh"

folder="${1:?give the folder of the environment}"
make_env "$folder" "${PYTHON:-python3}" "${2:-torch>=2.10}"
folder="$(realpath "$folder")"
(cd "$root" && quietly "$folder/bin/python" -m pip install --group build)

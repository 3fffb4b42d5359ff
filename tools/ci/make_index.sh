#!/usr/bin/env bash
# Writes the page that pip reads for the wheels with a suffix, from the assets of all releases:
#   tools/ci/make_index.sh FOLDER
# Needs GitHub's gh, and GITHUB_REPOSITORY as owner/name.
set -euo pipefail
source "$(dirname "$0")/env.sh"

gh api --paginate --slurp "repos/${GITHUB_REPOSITORY:?}/releases" > "$scratch/releases.json"
python3 "$root/tools/wheel_index.py" "$scratch/releases.json" "${1:?give the folder to write}"

#!/usr/bin/env bash
# Makes the release of a tag with every file of a folder, and its part of CHANGELOG.md as notes:
#   tools/ci/publish_assets.sh v1.2.3 FOLDER
# Needs GitHub's gh and a token; run again, it replaces the files.
set -euo pipefail
source "$(dirname "$0")/env.sh"

tag="${1:?give the tag}"
folder="${2:?give the folder of files}"
python3 "$root/tools/version.py" --tag "$tag" --notes > "$scratch/notes"
(cd "$folder" && sha256sum -- * > "$scratch/SHA256SUMS")
gh release view "$tag" > /dev/null 2>&1 ||
  gh release create "$tag" --verify-tag --title "$tag" --notes-file "$scratch/notes"
gh release upload "$tag" --clobber "$folder"/* "$scratch/SHA256SUMS"

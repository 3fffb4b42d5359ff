#!/usr/bin/env bash
# Assembles an nvcc from PyPI, for a machine without the CUDA toolkit and without root:
#   tools/ci/cuda_toolkit.sh 13.0 /path/to/folder
# prints the folder to set CUDA_HOME to. CUDA 13 only: the 12.x packages hold no nvcc. About 350 MB.
set -euo pipefail

version="${1:?give a CUDA version like 13.0}"
folder="${2:?give the folder to make}"
python="${PYTHON:-python3}"

major="${version%%.*}"
minor="${version#*.}"
if [[ ! "$version" =~ ^[0-9]+\.[0-9]+$ ]] || ((major < 13)); then
  echo "cuda_toolkit.sh: the version must be major.minor from 13.0 on, got '$version'" >&2
  exit 2
fi
# From 13.3 on the headers of CCCL are numbered by CCCL's own version, 3.MINOR.
cccl="$version"
if ((major == 13 && minor >= 3)); then cccl="13.3.$minor"; fi

packages=("nvidia-cuda-cccl==$cccl.*")
for part in nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime; do
  packages+=("$part==$version.*")
done
rm -rf "$folder"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
  "${packages[@]}" >&2

home="$(cd "$folder/nvidia/cu$major" && pwd)"
"$home/bin/nvcc" --version | grep --quiet "release $version," || {
  echo "cuda_toolkit.sh: $home/bin/nvcc does not say release $version" >&2
  exit 1
}
echo "$home"

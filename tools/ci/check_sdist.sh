#!/usr/bin/env bash
# Installs the source archive as users do: with pip and isolation, with pip and without, with uv.
#   tools/ci/check_sdist.sh SDIST [PYTHON=TORCH]
# Each way ends in a call of the operator from an empty folder. TORCH is what both the build and the
# user have; the default downloads the newest, some GB.
set -euo pipefail
source "$(dirname "$0")/env.sh"

sdist="$(realpath "${1:?give the source archive}")"
row="${2:-3.12=torch}"
python="$(find_python "${row%%=*}")"
torch="${row#*=}"

smoke="import torch, convt_reduce
ones = torch.ones(1, 1, 2, 2)
assert convt_reduce.fused_mean(ones, ones[..., :1, :1], None, 1, 0, 0, 1, 1, 2.0).item() == 2.0
print('convt_reduce', convt_reduce.__version__, 'beside torch', torch.__version__)"

try_it() {
  mkdir -p "$scratch/empty"
  (cd "$scratch/empty" && "$scratch/env/bin/python" -c "$smoke")
}

# Build environments take the same torch.
if [[ "$torch" == torch==* ]]; then echo "$torch"; fi > "$scratch/constraints"

for way in "pip, isolated" "pip, without isolation" "uv, isolated"; do
  printf '##### %s\n' "$way"
  make_env "$scratch/env" "$python" "$torch"
  started=$SECONDS
  case "$way" in
    "pip, isolated")
      quietly "$scratch/env/bin/python" -m pip install --build-constraint "$scratch/constraints" "$sdist"
      ;;
    "pip, without isolation")
      (cd "$root" && quietly "$scratch/env/bin/python" -m pip install --group build)
      PATH="$scratch/env/bin:$PATH" quietly "$scratch/env/bin/python" -m pip install --no-build-isolation "$sdist"
      ;;
    "uv, isolated")
      quietly "$(release_tools)/uv" pip install --python "$scratch/env/bin/python" \
        --build-constraints "$scratch/constraints" ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$sdist"
      ;;
  esac
  try_it
  echo "in $((SECONDS - started)) s"
  rm -rf "$scratch/env"
done

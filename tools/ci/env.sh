# Sourced by the scripts beside it: Pythons, throw-away environments and the tools of a release.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# find_python 3.12: a working Python of that version, from PATH or from pyenv.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2> /dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# make_env FOLDER PYTHON TORCH: a new environment with torch and numpy. TORCH is what pip
# understands, or a site-packages folder whose torch is used as it is, which costs no disk.
# TORCH_INDEX names another index for torch, TORCH_PRE=1 takes its nightly builds.
make_env() {
  local folder="$1" python="$2" torch="$3"
  rm -rf "$folder"
  "$python" -m venv "$folder"
  quietly "$folder/bin/python" -m pip install "pip>=25.3"
  if [[ -d "$torch" ]]; then
    echo "$torch" > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
  else
    quietly "$folder/bin/python" -m pip install numpy
    quietly "$folder/bin/python" -m pip install ${TORCH_PRE:+--pre} \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
  fi
}

# quietly COMMAND...: its output only if it fails.
quietly() {
  local log
  log="$(mktemp -p "$scratch")"
  "$@" > "$log" 2>&1 || {
    cat "$log" >&2
    return 1
  }
}

# release_tools: the folder with the programs of the dependency group "release", made on first use.
release_tools() {
  local folder="${RELEASE_TOOLS:-$root/build/release-tools}"
  if [[ ! -e "$folder/.complete" || "$root/pyproject.toml" -nt "$folder/.complete" ]]; then
    mkdir -p "$folder"
    # Some of them want a Python that is newer than the oldest one that the package supports.
    "${PYTHON:-$(find_python 3.12 || find_python 3.13 || find_python 3.11 || command -v python3)}" \
      -m venv "$folder"
    quietly "$folder/bin/python" -m pip install --upgrade "pip>=25.1"
    (cd "$root" && quietly "$folder/bin/python" -m pip install --group release)
    touch "$folder/.complete"
  fi
  echo "$folder/bin"
}

# copy_tree FOLDER: the tracked files as they are now, without what builds left.
copy_tree() {
  mkdir -p "$1"
  if [[ -e "$root/.git" ]]; then
    (cd "$root" && git ls-files -z | tar --create --null --files-from=- --file=-) | tar -x -C "$1"
  else
    tar --create --directory "$root" --exclude=build --exclude=dist --exclude=.venv . | tar -x -C "$1"
  fi
}

#!/usr/bin/env bash
# Installs a wheel over an older version, then removes it:
#   tools/ci/check_install.sh WHEEL [PYTHON=TORCH]
# The new version must replace the old one's files, those that it no longer has too, and after
# uninstalling nothing may be left but what was there before.
set -euo pipefail
source "$(dirname "$0")/env.sh"

wheel="$(realpath "${1:?give a wheel}")"
row="${2:-3.12=torch}"
env="$scratch/env"
make_env "$env" "$(find_python "${row%%=*}")" "${row#*=}"
mkdir "$scratch/empty" "$scratch/old"
cd "$scratch/empty"
if "$env/bin/python" -c "import convt_reduce" 2> /dev/null; then
  echo "check_install.sh: ${row#*=} must hold no convt_reduce of its own" >&2
  exit 2
fi

contents() { (cd "$env" && find . -not -name '*.pyc' -not -name __pycache__ | sort); }

"$env/bin/python" "$root/tools/older_wheel.py" "$wheel" "$scratch/old"
contents > "$scratch/before"
quietly "$env/bin/python" -m pip install --no-deps "$scratch"/old/*.whl
"$env/bin/python" -c "import convt_reduce.only_in_the_old_version"
quietly "$env/bin/python" -m pip install --no-deps --force-reinstall "$wheel"
"$env/bin/python" - << 'PYTHON'
import importlib.metadata
import importlib.util

import convt_reduce

assert convt_reduce.__version__ == importlib.metadata.version("convt_reduce") != "0.0.1"
assert importlib.util.find_spec("convt_reduce.only_in_the_old_version") is None
print("installed over 0.0.1:", convt_reduce.__version__)
PYTHON
"$env/bin/python" -m convt_reduce info > /dev/null
quietly "$env/bin/python" -m pip uninstall --yes convt_reduce
contents > "$scratch/after"
diff "$scratch/before" "$scratch/after" || {
  echo "uninstalling left these behind" >&2
  exit 1
}
if find "$env" -name '*convt_reduce*' | grep .; then
  echo "uninstalling left these behind" >&2
  exit 1
fi
echo "uninstalled without a trace"

#!/usr/bin/env bash
# The CPU half under AddressSanitizer and UndefinedBehaviorSanitizer, or under ThreadSanitizer.
#
#   tools/sanitize_cpu.sh address [pytest arguments]     the tests of the operators, minutes
#   tools/sanitize_cpu.sh thread                         the threaded loops, a minute
#
# Python and torch are not instrumented, so the runtime is preloaded; leaks are theirs, not ours, and
# not looked for. PYTHON names the Python with torch and the installed wheel; it runs elsewhere.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
kind="${1:-address}"
shift || true
folder="$root/build/sanitize-$kind"
mkdir -p "$root/build/elsewhere"
cd "$root/build/elsewhere"

runtime() { "${CXX:-g++}" -print-file-name="lib$1.so"; }

# What runs no native code of ours, or only in other processes, or compiles for minutes.
left_out=(--ignore-glob="*/test_fuse_*" --ignore-glob="*/test_compile*"
  --ignore-glob="*/test_export*" --ignore-glob="*/test_distributed*" --ignore-glob="*/test_import*"
  --ignore-glob="*/test_kernelbench*" --ignore-glob="*/test_release*" --ignore-glob="*/test_wheel*"
  --ignore-glob="*/test_bench*" --ignore-glob="*/test_faults*")

case "$kind" in
  address)
    flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    "$python" "$root/tools/native_build.py" "$folder" --flags "$flags"
    # detect_odr_violation: torch itself has some. The stack of a fault goes to stderr.
    export ASAN_OPTIONS="detect_leaks=0,detect_odr_violation=0,abort_on_error=1"
    export UBSAN_OPTIONS="print_stacktrace=1,halt_on_error=1"
    LD_PRELOAD="$(runtime asan) $(runtime ubsan) $(runtime stdc++)" PYTHONPATH="$folder" \
      "$python" -m pytest -c "$root/pyproject.toml" "$root/tests" "${left_out[@]}" \
      -q -p no:cacheprovider -s "$@"
    ;;
  thread)
    "$python" "$root/tools/native_build.py" "$folder" --flags "-O1 -g -fsanitize=thread"
    # Only accesses by our own code are checked; OpenMP's barriers are invisible to it, so what they
    # order is named in the suppressions.
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=0 exitcode=66"
    LD_PRELOAD="$(runtime tsan) $(runtime stdc++)" PYTHONPATH="$folder" \
      "$python" "$root/tools/threads.py" "$@"
    ;;
  *)
    echo "sanitize_cpu: expected address or thread, got $kind" >&2
    exit 2
    ;;
esac

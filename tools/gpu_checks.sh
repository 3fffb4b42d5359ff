#!/usr/bin/env bash
# Everything of docs/reliability.md that needs a GPU, in about ten minutes on a fast machine.
#
#   PYTHON=/path/to/python tools/gpu_checks.sh [RESULTS]
#
# PYTHON has torch, pytest and the installed wheel. Each part writes RESULTS/NAME.log; the summary at
# the end has one line for each. Runs from an empty folder. compute-sanitizer is looked for on PATH
# and in the CUDA toolkit; without it those parts say so and count as failed. Parts run at the same
# time, on all GPUs there are, and none longer than LIMIT_S; each sanitizer's cases are cut into
# SHARES. memcheck and synccheck get all cases, racecheck and initcheck, which are slow, as many as
# run every kernel.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
results="$(mkdir -p "${1:-$root/build/gpu-checks}" && cd "${1:-$root/build/gpu-checks}" && pwd)"
limit="${LIMIT_S:-560}" # seconds for each part
shares="${SHARES:-8}"
gpus="$(nvidia-smi --list-gpus 2> /dev/null | wc -l)"
[ "$gpus" -gt 0 ] || gpus=1
started=0
sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | tail -n 1)"
elsewhere="$(mktemp -d)"
trap 'rm -rf "$elsewhere"' EXIT
cd "$elsewhere"
export CONVT_REDUCE_REQUIRE_GPU=1
declare -A parts

# part NAME COMMAND..: in the background on the next GPU, its output in a log.
part() {
  local name="$1" gpu=$((started % gpus))
  shift
  started=$((started + 1))
  CUDA_VISIBLE_DEVICES="$gpu" timeout "$limit" "$@" > "$results/$name.log" 2>&1 &
  parts[$name]=$!
}

# Without the caching allocator every tensor is an allocation of its own, and the sanitizer guards
# both its ends; with it, a neighbour in the same segment would hide a stray access.
sanitize() { # TOOL CASES OPTION..: CASES is a file of case numbers, or nothing for all
  local share tool="$1" cases=(${2:+--of "$2"})
  # What torch's kernels write counts as unwritten where only ours are looked at: none for ours then.
  [ "$tool" != initcheck ] || cases+=(--direct)
  shift 2
  for ((share = 0; share < shares; ++share)); do
    part "$tool-$share" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${sanitizer:-compute-sanitizer}" \
      --tool "$tool" "$@" --error-exitcode 9 --print-limit 20 \
      "$python" "$root/tools/gpu_cases.py" "${cases[@]}" --part "$share/$shares"
  done
}

rm -f "$results/cover.txt"
# Many processes at a time: of few threads each, and those that profile before the others.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
part cover "$python" "$root/tools/gpu_cases.py" --cover "$results/cover.txt"
part instantiations "$python" "$root/tools/gpu_cases.py" --instantiations
wait "${parts[cover]}" "${parts[instantiations]}"
sanitize memcheck ""
# Its own table of barriers is for few kernels at a time, so one at a time; and of smaller grids than
# some have. A much larger one ends in accesses of its own to no memory.
CUDA_LAUNCH_BLOCKING=1 sanitize synccheck "" --num-cuda-barriers 16384
sanitize racecheck "$results/cover.txt"
# Only our kernels: torch's own read padding that nobody wrote.
sanitize initcheck "$results/cover.txt" --check-api-memory-access no --kernel-name kns=convt_reduce
# With a million calls that keep nothing.
part faults env CONVT_REDUCE_LARGE_TESTS=1 "$python" -m pytest -c "$root/pyproject.toml" "$root/tests/test_cuda_faults.py" \
  "$root/tests/test_sizes.py" "$root/tests/test_kinds_of_tensors.py" -m gpu -q -p no:cacheprovider
# 16,000 right and 4,000 wrong calls, in pieces so that one process does not wait for another.
for piece in 0 1 2 3; do
  part "fuzz-valid-$piece" "$python" "$root/tests/fuzz" --device cuda --kind valid \
    --seed 7 --first $((piece * 4000)) --cases 4000
done
part fuzz-malformed "$python" "$root/tests/fuzz" --device cuda --kind malformed --seed 7 --cases 4000
part numerics "$python" "$root/tools/numerics.py" --device cuda --largest 28 --dtypes float32

failed=0
for name in $(printf '%s\n' "${!parts[@]}" | sort); do
  wait "${parts[$name]}"
  code=$?
  [ "$code" = 0 ] || failed=1
  last="$(grep -v '^$' "$results/$name.log" | tail -n 1 | cut -c1-120)"
  printf '%-20s exit %3d  %s\n' "$name" "$code" "$last"
done
exit "$failed"

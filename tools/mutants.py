"""Seeded faults: each is built into a copy of the CPU half or the package and must be caught.

    python tools/mutants.py [--only NAMES]      about 20 minutes on two cores

Run from an empty folder beside an installed package. A fault is one exact replacement in
csrc/cells.h, the validation or the CPU kernels; the tests named with it run against the faulty copy
and at least one must fail. A replacement that no longer fits its file is an error here, so that the
list follows the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from native_build import ROOT, build

LIMIT = 240  # seconds, several times what the tests take; some faults make a loop endless
CELLS = "csrc/cells.h"
KERNELS = "tests/test_literals.py tests/test_property.py tests/test_laws.py tests/test_accuracy.py"
ERRORS = "tests/test_errors.py tests/test_errors_of_taps.py tests/test_kinds_of_tensors.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str = KERNELS


MUTANTS = (
    Mutant("first-floors", CELLS, "(first - 1) / step + 1", "first / step"),
    Mutant("first-one-late", CELLS, "first <= 0 ? 0", "first < 0 ? 0"),
    Mutant("last-truncates", CELLS, "last < 0 ? 0 : last / step + 1", "last / step + 1"),
    Mutant("last-one-short", CELLS, "last / step + 1", "last / step"),
    Mutant("end-not-clipped", CELLS, "if (range.end > count) range.end = count;", ""),
    Mutant("run-ignores-dilation", CELLS, "tap * axis.dilation, axis.padding", "tap, axis.padding"),
    Mutant("taps-ignore-stride", CELLS, "position * axis.stride,", "position,"),
    Mutant("cut-misses-joins", CELLS, "if (joins < cut) cut = joins;", ""),
    Mutant("cut-misses-leaves", CELLS, "if (leaves < cut) cut = leaves;", ""),
    Mutant("band-search", CELLS, ".begin <= position", ".begin < position"),
    Mutant(
        "axes-exchanged",
        CELLS,
        "(b0 * axis[1].bands + b1) * axis[2].bands + b2",
        "(b1 * axis[0].bands + b0) * axis[2].bands + b2",
    ),
    Mutant(
        "inline-table-short",
        CELLS,
        "return cells.bands > kInlineBands;",
        "return cells.bands > 4 * kInlineBands;",
    ),
    Mutant(
        "errors-dropped",
        "csrc/cpu/element.h",
        "lost += (sum - (total - added)) + (value - added);",
        "",
    ),
    Mutant(
        "errors-spoil-infinity",
        "csrc/cpu/element.h",
        "return total == total ? total : sum;",
        "return total;",
    ),
    Mutant(
        "multiplier-first",
        "csrc/cpu/results.h",
        "multiplier * (mean + b)",
        "multiplier * mean + b",
    ),
    Mutant(
        "one-entry-only",
        "csrc/checks.cpp",
        "if (entries == 1 || entries ==",
        "if (entries ==",
        ERRORS,
    ),
    Mutant(
        "padding-unchecked",
        "csrc/checks.cpp",
        'paddings{"padding", &padding, 0}',
        'paddings{"padding", &padding, -9}',
        ERRORS,
    ),
    Mutant(
        "output-padding-and",
        "csrc/checks.cpp",
        "output_paddings.at(i) < strides.at(i) || output",
        "output_paddings.at(i) < strides.at(i) && output",
        ERRORS + " tests/test_literals.py",
    ),
    Mutant(
        "empty-output-allowed", "csrc/checks.cpp", "if (output < 1) {", "if (output < 0) {", ERRORS
    ),
    Mutant(
        "size-wraps",
        "csrc/checks.cpp",
        "if (extent >= kMaxExtent) {",
        "if (static_cast<int64_t>(extent) >= kMaxExtent) {",
        ERRORS,
    ),
    Mutant(
        "memory-off-by-one",
        "csrc/checks.cpp",
        "int64_t elements = offset + 1;",
        "int64_t elements = offset;",
        ERRORS,
    ),
    Mutant("groups-unchecked", "csrc/validate.cpp", "problem.c_in % groups != 0", "false", ERRORS),
    Mutant(
        "bias-of-a-group",
        "csrc/validate.cpp",
        "shape[0] != problem.c_out",
        "shape[0] < problem.c_out / groups",
        ERRORS,
    ),
    Mutant("fake-groups", "convt_reduce/_validation.py", "channels % groups == 0", "True", ERRORS),
    Mutant(
        "fake-bias", "convt_reduce/_validation.py", "bias.shape[0] == out_channels", "True", ERRORS
    ),
    Mutant("fake-output", "convt_reduce/_validation.py", "output >= 1,", "output >= 0,", ERRORS),
    Mutant(
        "fake-output-padding",
        "convt_reduce/_validation.py",
        "torch.sym_max(stride, dilation)",
        "stride",
        "tests/test_fuzz.py",
    ),
)


def run(mutant: Mutant, folder: Path, base: Path) -> tuple[bool, str]:
    """(caught, the first test that failed or the last line of the tests).

    Args:
        base: a build without a fault, whose objects are used again where the fault is not in them.
    """
    source = folder / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    shutil.copy(ROOT / "setup.py", source)
    python = mutant.file.startswith("convt_reduce/")
    if not python:
        replace(source / mutant.file, mutant)
    # -O1: the build is most of the time.
    package = build(folder / "site", ["-O1"], root=source, base=base, changed=mutant.file)
    if python:
        replace(package / Path(mutant.file).name, mutant)
    tests = [str(ROOT / test) for test in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *tests]
    command += ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=folder, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT} s"
    lines = [line for line in result.stdout.splitlines() if line.startswith("FAILED")] or [
        (result.stdout.strip() or result.stderr.strip() or "no output").splitlines()[-1]
    ]
    # 1: tests failed. A crash is caught too; a usage error or no tests at all is not.
    return result.returncode == 1 or result.returncode < 0, lines[0][:110]


def replace(path: Path, mutant: Mutant) -> None:
    text = path.read_text()
    if mutant.old not in text:
        raise SystemExit(f"mutants: {mutant.name}: {mutant.old!r} is not in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(o in m.name for o in options.only)]
    survivors = []
    everything = tempfile.TemporaryDirectory()
    base = Path(everything.name) / "base"
    build(base, ["-O1"])
    for mutant in chosen:
        started = time.time()
        with tempfile.TemporaryDirectory() as folder:
            caught, line = run(mutant, Path(folder), base)
        if not caught:
            survivors.append(mutant.name)
        verdict = "caught" if caught else "SURVIVED"
        print(f"{verdict:8} {mutant.name:24} {time.time() - started:5.0f} s  {line}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught; left: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

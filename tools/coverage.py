"""Coverage: lines and branches of the Python, lines of the C++ of the CPU half, in one table.

    make coverage                                  the suite less what is named below: 6 minutes
    python tools/coverage.py [pytest arguments]    -m "not gpu", for instance: all, 20 minutes

Needs coverage.py (`pip install --group coverage`) and gcov beside an installed package. The CPU
half is built once more with counters, and the suite runs against that copy. Python processes that
tests start are counted too; what runs inside autograd's C++ threads, or in a process that is
killed, only where coverage.py can see it.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# `import coverage`, which pytest's plugins may do, must not find this file.
sys.path[0] = str(Path(__file__).resolve().parent)
from native_build import ROOT, build  # noqa: E402


def native_lines(objects: Path) -> dict[str, dict[int, bool]]:
    """file below csrc -> line -> whether it ran, over all that the file was compiled into."""
    lines: dict[str, dict[int, bool]] = collections.defaultdict(dict)
    for counts in sorted(objects.glob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", str(counts)]
        report = subprocess.run(command, capture_output=True, text=True, check=True, cwd=objects)
        for one in report.stdout.splitlines():
            for file in json.loads(one)["files"]:
                path = Path(file["file"])
                if not path.is_relative_to(ROOT / "csrc"):
                    continue
                seen = lines[str(path.relative_to(ROOT))]
                for line in file["lines"]:
                    number = line["line_number"]
                    seen[number] = seen.get(number, False) or line["count"] > 0
    return lines


def print_native(lines: dict[str, dict[int, bool]]) -> None:
    print(f"\n{'C++ of the CPU half':36} lines  missed")
    total = missed = 0
    for file, seen in sorted(lines.items()):
        absent = [n for n, ran in sorted(seen.items()) if not ran]
        total, missed = total + len(seen), missed + len(absent)
        shown = ", ".join(map(str, absent[:12])) + (" .." if len(absent) > 12 else "")
        print(f"{file:36} {len(seen):5}  {len(absent):6}  {shown}")
    share = 100 * (total - missed) / max(1, total)
    print(f"{'all':36} {total:5}  {missed:6}  {share:.1f} % of the lines ran")


# What looks at wheels, starts other programs or waits for a compiler sees little of the package
# that the other tests do not.
LEFT_OUT = (
    "test_check_wheel.py",
    "test_compile*.py",
    "test_distributed.py",
    "test_export.py",
    "test_fuse_compile.py",
    "test_fuse_examples.py",
    "test_fuse_torchvision.py",
    "test_release*.py",
)
TESTS = ROOT / "tests"
SETTINGS = """
[run]
branch = true
source = {package}
data_file = {folder}/.coverage
parallel = true
patch = subprocess
"""


def shares(arguments: list[str]) -> list[list[str]]:
    """Arguments of pytest, for processes that run at the same time."""
    if arguments:
        tests = [] if any("tests" in argument for argument in arguments) else [str(TESTS)]
        return [[*arguments, *tests]]
    left_out = {file for pattern in LEFT_OUT for file in TESTS.glob(pattern)}
    files = sorted(str(file) for file in set(TESTS.glob("test_*.py")) - left_out)
    count = min(os.cpu_count() or 1, 4)
    return [["-m", "not gpu and not slow", *files[i::count]] for i in range(count)]


def main() -> int:
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "site", ["-O0", "-g", "--coverage"], ["--coverage"])
        settings = folder / "coverage.ini"
        package = folder / "site" / "convt_reduce"
        settings.write_text(SETTINGS.format(package=package, folder=folder))
        path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        coverage = [sys.executable, "-m", "coverage"]
        command = [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        command += ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
        running = []
        for share in shares(arguments):
            place = folder / f"share{len(running)}"  # an empty folder, as for the tests themselves
            place.mkdir()
            running.append(subprocess.Popen([*command, *share], cwd=place, env=environment))
        codes = [process.wait() for process in running]
        for report in (["combine", "--quiet"], ["report", "--show-missing", "--skip-empty"]):
            again = [*coverage, *report, f"--rcfile={settings}"]
            subprocess.run(again, cwd=folder, env=environment, check=False)
        print_native(native_lines(folder / "site" / "objects"))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

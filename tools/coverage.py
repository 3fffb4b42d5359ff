"""Coverage: lines and branches of the Python, lines of the C++ of the CPU half, in one table.

    python tools/coverage.py [pytest arguments]      the whole suite: about 20 minutes on two cores

Needs coverage.py (`pip install --group coverage`) and gcov beside an installed package. The CPU
half is built once more with counters, and the suite runs against that copy; what only runs in other
processes, or inside autograd's C++ threads, is counted where coverage.py can see it.
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


def main() -> int:
    arguments = sys.argv[1:] or ["-m", "not gpu"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "site", ["-O0", "-g", "--coverage"], ["--coverage"])
        package = folder / "site" / "convt_reduce"
        command = [sys.executable, "-m", "coverage", "run", "--branch", f"--source={package}"]
        command += ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
        command += ["-q", *arguments]
        if not any(str(a).endswith(".py") or "tests" in str(a) for a in arguments):
            command.append(str(ROOT / "tests"))
        path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        report = [sys.executable, "-m", "coverage", "report", "--show-missing", "--skip-empty"]
        subprocess.run(report, cwd=folder, env=environment, check=False)
        print_native(native_lines(folder / "site" / "objects"))
    return code


if __name__ == "__main__":
    sys.exit(main())

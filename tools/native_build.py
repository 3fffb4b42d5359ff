"""Builds the CPU library with other compiler flags into a copy of the installed package.

    python tools/native_build.py FOLDER --flags "-O1 -g -fsanitize=address,undefined"

For checks of the native code by tools that need it compiled in their own way: sanitizers, coverage,
seeded faults. The Python files come from this tree, the flags of the ABI from setup.py's build, as
_build_info.json of the installed package tells them; put FOLDER first on PYTHONPATH to use it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cpu_sources(root: Path = ROOT) -> list[str]:
    """What setup.py compiles for the CPU half."""
    found = re.search(r"^CPU_SOURCES = \[(.*?)\]", (root / "setup.py").read_text(), re.M | re.S)
    return re.findall(r'"(.+?)"', found[1])


def build(
    folder: Path,
    flags: list[str],
    link_flags: list[str] = (),
    root: Path = ROOT,
    base: Path | None = None,
    changed: str = "",
) -> Path:
    """Compiles the sources below `root`; returns the folder of the package.

    Args:
        base: an earlier folder, built with the same flags. Its objects are taken over except those
            that depend on the file `changed`.
    """
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    installed = subprocess.run(
        [sys.executable, "-c", "import convt_reduce; print(convt_reduce.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    ).stdout.strip()
    package = folder / "convt_reduce"
    objects = folder / "objects"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "convt_reduce", package, ignore=shutil.ignore_patterns("__pycache__"))
    info = json.loads((Path(installed) / "_build_info.json").read_text())
    info |= {"cuda_half": False, "cuda_half_reason": "tools/native_build.py builds the CPU half."}
    (package / "_build_info.json").write_text(json.dumps(info))
    objects.mkdir()
    target = re.search(r"^ABI_TARGET = \((\d+), (\d+)\)", (root / "setup.py").read_text(), re.M)
    abi = f"-DTORCH_TARGET_VERSION=0x{int(target[1]):02x}{int(target[2]):02x}000000000000"
    common = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-DTORCH_STABLE_ONLY", abi]
    common += [f"-I{root / 'csrc'}", *(f"-isystem{path}" for path in include_paths())]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    running = []
    for source in cpu_sources(root):
        compiled = objects / (source.replace("/", "-") + ".o")
        earlier = None if base is None else base / "objects" / compiled.name
        if earlier is not None and changed not in earlier.with_suffix(".d").read_text():
            shutil.copy(earlier, compiled)
            running.append((compiled, None))
            continue
        command = [*compiler, *common, *flags, "-MMD", "-c", str(root / source)]
        running.append((compiled, subprocess.Popen([*command, "-o", str(compiled)])))
    if any(process.wait() for _, process in running if process is not None):
        raise SystemExit("native_build: the compiler failed")
    libraries = [f"-L{path}" for path in library_paths()]
    link = [*compiler, "-shared", *flags, *link_flags, *(str(path) for path, _ in running)]
    subprocess.run([*link, *libraries, "-ltorch_cpu", "-o", str(package / "_C.so")], check=True)
    print(f"{package} with torch {torch.__version__}: {' '.join(flags)}")
    return package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flags", default="-O3")
    parser.add_argument("--link-flags", default="")
    options = parser.parse_args()
    build(options.folder.resolve(), options.flags.split(), options.link_flags.split())


if __name__ == "__main__":
    main()

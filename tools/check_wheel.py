"""Check a finished wheel: `python tools/check_wheel.py dist/*.whl [--require-cuda]`.

What a wheel promises is read from the file itself, not from how it was built: its tag, the
libraries inside, what these ask of the user's machine, and the GPU code in them. Every check is a
generator of problems, one sentence each, so that one run shows all of them. `--describe` checks
nothing and prints what was built; it needs nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CPU_LIBRARY = "convt_reduce/_C.so"
CUDA_LIBRARY = "convt_reduce/_C_cuda.so"
BUILD_INFO = "convt_reduce/_build_info.json"
TUNED_ARCH = "90"

# The split libraries are a few MB; ten times that means that something foreign was packed in.
MAX_WHEEL_BYTES = 20 * 2**20

# What a machine with torch has anyway. Not among them: libcuda, libcudart, libc10, libpython.
ALLOWED_NEEDED = re.compile(
    r"libtorch_(cpu|cuda)\.so|(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt)\.so\.\d+"
    r"|ld-linux-[\w-]+\.so\.\d+"
)
# libtorch's C interface, stable from one version to the next.
TORCH_SHIM = re.compile(r"(aoti_)?torch_[a-z0-9_]+")
SYSTEM_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+")
# Weak hooks that gcc puts into every library.
COMPILER_HOOK = re.compile(r"__gmon_start__|_ITM_\w+|__cxa_finalize")
PYTHON_NAME = re.compile(r"_?Py[A-Z_]\w*")
CUDA_NAME = re.compile(r"(__)?cu(da)?[A-Z]\w*")
TORCH_CXX_NAME = re.compile(r"_Z\w*?(2at|3c10|5torch)[A-Z0-9]\w*")


@dataclass(frozen=True)
class Symbol:
    """One entry of a library's dynamic symbol table; version is empty where it carries none."""

    name: str
    version: str
    defined: bool


@dataclass(frozen=True)
class Library:
    """What the dynamic section of one shared object says."""

    name: str
    needed: list[str]
    run_paths: list[str]
    symbols: list[Symbol]


def read_library(name: str, data: bytes) -> Library:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(data))
    dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
    run_paths = [tag.rpath for tag in dynamic if tag.entry.d_tag == "DT_RPATH"]
    run_paths += [tag.runpath for tag in dynamic if tag.entry.d_tag == "DT_RUNPATH"]
    version_of = elf.get_section_by_name(".gnu.version")
    requirements = elf.get_section_by_name(".gnu.version_r")
    symbols = []
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        version = ""
        # 0 and 1 (shown as strings) stand for local and unversioned.
        version_index = version_of.get_symbol(index)["ndx"] if version_of else "VER_NDX_LOCAL"
        if isinstance(version_index, int) and requirements:
            _, required = requirements.get_version(version_index)
            version = required.name if required else ""
        if symbol.name:
            defined = symbol["st_shndx"] != "SHN_UNDEF"
            symbols.append(Symbol(symbol.name, version, defined))
    return Library(
        name=name,
        needed=[tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"],
        run_paths=[path for entry in run_paths for path in entry.split(":")],
        symbols=symbols,
    )


def file_name_problems(wheel: Path, info: dict) -> Iterator[str]:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        yield f"the file name is not that of a wheel: {error}."
        return
    if name != "convt-reduce":
        yield f"the file name is that of {name}, not of convt_reduce."
    if str(version) != info.get("version"):
        yield f"the file name says version {version}, the build info {info.get('version')}."
    wrong = sorted(str(tag) for tag in tags if (tag.interpreter, tag.abi) != ("py3", "none"))
    if wrong:
        yield f"the tag must be py3-none-<platform>, got {', '.join(wrong)}."
    if any(tag.platform == "any" for tag in tags):
        yield "the tag says any platform, yet the wheel holds native code."


def content_problems(names: list[str], info: dict, require_cuda: bool) -> Iterator[str]:
    if CPU_LIBRARY not in names:
        yield f"{CPU_LIBRARY} is missing."
    cuda_there = CUDA_LIBRARY in names
    if cuda_there != bool(info.get("cuda_half")):
        found = "there" if cuda_there else "missing"
        yield f"{CUDA_LIBRARY} is {found}, while the build info says otherwise."
    if require_cuda and not cuda_there:
        yield f"the CUDA half is required but was left out: {info.get('cuda_half_reason')}"
    shared_objects = [name for name in names if re.search(r"\.so(\.|$)", name)]
    for name in sorted(set(shared_objects) - {CPU_LIBRARY, CUDA_LIBRARY}):
        yield f"{name} has no place in the wheel: only the two libraries of convt_reduce do."


def library_problems(library: Library) -> Iterator[str]:
    for needed in library.needed:
        if not ALLOWED_NEEDED.fullmatch(needed):
            yield f"it needs {needed}, which a user's machine may lack or have in another version."
    for path in library.run_paths:
        if not path.startswith("$ORIGIN"):
            yield f"its run path {path!r} points outside the wheel."
    for symbol in library.symbols:
        if symbol.defined:
            if CUDA_NAME.fullmatch(symbol.name):
                yield f"it exports {symbol.name}, which hides that of torch's cudart."
        elif not (
            SYSTEM_VERSION.fullmatch(symbol.version)
            or TORCH_SHIM.fullmatch(symbol.name)
            or COMPILER_HOOK.fullmatch(symbol.name)
        ):
            yield f"it wants the symbol {symbol.name}, {kind_of(symbol.name)}."


def kind_of(name: str) -> str:
    """Why a symbol that is neither the system's nor a shim's is not allowed."""
    if PYTHON_NAME.fullmatch(name):
        return "which ties it to one Python"
    if CUDA_NAME.fullmatch(name):
        return "which a static cudart should have given"
    if TORCH_CXX_NAME.match(name):
        return "C++ of torch, which changes from one torch to the next"
    return "neither torch's C interface nor the system's"


def fatbin_problems(library: Path, promised: list[str]) -> Iterator[str]:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        yield "its GPU code was not checked, for want of cuobjdump: install nvidia-cuda-cuobjdump."
        return
    command = [cuobjdump, "--list-elf", "--list-ptx", library]
    run = subprocess.run(command, capture_output=True, text=True)
    native = set(re.findall(r"sm_(\d+[af]?)\.cubin", run.stdout))
    ptx = set(re.findall(r"sm_(\d+[af]?)\.ptx", run.stdout))
    if not {TUNED_ARCH, TUNED_ARCH + "a"} & native:
        yield f"it holds no native code for sm_{TUNED_ARCH}; found {sorted(native) or run.stderr}."
    for arch in promised:
        number = arch.removesuffix("+PTX").replace(".", "")
        if number not in native:
            yield f"the build info promises {arch}, but there is no native code for sm_{number}."
        if arch.endswith("+PTX") and number not in ptx:
            yield f"the build info promises {arch}, but there is no PTX for compute_{number}."


def find_cuobjdump() -> str | None:
    site_packages = Path(sysconfig.get_path("platlib"))
    packaged = sorted(site_packages.glob("nvidia/*/bin/cuobjdump"))
    return str(packaged[-1]) if packaged else shutil.which("cuobjdump")


def read_build_info(wheel: Path) -> dict:
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read(BUILD_INFO)) if BUILD_INFO in archive.namelist() else {}


def describe(info: dict) -> str:
    """One or two lines for the person who just built the wheel."""
    if info.get("cuda_half"):
        return f"CUDA half built for {' '.join(info['archs'])}: {info['cuda_half_reason']}"
    return f"CUDA half left out, the CPU half is complete: {info.get('cuda_half_reason')}"


def wheel_problems(wheel: Path, require_cuda: bool = False) -> list[str]:
    """All that is wrong with one wheel; empty if nothing is."""
    info = read_build_info(wheel)
    problems = [] if info else [f"{BUILD_INFO} is missing."]
    size = wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        problems.append(f"it has {size:,} bytes; at most {MAX_WHEEL_BYTES:,} are expected.")
    problems += file_name_problems(wheel, info)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        names = archive.namelist()
        problems += content_problems(names, info, require_cuda)
        for name in sorted({CPU_LIBRARY, CUDA_LIBRARY} & set(names)):
            problems += [
                f"{name}: {problem}"
                for problem in library_problems(read_library(name, archive.read(name)))
            ]
        if CUDA_LIBRARY in names:
            extracted = Path(archive.extract(CUDA_LIBRARY, scratch))
            problems += [
                f"{CUDA_LIBRARY}: {problem}"
                for problem in fatbin_problems(extracted, info.get("archs", []))
            ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument(
        "--require-cuda", action="store_true", help="a missing CUDA half is an error"
    )
    parser.add_argument("--describe", action="store_true", help="only say what was built")
    options = parser.parse_args()
    failed = False
    for wheel in options.wheels:
        if options.describe:
            print(describe(read_build_info(wheel)))
            continue
        problems = wheel_problems(wheel, options.require_cuda)
        for problem in problems:
            print(f"{wheel.name}: {problem}")
        if not problems:
            size = f"{wheel.stat().st_size:,} bytes"
            print(f"{wheel.name}: in order, {size}. {describe(read_build_info(wheel))}")
        failed = failed or bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

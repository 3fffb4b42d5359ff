"""What the shared libraries inside a wheel ask of a user's machine, and the GPU code they hold.

check_wheel.py asks; this file reads ELF, cuobjdump and torch-abi-audit. As there, a check is a
generator of problems, one sentence each.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from architectures import native_number, ptx_number

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

ELF_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
# The newest libstdc++ symbols that a manylinux platform has, beside the glibc it is named after.
NEWEST_GLIBCXX = {(2, 28): (3, 4, 24), (2, 34): (3, 4, 29)}


@dataclass(frozen=True)
class Symbol:
    """One entry of a library's dynamic symbol table; version is empty where it carries none."""

    name: str
    version: str
    defined: bool


@dataclass(frozen=True)
class Library:
    """What the dynamic section of one shared object says."""

    machine: str
    needed: list[str]
    run_paths: list[str]
    symbols: list[Symbol]


def read_library(data: bytes) -> Library:
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
        machine=ELF_MACHINES.get(elf["e_machine"], elf["e_machine"]),
        needed=[tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"],
        run_paths=[path for entry in run_paths for path in entry.split(":")],
        symbols=symbols,
    )


def library_problems(library: Library, platforms: list[str]) -> Iterator[str]:
    """``platforms`` are those of the wheel's tag, like manylinux_2_28_x86_64."""
    for platform in platforms:
        if not platform.endswith(library.machine):
            yield f"it is for {library.machine}, while the tag says {platform}."
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
    for platform in platforms:
        yield from age_problems(library, platform)


def kind_of(name: str) -> str:
    """Why a symbol that is neither the system's nor a shim's is not allowed."""
    if PYTHON_NAME.fullmatch(name):
        return "which ties it to one Python"
    if CUDA_NAME.fullmatch(name):
        return "which a static cudart should have given"
    if TORCH_CXX_NAME.match(name):
        return "C++ of torch, which changes from one torch to the next"
    return "neither torch's C interface nor the system's"


def age_problems(library: Library, platform: str) -> Iterator[str]:
    """Symbols newer than the platform promises; a plain linux tag promises nothing."""
    promised = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    if promised is None:
        return
    glibc = (int(promised[1]), int(promised[2]))
    newest = {"GLIBC": glibc, "GLIBCXX": NEWEST_GLIBCXX.get(glibc)}
    for version in sorted({symbol.version for symbol in library.symbols}):
        family, _, number = version.partition("_")
        limit = newest.get(family)
        if not limit or not re.fullmatch(r"[\d.]+", number):
            continue
        if tuple(map(int, number.split("."))) > limit:
            most = f"{family}_{'.'.join(map(str, limit))}"
            yield f"it wants {version}, newer than the {most} that {platform} promises."


def fatbin_problems(library: Path, promised: list[str], tuned: str) -> Iterator[str]:
    """``promised`` are architectures like 9.0 and 12.0+PTX; ``tuned`` must be there anyway."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        yield "its GPU code was not checked, for want of cuobjdump: install nvidia-cuda-cuobjdump."
        return
    command = [cuobjdump, "--list-elf", "--list-ptx", library]
    run = subprocess.run(command, capture_output=True, text=True)
    native = set(re.findall(r"sm_(\d+[af]?)\.cubin", run.stdout))
    ptx = set(re.findall(r"sm_(\d+[af]?)\.ptx", run.stdout))
    tuned = native_number(tuned)
    if tuned not in native:
        yield f"it holds no native code for sm_{tuned}; found {sorted(native) or run.stderr}."
    numbers = {native_number(arch) for arch in promised}
    for arch in promised:
        if native_number(arch) not in native:
            yield (
                f"the build info promises {arch}, but there is no native code for "
                f"sm_{native_number(arch)}."
            )
        if arch.endswith("+PTX") and ptx_number(arch) not in ptx:
            yield (
                f"the build info promises {arch}, but there is no PTX for "
                f"compute_{ptx_number(arch)}."
            )
    for number in sorted(native - numbers):
        yield f"it holds native code for sm_{number}, which the build info does not name."


def kernel_problems(library: Path) -> Iterator[str]:
    """Whether each architecture has every kernel, under the name by which the host asks for it.

    The build changes names on both sides (setup.py says why); nothing else would notice a slip
    before the first launch.
    """
    from elftools.elf.elffile import ELFFile

    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        return  # fatbin_problems has said so
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, "--extract-elf", "all", library.resolve()]
        subprocess.run(command, cwd=folder, capture_output=True)
        kernels: dict[str, set[str]] = {}
        for path in Path(folder).glob("*.cubin"):
            with path.open("rb") as file:
                symbols = list(ELFFile(file).get_section_by_name(".symtab").iter_symbols())
            kernels.setdefault(path.suffixes[-2], set()).update(
                symbol.name
                for symbol in symbols
                # Names of the compiler's own helpers, such as 64-bit division, are not C++.
                if symbol["st_info"]["type"] == "STT_FUNC" and symbol.name.startswith("_Z")
            )
    if not kernels:
        yield "no GPU code could be taken out of it."
    with library.open("rb") as file:
        host = ELFFile(file).get_section_by_name(".rodata").data()
    every = set().union(*kernels.values())
    for arch, names in sorted(kernels.items()):
        if missing := every - names:
            yield f"the code for {arch[1:]} lacks {len(missing)} kernels, such as {min(missing)}."
    if unknown := {name for name in every if name.encode() + b"\0" not in host}:
        yield f"the host asks for no kernel named {min(unknown)}, nor {len(unknown) - 1} others."


def find_cuobjdump() -> str | None:
    site_packages = Path(sysconfig.get_path("platlib"))
    packaged = sorted(site_packages.glob("nvidia/*/bin/cuobjdump"))
    return str(packaged[-1]) if packaged else shutil.which("cuobjdump")


def torch_floor_problems(folder: Path, floor: str) -> Iterator[str]:
    """Whether torch-abi-audit says of all libraries in ``folder``: stable, from ``floor`` on."""
    if importlib.util.find_spec("torch_abi_audit") is None:
        yield (
            "the oldest torch was not checked, for want of torch-abi-audit: install it, "
            "under Python 3.11 or newer."
        )
        return
    command = [sys.executable, "-m", "torch_abi_audit.cli", "--json", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        yield f"torch-abi-audit could not read it: {(run.stderr or run.stdout).strip()}."
        return
    report = json.loads(run.stdout)
    for library in report["extensions"] + report["bundled_libs"]:
        name, torch = Path(library["path"]).name, library["torch"]
        oldest = torch["min_torch_version"]
        if not torch["stable"]:
            symbols = torch["unstable_symbols"]
            yield f"{name}: torch-abi-audit says it leaves the stable ABI: {symbols}."
        elif oldest.split(".")[:2] != floor.split(".")[:2]:
            yield f"{name}: torch-abi-audit says it needs torch {oldest}, not the {floor} promised."

"""Check a finished wheel: `python tools/check_wheel.py dist/*.whl [--require-cuda | --release]`.

What a wheel promises is read from the file itself, not from how it was built: its tag, the
libraries inside, what these ask of the user's machine, and the GPU code in them. Every check is a
generator of problems, one sentence each, so that one run shows all of them. `--release` asks for
what is published: manylinux, the CUDA half, every architecture of a release. `--describe` checks
nothing and prints what was built; it needs nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import email
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from architectures import TUNED, release_architectures
from wheel_libraries import (
    fatbin_problems,
    kernel_problems,
    library_problems,
    read_library,
    torch_floor_problems,
)

CPU_LIBRARY = "convt_reduce/_C.so"
CUDA_LIBRARY = "convt_reduce/_C_cuda.so"
BUILD_INFO = "convt_reduce/_build_info.json"

# With code for seven architectures it has 25 MB; much more means that something foreign is in it.
MAX_WHEEL_BYTES = 28 * 2**20
# What is published works with every glibc from this one on.
RELEASE_PLATFORM = "manylinux_2_28"


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
    suffix = re.fullmatch(r"cu(\d+)", version.local or "")
    cuda = info.get("cuda") or "none"
    if suffix and suffix[1] not in (cuda.split(".")[0], cuda.replace(".", "")):
        yield f"the version ends in +{version.local}, while the build info says CUDA {cuda}."
    wrong = sorted(str(tag) for tag in tags if (tag.interpreter, tag.abi) != ("py3", "none"))
    if wrong:
        yield f"the tag must be py3-none-<platform>, got {', '.join(wrong)}."
    if any(tag.platform == "any" for tag in tags):
        yield "the tag says any platform, yet the wheel holds native code."


def metadata_problems(wheel: Path, archive: zipfile.ZipFile) -> Iterator[str]:
    """The metadata inside must say what the file name says: installers read either."""
    found = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    for name in ("WHEEL", "METADATA"):
        if name not in found:
            yield f"its metadata lacks {name}."
            return
    version, tags = wheel.stem.split("-", 1)[1].split("-", 1)
    inside = email.message_from_bytes(archive.read(found["METADATA"]))["Version"]
    if inside != version.replace("_", "."):
        yield f"the file name says version {version}, METADATA {inside}."
    described = email.message_from_bytes(archive.read(found["WHEEL"]))
    python_and_abi, _, platforms = tags.rpartition("-")
    expected = {f"{python_and_abi}-{platform}" for platform in platforms.split(".")}
    tags_inside = set(described.get_all("Tag", []))
    if tags_inside != expected:
        yield f"the file name says {', '.join(sorted(expected))}, WHEEL {sorted(tags_inside)}."
    if described["Root-Is-Purelib"] != "false":
        yield "WHEEL calls it pure Python, yet it holds native code."


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
    target = re.search(r"TORCH_TARGET_VERSION=0x(..)(..)0", " ".join(info.get("cxx_flags", [])))
    flag = f"{int(target[1], 16)}.{int(target[2], 16)}" if target else "none"
    if info and flag != info.get("abi_target"):
        yield f"the build info promises torch {info.get('abi_target')}, its flags say {flag}."


def release_problems(platforms: list[str], info: dict, wanted: str) -> Iterator[str]:
    for platform in platforms:
        if not platform.startswith(wanted + "_"):
            yield f"a release must be for {wanted}, got {platform}: auditwheel repair does that."
    if not info.get("cuda_half"):
        return  # content_problems has said so
    cuda = tuple(int(part) for part in info["cuda"].split("."))
    machine = "aarch64" if platforms[0].endswith("aarch64") else "x86_64"
    expected = release_architectures(cuda, machine)
    if info["archs"] != expected:
        yield f"a release must have code for {' '.join(expected)}, got {' '.join(info['archs'])}."


def read_build_info(wheel: Path) -> dict:
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read(BUILD_INFO)) if BUILD_INFO in archive.namelist() else {}


def describe(info: dict) -> str:
    """One or two lines for the person who just built the wheel."""
    if info.get("cuda_half"):
        return f"CUDA half built for {' '.join(info['archs'])}: {info['cuda_half_reason']}"
    return f"CUDA half left out, the CPU half is complete: {info.get('cuda_half_reason')}"


def wheel_problems(
    wheel: Path, require_cuda: bool = False, release_platform: str | None = None
) -> list[str]:
    """All that is wrong with one wheel; empty if nothing is."""
    info = read_build_info(wheel)
    problems = [] if info else [f"{BUILD_INFO} is missing."]
    size = wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        problems.append(f"it has {size:,} bytes; at most {MAX_WHEEL_BYTES:,} are expected.")
    problems += file_name_problems(wheel, info)
    platforms = wheel.stem.split("-")[-1].split(".")
    if release_platform is not None:
        problems += release_problems(platforms, info, release_platform)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        names = archive.namelist()
        problems += metadata_problems(wheel, archive)
        problems += content_problems(names, info, require_cuda or release_platform is not None)
        ours = sorted({CPU_LIBRARY, CUDA_LIBRARY} & set(names))
        for name in ours:
            problems += [
                f"{name}: {problem}"
                for problem in library_problems(read_library(archive.read(name)), platforms)
            ]
            archive.extract(name, scratch)
        if CUDA_LIBRARY in names:
            library = Path(scratch, CUDA_LIBRARY)
            found = [*fatbin_problems(library, info.get("archs", []), TUNED)]
            found += kernel_problems(library)
            problems += [f"{CUDA_LIBRARY}: {problem}" for problem in found]
        if ours:
            folder = Path(scratch, CPU_LIBRARY).parent
            problems += torch_floor_problems(folder, info.get("abi_target", "2.10"))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument(
        "--require-cuda", action="store_true", help="a missing CUDA half is an error"
    )
    parser.add_argument(
        "--release",
        nargs="?",
        const=RELEASE_PLATFORM,
        metavar="PLATFORM",
        help=f"also ask for what is published, on {RELEASE_PLATFORM} or the platform named",
    )
    parser.add_argument("--describe", action="store_true", help="only say what was built")
    options = parser.parse_args()
    failed = False
    for wheel in options.wheels:
        if options.describe:
            print(describe(read_build_info(wheel)))
            continue
        problems = wheel_problems(wheel, options.require_cuda, options.release)
        for problem in problems:
            print(f"{wheel.name}: {problem}")
        if not problems:
            size = f"{wheel.stat().st_size:,} bytes"
            print(f"{wheel.name}: in order, {size}. {describe(read_build_info(wheel))}")
        failed = failed or bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the two native libraries of convt_reduce.

`convt_reduce/_C.so` holds the schemas and the CPU half; `convt_reduce/_C_cuda.so` holds the CUDA
half and is a separate file, so that a torch without CUDA can still load the first. Both speak to
torch through its stable ABI and hold no Python symbol: one wheel serves every torch from ABI_TARGET
on and every Python 3. Metadata lives in pyproject.toml.

Switches, all environment variables: CONVT_REDUCE_BUILD_CUDA=1|0|auto, TORCH_CUDA_ARCH_LIST,
CONVT_REDUCE_LOCAL_VERSION, MAX_JOBS, NVCC_THREADS.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

CPU_SOURCES = [
    "csrc/library.cpp",
    "csrc/checks.cpp",
    "csrc/validate.cpp",
    "csrc/cpu/stats.cpp",
    "csrc/cpu/combine.cpp",
    "csrc/cpu/combine_backward.cpp",
    "csrc/cpu/combine_taps.cpp",
    "csrc/cpu/taps.cpp",
    "csrc/cpu/ops.cpp",
]
CUDA_SOURCES = [
    "csrc/checks.cpp",
    "csrc/validate.cpp",
    "csrc/cuda/ops.cpp",
    "csrc/cuda/mean_small.cu",
    "csrc/cuda/merge.cu",
    "csrc/cuda/planes.cu",
    "csrc/cuda/stats.cu",
    "csrc/cuda/stats_channels.cu",
    "csrc/cuda/stats_combine.cu",
    "csrc/cuda/stats_plan.cu",
    "csrc/cuda/combine.cu",
    "csrc/cuda/combine_batch.cu",
    "csrc/cuda/combine_fold.cu",
    "csrc/cuda/combine_split.cu",
    "csrc/cuda/combine_strip.cu",
    "csrc/cuda/combine_backward.cu",
    "csrc/cuda/spread.cu",
]

# The oldest torch whose C interface the libraries may use; pyproject.toml's torch>= is the same.
ABI_TARGET = (2, 10)

ROOT = Path(__file__).resolve().parent
ARCHITECTURES = runpy.run_path(str(ROOT / "tools" / "architectures.py"))

if sys.platform != "linux":
    sys.exit(f"convt_reduce builds on Linux only; this is {sys.platform}.")


def output_of(command: list[str]) -> str:
    """What a tool says, on either stream; its exit code does not matter to any caller here."""
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.stdout


def find_toolkit() -> Path | None:
    """The folder whose bin/nvcc is used: CUDA_HOME, then PATH, then /usr/local/cuda, as torch does.

    One case more than torch: an nvcc on PATH may be a small script that starts the real one
    elsewhere. Then the headers are not beside it, and nvcc itself is asked where it lives.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    on_path = shutil.which("nvcc")
    if on_path is None:
        default = Path("/usr/local/cuda")
        return default if (default / "bin" / "nvcc").exists() else None
    home = Path(on_path).parent.parent
    if not (home / "include" / "cuda_runtime.h").exists():
        # --dryrun only prints what it would do; it wants a file to exist, so it gets this one.
        dryrun = output_of([on_path, "--dryrun", "-x", "cu", "-c", __file__])
        top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
        if top and (Path(top[1]) / "include" / "cuda_runtime.h").exists():
            home = Path(top[1]).resolve()
    return home


TOOLKIT = find_toolkit()
if TOOLKIT is not None:
    # cpp_extension reads it once, when it is imported: hence before the imports below.
    os.environ["CUDA_HOME"] = str(TOOLKIT)
if "CXX" not in os.environ and shutil.which("c++") is None:
    # cpp_extension asks for c++, a name that a machine with g++ alone may lack.
    os.environ["CXX"] = "g++"

import torch  # noqa: E402
from setuptools import setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


@dataclass(frozen=True)
class CudaHalf:
    """Whether the CUDA half is built, and the sentence that says why."""

    built: bool
    reason: str
    nvcc_version: tuple[int, int] = (0, 0)


def decide_cuda_half() -> CudaHalf:
    """The one place that decides.

    It looks at the toolkit and at torch's build, never at a GPU: a builder often has none.
    """
    mode = os.environ.get("CONVT_REDUCE_BUILD_CUDA", "auto").strip().lower() or "auto"
    if mode not in ("0", "1", "auto"):
        sys.exit(f"CONVT_REDUCE_BUILD_CUDA must be 1, 0 or auto, got {mode!r}.")
    if mode == "0":
        return CudaHalf(False, "CONVT_REDUCE_BUILD_CUDA=0 asked for the CPU half alone.")
    verdict = cuda_half_by_toolkit()
    if mode == "1" and not verdict.built:
        sys.exit(f"CONVT_REDUCE_BUILD_CUDA=1, but the CUDA half cannot be built: {verdict.reason}")
    return verdict


def cuda_half_by_toolkit() -> CudaHalf:
    beside = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return CudaHalf(False, f"{beside} has no CUDA; build beside a torch for CUDA to get it.")
    torch_major = torch.version.cuda.split(".")[0]
    remedy = f"install the CUDA {torch_major} toolkit, set CUDA_HOME or PATH to it and build again"
    if TOOLKIT is None:
        return CudaHalf(False, f"no nvcc was found; {remedy}.")
    nvcc = TOOLKIT / "bin" / "nvcc"
    if not nvcc.exists():
        return CudaHalf(False, f"there is no {nvcc}; {remedy}.")
    release = re.search(r"release (\d+)\.(\d+)", output_of([str(nvcc), "--version"]))
    if release is None:
        return CudaHalf(False, f"{nvcc} --version names no release; {remedy}.")
    version = (int(release[1]), int(release[2]))
    found = f"nvcc {version[0]}.{version[1]}"
    wanted = f"{beside} (CUDA {torch.version.cuda})"
    if str(version[0]) != torch_major:
        other = f"or build beside a torch for CUDA {version[0]}"
        return CudaHalf(False, f"{found} and {wanted} differ in CUDA major; {remedy}, {other}.")
    return CudaHalf(True, f"{found} fits {wanted}.", version)


def architectures(nvcc_version: tuple[int, int]) -> list[str]:
    """The architectures to compile for: TORCH_CUDA_ARCH_LIST, or those of a release."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").replace(",", " ").split()
    for arch in asked:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            sys.exit(f"TORCH_CUDA_ARCH_LIST must hold numbers like 9.0 or 12.0+PTX, got {arch!r}.")
    archs = asked or ARCHITECTURES["release_architectures"](nvcc_version, platform.machine())
    tuned = ARCHITECTURES["TUNED"]
    if not any(arch.startswith(tuned) for arch in archs):
        print(
            f"convt_reduce: warning: {' '.join(archs)} lacks {tuned}, which the kernels are "
            "tuned for."
        )
    return archs


def gencode_flags(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        native = ARCHITECTURES["native_number"](arch)
        flags.append(f"-gencode=arch=compute_{native},code=sm_{native}")
        if arch.endswith("+PTX"):
            number = ARCHITECTURES["ptx_number"](arch)
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def package_version() -> str:
    text = (ROOT / "convt_reduce" / "_version.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if version is None:
        sys.exit('convt_reduce/_version.py holds no line __version__ = "...".')
    local = os.environ.get("CONVT_REDUCE_LOCAL_VERSION", "")
    if local and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", local):
        sys.exit(f"CONVT_REDUCE_LOCAL_VERSION must be letters and digits like cu13, got {local!r}.")
    return f"{version[1]}+{local}" if local else version[1]


VERSION = package_version()
CUDA_HALF = decide_cuda_half()
ARCHS = architectures(CUDA_HALF.nvcc_version) if CUDA_HALF.built else []

# cpp_extension adds neither, and without the target the floor silently becomes the torch at hand.
STABLE_ABI = [
    f"-DTORCH_TARGET_VERSION=0x{ABI_TARGET[0]:02x}{ABI_TARGET[1]:02x}000000000000",
    "-DTORCH_STABLE_ONLY",
]
# The language standard is given here, once: cpp_extension then adds none of its own.
COMMON = ["-O3", "-std=c++20", *STABLE_ABI]
# Hidden: two extensions in one process must not bind to each other's helpers.
# -g0: the -g that Python's own build brings along would multiply the size of the libraries.
# fp-contract: a product that is added is rounded first, on machines with fused multiply-adds too.
CXX_FLAGS = [
    *COMMON,
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-g0",
]
# Error texts of torch's check macros name the file: as csrc/... or torch/..., not as a path of this
# machine, so that the same sources make the same library in any folder.
SHORT_PATHS = [
    f"-ffile-prefix-map={ROOT}/=",
    f"-ffile-prefix-map={Path(torch.__file__).parent}/=torch/",
]
CUDA_CXX_FLAGS = [*CXX_FLAGS, "-DUSE_CUDA", f'-DCONVT_REDUCE_ARCHS="{" ".join(ARCHS)}"']
NVCC_FLAGS = [*COMMON, "-DUSE_CUDA", "-Xcompiler=-fvisibility=hidden", *gencode_flags(ARCHS)]
PLAIN_FATBIN = CUDA_HALF.nvcc_version >= (12, 8)
if PLAIN_FATBIN:
    # A compressed fatbin needs a driver that can unpack it. And names inside could not be changed,
    # as forget_where_it_was_built does on the host's side and in the GPU code alike.
    NVCC_FLAGS.append("--compress-mode=none")
# Few .cu files, many architectures: compiling file beside file alone would leave cores idle.
NVCC_FLAGS.append(f"--threads={os.environ.get('NVCC_THREADS') or 4}")
# exclude-libs: a static cudart that exported its names would be mistaken for torch's shared one.
# defs: a forgotten library fails here, not at a user's import.
LINK_FLAGS = ["-Wl,--exclude-libs,ALL", "-Wl,-z,defs"]


def extensions() -> list:
    cpu = CppExtension(
        "convt_reduce._C",
        CPU_SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": [*CXX_FLAGS, *SHORT_PATHS]},
        extra_link_args=LINK_FLAGS,
    )
    # Overwritten, because cpp_extension also links torch's C++ and Python libraries and the shared
    # cudart: exactly what ties a wheel to one torch, one Python and one CUDA.
    cpu.libraries = ["torch_cpu"]
    if not CUDA_HALF.built:
        return [cpu]
    cuda = CUDAExtension(
        "convt_reduce._C_cuda",
        CUDA_SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        # An nvcc installed by pip keeps its static cudart in lib, where torch looks in lib64 alone.
        library_dirs=[str(TOOLKIT / "lib")],
        extra_compile_args={
            "cxx": [*CUDA_CXX_FLAGS, *SHORT_PATHS],
            "nvcc": [*NVCC_FLAGS, *(f"-Xcompiler={flag}" for flag in SHORT_PATHS)],
        },
        extra_link_args=LINK_FLAGS,
    )
    cuda.libraries = ["torch_cpu", "torch_cuda", "cudart_static", "rt", "pthread", "dl"]
    return [cpu, cuda]


def build_info() -> dict[str, object]:
    """The facts that `python -m convt_reduce info` and the loader's errors show."""
    compiler = output_of([*shlex.split(os.environ.get("CXX", "c++")), "--version"])
    return {
        "version": VERSION,
        "torch": torch.__version__,
        "cuda": ".".join(map(str, CUDA_HALF.nvcc_version)) if CUDA_HALF.built else None,
        "cuda_half": CUDA_HALF.built,
        "cuda_half_reason": CUDA_HALF.reason,
        "archs": ARCHS,
        "abi_target": ".".join(map(str, ABI_TARGET)),
        "compiler": compiler.partition("\n")[0],
        "cxx_flags": CXX_FLAGS,
        "nvcc_flags": NVCC_FLAGS if CUDA_HALF.built else [],
        "python": platform.python_version(),
        "platform": sysconfig.get_platform(),
    }


def forget_where_it_was_built(path: Path, name: str) -> None:
    """Makes an object file that nvcc wrote independent of the folder and the process.

    nvcc puts a hash of the source's absolute path into the names of everything in an anonymous
    namespace, and a process number into the name of its temporary file; no option turns that off.
    Both are replaced by something of the same length: these are names and nothing else, and the
    host finds a kernel in the GPU code by its name. ``name`` tells files apart.
    """
    data = path.read_bytes()
    stable = re.sub(
        rb"_GLOBAL__N__[0-9a-f]{8}_", b"_GLOBAL__N__%08x_" % zlib.crc32(name.encode()), data
    )
    stable = re.sub(rb"tmpxft_[0-9a-f]{8}_[0-9a-f]{8}", b"tmpxft_00000000_00000000", stable)
    if stable != data:
        path.write_bytes(stable)


class CleanBuildPy(build_py):
    """Empties the package's build folder first, lest this wheel hold what an earlier build left."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "convt_reduce", ignore_errors=True)
        super().run()


class BuildLibraries(BuildExtension.with_options(no_python_abi_suffix=True)):
    """Plain names _C.so and _C_cuda.so, and the build-info file beside them."""

    def run(self) -> None:
        verdict = "built" if CUDA_HALF.built else "left out"
        print(f"convt_reduce: CUDA half {verdict}: {CUDA_HALF.reason}", flush=True)
        super().run()
        package = Path(self.get_ext_fullpath("convt_reduce._C")).parent
        (package / "_build_info.json").write_text(json.dumps(build_info(), indent=2) + "\n")

    def build_extension(self, ext) -> None:
        # Both halves compile validate.cpp, with different flags: to each its own folder of objects.
        shared, link = self.build_temp, self.compiler.link_shared_object
        self.build_temp = str(Path(shared) / ext.name)

        def link_the_same_everywhere(objects, *args, **settings) -> None:
            for path in map(Path, objects) if PLAIN_FATBIN else ():
                forget_where_it_was_built(path, os.path.relpath(path, self.build_temp))
            link(objects, *args, **settings)

        self.compiler.link_shared_object = link_the_same_everywhere
        try:
            super().build_extension(ext)
        finally:
            self.build_temp, self.compiler.link_shared_object = shared, link


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: native code, but none that knows Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    version=VERSION,
    ext_modules=extensions(),
    cmdclass={"build_py": CleanBuildPy, "build_ext": BuildLibraries, "bdist_wheel": AnyPythonWheel},
)

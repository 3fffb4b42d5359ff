"""Every way in which loading can fail, each in a process of its own: what is said, and when.

Import stays possible wherever the CPU half can load; what is wrong with the CUDA half is said at
the first call that needs it. Each sentence tells what was expected, what came, and what to do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convt_reduce

pytestmark = pytest.mark.usefixtures("empty_folder")
FOLDER = Path(convt_reduce.__file__).parent
TORCH_HAS_CUDA = torch.version.cuda is not None

CPU_CALL = """
ones = torch.ones(1, 1, 2, 2)
y = convt_reduce.fused_mean(ones, ones[..., :1, :1], None, 1, 0, 0, 1, 1, 2.0)
assert y.tolist() == [[[[2.0]]]], y
"""
# Asks for the CUDA kernel directly, which needs no GPU where there is none.
CUDA_CALL = """
operator = torch.ops.convt_reduce.fused_mean.default
try:
    operator._op_dk(torch._C.DispatchKey.CUDA, ones, ones[..., :1, :1])
except RuntimeError as error:
    print(error)
else:
    raise SystemExit("a CUDA call without a CUDA half succeeded")
"""


def run(script, package_in=None):
    """Runs Python from an empty folder, on the package in ``package_in`` if one is given."""
    environment = dict(os.environ)
    if package_in is not None:
        paths = [str(package_in), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return result.stdout.strip()


def import_error(script, package_in=None):
    """The sentence of the ImportError that importing the package raises after ``script``."""
    return run(
        f"""
{script}
try:
    import convt_reduce
except ImportError as error:
    print(error)
else:
    raise SystemExit("the import succeeded")
""",
        package_in,
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of the installed package, to be damaged."""
    folder = tmp_path / "copy" / "convt_reduce"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def change_info(package, **facts):
    path = package / "_build_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_a_torch_that_is_too_old():
    versions = ["2.9.1", "2.9.1+cu128", "1.13.0", "2.9.0a0+git1234"]
    out = run(f"""
import torch
for version in {versions}:
    torch.__version__ = version
    try:
        import convt_reduce
    except ImportError as error:
        print(error)
""")
    assert out.splitlines() == [
        f"convt_reduce: torch must be 2.10 or newer, got {version}; "
        "upgrade it with pip install -U torch"
        for version in versions
    ]


def test_a_cpu_half_that_does_not_load(copy):
    (copy / "_C.so").write_bytes(b"not a library")
    sentence = import_error("", copy.parent)
    info = convt_reduce.build_info()
    assert sentence.startswith("convt_reduce: the CPU half did not load; convt_reduce ")
    assert f"was built with torch {info['torch']} " in sentence
    assert f"found torch {torch.__version__} " in sentence
    assert f"{copy / '_C.so'}: " in sentence
    assert sentence.endswith(
        "; reinstall it with pip install --force-reinstall --no-deps convt_reduce"
    )


def test_a_system_that_is_too_old(copy):
    """The loader's complaint about a symbol version is what an older system would say."""
    library = copy / "_C.so"
    data = library.read_bytes()
    old = re.search(rb"\0(GLIBC_2\.[\d.]+)\0", data)[1]
    new = re.sub(rb"\d", b"9", old)
    data = data.replace(b"\0" + old + b"\0", b"\0" + new + b"\0")
    # The version is looked up by its hash, which stands beside the name.
    old_hash, new_hash = (elf_hash(name).to_bytes(4, "little") for name in (old, new))
    library.write_bytes(data.replace(old_hash, new_hash))
    sentence = import_error("", copy.parent)
    assert new.decode() in sentence
    assert sentence.endswith(
        "; this system is older than the wheel is made for, so build from source"
    )


def elf_hash(name):
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value


@pytest.mark.skipif(not TORCH_HAS_CUDA, reason="this torch has no CUDA")
def test_no_cuda_half(copy):
    (copy / "_C_cuda.so").unlink(missing_ok=True)
    change_info(copy, cuda_half=False, cuda_half_reason="no nvcc was found; install it.")
    script = f"import torch, convt_reduce\n{CPU_CALL}"
    assert run(script, copy.parent) == ""
    assert run(script + CUDA_CALL, copy.parent) == (
        "convt_reduce: CUDA tensors need the CUDA half, got none; this build has no CUDA half "
        "(no nvcc was found; install it); install a wheel that has one"
    )


@pytest.mark.skipif(not TORCH_HAS_CUDA, reason="this torch has no CUDA")
def test_a_cuda_half_that_does_not_load(copy):
    (copy / "_C_cuda.so").write_bytes(b"not a library")
    script = f"import torch, convt_reduce\n{CPU_CALL}"
    assert run(script, copy.parent) == ""
    sentence = run(script + CUDA_CALL, copy.parent)
    assert sentence.startswith("convt_reduce: CUDA tensors need the CUDA half, got none; ")
    assert "the CUDA half did not load; convt_reduce " in sentence
    assert f"found torch {torch.__version__} with CUDA {torch.version.cuda}: " in sentence
    assert "; reinstall it with " in sentence


def test_a_torch_without_cuda():
    """Set before the import, because only the loader looks at it."""
    sentence = run(
        f"import torch; torch.version.cuda = None; import convt_reduce\n{CPU_CALL}{CUDA_CALL}"
    )
    assert sentence == (
        "convt_reduce: CUDA tensors need the CUDA half, got none; "
        f"torch {torch.__version__} has no CUDA; install a torch for CUDA beside it"
    )


def test_another_copy_was_loaded_before(copy):
    """Whichever comes second is refused; here it is the whole package, so import says so."""
    first = str((copy / "_C.so").resolve())
    sentence = import_error(f"import torch; torch.ops.load_library({first!r})")
    assert sentence == (
        "convt_reduce: the operator convt_reduce::fused_mean must be registered by "
        f"{FOLDER.resolve() / '_C.so'}, but {first} has registered it already; use one copy of "
        "convt_reduce, and no other package that takes its names"
    )


@pytest.mark.parametrize("name", ["fused_mean", "_tap_spread"])
def test_another_package_owns_one_of_the_names(name):
    """Nothing is registered half-way, and the other package works on."""
    sentence = import_error(f"""
import torch
library = torch.library.Library("convt_reduce", "DEF")
library.define("{name}(Tensor x) -> Tensor")
library.impl("{name}", torch.neg, "CPU")
import atexit
atexit.register(lambda: print(torch.ops.convt_reduce.{name}(torch.ones(1)).item()))
""")
    sentence, value = sentence.splitlines()
    assert f"the operator convt_reduce::{name} must be registered by {FOLDER.resolve()}" in sentence
    assert "something else in this process has registered it already; use one copy" in sentence
    assert value == "-1.0"


def test_another_package_in_the_same_namespace():
    """Other names in it are no obstacle."""
    assert (
        run(f"""
import torch
library = torch.library.Library("convt_reduce", "DEF")
library.define("another(Tensor x) -> Tensor")
import convt_reduce
{CPU_CALL}""")
        == ""
    )


def test_the_unbuilt_folder(copy):
    for file in ("_build_info.json", "_C.so", "_C_cuda.so"):
        (copy / file).unlink(missing_ok=True)
    assert "must be imported from an installed wheel" in import_error("", copy.parent)


def test_info_says_why_there_is_no_gpu():
    result = subprocess.run(
        [sys.executable, "-m", "convt_reduce", "info"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    if TORCH_HAS_CUDA and convt_reduce.build_info()["cuda_half"]:
        (row,) = (line for line in result.stdout.splitlines() if line.startswith("GPUs"))
        assert "none: " in row
        assert "NVIDIA" in row or "CUDA" in row, row

"""Importing the package, each time in a fresh process and from an empty folder.

Import is quick, quiet and touches no GPU, so that fork stays safe; it can be repeated; a second
copy of the libraries is refused in words and is not the end of the process.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys

import pytest
import torch

import convt_reduce

pytestmark = pytest.mark.usefixtures("empty_folder")
SMALLEST_CALL = """
ones = torch.ones(1, 1, 2, 2)
y = convt_reduce.fused_mean(ones, ones[..., :1, :1], None, 1, 0, 0, 1, 1, 2.0)
assert y.tolist() == [[[[2.0]]]], y
"""


def python(*arguments, **environment):
    """Runs Python and returns what it wrote; fails the test if it does not end well."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return result.stdout + result.stderr


def test_import_is_quick():
    """Under 50 ms beyond torch's own import. About 10 ms here: reading two libraries and no more.

    The median of seven, because a busy machine doubles single runs; a compilation, a device query
    or a heavy import would cost hundreds.
    """
    script = (
        "import time, torch; t = time.perf_counter(); import convt_reduce; "
        "print(time.perf_counter() - t)"
    )
    seconds = [float(python("-c", script)) for _ in range(7)]
    assert statistics.median(seconds) < 0.050, seconds


def test_import_alone_and_smallest_call():
    """Without an earlier import of torch."""
    python("-c", f"import convt_reduce, torch\n{SMALLEST_CALL}")


def test_import_is_quiet_and_changes_nothing():
    out = python(
        "-c",
        """
import sys, warnings, torch

def state():
    return (
        sys.path[:], warnings.filters[:], torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32, torch.initial_seed(),
        torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist(),
    )

before = state()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import convt_reduce
assert state() == before
""",
    )
    assert out == ""


def test_without_any_gpu():
    """Hidden GPUs are no GPUs. The call works, and what torch says of CUDA is left as it is."""
    python(
        "-c",
        f"""
import torch, convt_reduce
{SMALLEST_CALL}
try:
    convt_reduce.fused_mean(ones.cuda(), ones.cuda())
except (RuntimeError, AssertionError) as error:
    assert "CUDA" in str(error) or "NVIDIA" in str(error), error
else:
    raise SystemExit("a CUDA call without a GPU succeeded")
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_import_opens_no_device():
    """torch.cuda.is_initialized() misses some of what makes a context; open files do not."""
    python(
        "-c",
        f"""
import os, torch
def opened():
    names = [os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")]
    return sorted(name for name in names if "/dev/nvidia" in name)
before = opened()
import convt_reduce
{SMALLEST_CALL}
assert opened() == before, opened()
assert not torch.cuda.is_initialized()
""",
    )


FORK = """
import os, torch, convt_reduce
{call}
child = os.fork()
if child == 0:
    try:
        {child}
        os._exit(0)
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_after_import():
    child = "convt_reduce.fused_mean(ones, ones).item()"
    python("-c", FORK.format(call=SMALLEST_CALL, child=child))


@pytest.mark.gpu
def test_fork_after_import_and_cuda_in_the_child():
    child = "assert convt_reduce.fused_mean(ones.cuda(), ones[..., :1, :1].cuda()).item() == 1.0"
    python("-c", FORK.format(call=SMALLEST_CALL, child=child))


def test_data_loader_with_forked_workers(empty_folder):
    script = empty_folder / "load.py"
    script.write_text(f"""
import torch, convt_reduce
{SMALLEST_CALL}
class Means(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return convt_reduce.fused_mean(torch.full((1, 1, 4, 4), float(i)), torch.ones(1, 1, 1, 1))
loader = torch.utils.data.DataLoader(Means(), 2, num_workers=2, multiprocessing_context="fork")
assert torch.cat(list(loader)).flatten().tolist() == list(range(8))
""")
    python(script)


def test_reload_changes_nothing():
    python(
        "-c",
        f"""
import importlib, torch, convt_reduce
{SMALLEST_CALL}
operator = torch.ops.convt_reduce.fused_mean.default
for _ in range(2):
    assert importlib.reload(convt_reduce) is convt_reduce
    assert torch.ops.convt_reduce.fused_mean.default is operator
{SMALLEST_CALL}
w = ones[..., :1, :1].clone().requires_grad_()
convt_reduce.fused_mean(ones, w).backward()
assert w.grad.item() == 1.0
""",
    )


def test_a_second_copy_of_the_libraries_does_not_abort():
    """It is refused in words that name the file; the process and the operator live on."""
    out = python(
        "-c",
        f"""
import pathlib, shutil, torch, convt_reduce
{SMALLEST_CALL}
folder = pathlib.Path(convt_reduce.__file__).parent
libraries = sorted(folder.glob("*.so"))
assert libraries
for library in libraries:
    torch.ops.load_library(library)  # the same file again is nothing new
for library in libraries:
    copy = shutil.copy(library, "copy_of_" + library.name)
    try:
        torch.ops.load_library(pathlib.Path(copy).resolve())
    except Exception as error:
        print(error)
{SMALLEST_CALL}
w = ones[..., :1, :1].clone().requires_grad_()
convt_reduce.fused_mean(ones, w).backward()
assert w.grad.item() == 1.0
""",
    )
    refusals = [line for line in out.splitlines() if line.startswith("convt_reduce: ")]
    assert any("copy_of_" in line for line in refusals), out


def test_command_line_info():
    """It must run where nothing else does, so it is run without a GPU."""
    out = python("-m", "convt_reduce", "info", CUDA_VISIBLE_DEVICES="")
    for fact in (convt_reduce.__version__, torch.__version__, "CUDA"):
        assert fact in out


@pytest.mark.gpu
def test_command_line_info_covers_this_gpu():
    out = python("-m", "convt_reduce", "info")
    assert torch.cuda.get_device_name(0) in out
    assert "not covered" not in out


def test_command_line_refuses_what_it_does_not_know():
    result = subprocess.run(
        [sys.executable, "-m", "convt_reduce", "nonsense"], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "nonsense" in result.stderr


def test_version_and_build_info():
    assert convt_reduce.__version__ == importlib.metadata.version("convt_reduce")
    info = convt_reduce.build_info()
    assert isinstance(info, dict)
    assert info["version"] == convt_reduce.__version__
    json.dumps(info)
    assert set(convt_reduce.__all__) <= set(dir(convt_reduce))


def test_which_gpu_a_build_covers():
    from convt_reduce._info import covers

    assert covers(["8.0", "9.0"], (9, 0)) == "covered by native code (9.0)"
    assert covers(["8.0"], (8, 6)) == "covered by native code (8.0)"
    assert covers(["9.0a"], (9, 0)) == "covered by native code (9.0a)"
    assert "PTX (9.0)" in covers(["9.0a+PTX"], (10, 0))
    assert covers(["9.0", "12.0+PTX"], (12, 1)) == "covered by native code (12.0)"
    assert "PTX (12.0)" in covers(["9.0", "12.0+PTX"], (13, 0))
    assert "not covered" in covers(["9.0a"], (10, 0))

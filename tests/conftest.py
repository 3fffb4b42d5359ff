"""What every test shares: the devices, the rule for GPU tests, and a guard on what is under test.

The suite tests the package that is installed, as a user has it. Without a GPU the tests marked gpu
are skipped; with CONVT_REDUCE_REQUIRE_GPU=1 they fail instead, so that a GPU job cannot be green
without having run them. Tests marked multi_gpu are skipped where there are fewer than two GPUs;
with CONVT_REDUCE_REQUIRE_GPUS=n they fail where there are fewer than n.
"""

import functools
import os
import sys
from pathlib import Path

# cuBLAS reads this when it is first used; torch.use_deterministic_algorithms asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config):
    # `python -m pytest` puts the current folder first, where the source tree hides the package.
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
    import convt_reduce

    if Path(convt_reduce.__file__).resolve().parent == ROOT / "convt_reduce":
        raise pytest.UsageError(
            f"the tests are for the installed package, but convt_reduce came from {ROOT}: "
            "install the wheel, and leave the source tree out of PYTHONPATH"
        )
    # References run in full precision; TF32 keeps 10 of float32's 23 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # The tensors are small: on a machine of many cores, more threads only get in each other's way.
    torch.set_num_threads(min(4, torch.get_num_threads()))


@functools.cache
def why_no_gpu():
    """Why the GPU tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    x = torch.ones(1, 1, 1, device="cuda")
    try:
        torch.ops.convt_reduce.fused_mean(x, x)
    except RuntimeError as error:  # built without CUDA, or for other GPUs; it says which
        return str(error)
    return None


def check_several_gpus():
    """Skips or fails a multi_gpu test where it cannot run as it should."""
    required = int(os.environ.get("CONVT_REDUCE_REQUIRE_GPUS", "0"))
    reason, count = why_no_gpu(), torch.cuda.device_count()
    if reason is None and count < max(2, required):
        reason = f"torch sees {count} GPU" + ("s" if count != 1 else "")
    if reason is None:
        return
    if required > 0:
        pytest.fail(f"CONVT_REDUCE_REQUIRE_GPUS={required}, but {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_setup(item):
    if item.get_closest_marker("multi_gpu") is not None:
        check_several_gpus()
    if item.get_closest_marker("gpu") is None:
        return
    reason = why_no_gpu()
    if reason is None:
        return
    if os.environ.get("CONVT_REDUCE_REQUIRE_GPU") == "1":
        pytest.fail(f"CONVT_REDUCE_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2718)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """A current folder from which nothing can be imported by accident."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

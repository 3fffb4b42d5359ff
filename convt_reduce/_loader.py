"""Loads the two native libraries.

Import must work wherever the CPU half can: without a GPU, without a driver, beside a torch that has
no CUDA. So whatever keeps the CUDA half from loading is remembered and said at the first CUDA call.
"""

import functools
import json
from pathlib import Path
from typing import Any, NoReturn

import torch

OLDEST_TORCH = (2, 10)
OPERATORS = ("fused_mean", "_fused_mean_with_sums", "_tap_sums", "_tap_spread")

FOLDER = Path(__file__).parent
_fallbacks: list[torch.library.Library] = []  # a registration ends when its object does


@functools.cache
def build_info() -> dict[str, Any]:
    """What this installation was built with and for: version, torch, cuda, archs, flags and so on.

    Raises:
        ImportError: the package was not built, as when Python found the source tree.
    """
    path = FOLDER / "_build_info.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ImportError(
            f"convt_reduce must be imported from an installed wheel, got the unbuilt folder "
            f"{FOLDER}; install it with pip and start Python elsewhere"
        ) from None


def load() -> None:
    """Registers the operators: the CPU half, and the CUDA half or a sentence in its place."""
    _check_torch()
    try:
        torch.ops.load_library(FOLDER / "_C.so")
    except OSError as error:
        raise ImportError(
            f"convt_reduce: the CPU half did not load; {_facts()}: {error}"
        ) from error
    missing = cuda_half_missing()
    if missing is not None:
        _refuse_cuda_calls(missing)


@functools.cache
def cuda_half_missing() -> str | None:
    """None where the CUDA half is loaded, else the reason as a sentence."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    library = FOLDER / "_C_cuda.so"
    if not library.exists():
        return f"this build has no CUDA half: {build_info()['cuda_half_reason']}"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"the CUDA half did not load; {_facts()}: {error}"
    return None


def _check_torch() -> None:
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        raise ImportError(
            f"convt_reduce: torch must be {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer, "
            f"got {torch.__version__}; upgrade it with pip install -U torch"
        )


def _facts() -> str:
    info = build_info()
    return (
        f"convt_reduce {info['version']} was built with torch {info['torch']} and CUDA "
        f"{info['cuda']} for the stable ABI of torch {info['abi_target']}, found torch "
        f"{torch.__version__} with CUDA {torch.version.cuda}"
    )


def _refuse_cuda_calls(reason: str) -> None:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"convt_reduce: CUDA tensors need the CUDA half, got none; {reason}")

    library = torch.library.Library("convt_reduce", "IMPL")
    for name in OPERATORS:
        library.impl(name, refuse, "CUDA")
    _fallbacks.append(library)

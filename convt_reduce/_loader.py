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
OPERATORS = (
    "fused_mean",
    "_fused_mean_with_sums",
    "_tap_sums",
    "_tap_spread",
    "_combine_backward",
)

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
    _check_that_names_are_free()
    try:
        torch.ops.load_library(FOLDER / "_C.so")
    except OSError as error:
        raise ImportError(
            f"convt_reduce: the CPU half did not load; {_facts()}: {_why_and_what_to_do(error)}"
        ) from error
    missing = cuda_half_missing()
    if missing is not None:
        _refuse_cuda_calls(missing)


@functools.cache
def cuda_half_missing() -> str | None:
    """None where the CUDA half is loaded, else the reason as a sentence."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a torch for CUDA beside it"
    library = FOLDER / "_C_cuda.so"
    if not library.exists():
        return (
            f"this build has no CUDA half ({build_info()['cuda_half_reason'].rstrip('.')}); "
            "install a wheel that has one"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"the CUDA half did not load; {_facts()}: {_why_and_what_to_do(error)}"
    return None


def _check_torch() -> None:
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        raise ImportError(
            f"convt_reduce: torch must be {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer, "
            f"got {torch.__version__}; upgrade it with pip install -U torch"
        )


def _check_that_names_are_free() -> None:
    """Without this a second library would give up in silence, and the first one's kernels be used.

    It would do so half-way where only some names are taken. What this very file registered earlier,
    as when the module is imported anew, is in order.
    """
    ours = str((FOLDER / "_C.so").resolve())
    if ours in {str(Path(path).resolve()) for path in torch.ops.loaded_libraries}:
        return
    taken = [name for name in OPERATORS if hasattr(torch.ops.convt_reduce, name)]
    if not taken:
        return
    copies = f"{FOLDER.name}/_C.so"  # other packages have a _C.so too
    others = sorted(path for path in torch.ops.loaded_libraries if path.endswith(copies))
    owner = f"{others[0]} has" if len(others) == 1 else "something else in this process has"
    raise ImportError(
        f"convt_reduce: the operator convt_reduce::{taken[0]} must be registered by {ours}, but "
        f"{owner} registered it already; use one copy of convt_reduce, and no other package that "
        "takes its names"
    )


def _why_and_what_to_do(error: OSError) -> str:
    # torch says which file, and what the system said of it only in the cause.
    why = str(error.__cause__ or error)
    if "GLIBC" in why or "CXXABI" in why:
        return f"{why}; this system is older than the wheel is made for, so build from source"
    return f"{why}; reinstall it with pip install --force-reinstall --no-deps convt_reduce"


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

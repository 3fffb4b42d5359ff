"""``python -m convt_reduce info``: what is installed, what it was built for, and what it finds."""

import platform

import torch

import convt_reduce
from convt_reduce import _loader


def covers(archs: list[str], capability: tuple[int, int]) -> str:
    """How a build with code for ``archs`` serves a GPU of ``capability``, as a phrase.

    Native code serves its own major version from its own minor on; PTX serves everything later, if
    the driver can compile it.
    """
    for arch in archs:
        major, minor = (int(part) for part in arch.removesuffix("+PTX").rstrip("af").split("."))
        if arch.rstrip("+PTX")[-1] in "af":  # code for this very GPU
            if (major, minor) == capability:
                return f"covered by native code ({arch})"
        elif major == capability[0] and minor <= capability[1]:
            return f"covered by native code ({major}.{minor})"
    for arch in archs:
        if arch.endswith("+PTX"):
            major, minor = (int(part) for part in arch.removesuffix("+PTX").rstrip("af").split("."))
            if (major, minor) <= capability:
                return f"covered by PTX ({major}.{minor}), which the driver compiles"
    return "not covered: build from source with TORCH_CUDA_ARCH_LIST set to include it"


def main() -> int:
    """Prints the facts; returns 0, since a missing GPU is no error."""
    info = convt_reduce.build_info()
    missing = _loader.cuda_half_missing()
    rows = [
        ("convt_reduce", f"{convt_reduce.__version__} in {_loader.FOLDER}"),
        ("built with", f"torch {info['torch']}, {info['compiler']}"),
        ("built for", f"torch {info['abi_target']} and later (stable ABI), any Python 3"),
        (
            "CUDA half",
            f"CUDA {info['cuda']}, code for {' '.join(info['archs'])}"
            if info["cuda_half"]
            else f"not built: {info['cuda_half_reason']}",
        ),
        ("running on", f"Python {platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("CUDA half", "loaded" if missing is None else f"not loaded: {missing}"),
        ("CPU threads", str(torch.get_num_threads())),
    ]
    if missing is None:
        rows += _gpu_rows(info["archs"])
    for name, text in rows:
        print(f"{name:13} {text}")
    return 0


def _why_no_gpu() -> str:
    """The first sentence of what torch says: no driver, one that is too old, or no visible GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n")[0]
    return "torch sees a driver and no GPU"


def _gpu_rows(archs: list[str]) -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPUs", f"none: {_why_no_gpu()}")]
    rows = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        rows.append(
            (
                f"GPU {index}",
                f"{name}, compute capability {capability[0]}.{capability[1]}, "
                f"{covers(archs, capability)}",
            )
        )
    return rows

"""The GPU architectures of a release, which setup.py builds and check_wheel.py demands.

Native code for every generation, because a driver older than the toolkit refuses PTX; PTX once, for
cards to come. The list is never taken from the visible GPU: a builder often has none.
"""

from __future__ import annotations

# Whatever else is built, the kernels are tuned for this one.
TUNED = "9.0"


def native_number(arch: str) -> str:
    """What nvcc calls the native code for ``arch``: "80" for "8.0" and for "8.0+PTX".

    Code for 9.0 is that of 9.0a, which runs on every GPU of 9.0 and may use all that these have.
    """
    number = ptx_number(arch)
    return "90a" if number == "90" else number


def ptx_number(arch: str) -> str:
    """What nvcc calls the PTX for ``arch``: "90" for "9.0+PTX"."""
    return arch.removesuffix("+PTX").replace(".", "")


def release_architectures(cuda: tuple[int, int], machine: str) -> list[str]:
    """For nvcc of version ``cuda``, on "x86_64" or "aarch64": a list like ["8.0", "12.0+PTX"].

    CUDA 12.8 is the first with 10.0 and 12.0; CUDA 13 drops 7.0. 11.0 exists on aarch64 alone.
    """
    if cuda >= (13, 0):
        integrated = ["11.0"] if machine == "aarch64" else []
        return ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", *integrated, "12.0+PTX"]
    if cuda >= (12, 8):
        return ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]
    return ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0+PTX"]

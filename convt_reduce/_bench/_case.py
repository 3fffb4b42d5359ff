"""One case: the settings of a call, what is done with it, who competes, and which target it serves.

A case is plain data. Its tensors are made by `inputs`, several copies at a time, so that each timed
call can read an input that no cache still holds.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = (
    "contiguous",
    "channels_last",
    "misaligned",  # contiguous, beginning one element into its storage
    "padded rows",  # the left part of wider rows
    "transposed",  # the two last axes exchanged
    "every second channel",
    "every second column",
)


class Inputs(NamedTuple):
    """The tensors of one call: x [N, C_in, *spatial], weight [C_in, C_out/groups, *kernel], bias.

    For a spread, x are the tap gradients instead: [N, C_in, *kernel], float32.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Case:
    """One measurement. Kernel, stride and the like are the same on every axis."""

    id: str
    group: str
    shape: tuple[int, ...]  # of x: [N, C_in, *spatial]
    c_out: int = 128
    kernel: int = 3
    stride: int = 2
    padding: int = 1
    output_padding: int = 1
    groups: int = 1
    dilation: int = 1
    multiplier: float = 0.5
    dtype: str = "float32"
    layout: str = "contiguous"
    device: str = "cuda"
    kind: str = "forward"  # forward, training (with backward) or spread (grad_x from tap gradients)
    mode: str = "inference_mode"  # forward only: or no_grad, or grad
    threads: int | None = None  # CPU only; 0 is all that there are
    protocols: tuple[str, ...] = ("graph",)
    peers: tuple[str, ...] = ("ours", "sum")
    targets: tuple[str, ...] = ()
    quick: bool = False  # part of the short set

    @property
    def axes(self) -> int:
        return len(self.shape) - 2

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        """The bytes of x, which must move: weight, bias and result are left out of the floor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def tap_settings(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """stride, padding, output_padding and dilation, as torch.ops wants them."""
        return [self.stride], [self.padding], [self.output_padding], [self.dilation]

    @property
    def out_size(self) -> tuple[int, ...]:
        """The spatial size of the transposed convolution's output."""
        grow = self.dilation * (self.kernel - 1) + self.output_padding + 1 - 2 * self.padding
        return tuple((n - 1) * self.stride + grow for n in self.shape[2:])

    def describe(self) -> dict:
        """The case as JSON holds it."""
        return dataclasses.asdict(self) | {"bytes": self.bytes}


def inputs(case: Case, device: torch.device, copies: int) -> list[Inputs]:
    """``copies`` inputs that share nothing but weight and bias, filled with normal numbers.

    The numbers depend on the case alone: a run that is repeated compares the same sums.
    """
    generator = torch.Generator(device).manual_seed(44)
    dtype = case.torch_dtype

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    c_in, kernel = case.shape[1], (case.kernel,) * case.axes
    weight = randn(c_in, case.c_out // case.groups, *kernel)
    bias = randn(case.c_out)
    if case.kind == "spread":
        tap_grads = randn(case.shape[0], c_in, *kernel).float()
        return [Inputs(tap_grads, weight, bias) for _ in range(copies)]
    return [Inputs(_laid_out(case, randn), weight, bias) for _ in range(copies)]


def _laid_out(case: Case, randn) -> Tensor:
    shape, layout = case.shape, case.layout
    if layout == "contiguous":
        return randn(*shape)
    if layout == "channels_last":
        # For 1-D, too, where torch has no memory format of that name.
        return randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    if layout == "misaligned":
        return randn(math.prod(shape) + 1)[1:].view(shape)
    if layout == "padded rows":
        return randn(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
    if layout == "transposed":
        return randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "every second channel":
        return randn(shape[0], 2 * shape[1], *shape[2:])[:, ::2]
    if layout == "every second column":
        return randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def shrunk(case: Case) -> Case:
    """The same case at a size that any machine does at once.

    Its times mean nothing: its targets are dropped. Widths keep their residue mod 8.
    """
    n, c, *spatial = case.shape
    small = [size if size <= 16 else 8 + size % 8 for size in spatial]
    channels = min(c, 4 * case.groups)
    c_out = min(case.c_out, 6 * case.groups)
    return dataclasses.replace(case, shape=(min(n, 3), channels, *small), c_out=c_out, targets=())


def runs(size: int, case: Case) -> list[tuple[int, int]]:
    """Per tap of one axis, the inputs [lo, hi) that it sends inside the output; lo = hi if none.

    The formula of docs/math.md, written again: what judges the operator must not come from it.
    """
    s, p, d = case.stride, case.padding, case.dilation
    m = (size - 1) * s - 2 * p + d * (case.kernel - 1) + case.output_padding + 1
    found = []
    for tap in range(case.kernel):
        lo = max(0, -((tap * d - p) // s))
        hi = min(size, (m - 1 + p - tap * d) // s + 1)
        found.append((lo, hi) if lo < hi else (0, 0))
    return found


def bands(size: int, case: Case) -> list[tuple[int, int, list[int]]]:
    """The bands (begin, end, taps that cover it) of one axis; those that no tap covers left out."""
    of_taps = runs(size, case)
    cuts = sorted({0, size, *itertools.chain.from_iterable(of_taps)})
    found = []
    for begin, end in itertools.pairwise(cuts):
        taps = [tap for tap, (lo, hi) in enumerate(of_taps) if lo <= begin and end <= hi]
        if taps:
            found.append((begin, end, taps))
    return found

"""Who competes. A peer is a function (x, weight, bias) -> result, made for one case.

It says what it computes, and with that what it is checked against; what it gives away in accuracy;
and which cases it cannot do. Peers that need a C++ compiler are in the repository's benchmarks/,
which hands them to the run: nothing here knows of them.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import convt_reduce
from convt_reduce._bench._case import Case, bands
from convt_reduce._bench._oracle import chain_of

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[Case, torch.device], Function]


def does_every_case(case: Case) -> str | None:
    """The `refuses` of a peer that refuses nothing."""
    return None


@dataclass(frozen=True)
class Peer:
    """One contender.

    make: the function for a case on a device. refuses: why it cannot do a case, as the end of a
    sentence that begins with "does only", or None. computes: mean (what `fused_mean` gives), sum
    (of x over space), copy (of x, dense), spread (grad_x from tap gradients, in place of x), fill
    (of x's size) or matmul (of the cell sums' size).
    rounding: a key of `_oracle.ROUNDINGS`. tf32: False turns TF32 off while the peer runs, None
    leaves it as PyTorch ships it.
    """

    name: str
    make: Make
    computes: str = "mean"
    rounding: str = "float32"
    tf32: bool | None = None
    refuses: Callable[[Case], str | None] = does_every_case
    compiled: bool = False

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """What holds while the peer is checked and timed. What it compiled is forgotten after."""
        shipped = torch.backends.cudnn.allow_tf32
        if self.tf32 is not None:
            torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = shipped
            if self.compiled:
                torch.compiler.reset()


def _ours(door: Callable[[], Callable[..., Tensor]]) -> Make:
    """The operator through one of its doors; each costs the host differently."""

    def make(case: Case, device: torch.device) -> Function:
        operator = door()
        stride, padding, output_padding, dilation = case.tap_settings
        groups, multiplier = case.groups, case.multiplier

        def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return operator(
                x, weight, bias, stride, padding, output_padding, groups, dilation, multiplier
            )

        return ours

    return make


def algebra(case: Case, device: torch.device) -> Function:
    """The closed form in torch ops: a sum over each cell, then one contraction with the weight.

    Sums and products in float32, as in ours; the result is rounded once. What does not depend on
    the tensors' values is worked out here, before any call: slices, and which taps cover each cell.
    """
    cells = cells_of(case)
    slices = [(..., *(slice(begin, end) for begin, end, _ in cell)) for cell in cells]
    cover = torch.zeros(case.kernel**case.axes, len(cells))
    for index, cell in enumerate(cells):
        taps = [0]
        for _, _, of_axis in cell:
            taps = [tap * case.kernel + other for tap in taps for other in of_axis]
        cover[taps, index] = 1 / math.prod(case.out_size)
    cover = cover.to(device)
    space, groups, multiplier = _space(case), case.groups, case.multiplier

    def in_torch_ops(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        sums = torch.stack([x[at].sum(space, dtype=torch.float32) for at in slices], -1)
        sums = sums.reshape(x.shape[0], groups, -1, len(slices))
        folded = weight.flatten(2).float() @ cover
        folded = folded.reshape(groups, -1, weight.shape[1], len(slices))
        y = torch.einsum("ngcs,gcos->ngo", sums, folded).flatten(1)
        y = (y + bias.float()) * multiplier
        return y.to(x.dtype).reshape(*y.shape, *(1,) * len(space))

    return in_torch_ops


def cells_of(case: Case) -> list[tuple[tuple[int, int, list[int]], ...]]:
    """The cells that some tap covers, each with its band per axis."""
    return list(itertools.product(*(bands(size, case) for size in case.shape[2:])))


def matmul_operands(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """float32 [N, C_in * cells] and [C_in * cells, C_out]: the product that combining is."""
    generator = torch.Generator(device).manual_seed(45)
    inner = case.shape[1] * len(cells_of(case))
    return (
        torch.randn(case.shape[0], inner, device=device, generator=generator),
        torch.randn(inner, case.c_out, device=device, generator=generator),
    )


def _matmul(case: Case, device: torch.device) -> Function:
    left, right = matmul_operands(case, device)
    return lambda x, weight, bias: left @ right


def _reference(case: Case, device: torch.device) -> Function:
    return chain_of(case)


def _compiled(make: Make, mode: str = "default") -> Make:
    def compiled(case: Case, device: torch.device) -> Function:
        return torch.compile(make(case, device), mode=mode, dynamic=False)

    return compiled


def _space(case: Case) -> tuple[int, ...]:
    return tuple(range(2, 2 + case.axes))


def _sum(case: Case, device: torch.device) -> Function:
    space = _space(case)
    return lambda x, weight, bias: x.sum(space)


def _copy(case: Case, device: torch.device) -> Function:
    """A dense copy: of the same layout where that is dense, else contiguous."""
    dense = case.layout in ("contiguous", "channels_last", "misaligned")
    memory_format = torch.preserve_format if dense else torch.contiguous_format
    return lambda x, weight, bias: x.clone(memory_format=memory_format)


def _fill(case: Case, device: torch.device) -> Function:
    shape, dtype = case.shape, case.torch_dtype
    return lambda x, weight, bias: torch.empty(shape, dtype=dtype, device=device).fill_(1.0)


def _spread(case: Case, device: torch.device) -> Function:
    operator = torch.ops.convt_reduce._tap_spread.default
    size, dtype, settings = list(case.shape[2:]), case.torch_dtype, case.tap_settings
    return lambda tap_grads, weight, bias: operator(tap_grads, size, dtype, *settings)


def _not_for_tf32(case: Case) -> str | None:
    return None if case.dtype == "float32" else "float32, the only dtype that TF32 concerns"


def _twice(name: str, make: Make, compiled: bool = False) -> list[Peer]:
    """A reference as PyTorch ships it, and with TF32 off."""
    off = Peer(
        f"{name}, TF32 off",
        make,
        rounding="chain",
        tf32=False,
        refuses=_not_for_tf32,
        compiled=compiled,
    )
    return [Peer(name, make, rounding="tf32", compiled=compiled), off]


# Not plain max-autotune: its own CUDA graphs cannot be captured into the protocol's.
_TUNED = "max-autotune-no-cudagraphs"

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in [
        Peer("ours", _ours(lambda: torch.ops.convt_reduce.fused_mean.default)),
        Peer("ours, the packet", _ours(lambda: torch.ops.convt_reduce.fused_mean)),
        Peer("ours, the function", _ours(lambda: convt_reduce.fused_mean)),
        Peer("ours, spread", _spread, computes="spread"),
        *_twice("reference", _reference),
        *_twice("reference compiled", _compiled(_reference), compiled=True),
        *_twice("reference max-autotune", _compiled(_reference, _TUNED), compiled=True),
        Peer("algebra", algebra),
        Peer("algebra compiled", _compiled(algebra), compiled=True),
        Peer("sum", _sum, computes="sum"),
        Peer("copy", _copy, computes="copy"),
        Peer("fill", _fill, computes="fill"),
        Peer("matmul", _matmul, computes="matmul"),
    ]
}

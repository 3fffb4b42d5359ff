"""Who is right: every result in float64, with the error that a peer is allowed.

The mean comes from the closed form of docs/math.md, sums over each tap's box and one contraction;
`definition` is the transposed convolution itself, for one batch element, so that the closed form is
checked in every run and not believed. Everything is done piecewise over the batch, to need little
memory beside inputs of a GiB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from convt_reduce._bench._case import Case, Inputs, runs

_PIECE_ELEMENTS = 2**24  # of the input, in float64 at a time
_DEFINITION_ELEMENTS = 2**24  # of the output, above which the convolution is left out

# What a peer loses beyond adding in float32 in blocks, as a share of the same sum over absolute
# values. A convolution and its gradients may add one product after another, which loses more; TF32
# keeps 10 bits of both factors; a chain in half precision rounds the image between its steps.
ROUNDINGS: dict[str, Callable[[torch.dtype], float]] = {
    "float32": lambda dtype: 0.0,
    "chain": lambda dtype: 2.0**-14 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps,
    "tf32": lambda dtype: 2.0**-9 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps,
}


@dataclass(frozen=True)
class Expected:
    """A result in float64, the same on absolute values, and how many products each element adds."""

    value: Tensor
    magnitude: Tensor
    terms: int


@dataclass(frozen=True)
class Check:
    """How far a result is off: the largest error, also as a share of the largest true value."""

    right: bool
    max_error: float
    max_share: float
    allowed: float  # the largest bound of any element

    @property
    def sentence(self) -> str:
        return f"largest error {self.max_error:.3g}, where {self.allowed:.3g} is allowed"


def check(result: Tensor, expected: Expected, rounding: str, dtype: torch.dtype) -> Check:
    """Compares element by element. rounding: a key of ROUNDINGS; dtype: of the inputs."""
    value, magnitude = expected.value, expected.magnitude
    if result.numel() != value.numel():
        return Check(False, math.inf, math.inf, 0.0)
    error = (result.detach().double().reshape(value.shape) - value).abs()
    float32 = torch.finfo(torch.float32).eps
    share = (4 + math.log2(1 + expected.terms)) * float32 + ROUNDINGS[rounding](dtype)
    info = torch.finfo(result.dtype)
    bound = share * magnitude + info.eps * value.abs() + info.smallest_normal * info.eps
    right = bool((error <= bound).all())  # false for NaN, too
    # NaN must be seen, and max() of an empty tensor is an error.
    largest = error.max().item() if error.numel() else 0.0
    scale = value.abs().max().item() if value.numel() else 0.0
    allowed = bound.max().item() if bound.numel() else 0.0
    return Check(right, largest, largest / scale if scale else 0.0, allowed)


def tap_sums(x: Tensor, case: Case) -> Tensor:
    """x [N, C, *spatial] in float64 summed over each tap's box: [N, C, *kernel]."""
    for axis in range(2, x.dim()):
        parts = [x.narrow(axis, lo, hi - lo).sum(axis) for lo, hi in runs(case.shape[axis], case)]
        x = torch.stack(parts, axis)
    return x


def closed_form(x: Tensor, weight: Tensor, bias: Tensor, case: Case, multiplier: float) -> Tensor:
    """The mean [N, C_out] of float64 tensors. Differentiable."""
    n, c_in = x.shape[:2]
    sums = tap_sums(x, case).reshape(n, case.groups, c_in // case.groups, -1)
    weight = weight.reshape(case.groups, c_in // case.groups, weight.shape[1], -1)
    y = torch.einsum("ngct,gcot->ngo", sums, weight).flatten(1) / math.prod(case.out_size)
    return multiplier * (y + bias)


def mean(case: Case, inputs: Inputs) -> Expected:
    """What `fused_mean` should give for one input: [N, C_out]."""
    weight, bias = inputs.weight.double(), inputs.bias.double()
    values, magnitudes = [], []
    for piece in _pieces(inputs.x):
        values.append(closed_form(piece, weight, bias, case, case.multiplier))
        magnitudes.append(
            closed_form(piece.abs(), weight.abs(), bias.abs(), case, abs(case.multiplier))
        )
    terms = math.prod(case.shape[1:]) * case.kernel**case.axes // case.groups
    return Expected(torch.cat(values), torch.cat(magnitudes), terms)


def sums(case: Case, inputs: Inputs) -> Expected:
    """x summed over space: [N, C_in]."""
    space = tuple(range(2, 2 + case.axes))
    pieces = [(piece.sum(space), piece.abs().sum(space)) for piece in _pieces(inputs.x)]
    values, magnitudes = (torch.cat(part) for part in zip(*pieces, strict=True))
    return Expected(values, magnitudes, math.prod(case.shape[2:]))


def definition(case: Case, inputs: Inputs) -> float | None:
    """How far the closed form is from the convolution itself, both in float64: the largest
    difference over the first batch element, as a share of its largest value. None where the
    convolution's output would be too large to try."""
    if not case.shape[0] or case.c_out * math.prod(case.out_size) > _DEFINITION_ELEMENTS:
        return None
    x, weight, bias = (t.double() for t in (inputs.x[:1], inputs.weight, inputs.bias))
    chain = chain_of(case)(x, weight, bias).flatten(1)
    form = closed_form(x, weight, bias, case, case.multiplier)
    return ((chain - form).abs().max() / chain.abs().max()).item()


def chain_of(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The definition: PyTorch's transposed convolution, scaled, averaged over space."""
    convolve = getattr(functional, f"conv_transpose{case.axes}d")
    space = tuple(range(2, 2 + case.axes))
    stride, padding, output_padding = case.stride, case.padding, case.output_padding
    groups, dilation, multiplier = case.groups, case.dilation, case.multiplier

    def chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = convolve(x, weight, bias, stride, padding, output_padding, groups, dilation)
        return (y * multiplier).mean(space, keepdim=True)

    return chain


def gradients(case: Case, inputs: Inputs, grad: Tensor) -> list[Expected]:
    """What backward should give for x, weight and bias; grad is y's gradient [N, C_out]."""
    found = []
    terms = math.prod(case.shape[:1] + case.shape[2:]) * case.kernel**case.axes * case.c_out
    exact = [t.double() for t in (*inputs, grad)]
    for x, weight, bias, g, multiplier in (
        (*exact, case.multiplier),
        (*(t.abs() for t in exact), abs(case.multiplier)),
    ):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = closed_form(*leaves, case, multiplier)
        found.append(torch.autograd.grad(y, leaves, g))
    return [Expected(value, magnitude, terms) for value, magnitude in zip(*found, strict=True)]


def spread(case: Case, tap_grads: Tensor) -> Expected:
    """Each input's gradient: the sum over the taps whose box holds it, [N, C_in, *spatial]."""
    found = []
    for part in (tap_grads.double(), tap_grads.double().abs()):
        for axis in range(2, part.dim()):
            size = list(part.shape)
            size[axis] = case.shape[axis]
            wider = part.new_zeros(size)
            for tap, (lo, hi) in enumerate(runs(case.shape[axis], case)):
                wider.narrow(axis, lo, hi - lo).add_(part.narrow(axis, tap, 1))
            part = wider
        found.append(part)
    return Expected(*found, case.kernel**case.axes)


def _pieces(x: Tensor) -> list[Tensor]:
    """x in float64, a few batch elements at a time."""
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(x.shape[1:])))
    return (part.double() for part in x.split(step))

"""The two oracles and the one tolerance policy.

`torch_chain` is the definition: PyTorch's transposed convolution, scaled, then averaged.
`closed_form` is what the package computes, spelled out in plain torch: sums over runs, then one
contraction with the weight. Both work in float64, whatever the dtype of the tensors they are given.
"""

import functools
import math

import torch
from torch.nn import functional


def per_axis(value, axes):
    """One entry per spatial axis from an int, a list of one or a list of `axes`."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


# ---- oracle 1: the definition -------------------------------------------------------------------


def torch_chain(
    x, w, b=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, multiplier=1.0
):
    axes = w.dim() - 2
    conv = getattr(functional, f"conv_transpose{axes}d")
    lists = (per_axis(v, axes) for v in (stride, padding, output_padding))
    b = None if b is None else b.double()
    y = conv(x.double(), w.double(), b, *lists, groups, per_axis(dilation, axes))
    return (y * multiplier).mean(dim=tuple(range(-axes, 0)), keepdim=True)


# ---- oracle 2: the closed form ------------------------------------------------------------------


def output_size(n, k, stride, padding, output_padding, dilation):
    return (n - 1) * stride - 2 * padding + dilation * (k - 1) + output_padding + 1


@functools.cache
def runs(n, k, stride, padding, output_padding, dilation):
    """For each tap of one axis, the inputs [lo, hi) that it sends inside the output.

    Tap i sends input h to h*stride - padding + i*dilation. Both ends are found by trying every h:
    slower than a formula, and with nothing in it to get wrong by one.
    """
    m = output_size(n, k, stride, padding, output_padding, dilation)
    found = []
    for i in range(k):
        inside = [h for h in range(n) if 0 <= h * stride - padding + i * dilation < m]
        found.append((inside[0], inside[-1] + 1) if inside else (0, 0))
    return found


def axis_settings(size, kernel_size, stride, padding, output_padding, dilation):
    axes = len(size)
    lists = (per_axis(v, axes) for v in (stride, padding, output_padding, dilation))
    return list(zip(size, kernel_size, *lists, strict=True))


def tap_sums(x, kernel_size, stride=1, padding=0, output_padding=0, dilation=1):
    """x summed over each tap's box. A box is a product of runs, so the axes go one at a time."""
    axes, sums = len(kernel_size), x.double()
    settings = axis_settings(
        x.shape[-axes:], kernel_size, stride, padding, output_padding, dilation
    )
    for axis, setting in zip(range(-axes, 0), settings, strict=True):
        parts = [sums.narrow(axis, lo, hi - lo).sum(axis) for lo, hi in runs(*setting)]
        sums = torch.stack(parts, dim=axis)
    return sums


def tap_spread(g, size, stride=1, padding=0, output_padding=0, dilation=1):
    """The adjoint of `tap_sums`: each input receives the g of every tap whose box holds it."""
    axes = len(size)
    spread = g.double()
    settings = axis_settings(size, g.shape[-axes:], stride, padding, output_padding, dilation)
    for axis, setting in zip(range(-axes, 0), settings, strict=True):
        taps = spread
        shape = list(taps.shape)
        shape[axis] = setting[0]
        spread = taps.new_zeros(shape)
        for tap, (lo, hi) in enumerate(runs(*setting)):
            spread.narrow(axis, lo, hi - lo).add_(taps.narrow(axis, tap, 1))
    return spread


def closed_form(
    x, w, b=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, multiplier=1.0
):
    axes = w.dim() - 2
    parameters = (stride, padding, output_padding, dilation)
    sums = tap_sums(x, w.shape[2:], *parameters)
    settings = axis_settings(x.shape[-axes:], w.shape[2:], *parameters)
    positions = math.prod(output_size(*setting) for setting in settings)

    batch, taps, per_group = x.shape[: -axes - 1], w[0, 0].numel(), w.shape[0] // groups
    sums = sums.reshape(*batch, groups, per_group, taps)
    weight = w.double().reshape(groups, per_group, w.shape[1], taps)
    # As a float: a stride of 2**40 gives more positions than torch can take as an int.
    y = torch.einsum("...gct,gcot->...go", sums, weight).flatten(-2) / float(positions)
    if b is not None:
        y = y + b.double()
    return multiplier * y.reshape(*y.shape, *(1,) * axes)


def gradients(oracle, g, x, w, b=None, *settings):
    """The oracle's gradients for input, weight and (if given) bias; g is the incoming one."""
    leaves = [t.detach().double().requires_grad_() for t in (x, w, b) if t is not None]
    y = oracle(*leaves, *(() if b is not None else (None,)), *settings)
    return torch.autograd.grad(y, leaves, g.double())


# ---- the tolerance ------------------------------------------------------------------------------
#
# A result may be wrong by one rounding to its own dtype, and by what the accumulation loses.
# The second part is bounded, for sums of `terms` products taken in blocks, by about
# log2(terms) * eps * magnitude, where magnitude is the same computation on absolute values: |x|,
# |w|, |b|, |multiplier|. It is small wherever the exact result's summands are small, element by
# element, so a wrong element cannot hide behind a large neighbour; and unlike a multiple of
# PyTorch's own error it does not vary with luck, nor grow with the rounding of the intermediate
# image that PyTorch makes in float16 and bfloat16. `_SPARE` roundings cover the scale, the folding
# of the weights and the bias. The oracle is itself computed in float64, in part by adding one term
# after another; its error, about sqrt(terms) roundings, matters for float64 results only.
# Sharper tests stand beside this bound: test_exact.py allows nothing, and test_value.py holds the
# halves to twice PyTorch's own error.

_SPARE = 4


def accumulation_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def error_bound(expected, magnitude, dtype, terms):
    """The largest error allowed to each element; all tensors in float64."""
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    oracle = math.sqrt(terms) * torch.finfo(torch.float64).eps
    accumulation = ((_SPARE + math.log2(1 + terms)) * eps + oracle) * magnitude.abs()
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * (expected.abs() + accumulation) + info.smallest_normal * info.eps
    return accumulation + rounding


def absolute(*arguments):
    """The arguments with every tensor and number replaced by its absolute value."""
    return [a.double().abs() if isinstance(a, torch.Tensor) else a for a in arguments]


def magnitude_of(x, w, b=None, *settings):
    """The same computation on absolute values. settings may end in the multiplier."""
    settings = list(settings)
    if len(settings) == 6:
        settings[5] = abs(settings[5])
    return closed_form(*absolute(x, w, b), *settings)


def gradient_magnitudes(g, x, w, b=None, *settings):
    settings = list(settings)
    if len(settings) == 6:
        settings[5] = abs(settings[5])
    return gradients(closed_form, g.double().abs(), *absolute(x, w, b), *settings)


def assert_within(actual, expected, magnitude, terms, dtype=None, what="result"):
    """Every element of `actual` is `expected` (float64) up to the bound; NaN and inf exactly."""
    dtype = dtype or actual.dtype
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, not {dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    bound = error_bound(expected, magnitude.detach().double().cpu(), dtype, terms)
    error = (actual - expected).abs()
    same = torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True)
    wrong = ~same & ~(error <= bound)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at "
            f"{index}: {actual[index].item()!r}, expected {expected[index].item()!r} "
            f"+- {bound[index].item():.3g}"
        )


def assert_closed_form(y, terms, settings, *tensors, dtype=None):
    """A value of so many terms, for input, weight and bias, against the closed form."""
    expected = closed_form(*tensors, *settings)
    assert_within(y, expected, magnitude_of(*tensors, *settings), terms, dtype)


def assert_right(y, case, dtype, *tensors):
    """A case's value, for its input, weight and bias, against the closed form."""
    assert_closed_form(y, case.terms, case.settings, *tensors, dtype=dtype)


def assert_not_finite_alike(actual, expected):
    """Infinite where `expected` is, NaN where it is NaN, and finite elsewhere."""
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual[~finite].isnan(), expected[~finite].isnan())

"""Where the arithmetic is exact, the result must be too: no tolerance at all.

Small integers add and multiply without rounding in float32, in whatever order. The cases of the
table are stretched a little until the number of output positions is a power of two, so that the
scale does not round either. What is left is one rounding to the result's dtype: a single element
counted twice, missed or taken from the wrong place shows in every dtype, the halves included.
"""

import dataclasses
import math

import pytest
import reference
import torch
from cases import CASES, DTYPES, dtype_id

ops = torch.ops.convt_reduce
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def stretched(case):
    """The case with more inputs and another output_padding, until each axis has 2**k outputs."""
    sizes, extras = [], []
    for n, k, s, p, _, d in reference.axis_settings(case.size, case.kernel, *case.tap_settings):
        for size, extra in ((n + more, o) for more in range(4200) for o in range(max(s, d))):
            m = reference.output_size(size, k, s, p, extra, d)
            if m > 0 and m & (m - 1) == 0:
                sizes.append(size)
                extras.append(extra)
                break
    return dataclasses.replace(case, size=tuple(sizes), output_padding=tuple(extras))


STRETCHED = [stretched(case) for case in CASES]
each_stretched_case = pytest.mark.parametrize("case", STRETCHED, ids=lambda case: case.id)


def integers(shape, largest, generator):
    return torch.randint(-largest, largest + 1, shape, generator=generator).double()


def exact_problem(case):
    """input, weight, bias, multiplier and the result in float64, no element above 1024."""
    g = case.generator()
    x, w = integers(case.input_shape, 3, g), integers(case.weight_shape, 2, g)
    b = integers((case.c_out,), 2, g) if case.bias else None
    settings = reference.axis_settings(case.size, case.kernel, *case.tap_settings)
    positions = math.prod(reference.output_size(*setting) for setting in settings)
    assert 6 * case.terms + 2 * positions < 2**24, "no longer exact in float32"
    y = reference.closed_form(x, w, b, *case.settings[:-1], 1.0)
    multiplier = 2.0 ** (9 - math.floor(math.log2(1 + y.abs().max().item())))
    return x, w, b, multiplier, y * multiplier


@each_dtype
@each_stretched_case
def test_value_is_exact(case, dtype, device):
    x, w, b, multiplier, expected = exact_problem(case)
    there = [None if t is None else t.to(dtype).to(device) for t in (x, w, b)]
    y = ops.fused_mean(*there, *case.op_settings[:-1], multiplier)
    torch.testing.assert_close(y.cpu(), expected.to(dtype), rtol=0, atol=0)


@each_dtype
@each_stretched_case
def test_gradients_are_exact(case, dtype, device):
    x, w, b, multiplier, y = exact_problem(case)
    g = integers(y.shape, 1, case.generator())
    expected = reference.gradients(
        reference.closed_form, g, x, w, b, *case.settings[:-1], multiplier
    )
    leaves = [t.to(dtype).to(device).requires_grad_() for t in (x, w, b) if t is not None]
    tensors = leaves if case.bias else (*leaves, None)
    result = ops.fused_mean(*tensors, *case.op_settings[:-1], multiplier)
    found = torch.autograd.grad(result, leaves, g.to(dtype).to(device))
    for name, ours, theirs in zip(("input", "weight", "bias"), found, expected, strict=False):
        torch.testing.assert_close(
            ours.cpu(), theirs.to(dtype), rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@each_dtype
@each_case
def test_tap_operators_are_exact(case, dtype, device):
    g = case.generator()
    accumulated = reference.accumulation_dtype(dtype)
    x = integers(case.input_shape, 3, g)
    sums = ops._tap_sums(x.to(dtype).to(device), case.kernel, *case.op_tap_settings)
    expected = reference.tap_sums(x, case.kernel, *case.tap_settings)
    assert torch.equal(sums.cpu(), expected.to(accumulated))

    taps = integers(expected.shape, 3, g)
    arguments = (case.size, dtype, *case.op_tap_settings)
    spread = ops._tap_spread(taps.to(accumulated).to(device), *arguments)
    expected = reference.tap_spread(taps, case.size, *case.tap_settings)
    assert torch.equal(spread.cpu(), expected.to(dtype))

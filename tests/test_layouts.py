"""Memory: any strides and offsets of input, weight, bias and incoming gradients give right values.

Each layout is laid over each tensor in turn, on one case per number of axes and code path, and
compared with the oracle, which reads the same view. What lies between the elements is NaN.
"""

import pytest
import reference
import torch
from cases import DTYPES, VARIED, dtype_id, some
from layouts import LAYOUTS, shifted

ops = torch.ops.convt_reduce
each_case = pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def check(tensors, case):
    """The value for these views, as they are in memory."""
    expected = reference.torch_chain(*copies(tensors), *case.settings)
    magnitude = reference.magnitude_of(*copies(tensors), *case.settings)
    y = ops.fused_mean(*tensors, *case.op_settings)
    assert y.is_contiguous()
    reference.assert_within(y, expected, magnitude, case.terms, tensors[0].dtype)


def copies(tensors):
    return [None if t is None else t.detach().clone().cpu() for t in tensors]


# Two dtypes stand for four: float32 and float64 share every line but the width, so do the halves.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@each_layout
@each_case
def test_input(case, layout, dtype, device):
    x, w, b = case.tensors(dtype, device)
    check((layout(x), w, b), case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=dtype_id)
@each_layout
@each_case
def test_weight(case, layout, dtype, device):
    x, w, b = case.tensors(dtype, device)
    check((x, layout(w), b), case)


@each_dtype
@pytest.mark.parametrize("case", some("1d-small", "2d-all-unequal", "3d-small"), ids=lambda c: c.id)
def test_bias(case, dtype, device):
    x, w, b = case.tensors(dtype, device)
    in_steps = torch.full((2 * case.c_out,), float("nan"), dtype=dtype, device=device)[::2]
    check((x, w, in_steps.copy_(b)), case)
    check((x, w, shifted(1)(b)), case)
    check((x, w, b[:1].expand(case.c_out)), case)


@pytest.mark.parametrize("offset", range(1, 8))
@each_dtype
@pytest.mark.parametrize(
    "case", some("2d-w32", "2d-w33", "1d-n129", "3d-w33", "2d-c33-c127"), ids=lambda case: case.id
)
def test_contiguous_but_not_aligned(case, dtype, offset, device):
    """Offsets of 1 to 7 elements break the alignment of every wide load in a different way."""
    tensors = case.tensors(dtype, device)
    moved = [shifted(offset)(t) for t in tensors]
    assert all(t.is_contiguous() for t in moved)
    check(moved, case)
    assert torch.equal(
        ops.fused_mean(*moved, *case.op_settings), ops.fused_mean(*tensors, *case.op_settings)
    )


@each_layout
@each_case
def test_incoming_gradient(case, layout, device):
    x, w, b = case.tensors(torch.float64, device)
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    y = ops.fused_mean(x, w, b, *case.op_settings)
    g = layout(torch.randn_like(y))
    expected = reference.gradients(reference.torch_chain, *copies((g, x, w, b)), *case.settings)
    magnitudes = reference.gradient_magnitudes(*copies((g, x, w, b)), *case.settings)
    found = torch.autograd.grad(y, leaves, g)
    for ours, theirs, magnitude in zip(found, expected, magnitudes, strict=True):
        reference.assert_within(ours, theirs, magnitude, g.numel() * case.terms)


@each_layout
@each_case
def test_gradients_of_views(case, layout, device):
    """The layout of input and weight reaches the backward too, which reads the weight."""
    x, w, b = case.tensors(torch.float64, device)
    x, w = layout(x).detach().requires_grad_(), layout(w).detach().requires_grad_()
    y = ops.fused_mean(x, w, b, *case.op_settings)
    g = torch.randn_like(y)
    expected = reference.gradients(reference.torch_chain, *copies((g, x, w, b)), *case.settings)
    magnitudes = reference.gradient_magnitudes(*copies((g, x, w, b)), *case.settings)
    found = torch.autograd.grad(y, (x, w), g)
    for ours, theirs, magnitude in zip(found, expected, magnitudes, strict=False):
        reference.assert_within(ours, theirs, magnitude, y.numel() * case.terms)


@each_dtype
@each_layout
@each_case
def test_tap_operators(case, layout, dtype, device):
    x = layout(case.tensors(dtype, device)[0])
    sums = ops._tap_sums(x, case.kernel, *case.op_tap_settings)
    plain = x.clone().cpu()
    expected = reference.tap_sums(plain, case.kernel, *case.tap_settings)
    magnitude = reference.tap_sums(plain.abs(), case.kernel, *case.tap_settings)
    accumulated = reference.accumulation_dtype(dtype)
    reference.assert_within(sums, expected, magnitude, case.terms, accumulated, "tap sums")

    g = layout(torch.randn(sums.shape, dtype=accumulated, device=device))
    spread = ops._tap_spread(g, case.size, dtype, *case.op_tap_settings)
    plain = g.clone().cpu()
    expected = reference.tap_spread(plain, case.size, *case.tap_settings)
    magnitude = reference.tap_spread(plain.abs(), case.size, *case.tap_settings)
    reference.assert_within(spread, expected, magnitude, case.terms, dtype, "spread")

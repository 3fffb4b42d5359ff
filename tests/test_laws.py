"""Laws that hold whatever a reference says, and would catch what two references share.

The operator is linear in the input and in weight and bias; the multiplier scales it; tap sums and
spread are adjoint; one element of the input changes the result by its share and nothing else.
"""

import math

import pytest
import reference
import torch
from cases import VARIED, some

ops = torch.ops.convt_reduce
each_varied_case = pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)


def apply(case, x, w, b=None, multiplier=None):
    settings = list(case.op_settings)
    if multiplier is not None:
        settings[-1] = multiplier
    return ops.fused_mean(x, w, b, *settings)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@each_varied_case
def test_linear_in_each_argument(case, device):
    x, w, _ = case.tensors(device=device)
    x2, w2, b = torch.randn_like(x), torch.randn_like(w), torch.randn(case.c_out, device=device)
    b = b.double()
    close(apply(case, 2 * x - 3 * x2, w), 2 * apply(case, x, w) - 3 * apply(case, x2, w))
    close(apply(case, x, 2 * w - 3 * w2), 2 * apply(case, x, w) - 3 * apply(case, x, w2))
    b_only = apply(case, x, w, b) - apply(case, x, w)
    close(b_only, (case.multiplier * b).view(case.c_out, *(1,) * case.axes).expand_as(b_only))


@each_varied_case
def test_multiplier_scales_everything_once(case, device):
    x, w, b = case.tensors(device=device)
    for multiplier in (-2.5, 0.0, 1e3):
        close(apply(case, x, w, b, multiplier), multiplier * apply(case, x, w, b, 1.0))


def test_constant_input_on_a_full_window(device):
    """Nothing is cropped: each tap sums all of x, and y = (inputs / outputs) * sum of weights."""
    x = torch.full((2, 3, 5, 7), 1.5, dtype=torch.float64, device=device)
    w = torch.randn(3, 4, 2, 3, dtype=torch.float64, device=device)
    y = ops.fused_mean(x, w)
    close(y, (35 / 54 * 1.5 * w.sum((0, 2, 3))).view(1, 4, 1, 1).expand(2, 4, 1, 1))


@each_varied_case
def test_tap_sums_and_spread_are_adjoint(case, device):
    x = case.tensors(device=device)[0]
    sums = ops._tap_sums(x, case.kernel, *case.op_tap_settings)
    s = torch.randn_like(sums)
    spread = ops._tap_spread(s, case.size, torch.float64, *case.op_tap_settings)
    assert (sums * s).sum().item() == pytest.approx((x * spread).sum().item(), rel=1e-12)


@pytest.mark.parametrize(
    "case",
    some("1d-small", "2d-kernel-longer-than-input", "2d-cropped-rows", "2d-stride-over-kernel"),
    ids=lambda case: case.id,
)
def test_equals_the_inner_product_with_a_convolution_of_ones(case, device):
    """The mean of a transposed convolution is <x, convolution of a constant image>.

    No transposed convolution is computed at all. The shapes agree when output_padding is smaller
    than the stride on every axis.
    """
    x, w, _ = case.tensors()
    parameters = reference.axis_settings(case.size, case.kernel, *case.tap_settings)
    shape = [reference.output_size(*p) for p in parameters]
    ones = torch.ones(1, case.c_out, *shape, dtype=torch.float64)
    conv = getattr(torch.nn.functional, f"conv{case.axes}d")
    for channel in range(case.c_out):
        image = torch.zeros_like(ones)
        image[:, channel] = ones[:, channel] / math.prod(shape)
        share = conv(image, w, None, case.stride, case.padding, case.dilation)
        expected = case.multiplier * (x * share).flatten(1).sum(1)
        y = apply(case, x.to(device), w.to(device))[:, channel].flatten()
        close(y.cpu(), expected)


@pytest.mark.parametrize(
    "case",
    some(
        "1d-small",
        "1d-kernel-longer-than-input",
        "2d-all-unequal",
        "2d-cropped-rows",
        "2d-output-padding-by-dilation",
        "3d-kernel-longer-than-input",
    ),
    ids=lambda case: case.id,
)
def test_one_input_element_changes_its_share_and_nothing_else(case, device):
    """Every input element in turn, one sample each: x + a one-hot is a batch of all of them."""
    count = math.prod(case.input_shape[1:])
    x, w, b = case.tensors()
    hot = torch.eye(count, dtype=torch.float64).view(count, *case.input_shape[1:])
    # Both batches have the same shape, so that a sample is computed in the same way in both.
    same = x[:1].expand_as(hot)
    before, after = (
        apply(case, t.contiguous().to(device), w.to(device), b.to(device)).cpu()
        for t in (same, same + hot)
    )
    ones = torch.ones(1, case.c_out, *(1,) * case.axes, dtype=torch.float64)
    for channel in range(case.c_out):
        g = torch.zeros_like(ones)
        g[:, channel] = 1
        share = reference.gradients(reference.torch_chain, g, x[:1], w, b, *case.settings)[0]
        change = (after[:, channel] - before[:, channel]).flatten()
        close(change, share.flatten())
        # Where no tap reaches, not even the last bit moves.
        assert (change[share.flatten() == 0] == 0).all()

"""Answers small enough to check by hand.

The literals pin what a fault shared with the reference would hide: half-precision sums that
saturate, infinities that must or must not arrive, counts beyond a launch limit.
"""

import math

import pytest
import reference
import torch
from cases import DTYPES, dtype_id

import convt_reduce

fused_mean = convt_reduce.fused_mean
ops = torch.ops.convt_reduce
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
each_half = pytest.mark.parametrize("dtype", DTYPES[2:], ids=dtype_id)
inf, nan = float("inf"), float("nan")


def flat(y):
    return y.flatten().tolist()


# ---- by hand ------------------------------------------------------------------------------------


@each_dtype
def test_smallest_call(dtype, device):
    ones = torch.ones(1, 1, 2, 2, dtype=dtype, device=device)
    y = fused_mean(ones, ones[..., :1, :1], None, 1, 0, 0, 1, 1, 2.0)
    assert y.shape == (1, 1, 1, 1)
    assert y.dtype == dtype
    assert flat(y) == [2.0]


def test_one_axis_by_hand(device):
    # k3 s2 p1 op1 on [1, 2, 3]: m = 6. Tap 0 loses the first input (it lands on -1), taps 1 and 2
    # keep all: 1*5 + 10*6 + 100*6.
    x = torch.tensor([[[1.0, 2.0, 3.0]]], dtype=torch.float64, device=device)
    w = torch.tensor([[[1.0, 10.0, 100.0]]], dtype=torch.float64, device=device)
    assert ops._tap_sums(x, [3], [2], [1], [1]).tolist() == [[[5.0, 6.0, 6.0]]]
    assert flat(fused_mean(x, w, None, 2, 1, 1)) == pytest.approx([665 / 6], rel=1e-15)


def test_views_by_hand(device):
    w = torch.arange(16.0, dtype=torch.float64, device=device).view(2, 2, 2, 2)
    ramp = torch.arange(30.0, dtype=torch.float64, device=device)
    x = ramp[:24].view(1, 3, 4, 2).permute(0, 3, 1, 2)
    assert flat(fused_mean(x, w)) == pytest.approx([313.2, 534.0], rel=1e-14)
    x = ramp[:24].view(1, 2, 3, 4)
    assert flat(fused_mean(x, w)) == pytest.approx([418.8, 639.6], rel=1e-14)
    x = x.to(memory_format=torch.channels_last)
    assert flat(fused_mean(x, w)) == pytest.approx([418.8, 639.6], rel=1e-14)
    x = ramp.view(1, 2, 3, 5)[..., 1:]
    assert flat(fused_mean(x, w)) == pytest.approx([540.0, 828.0], rel=1e-14)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device).view(1, 2, 1, 1)
    assert flat(fused_mean(x.expand(1, 2, 3, 4), w)) == pytest.approx([49.2, 78.0], rel=1e-14)


@each_half
@pytest.mark.parametrize("side", [64, 512])
def test_half_sums_do_not_saturate(dtype, side, device):
    """4096 ones added in float16 stop at 2048, and 262144 of them are infinity."""
    x = torch.ones(1, 1, side, side, dtype=dtype, device=device)
    assert flat(fused_mean(x, x[..., :1, :1])) == [1.0]


def test_half_result_where_the_image_overflows(device):
    """A float16 chain is infinite here: its image holds 115200."""
    x = torch.full((1, 64, 8, 8), 100.0, dtype=torch.float16, device=device)
    w = torch.full((64, 1, 3, 3), 2.0, dtype=torch.float16, device=device)
    # 64 channels, weight 2. Of the 9 taps, 1 keeps all 64 inputs, 4 lose a row or a column and 4
    # lose both.
    exact = 0.01 * 64 * 2 * 100 * (64 + 4 * 56 + 4 * 49) / 64
    assert exact == pytest.approx(968.0)
    assert flat(fused_mean(x, w, None, 1, 1, multiplier=0.01)) == [968.0]


@pytest.mark.parametrize(
    ("dtype", "input_gradient"),
    [(torch.float16, 2.0**-16), (torch.bfloat16, 2.0**-16), (torch.float32, 2.0**-16)],
    ids=["float16", "bfloat16", "float32"],
)
def test_half_gradient_of_a_large_plane(dtype, input_gradient, device):
    """65536 is infinity in float16, so neither the count nor its inverse may be rounded alone."""
    x = torch.ones(1, 1, 256, 256, dtype=dtype, device=device, requires_grad=True)
    w = torch.ones(1, 1, 1, 1, dtype=dtype, device=device, requires_grad=True)
    fused_mean(x, w).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, input_gradient))
    assert w.grad.item() == 1.0


def test_large_scale_and_large_count_meet_in_half(device):
    """multiplier/M is an ordinary number though the multiplier alone is infinite in float16."""
    x = torch.ones(1, 1, 256, 256, dtype=torch.float16, device=device, requires_grad=True)
    w = torch.full((1, 1, 1, 1), 2.0**-12, dtype=torch.float16, device=device, requires_grad=True)
    y = fused_mean(x, w, multiplier=2.0**20)
    y.sum().backward()
    assert y.item() == 256.0
    assert torch.equal(x.grad, torch.full_like(x, 2.0**-8))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_counts_beyond_a_launch_limit(axes, device):
    """65535 is the most blocks that CUDA takes on the second and third axis of a grid."""
    many, ones = 65537, (1,) * axes

    def of(*shape):
        return torch.ones(*shape, *ones, device=device)

    assert torch.equal(fused_mean(of(many, 1), of(1, 1)), of(many, 1))
    assert torch.equal(fused_mean(of(1, many), of(many, 1)), of(1, 1) * many)
    assert torch.equal(fused_mean(of(1, 1), of(1, 70000)), of(1, 70000))
    ramp = torch.arange(float(many), device=device).view(1, many, *ones)
    w = of(many, 1).requires_grad_()
    y = fused_mean(ramp.requires_grad_(), w, groups=many)
    y.sum().backward()
    assert torch.equal(y, ramp)
    assert torch.equal(w.grad.flatten(), ramp.flatten())
    assert torch.equal(ramp.grad, torch.ones_like(ramp))


@each_dtype
def test_empty_batch(dtype, device):
    x = torch.zeros(0, 4, 5, 6, dtype=dtype, device=device, requires_grad=True)
    w = torch.ones(4, 3, 3, 3, dtype=dtype, device=device, requires_grad=True)
    b = torch.ones(3, dtype=dtype, device=device, requires_grad=True)
    y = fused_mean(x, w, b, 2, 1, 1)
    assert y.shape == (0, 3, 1, 1)
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(w.grad, torch.zeros_like(w))
    assert torch.equal(b.grad, torch.zeros_like(b))
    with torch.no_grad():
        assert fused_mean(x, w, b, 2, 1, 1).shape == (0, 3, 1, 1)
    assert ops._tap_sums(x, [3, 2]).shape == (0, 4, 3, 2)


def test_double_is_double_throughout(device):
    """A single float32 step, in the data or in the multiplier, would cost 1e-8."""
    x = torch.tensor([1.0, 1e-12], dtype=torch.float64, device=device).view(1, 1, 2)
    w = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    assert flat(fused_mean(x, w)) == pytest.approx([(1 + 1e-12) / 2], rel=1e-15)
    assert flat(fused_mean(x, w, multiplier=1 / 3)) == pytest.approx([(1 + 1e-12) / 6], rel=1e-15)


# ---- NaN and infinity ---------------------------------------------------------------------------


@each_dtype
def test_nan_and_inf_go_where_the_convolution_takes_them(dtype, device):
    def tensor(shape, value=1.0):
        return torch.full(shape, value, dtype=dtype, device=device)

    x, w = tensor((1, 4, 5, 6)), tensor((4, 3, 3, 3))
    x[0, 0, 2, 3] = nan
    assert all(math.isnan(v) for v in flat(fused_mean(x, w, None, 2, 1, 1)))
    # Two groups: only the first one sees it.
    y = flat(fused_mean(x, w[:, :1], None, 2, 1, 1, groups=2))
    assert math.isnan(y[0])
    assert math.isfinite(y[1])
    # An infinite input times a zero weight, or a zero multiplier, is NaN: nothing is skipped.
    x[0, 0, 2, 3] = inf
    assert flat(fused_mean(x, w)) == [inf] * 3
    assert all(math.isnan(v) for v in flat(fused_mean(x, 0 * w)))
    assert all(math.isnan(v) for v in flat(fused_mean(x, w, multiplier=0.0)))
    assert flat(fused_mean(tensor((1, 4, 5, 6)), w, multiplier=inf)) == [inf] * 3
    assert flat(fused_mean(tensor((1, 4, 5, 6)), w, tensor((3,), -inf))) == [-inf] * 3
    # Opposite infinities meet in one sum.
    x[0, 1, 0, 0] = -inf
    assert all(math.isnan(v) for v in flat(fused_mean(x, w)))
    # A NaN weight spoils its output channel alone.
    w[2, 1, 0, 2] = nan
    y = flat(fused_mean(tensor((1, 4, 5, 6)), w))
    assert [math.isnan(v) for v in y] == [False, True, False]


@each_dtype
@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_an_input_that_no_tap_covers_does_not_count(value, dtype, device):
    """k3 s2 p5 op1: the two outer rows and columns land outside whatever the tap."""
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64).to(dtype).to(device)
    w = torch.randn(3, 2, 3, 3, dtype=torch.float64).to(dtype).to(device)
    parameters = reference.axis_settings((9, 11), (3, 3), 2, 5, 1, 1)
    inside = [
        range(min(lo for lo, _ in runs), max(hi for _, hi in runs))
        for runs in (reference.runs(*setting) for setting in parameters)
    ]
    assert [len(axis) for axis in inside] == [6, 8]
    y = fused_mean(x, w, None, 2, 5, 1)
    spoilt = torch.full_like(x, value)
    middle = (..., *(slice(axis.start, axis.stop) for axis in inside))
    spoilt[middle] = x[middle]
    assert torch.equal(fused_mean(spoilt, w, None, 2, 5, 1), y)
    assert torch.isfinite(y).all()

    spoilt.requires_grad_()
    w.requires_grad_()
    fused_mean(spoilt, w, None, 2, 5, 1).sum().backward()
    assert torch.isfinite(w.grad).all()
    outside = torch.ones_like(x, dtype=torch.bool)
    outside[middle] = False
    assert (spoilt.grad[outside] == 0).all()
    assert (spoilt.grad[middle] != 0).all()


@each_dtype
@pytest.mark.parametrize("value", [inf, nan])
def test_a_tap_that_loses_the_row_with_the_infinity_stays_finite(value, dtype, device):
    """Subtracting the lost row from a total would leave inf - inf; adding what is kept does not."""
    x = torch.ones(1, 1, 4, 5, dtype=dtype, device=device)
    x[..., 0, :] = value
    sums = ops._tap_sums(x, [3, 3], [2], [1], [1])[0, 0]
    # Tap row 0 sends input row 0 to output row -1. Tap column 0 loses a column in the same way.
    assert sums[0].tolist() == [12.0, 15.0, 15.0]
    assert not torch.isfinite(sums[1:]).any()
    w = torch.zeros(1, 1, 3, 3, dtype=dtype, device=device)
    y = fused_mean(x, w + 1, None, 2, 1, 1)
    assert not torch.isfinite(y).any()


@each_dtype
@pytest.mark.parametrize("value", [inf, nan])
@pytest.mark.parametrize("batch", [1, 3, 130])
def test_a_weight_that_meets_no_input_does_not_count(batch, value, dtype, device):
    """1x1, k3 s2 p1 op1: the first taps of both axes land outside."""
    x = torch.linspace(1, 2, batch * 64, dtype=dtype, device=device).view(batch, 64, 1, 1)
    w = torch.linspace(-1, 1, 64 * 72, dtype=dtype, device=device).view(64, 8, 3, 3)
    y = fused_mean(x, w, None, 2, 1, 1)
    w[..., 0, :] = value
    w[..., 0] = value
    assert torch.equal(fused_mean(x, w, None, 2, 1, 1), y)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=dtype_id)
def test_a_lost_large_value_does_not_cancel_the_small_ones(dtype, device):
    x = torch.ones(1, 1, 4, dtype=dtype, device=device)
    x[..., 0] = 1e30
    assert ops._tap_sums(x, [3], [2], [1], [1])[0, 0, 0].item() == 3.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # One tap has no dilation to speak of, and one element no stride: any size of them is right.
        (([1], [3], [0], 1, [2**63 - 1]), 1.0),
        (([2**62], [0], [0], 1, [1]), 1.0),
    ],
)
def test_settings_that_reach_nothing(settings, expected, device):
    stride, padding = settings[0][0], settings[1][0]
    x = torch.ones(1, 1, 1 if stride > 1 else 2 * padding + 2, device=device)
    y = torch.ops.convt_reduce.fused_mean(x, torch.ones(1, 1, 1, device=device), None, *settings)
    assert y.item() == expected

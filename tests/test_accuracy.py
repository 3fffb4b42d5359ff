"""Long sums lose no more digits than short ones, whatever the values and however rows are cut.

Adding equal numbers one after another errs in one direction: a float32 sum of a million of them
keeps three digits. tools/numerics.py makes the whole table; these are its hardest rows.
"""

import math

import pytest
import reference
import torch

ops = torch.ops.convt_reduce

# Many rows of few elements, one long row, many channels, neighbouring channels, a plane in pieces.
SHAPES = {
    "rows-of-3": (1, 2, 300, 300, 3),
    "rows-of-7": (1, 2, 20001, 7),
    "rows-of-1": (1, 1, 40000, 1),
    "one-row": (1, 2, 1_000_000),
    "channels": (2, 1024, 4, 4),
    "plane": (1, 1, 1024, 1024),
}


def values(kind, shape):
    if kind == "constant":
        return torch.full(shape, 0.1)
    if kind == "ramp":
        count = math.prod(shape)
        return (torch.arange(count, dtype=torch.float64) / count).view(shape).float()
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["constant", "ramp", "positive"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_long_sums(shape, kind, channels_last):
    """Within 4 units in the last place of the exact tap sums and mean, in float32 on the CPU."""
    x = values(kind, shape)
    if channels_last:
        x = torch.cat([x] * 8, 1)[:, : max(4, shape[1])]  # from 4 channels on they go side by side
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    axes = x.dim() - 2
    w = torch.ones(x.shape[1], 1, *[3] * axes) / x.shape[1]
    settings = (2, 1, 1)
    y, sums = ops._fused_mean_with_sums(x, w, None, *([s] for s in settings))
    expected = reference.closed_form(x, w, None, *settings)
    exact_sums = reference.tap_sums(x, w.shape[2:], *settings)
    eps = torch.finfo(torch.float32).eps
    assert ((sums - exact_sums).abs() <= 4 * eps * exact_sums.abs()).all()
    assert ((y - expected).abs() <= 4 * eps * expected.abs()).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(1, 1, 5000), (1, 8, 70, 70), (1, 1, 90000)])
def test_errors_that_are_kept_do_not_spoil_infinity(value, shape):
    """The error of an addition to infinity is NaN; the sum is still infinite."""
    x = torch.ones(shape)
    for layout in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        layout[..., 17] = value
        sums = ops._tap_sums(layout, [1] * (x.dim() - 2))
        expected = torch.full_like(sums, value)
        assert torch.equal(sums.nan_to_num(7.0), expected.nan_to_num(7.0))
    big = torch.full(shape, 3e38)  # finite, but not their sum
    assert torch.isinf(ops._tap_sums(big, [1] * (x.dim() - 2))).all()

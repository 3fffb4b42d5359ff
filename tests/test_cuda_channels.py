"""Channels that are neighbours in memory, on a GPU: planes and numbers of channels of every kind.

How they are shared out among threads depends on both, and on the element size and the cells.
"""

import itertools

import pytest
import reference
import torch
from cases import DTYPES, dtype_id
from layouts import channels_last

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu
SHAPES = (
    (3, 3, 130, 70),
    (2, 64, 128, 128),
    (9, 64, 7, 7),
    (5, 17, 14, 14),
    (5, 66, 33, 20),
    (70, 8, 7, 9),
    (2, 300, 9, 40),
    (3, 1030, 7, 7),
    (3, 24, 5000),
    (2, 5, 700, 3),
    (3, 40, 8, 7, 7),
    (2, 3, 9, 20, 21),
)
SETTINGS = ((3, 2, 1), (3, 1, 1), (5, 1, 2), (2, 3, 0))  # kernel, stride, padding; for every axis


# A block of these takes the last of the 48 KiB of shared memory that it may have, or nearly.
FULL = (
    ((2, 24, 16, 11, 12), (11, 5, 2), torch.float32),
    ((2, 32, 16, 11, 10), (3, 3, 2), torch.float32),
    ((2, 12, 8, 22, 24), (7, 5, 3), torch.float32),
    ((2, 6, 8, 22, 24), (4, 1, 1), torch.float64),
    ((2, 16, 8, 22, 10), (5, 5, 3), torch.float64),
)
EACH = [*itertools.product(SHAPES, SETTINGS, DTYPES), *FULL]


def case_id(case):
    return dtype_id(case) if isinstance(case, torch.dtype) else "x".join(map(str, case))


@pytest.mark.parametrize(("shape", "settings", "dtype"), EACH, ids=case_id)
def test_sums_of_neighbouring_channels(shape, settings, dtype):
    """Near the exact ones, and the same bits for a sample alone and for any alignment."""
    axes = len(shape) - 2
    kernel, stride, padding = settings
    each = [[value] * axes for value in (kernel, stride, padding)]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    x = channels_last(x)
    sums = ops._tap_sums(x, *each)
    exact = reference.tap_sums(x, each[0], stride, padding)
    eps = torch.finfo(sums.dtype).eps
    assert ((sums - exact).abs() <= 16 * eps * exact.abs()).all()

    assert torch.equal(ops._tap_sums(x[-1:], *each), sums[-1:])
    buffer = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")
    shifted = torch.as_strided(buffer, x.shape, x.stride(), 1).copy_(x)
    assert torch.equal(ops._tap_sums(shifted, *each), sums)
    wider = channels_last(torch.cat([x, x], 1))[:, : shape[1]]
    torch.testing.assert_close(ops._tap_sums(wider, *each).double(), exact, rtol=16 * eps, atol=0)

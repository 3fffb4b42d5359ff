"""Large batches of small planes, on a GPU: those with few output channels take a way of their own.

It multiplies the input itself, where sizes and strides allow; the same shapes with a batch or a
stride that it does not take go the usual way, and both are compared with the oracle.
"""

import math

import pytest
import reference
import torch
from cases import DTYPES, Case, dtype_id
from layouts import apart, channels_last, shifted
from repeats import assert_spoilt_elements_alone

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu

# Planes and kernels of every kind; one and several slices, groups, rows that are not aligned.
CASES = (
    Case("1x1", 3100, 40, (1, 1), 8, (3, 3), 2, 1, 1),
    Case("1x1-k1", 800, 24, (1, 1), 1, (1, 1)),
    Case("2x2-slices", 1601, 512, (2, 2), 7, (3, 3), 2, 1, 1),
    Case("3x3-two-fragments", 1700, 16, (3, 3), 16, (3, 3), 2, 1, 1),
    Case("4x4-slices", 1603, 128, (4, 4), 8, (3, 3), 2, 1, 1),
    Case("4x4-two-groups", 1999, 32, (4, 4), 12, (3, 3), 2, 1, 1, groups=2),
    Case("4x4-groups-of-16", 1999, 32, (4, 4), 32, (3, 3), 2, 1, 1, groups=2),
    Case("5x6", 1777, 24, (5, 6), 7, (3, 3), 2, 1, 1, bias=False),
    Case("7x7", 1800, 64, (7, 7), 9, (3, 3), 2, 1, 1),
    Case("8x8-nine-cells", 1650, 8, (8, 8), 4, (4, 4), 2, 1),
    Case("9x7-uncovered", 1600, 8, (9, 7), 5, (2, 2), 3, 2),
    Case("7x7-k7", 1600, 16, (7, 7), 4, (7, 7), 1, 3),
    Case("1d", 1600, 16, (40,), 4, (3,), 2, 1, 1),
    Case("3d", 1600, 8, (4, 4, 4), 3, (3, 3, 3), 2, 1, 1),
    Case("unaligned", 1650, 9, (5, 5), 8, (3, 3), 2, 1, 1),
    Case("batch-129", 129, 64, (7, 7), 8, (3, 3), 2, 1, 1),
    Case("batch-200", 200, 64, (7, 7), 8, (3, 3), 2, 1, 1),
    Case("batch-1000", 1000, 64, (7, 7), 8, (3, 3), 2, 1, 1),
    Case("17-channels", 1600, 16, (4, 4), 17, (3, 3), 2, 1, 1),
    Case("100-channels", 1600, 16, (4, 4), 100, (3, 3), 2, 1, 1),
    Case("128-channels", 1600, 16, (7, 7), 128, (3, 3), 2, 1, 1),
    Case("three-channels", 1601, 3, (8, 8), 8, (3, 3), 1, 1),
    Case("five-channels", 1600, 5, (7, 7), 16, (3, 3), 2, 1, 1),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@each_dtype
@each_case
def test_value(case, dtype):
    """Right for every element, and the same bits again."""
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)
    assert torch.equal(ops.fused_mean(x, w, b, *case.op_settings), y)


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
@each_dtype
@each_case
def test_bits_do_not_depend_on_alignment(case, dtype, offset):
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    assert torch.equal(ops.fused_mean(shifted(offset)(x), w, b, *case.op_settings), y)


@pytest.mark.parametrize("more", [16, 3])
@each_dtype
@each_case
def test_batch_elements_apart(case, dtype, more):
    """Planes of a batch element side by side, and something else between batch elements."""
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(apart(more)(x), w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)


@each_dtype
@each_case
def test_neighbouring_channels(case, dtype):
    """Images whose channels are neighbours have another order of elements in a row."""
    x, w, b = case.tensors(dtype, "cuda")
    last = channels_last(x)
    reference.assert_right(ops.fused_mean(last, w, b, *case.op_settings), case, dtype, x, w, b)


@each_dtype
@each_case
def test_nan_and_infinity_stay_with_their_batch_element(case, dtype):
    x, w, b = case.tensors(dtype, "cuda")
    last = case.batch - 1
    values = {(3, 0): math.inf, (5, -1): math.nan, (last, 0): math.inf, (last, -1): -math.inf}
    assert_spoilt_elements_alone(case, x, w, b, values)


@each_dtype
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_no_tap_covers_does_not_count(value, dtype):
    """k2 s3 p2: the outer rows and columns land outside whatever the tap."""
    case = next(case for case in CASES if case.id == "9x7-uncovered")
    x, w, b = case.tensors(dtype, "cuda")
    hidden = x.clone()
    hidden[::3, :, 0] = value
    hidden[1::3, :, :, -1] = value
    reference.assert_right(ops.fused_mean(hidden, w, b, *case.op_settings), case, dtype, x, w, b)

"""The CPU's two ways to combine and its ways to read: the same bits for any memory and batch.

Kernels with few taps to a cell multiply weights where they lie, up to two batch elements as they
are, more from a copy; others fold them. Small planes are turned before they are added up.
"""

import math

import layouts
import pytest
import reference
import torch
from cases import DTYPES, dtype_id

ops = torch.ops.convt_reduce
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
WEIGHTS = (
    layouts.channels_last,
    layouts.shifted(1),
    layouts.sliced,
    layouts.every_second,
    layouts.reversed_axes,
    layouts.swapped_last,
)

# channels in and out, kernel, stride, padding, output_padding, groups, dilation
KERNELS = {
    "3x3": (37, 50, (3, 3), 2, 1, 1, 1, 1),
    "wide tile": (20, 300, (3, 3), 2, 1, 1, 1, 1),
    "2x2 in groups": (6, 6, (2, 2), 2, 0, 0, 2, 1),
    "depthwise": (16, 16, (3, 3), 1, 1, 0, 16, 1),
    "1x1": (33, 50, (1, 1), 1, 0, 0, 1, 1),
    "dilated": (8, 9, (5, 5), 2, 2, 1, 1, 2),
    "oblong": (18, 36, (3, 5), 2, 1, 1, 2, 1),
    "patches": (20, 40, (8, 8), 8, 0, 0, 1, 1),
    "one out": (70, 1, (3, 3), 2, 1, 1, 1, 1),
    "three out of each": (12, 36, (3, 3), 1, 1, 0, 12, 1),
    "groups in parts": (150, 450, (3, 3), 2, 1, 1, 75, 1),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def problem(kernel, dtype, batch, size=(9, 11)):
    c_in, c_out, taps, stride, padding, output_padding, groups, dilation = KERNELS[kernel]
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, c_in, *size), (c_in, c_out // groups, *taps), (c_out,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    settings = ([stride], [padding], [output_padding], groups, [dilation])
    return tensors, settings


def assert_right(y, x, w, b, settings):
    reference.assert_closed_form(y, x[0].numel() * w[0, 0].numel(), settings, x, w, b)


@each_dtype
@each_kernel
@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_weights_in_any_memory(kernel, dtype, batch):
    (x, w, b), settings = problem(kernel, dtype, batch)
    y = ops.fused_mean(x, w, b, *settings)
    assert_right(y, x, w, b, settings)
    for maker in WEIGHTS:
        assert torch.equal(ops.fused_mean(x, maker(w), b, *settings), y), maker.__name__


@each_dtype
@each_kernel
def test_elements_of_a_batch_that_is_cut(kernel, dtype):
    (x, w, b), settings = problem(kernel, dtype, 131)
    y = ops.fused_mean(x, w, b, *settings)
    for n in (0, 7, 8, 127, 128, 130):
        assert torch.equal(ops.fused_mean(x[n : n + 1], w, b, *settings), y[n : n + 1])


@each_dtype
@pytest.mark.parametrize("size", [(4, 4), (16, 16), (16, 17), (40, 130)], ids=str)
@pytest.mark.parametrize("maker", [layouts.channels_last, layouts.sliced, layouts.reversed_axes])
def test_planes_in_any_memory(dtype, size, maker):
    (x, w, b), settings = problem("3x3", dtype, 2, size)
    for tensor in (x, maker(x)):
        y = ops.fused_mean(tensor, w, b, *settings)
        assert_right(y, x, w, b, settings)


@pytest.mark.parametrize("weight", [1e29, 1e33, 1e35])
@pytest.mark.parametrize("c_out", [2, 64])
def test_sums_beyond_the_largest_number(weight, c_out):
    """Their mean is finite: what adds up to it carefully must lose no more than the usual way."""
    x, w = torch.full((2, 512, 16, 16), 0.7), torch.full((512, c_out, 3, 3), weight)
    settings = ([2], [1], [1], 1, [1])
    assert_right(ops.fused_mean(x, w, None, *settings), x, w, None, settings)


@pytest.mark.parametrize("kernel", [512, 1500])
@pytest.mark.parametrize("channels", [1, 8])
def test_many_bands_of_equal_numbers(kernel, channels):
    x, w = torch.full((1, channels, 2048), 0.1), torch.full((channels, 3, kernel), 0.7)
    settings = ([1], [kernel - 1], [0], 1, [1])
    assert_right(ops.fused_mean(x, w, None, *settings), x, w, None, settings)
    sums = ops._tap_sums(x, [kernel], [1], [kernel - 1], [0], [1])
    expected = reference.tap_sums(x.double(), [kernel], [1], [kernel - 1], [0], [1])
    reference.assert_within(sums, expected, expected, x[0].numel())


@each_dtype
@each_kernel
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite(kernel, dtype, value):
    """It stays with its batch element and its group, and the others keep their bits."""
    (x, w, b), settings = problem(kernel, dtype, 4)
    y = ops.fused_mean(x, w, b, *settings)
    spoilt = x.clone()
    spoilt[2, 1, 4, 5] = value
    found = ops.fused_mean(spoilt, w, b, *settings)
    reference.assert_not_finite_alike(found[2], reference.torch_chain(spoilt, w, b, *settings)[2])
    finite = found.isfinite()
    assert torch.equal(found[finite], y[finite])
    assert finite[[0, 1, 3]].all()


def test_one_position_with_a_wild_stride():
    x = torch.empty_strided((1, 8, 1, 1), (1, 1, 2**60, 2**60)).copy_(torch.randn(1, 8, 1, 1))
    w = torch.randn(8, 5, 3, 3)
    settings = ([2], [1], [1], 1, [1])
    assert_right(ops.fused_mean(x, w, None, *settings), x, w, None, settings)

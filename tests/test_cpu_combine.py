"""The CPU's two ways to combine and its ways to read: the same bits for any memory and batch.

Kernels with few taps to a cell multiply weights where they lie, up to two batch elements as they
are, more from a copy; others fold them. Small planes are turned before they are added up.
"""

import layouts
import pytest
import torch
from cases import DTYPES, dtype_id
from reference import torch_chain

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
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

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
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def problem(kernel, dtype, batch, size=(9, 11)):
    c_in, c_out, taps, stride, padding, output_padding, groups, dilation = KERNELS[kernel]
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, c_in, *size), (c_in, c_out // groups, *taps), (c_out,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    settings = ([stride], [padding], [output_padding], groups, [dilation])
    return tensors, settings


@each_dtype
@each_kernel
@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_weights_in_any_memory(kernel, dtype, batch):
    (x, w, b), settings = problem(kernel, dtype, batch)
    y = ops.fused_mean(x, w, b, *settings)
    expected = torch_chain(x, w, b, *settings)
    assert (y - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
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
        expected = torch_chain(x, w, b, *settings)
        assert (y - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()

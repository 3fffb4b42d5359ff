"""Planes that are read in chunks, on a GPU.

Where chunks are few, combine adds them as it loads them, and where others want the cell sums too, a
kernel of its own adds them: both must give the same bits, and every form of combine the right ones.
"""

import math

import pytest
import reference
import torch
from cases import DTYPES, Case, dtype_id
from layouts import channels_last, contiguous

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu

# Chunks are of 32 to 128 KiB by dtype and width, and combine adds up to 8 where depths allow.
CASES = (
    Case("small", 3, 4, (90, 181), 8, (3, 3), 2, 1, 1),
    Case("whole-warps", 3, 4, (128, 128), 8, (3, 3), 2, 1, 1),
    Case("whole-warps-wide", 3, 4, (99, 224), 8, (3, 3), 2, 1, 1),
    Case("sixteen-slots", 2, 4, (120, 300), 8, (3, 3), 2, 1, 1),
    Case("few-chunks", 3, 4, (150, 221), 8, (3, 3), 2, 1, 1),
    Case("more-chunks", 2, 4, (193, 251), 7, (3, 3), 2, 1, 1),
    Case("narrow-slots", 2, 4, (301, 273), 9, (3, 3), 2, 1, 1, bias=False),
    Case("one-cell", 2, 4, (401, 327), 16, (4, 4), 2, 1),
    Case("one-cell-more", 1, 4, (443, 333), 16, (4, 4), 2, 1),
    Case("many-chunks", 1, 4, (997, 1003), 5, (3, 3), 2, 1, 1),
    Case("long-rows", 2, 4, (7, 12000), 8, (3, 3), 2, 1, 1),
    Case("groups", 2, 12, (150, 230), 26, (3, 3), 2, 1, 1, groups=2),
    Case("wide", 2, 12, (150, 230), 300, (3, 3), 2, 1, 1),
    Case("many-taps", 2, 12, (140, 260), 24, (7, 7), 3, 2, 1, dilation=2),
    Case("deep", 2, 96, (130, 270), 40, (3, 3), 2, 1, 1),
    Case("batch-67", 67, 4, (130, 260), 20, (3, 3), 2, 1, 1),
    Case("batch-131", 131, 4, (130, 260), 20, (3, 3), 2, 1, 1),
    Case("wide-tiles", 2, 12, (130, 260), 1100, (4, 4), 2, 1),
    Case("eight-of-16-bits", 2, 4, (1024, 128), 9, (3, 3), 2, 1, 1),
    Case("odd-depth", 2, 3, (193, 190), 6, (2, 2), 2),
    Case("1d", 2, 4, (70001,), 8, (5,), 2, 1, 1),
    Case("3d", 2, 8, (20, 50, 70), 24, (3, 3, 3), 2, 1, 1),
    Case("uncovered", 2, 4, (190, 251), 8, (2, 2), 3, 2),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@each_dtype
@each_case
@pytest.mark.parametrize("layout", [contiguous, channels_last])
def test_value_and_bits(case, dtype, layout):
    """Right for every element, whoever adds the chunks, alone and in a batch."""
    x, w, b = case.tensors(dtype, "cuda")
    x = layout(x)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)
    with_sums, sums = ops._fused_mean_with_sums(x, w, b, *case.op_settings)
    assert torch.equal(with_sums, y)
    assert torch.equal(sums, ops._tap_sums(x, case.kernel, *case.op_tap_settings))
    if case.batch <= 128:
        assert torch.equal(ops.fused_mean(x[-1:], w, b, *case.op_settings), y[-1:])


@each_dtype
@each_case
@pytest.mark.parametrize("values", [(math.inf,), (math.nan,), (math.inf, -math.inf)], ids=str)
def test_what_is_not_finite(case, dtype, values):
    """In the first chunk, the last, or both; other batch elements stay as they are."""
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    middle = [size // 2 for size in case.size]
    x[-1, 0].view(-1)[0] = values[0]
    x[(-1, 1, *middle)] = values[0]
    x[-1, 1].view(-1)[-1] = values[-1]
    found = ops.fused_mean(x, w, b, *case.op_settings)
    expected = reference.torch_chain(x[-1:], w, b, *case.settings)
    reference.assert_not_finite_alike(found[-1:], expected)
    assert torch.equal(found[:-1], y[:-1])
    with_sums, _ = ops._fused_mean_with_sums(x, w, b, *case.op_settings)
    assert torch.equal(with_sums.isnan(), found.isnan())
    assert torch.equal(with_sums.nan_to_num(), found.nan_to_num())

"""Weights that stats folds beside its own work, and deep small batches, on a GPU.

A call folds beside where there is enough to read meanwhile, so an element alone does not: it must
get the same bits all the same.
"""

import pytest
import reference
import torch
from cases import DTYPES, Case, dtype_id
from layouts import channels_last, contiguous
from repeats import assert_same_bits

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu

CASES = (
    Case("planes", 16, 64, (128, 128), 128, (4, 4), 2, 1),
    Case("clusters", 40, 64, (128, 128), 128, (7, 7), 1, 3),
    Case("clusters-of-eight", 9, 800, (64, 66), 8, (3, 3), 2, 1, 1),
    Case("clusters-of-square-tiles", 128, 272, (3, 3), 160, (3, 3), 2, 1, 1),
    Case("clusters-of-a-large-batch", 160, 280, (2, 2), 8, (3, 3), 2, 1, 1),
    Case("volumes", 32, 64, (16, 32, 32), 128, (3, 3, 3), 2, 1, 1),
    Case("groups", 30, 96, (120, 122), 80, (5, 5), 1, 2, groups=2),
    Case("slices", 131, 37, (93, 94), 41, (4, 4), 2, 1, bias=False),
    Case("uncovered", 40, 64, (100, 130), 40, (4, 4), 5, 2),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("layout", [contiguous, channels_last])
def test_value_and_bits(case, dtype, layout):
    x, w, b = case.tensors(dtype, "cuda")
    x = layout(x)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)
    assert_same_bits(y, case, x, w, b)

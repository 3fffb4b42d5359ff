"""Large batches that combine multiplies on tensor cores, on a GPU, with weights in shared memory.

How wide a strip of output channels a block takes depends on sizes and on the GPU, and one of
compute capability 9.0 multiplies by warpgroups; the cases are such that each of its ways occurs.
"""

import math

import pytest
import reference
import torch
from cases import DTYPES, Case, dtype_id
from layouts import shifted
from repeats import assert_spoilt_elements_alone

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu

CASES = (
    Case("64-channels", 9001, 64, (2, 2), 64, (3, 3), 2, 1, 1),
    Case("128-channels", 9001, 64, (2, 2), 128, (3, 3), 2, 1, 1),
    Case("128-channels-larger", 21401, 64, (2, 2), 128, (3, 3), 2, 1, 1),
    Case("128-channels-odd-step", 21401, 36, (2, 2), 128, (3, 3), 2, 1, 1),
    Case("96-channels", 26001, 64, (2, 2), 96, (3, 3), 2, 1, 1),
    Case("100-channels", 17000, 64, (2, 2), 100, (3, 3), 2, 1, 1),
    Case("two-strips", 9001, 64, (2, 2), 256, (3, 3), 2, 1, 1),
    Case("odd-channels", 9001, 40, (2, 2), 77, (3, 3), 2, 1, 1),
    Case("one-more-channel", 9001, 32, (2, 2), 129, (3, 3), 2, 1, 1, bias=False),
    Case("half-a-step", 9001, 34, (2, 2), 64, (3, 3), 2, 1, 1),
    Case("an-odd-step", 9001, 36, (2, 2), 128, (3, 3), 2, 1, 1),
    Case("one-step", 40001, 4, (2, 2), 128, (3, 3), 2, 1, 1),
    Case("deep", 9001, 128, (2, 2), 64, (3, 3), 2, 1, 1),
    Case("one-cell", 20000, 128, (1, 1), 128, (3, 3), 2, 1, 1),
    Case("groups", 5001, 96, (2, 2), 192, (3, 3), 2, 1, 1, groups=2),
    Case("many-groups", 1601, 512, (1, 1), 1152, (3, 3), 2, 1, 1, groups=16),
    Case("a-tile-not-full", 64 * 132 + 1, 64, (2, 2), 64, (3, 3), 2, 1, 1),
    Case("few-channels", 34001, 64, (2, 2), 32, (3, 3), 2, 1, 1),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype != torch.float64], ids=dtype_id
)


@each_dtype
@each_case
def test_value(case, dtype):
    """Right for every element, and the same bits again, from whatever address."""
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)
    assert torch.equal(ops.fused_mean(x, w, b, *case.op_settings), y)
    assert torch.equal(ops.fused_mean(shifted(1)(x), w, b, *case.op_settings), y)


@each_dtype
@each_case
def test_nan_and_infinity_stay_with_their_batch_element(case, dtype):
    x, w, b = case.tensors(dtype, "cuda")
    last = case.batch - 1
    values = {(3, 0): math.inf, (77, -1): math.nan, (last, 0): math.inf, (last, -1): -math.inf}
    assert_spoilt_elements_alone(case, x, w, b, values)


@each_dtype
def test_sums_that_cancel(dtype):
    """Channels that differ only in sign: what is left of them is as right as of any others."""
    case = next(case for case in CASES if case.id == "128-channels")
    x, w, b = case.tensors(dtype, "cuda")
    x[:, 1::2] = -x[:, ::2]
    w[1::2] = w[::2]
    b.zero_()
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)

"""Small calls, on a GPU: where there is little to read, one kernel does all of a call.

It takes a call by its sizes, so the same shapes with a larger batch go the usual way, and so does
the operator that autograd calls, which wants the sums. Results are the same bits everywhere.
"""

import math

import pytest
import reference
import torch
from cases import DTYPES, Case, dtype_id
from layouts import apart, channels_last, contiguous, shifted
from repeats import assert_same_bits, assert_spoilt_elements_alone

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu

# Clusters of every size, planes for 2 to 32 lanes, blocks with no channels of their own, groups,
# and sizes about the limits.
CASES = (
    Case("8x8", 1, 64, (8, 8), 128, (3, 3), 2, 1, 1),
    Case("16x16", 3, 64, (16, 16), 128, (3, 3), 2, 1, 1),
    Case("32x32", 1, 64, (32, 32), 128, (3, 3), 2, 1, 1),
    Case("34x34", 1, 64, (34, 34), 72, (3, 3), 2, 1, 1),
    Case("36x36", 1, 64, (36, 36), 72, (3, 3), 2, 1, 1),  # too large in float32
    Case("50x50", 2, 4, (50, 50), 24, (3, 3), 2, 1, 1),
    Case("batch-16", 16, 64, (8, 8), 128, (3, 3), 2, 1, 1),
    Case("batch-17", 17, 64, (7, 7), 60, (3, 3), 2, 1, 1),
    Case("batch-64", 64, 64, (8, 8), 128, (3, 3), 2, 1, 1),
    Case("batch-128", 128, 24, (9, 9), 64, (3, 3), 2, 1, 1),
    Case("1x1", 5, 40, (1, 1), 9, (3, 3), 2, 1, 1, bias=False),
    Case("one-channel-out", 2, 20, (11, 13), 1, (3, 3), 2, 1, 1),
    Case("odd-channels-out", 4, 32, (14, 14), 67, (3, 3), 2, 1, 1),
    Case("512-channels-out", 1, 64, (8, 8), 512, (3, 3), 2, 1, 1),
    Case("nine-cells", 1, 8, (14, 14), 32, (3, 3), 1, 1),
    Case("32-cells", 2, 4, (5, 9, 9), 20, (2, 2, 2), 1, 1),
    Case("uncovered", 4, 8, (9, 7), 13, (2, 2), 3, 2),
    Case("groups", 4, 128, (8, 8), 128, (3, 3), 2, 1, 1, groups=4),
    Case("groups-of-9", 3, 24, (10, 9), 27, (3, 3), 2, 1, 1, groups=3),
    Case("1d", 4, 64, (200,), 128, (3,), 2, 1, 1),
    Case("3d", 2, 16, (6, 6, 6), 32, (2, 2, 2), 2),
    Case("three-channels", 32, 3, (16, 16), 64, (3, 3), 1, 1),
    Case("four-channels", 8, 4, (12, 12), 64, (3, 3), 2, 1, 1),
    Case("too-much-to-read", 32, 64, (32, 32), 128, (3, 3), 2, 1, 1),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
each_layout = pytest.mark.parametrize("layout", [contiguous, channels_last])


@each_dtype
@each_case
@each_layout
def test_value_and_bits(case, dtype, layout):
    x, w, b = case.tensors(dtype, "cuda")
    x = layout(x)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, x, w, b)
    assert_same_bits(y, case, x, w, b)


@each_dtype
@each_case
@each_layout
def test_bits_are_those_of_a_larger_batch(case, dtype, layout):
    x, w, b = case.tensors(dtype, "cuda")
    repeats = 128 // case.batch
    many = layout(x.repeat(repeats, *[1] * (x.dim() - 1)))
    y = ops.fused_mean(layout(x), w, b, *case.op_settings)
    found = ops.fused_mean(many, w, b, *case.op_settings)
    assert torch.equal(found, y.repeat(repeats, *[1] * (y.dim() - 1)))


@pytest.mark.parametrize("offset", [1, 3, 4, 7])
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
    y = ops.fused_mean(x, w, b, *case.op_settings)
    assert torch.equal(ops.fused_mean(apart(more)(x), w, b, *case.op_settings), y)


@each_dtype
@each_case
def test_nan_and_infinity(case, dtype):
    """They stay with their batch element, and come out as in PyTorch."""
    x, w, b = case.tensors(dtype, "cuda")
    size = x[0].numel()
    values = {(0, size // 2): math.inf, (0, size // 3): -math.inf, (case.batch - 1, -1): math.nan}
    assert_spoilt_elements_alone(case, x, w, b, values)


@each_dtype
@each_case
def test_capture(case, dtype):
    """Calls one behind the other in a graph, each with inputs that a kernel before it writes."""
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    doubled = ops.fused_mean(x + x, w, b, *case.op_settings)
    given = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.fused_mean(given, w, b, *case.op_settings)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = ops.fused_mean(given, w, b, *case.op_settings)
        again = ops.fused_mean(given, w, b, *case.op_settings)
        twice = ops.fused_mean(given + given, w, b, *case.op_settings)
    given.copy_(x)
    graph.replay()
    assert torch.equal(first, y)
    assert torch.equal(again, y)
    assert torch.equal(twice, doubled)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@each_dtype
def test_a_weight_that_meets_no_input_does_not_count(dtype, value):
    """1x1, k3 s2 p1 op1: the first taps land outside. Those that are met are added as ever."""
    case = next(case for case in CASES if case.id == "1x1")
    x, w, b = case.tensors(dtype, "cuda")
    y = ops.fused_mean(x, w, b, *case.op_settings)
    w[..., 0, :] = value
    assert torch.equal(ops.fused_mean(x, w, b, *case.op_settings), y)
    assert_same_bits(y, case, x, w, b)

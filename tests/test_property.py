"""Random settings: every valid combination of sizes and parameters equals the definition.

Hypothesis draws the same examples on every run, so a failure here is a failure everywhere. Values
are small integers in float64: both sides are exact up to the division by M, and a failing example
reads well.
"""

import math

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ops = torch.ops.convt_reduce

common = settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def problems(draw):
    """Shapes and settings as a dict; every draw is valid."""
    axes = draw(st.integers(1, 3))
    largest = (12, 9, 6)[axes - 1]

    def lists(low, high):
        return draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    size, kernel = lists(1, largest), lists(1, 5)
    stride, dilation, padding = lists(1, 4), lists(1, 3), lists(0, 5)
    output_padding = [
        draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    ]
    for a in range(axes):
        # The most padding that leaves an output on this axis.
        full = reference.output_size(
            size[a], kernel[a], stride[a], 0, output_padding[a], dilation[a]
        )
        padding[a] = min(padding[a], (full - 1) // 2)
    groups = draw(st.integers(1, 3))
    c_in, per_group = groups * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = draw(st.sampled_from([(), (0,), (1,), (2,), (3,)]))
    return {
        "input": (*batch, c_in, *size),
        "weight": (c_in, per_group, *kernel),
        "bias": (groups * per_group,) if draw(st.booleans()) else None,
        "settings": (
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            draw(st.sampled_from([1.0, 0.5, -3.0])),
        ),
        "seed": draw(st.integers(0, 2**16)),
    }


def make(problem, device="cpu", dtype=torch.float64):
    g = torch.Generator().manual_seed(problem["seed"])
    shapes = (problem["input"], problem["weight"], problem["bias"])
    return [
        None if s is None else torch.randint(-4, 5, s, generator=g).to(dtype).to(device)
        for s in shapes
    ]


def close(actual, expected):
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-12, atol=1e-12)


@common
@given(problem=problems())
def test_value(device, problem):
    tensors = make(problem)
    y = ops.fused_mean(*make(problem, device), *problem["settings"])
    closed = reference.closed_form(*tensors, *problem["settings"])
    close(y, closed)
    if tensors[0].numel():  # PyTorch's convolution refuses some empty batches
        close(y, reference.torch_chain(*tensors, *problem["settings"]))


@common
@given(problem=problems())
def test_gradients(device, problem):
    x, w, b = make(problem, device)
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    y = ops.fused_mean(x, w, b, *problem["settings"])
    g = torch.randint(-3, 4, y.shape).double()
    expected = reference.gradients(reference.closed_form, g, *make(problem), *problem["settings"])
    for ours, theirs in zip(torch.autograd.grad(y, leaves, g.to(device)), expected, strict=True):
        close(ours, theirs)


@common
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_tap_operators(device, problem, dtype):
    """Integers this small are exact in every dtype."""
    x = make(problem)[0]
    stride, padding, output_padding, _, dilation, _ = problem["settings"]
    kernel, size = problem["weight"][2:], problem["input"][-len(stride) :]
    lists = (stride, padding, output_padding, dilation)
    sums = ops._tap_sums(x.to(dtype).to(device), kernel, *lists)
    assert torch.equal(sums.double().cpu(), reference.tap_sums(x, kernel, *lists))

    taps = torch.randint(-1, 2, sums.shape).float()
    spread = ops._tap_spread(taps.to(device), size, dtype, *lists)
    assert spread.dtype == dtype
    assert torch.equal(spread.double().cpu(), reference.tap_spread(taps, size, *lists))

    # <tap_sums x, taps> = <x, spread taps>
    left = (sums.double().cpu() * taps).sum()
    assert left.item() == (x * spread.double().cpu()).sum().item()


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_oracles_agree_on_every_small_axis(axes):
    """All settings of one axis up to a size, in place of luck; the other axes stay plain."""
    count = 0
    for n, k, s, d in (
        (n, k, s, d) for n in (1, 2, 5) for k in (1, 2, 4) for s in (1, 2, 3) for d in (1, 3)
    ):
        for p in range(6):
            for op in range(max(s, d)):
                if reference.output_size(n, k, s, p, op, d) < 1:
                    continue
                x = torch.arange(1.0, n + 1).view(1, 1, n, *(1,) * (axes - 1)).double()
                w = (10.0 ** torch.arange(k)).view(1, 1, k, *(1,) * (axes - 1)).double()
                ones, zeros = [1] * (axes - 1), [0] * (axes - 1)
                lists = ([s, *ones], [p, *zeros], [op, *zeros], 1, [d, *ones])
                chain = reference.torch_chain(x, w, None, *lists)
                close(reference.closed_form(x, w, None, *lists), chain)
                close(ops.fused_mean(x, w, None, *lists), chain)
                assert math.isfinite(chain.item())
                count += 1
    assert count > 300

"""What only a GPU shows: streams, waiting, shared scratch memory, graph capture, mixed devices.

Values and gradients on CUDA are the business of the other files, which run on every device; sizes
and limits are test_cuda_limits.py's.
"""

import math
import os
import subprocess
import sys
import threading

import pytest
import reference
import torch
from cases import Case, some

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu
LONG = 200_000_000  # clock cycles of sleep, about a tenth of a second


def benchmark(batch=4, side=64):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(batch, 64, side, side, generator=g).cuda()
    w = torch.randn(64, 128, 3, 3, generator=g).cuda()
    return x, w, torch.randn(128, generator=g).cuda()


SETTINGS = ([2], [1], [1], 1, [1], 0.5)


# ---- streams ------------------------------------------------------------------------------------


def test_work_goes_to_the_current_stream():
    """On another stream than the current one, the operator would read x before the fill."""
    x, w, b = benchmark()
    x.fill_(2.0)
    expected = ops.fused_mean(x, w, b, *SETTINGS)
    x.fill_(1.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.fill_(2.0)
        y = ops.fused_mean(x, w, b, *SETTINGS)
        seen = y.clone()
    side.synchronize()
    assert torch.equal(seen, expected)


def test_backward_goes_to_the_current_stream():
    x, w, b = (t.requires_grad_() for t in benchmark())
    g = torch.full((4, 128, 1, 1), 2.0, device="cuda")
    y = ops.fused_mean(x, w, b, *SETTINGS)
    expected = torch.autograd.grad(y, (x, w, b), g)
    del y  # and with it the nodes of the default stream
    g.fill_(1.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        g.fill_(2.0)
        y = ops.fused_mean(x, w, b, *SETTINGS)
        found = [t.clone() for t in torch.autograd.grad(y, (x, w, b), g)]
    side.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("step", ["inference", "forward", "backward"])
def test_a_call_does_not_wait(step):
    """The call returns while the GPU is still asleep: nothing in it synchronises."""
    leaves = [t.requires_grad_() for t in benchmark()]
    g = torch.ones(4, 128, 1, 1, device="cuda")

    def forward():
        with torch.set_grad_enabled(step != "inference"):
            return ops.fused_mean(*leaves, *SETTINGS)

    def backward(y):
        return torch.autograd.grad(y, leaves, g) if step == "backward" else None

    # Twice beforehand: the allocator must have the memory, and cuBLAS its own.
    for _ in range(2):
        backward(forward())
    y = forward()
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * LONG)
    woken = torch.cuda.Event()
    woken.record()
    result = backward(y) if step == "backward" else forward()
    asleep = not woken.query()
    torch.cuda.synchronize()
    assert asleep
    assert result is not None


def test_interleaved_streams_do_not_share_memory():
    """Same shapes on two streams at once: a scratch buffer kept by shape would be overwritten."""
    inputs = [benchmark(batch=2, side=40)[0] * k for k in (1.0, -3.0)]
    _, w, b = benchmark()
    expected = [ops.fused_mean(x, w, b, *SETTINGS) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results = [[], []]
    for _ in range(200):
        for x, stream, kept in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(ops.fused_mean(x, w, b, *SETTINGS))
    torch.cuda.synchronize()
    for kept, truth in zip(results, expected, strict=True):
        assert all(torch.equal(y, truth) for y in kept)


def test_threads_do_not_share_memory():
    inputs = [benchmark(batch=2, side=40)[0] * k for k in (1.0, -3.0)]
    _, w, b = benchmark()
    leaf = w.clone().requires_grad_()
    expected = []
    for x in inputs:
        y = ops.fused_mean(x, leaf, b, *SETTINGS)
        expected.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    torch.cuda.synchronize()
    wrong = []

    def work(x, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            own = w.clone().requires_grad_()  # on this stream: it would not wait for another's copy
            for _ in range(100):
                y = ops.fused_mean(x, own, b, *SETTINGS)
                found = (y.detach(), *torch.autograd.grad(y.sum(), own))
                wrong.extend(a for a, t in zip(found, truth, strict=True) if not torch.equal(a, t))

    torch.cuda.synchronize()
    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_same_bits_while_the_gpu_is_busy():
    """Another stream changes when warps run; a missing barrier shows as another result."""
    x, w, b = (t.requires_grad_() for t in benchmark(batch=3, side=33))
    y = ops.fused_mean(x, w, b, *SETTINGS)
    expected = (y.detach(), *torch.autograd.grad(y.sum(), (x, w, b)))
    noise = torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    for _ in range(300):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        y = ops.fused_mean(x, w, b, *SETTINGS)
        found = (y.detach(), *torch.autograd.grad(y.sum(), (x, w, b)))
        assert all(torch.equal(a, t) for a, t in zip(found, expected, strict=True))


# ---- large batches and weights, which are multiplied as matrices --------------------------------

# Each tile of the product: narrow, middle, wide, low; slices, groups, rows that are not aligned;
# and the ways of folding: up to 9, 16, 32 and 64 taps, and any.
PRODUCTS = (
    Case("narrow", 300, 33, (3, 4), 5, (3, 3), 2, 1, 1),
    Case("narrow-slices", 200, 1030, (2, 2), 8, (3, 3), 2, 1, 1),
    Case("middle-unaligned", 150, 35, (7,), 20, (3,), 2, 1, 1),
    Case("wide", 1300, 130, (3, 3), 150, (3, 3), 2, 1, 1),
    Case("wide-k4-slices", 257, 600, (3, 3), 136, (4, 4), 2, 1),
    Case("groups-k5", 260, 36, (6, 6), 135, (5, 5), 2, 2, 1, groups=3),
    Case("depthwise", 140, 19, (5, 4), 19, (3, 3), 2, 1, 1, groups=19),
    Case("k7", 131, 20, (7, 7), 40, (7, 7), 2, 3, 1),
    Case("3d-k4", 133, 18, (4, 5, 3), 34, (4, 4, 4), 2, 1),
    Case("many-cells", 130, 6, (12, 12), 70, (9, 9), 1, 4),
    Case("low", 3, 512, (3, 3), 512, (3, 3), 2, 1, 1),
    Case("low-batch-of-100", 100, 512, (3, 3), 512, (3, 3), 2, 1, 1),
)
each_product = pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@each_product
def test_products(case, dtype):
    """A NaN is its own batch element's business, however elements share tiles."""
    tensors = case.tensors(dtype)
    x, w, b = (t if t is None else t.cuda() for t in tensors)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_right(y, case, dtype, *tensors)
    x[1] = math.nan
    spoilt = ops.fused_mean(x, w, b, *case.op_settings)
    assert spoilt[1].isnan().all()
    spoilt[1] = y[1]
    assert torch.equal(spoilt, y)


@each_product
def test_equal_numbers_keep_their_digits(case):
    """Errors in one direction add up, also those of tensor cores, which cut instead of rounding."""
    x, w, _ = (t if t is None else torch.full_like(t, 0.1) for t in case.tensors(torch.float32))
    y = ops.fused_mean(x.cuda(), w.cuda(), None, *case.op_settings).double().cpu()
    expected = reference.closed_form(x, w, None, *case.settings)
    assert ((y - expected).abs() <= 16 * torch.finfo(torch.float32).eps * expected.abs()).all()


# ---- graph capture ------------------------------------------------------------------------------

FIRST_CALL = """
import torch, convt_reduce
F = torch.ops.convt_reduce.fused_mean
x = torch.ones(2, 3, 5, 6, device="cuda")
w = torch.ones(3, 4, 3, 3, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = F(x, w, None, [2], [1], [1])
for value in (1.0, 3.0):
    x.fill_(value)
    graph.replay()
    expected = F(x.cpu(), w.cpu(), None, [2], [1], [1])
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert y[0, 0].item() != 0
"""


def test_capture_as_the_very_first_call(empty_folder):
    """Anything done once and lazily (an attribute, an allocation) would break the capture."""
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("case", some("2d-all-unequal", "2d-many-cells-k7", "1d-small", "3d-small"))
def test_capture_forward_and_backward(case):
    tensors = case.tensors(torch.float32, "cuda")
    x, w, b = (t.requires_grad_() for t in tensors)
    g = torch.randn(case.output_shape, device="cuda")

    def step():
        y = ops.fused_mean(x, w, b, *case.op_settings)
        return (y, *torch.autograd.grad(y, (x, w, b), g))

    # cuBLAS, which the backward uses through torch, must not start inside a capture.
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, -2.0, 0.5):
        with torch.no_grad():
            x.mul_(scale).add_(1)
            w.mul_(scale)
            g.mul_(scale)
        graph.replay()
        replayed = [t.clone() for t in captured]
        for ours, theirs in zip(replayed, step(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # and the value, which no library has a hand in, bit for bit
        assert torch.equal(replayed[0], ops.fused_mean(x, w, b, *case.op_settings))


def test_replays_are_bit_equal():
    x, w, b = benchmark()
    expected = ops.fused_mean(x, w, b, *SETTINGS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fused_mean(x, w, b, *SETTINGS)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["input", "weight", "bias"])
@pytest.mark.parametrize("gradients", [True, False])
def test_mixed_devices(elsewhere, gradients):
    named = {"input": (2, 4, 5, 6), "weight": (4, 3, 3, 3), "bias": (3,)}
    tensors = {
        name: torch.zeros(shape, device="cpu" if name == elsewhere else "cuda:0")
        for name, shape in named.items()
    }
    for t in tensors.values():
        t.requires_grad_(gradients)
    with pytest.raises(RuntimeError) as caught:
        ops.fused_mean(**tensors)
    wrong, here, there = (
        ("weight", "cpu", "cuda:0") if elsewhere == "input" else (elsewhere, "cuda:0", "cpu")
    )
    assert str(caught.value) == f"fused_mean: {wrong} must be on input's device {here}, got {there}"


def test_half_gradients_of_channels_last_without_cudnn():
    x = torch.randn(6, 28, 108, 108).half().cuda().to(memory_format=torch.channels_last)
    w = torch.randn(28, 28, 1, 1).half().cuda()
    x.requires_grad_()
    w.requires_grad_()
    with torch.backends.cudnn.flags(enabled=False):
        y = ops.fused_mean(x, w)
        y.backward(torch.ones_like(y))
    plain = x.detach().cpu(), w.detach().cpu()
    terms = 28 * 108 * 108
    expected = reference.closed_form(*plain)
    reference.assert_within(y, expected, reference.magnitude_of(*plain), terms)
    g = torch.ones(6, 28, 1, 1)
    expected = reference.gradients(reference.closed_form, g, *plain)
    magnitudes = reference.gradient_magnitudes(g, *plain)
    for leaf, theirs, magnitude in zip((x, w), expected, magnitudes, strict=True):
        reference.assert_within(leaf.grad, theirs, magnitude, terms * 6)
    assert math.isfinite(w.grad.abs().max().item())

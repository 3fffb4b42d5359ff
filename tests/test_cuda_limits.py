"""The edges of a GPU: empty launches, much shared memory, sizes beyond 2**31, memory in use.

Nothing may grow with the input but the input's gradient, and no size may wrap, fail to launch or
quietly give zeros. The largest test holds 17 GB.
"""

import gc

import pytest
import reference
import torch
from cases import Case
from test_cuda import SETTINGS, benchmark

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.gpu


def test_an_empty_launch_leaves_no_error():
    x, w = torch.zeros(0, 4, 5, 6, device="cuda"), torch.ones(4, 3, 3, 3, device="cuda")
    for gradients in (False, True):
        leaf = w.clone().requires_grad_(gradients)
        y = ops.fused_mean(x, leaf)
        if gradients:
            y.sum().backward()
        assert y.shape == (0, 3, 1, 1)
        assert (torch.ones(1, device="cuda") + 1).item() == 2.0
        torch.cuda.synchronize()


KERNELS = (
    # Weights and tap sums beyond 48 KiB, the shared memory that a block has without asking; taps
    # as many as 33**3; numbers of taps around 48 KiB / 4.
    Case("3d-k33", 1, 64, (5, 6, 7), 1, (33, 33, 33), 1, (15, 14, 16)),
    Case("3d-k33-s2", 2, 3, (9, 8, 10), 2, (33, 31, 32), 2, (7, 9, 5), 1),
    Case("1d-k12287", 2, 2, (100,), 2, (12287,), 1, 6000),
    Case("1d-k12288", 2, 2, (100,), 2, (12288,), 1, 6000),
    Case("1d-k12289", 2, 2, (100,), 2, (12289,), 1, 6000),
    Case("2d-k111", 2, 2, (50, 60), 3, (111, 110), 1, (55, 80)),
    Case("1d-2101-bands", 1, 2, (2500,), 2, (2101,), 1, 2100),
    Case("2d-k64-many-channels", 1, 128, (12, 9), 130, (16, 16), 1, 8),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.id)
def test_large_kernels(case, dtype):
    tensors = case.tensors(dtype)
    x, w, b = (t.cuda().requires_grad_() for t in tensors)
    # The definition would make an image per tap; the closed form is exact enough and quick.
    expected = reference.closed_form(*tensors, *case.settings)
    magnitude = reference.magnitude_of(*tensors, *case.settings)
    with torch.no_grad():
        y = ops.fused_mean(x, w, b, *case.op_settings)
    reference.assert_within(y, expected, magnitude, case.terms, dtype)

    y = ops.fused_mean(x, w, b, *case.op_settings)
    g = torch.randn(y.shape).to(dtype)
    expected = reference.gradients(reference.closed_form, g, *tensors, *case.settings)
    magnitudes = reference.gradient_magnitudes(g, *tensors, *case.settings)
    found = torch.autograd.grad(y, (x, w, b), g.cuda())
    for name, ours, theirs, magnitude in zip("xwb", found, expected, magnitudes, strict=True):
        reference.assert_within(ours, theirs, magnitude, case.terms * g.numel(), dtype, name)


def test_a_plane_beyond_two_to_the_31():
    """Each sample alone has more elements than an int counts; the last row of the last is marked.

    4.3e9 elements, 8.6 GB and as much again for the gradient.
    """
    x = torch.zeros(2, 1, 32769, 65536, dtype=torch.float16, device="cuda")
    x[1, 0, -1] = 1024
    w = torch.ones(1, 1, 1, 1, dtype=torch.float16, device="cuda", requires_grad=True)
    with torch.no_grad():
        assert ops.fused_mean(x, w).flatten().tolist() == [0.0, 0.03125]  # 1024/32769 in float16
    x.requires_grad_()
    y = ops.fused_mean(x, w, multiplier=32769.0 * 65536 / 1024)
    y.backward(torch.tensor([1.0, 2.0], dtype=torch.float16, device="cuda").view(2, 1, 1, 1))
    for sample, share in enumerate((2.0**-10, 2.0**-9)):
        assert x.grad[sample].min().item() == share
        assert x.grad[sample].max().item() == share


def test_many_small_planes_beyond_two_to_the_31():
    x = torch.full((70001, 512, 8, 8), 0.5, dtype=torch.float16, device="cuda")
    x[-1, -1] = 2.5
    w = torch.full((512, 1, 1, 1), 1 / 512, dtype=torch.float16, device="cuda")
    y = ops.fused_mean(x, w).flatten()
    assert (y[:-1] == 0.5).all()
    assert y[-1].item() == 0.50390625  # 0.5 + 2 / 512


def test_expanded_beyond_two_to_the_31():
    """One number for 4.3e9: the index is large though the memory is not."""
    one = torch.ones(1, 1, 1, 1, device="cuda")
    y = ops.fused_mean(one.expand(2, 1, 32769, 65536), one)
    torch.testing.assert_close(y, one.expand(2, 1, 1, 1), rtol=1e-5, atol=0)


def test_memory_of_a_call():
    """Nothing grows with the input but the input's gradient."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x, w, b = benchmark(batch=16, side=128)
        x = x.to(memory_format=memory_format)
        tap_bytes = 4 * 16 * 64 * 9
        spare = 8 * tap_bytes + 2**21 + 16 * w.numel()

        def peak(call, *given):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call(*given)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before

        with torch.no_grad():
            assert peak(ops.fused_mean, x, w, b, *SETTINGS) < spare
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        assert peak(ops.fused_mean, *leaves, *SETTINGS) < spare
        y = ops.fused_mean(*leaves, *SETTINGS)
        g = torch.ones_like(y)
        largest = x.numel() * 4 * 1.05 + spare
        # As a caller that needs no particular layout has it; .grad would be copied to x's.
        assert peak(lambda y, g, t: torch.autograd.grad(y, t, g), y, g, leaves) < largest


def test_no_growth_without_backward():
    """Graphs that are dropped unused free what they kept, without the garbage collector."""
    x, w, b = (t.requires_grad_() for t in benchmark(batch=2, side=16))
    ops.fused_mean(x, w, b, *SETTINGS)
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(500):
            ops.fused_mean(x, w, b, *SETTINGS)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()

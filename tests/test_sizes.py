"""2**31 - 1, 2**31 and 2**31 + 1 elements in every operator, forward and backward; one of each.

On a GPU always, 8 GB at a time. On the CPU only with CONVT_REDUCE_LARGE_TESTS=1, for the memory.
"""

import os

import pytest
import torch

ops = torch.ops.convt_reduce
AROUND = (2**31 - 1, 2**31, 2**31 + 1)


@pytest.fixture
def large(device):
    if device == "cpu" and os.environ.get("CONVT_REDUCE_LARGE_TESTS") != "1":
        pytest.skip("CONVT_REDUCE_LARGE_TESTS=1 asks for tests that hold 9 GB")
    return device


def marked(shape, device):
    """Zeros, and 1024 as the very last element."""
    x = torch.zeros(shape, dtype=torch.float16, device=device)
    x.view(-1)[-1] = 1024
    return x


@pytest.mark.slow
@pytest.mark.parametrize("count", AROUND)
def test_one_row(count, large):
    x = marked((1, 1, count), large)
    w = torch.ones(1, 1, 1, dtype=torch.float16, device=large, requires_grad=True)
    with torch.no_grad():
        assert ops.fused_mean(x, w, multiplier=count / 1024).item() == 1.0
    assert ops._tap_sums(x, [1]).item() == 1024.0
    x.requires_grad_()
    y = ops.fused_mean(x, w, multiplier=float(count))
    y.backward(torch.full_like(y, 0.5))
    assert w.grad.item() == 512.0
    # Piece by piece: a comparison of the whole would hold another 2 GB.
    assert all(part.min() == part.max() == 0.5 for part in x.grad[0, 0].split(2**28))
    x.grad = None
    spread = ops._tap_spread(torch.full((1, 1, 1), 0.25, device=large), [count], torch.float16)
    assert all(part.min() == part.max() == 0.25 for part in spread[0, 0].split(2**28))


@pytest.mark.slow
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_many_planes(extra, channels_last, large):
    """2**31 elements and a little less or more in planes of 8 x 8, the marked one the last."""
    batch, c = 2**31 // (64 * 128) + extra, 128
    x = torch.zeros(
        (batch, 8, 8, c) if channels_last else (batch, c, 8, 8), dtype=torch.float16, device=large
    )
    x = x.movedim(3, 1) if channels_last else x
    x[-1, -1, -1, -1] = 1024
    w = torch.ones(c, 1, 1, 1, dtype=torch.float16, device=large)
    y = ops.fused_mean(x, w, multiplier=64 / 1024)
    assert y[-1].item() == 1.0
    assert (y[:-1] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["input", "weight"])
def test_expanded_beyond(which, large):
    """One number stands for 2**32: the sizes are large, the memory is not."""
    one = torch.ones(1, 1, 1, 1, device=large)
    if which == "input":
        y = ops.fused_mean(one.expand(1, 1, 2**10, 2**22), one)
        assert y.item() == 1.0
    else:
        # 2**16 channels each way: 2**32 weights.
        y = ops.fused_mean(
            one.expand(1, 2**16, 1, 1), one.expand(2**16, 2**16, 1, 1), multiplier=2.0**-16
        )
        assert y.shape == (1, 2**16, 1, 1)
        assert (y == 1).all()


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_of_everything(axes, dtype, device):
    """One sample, one channel, one position, one tap; with gradients and unbatched."""
    ones = [1] * axes
    x = torch.full((1, 1, *ones), 3.0, dtype=dtype, device=device, requires_grad=True)
    w = torch.full((1, 1, *ones), 2.0, dtype=dtype, device=device, requires_grad=True)
    b = torch.full((1,), 4.0, dtype=dtype, device=device, requires_grad=True)
    y = ops.fused_mean(x, w, b, multiplier=0.5)
    assert y.item() == 5.0
    assert [g.item() for g in torch.autograd.grad(y.sum(), (x, w, b))] == [1.0, 1.5, 0.5]
    assert ops.fused_mean(x[0], w).shape == (1, *ones)
    assert ops._tap_sums(x, ones).item() == 3.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert ops._tap_spread(x.detach().to(wide), ones, dtype).item() == 3.0
    # Of three taps on each axis only the middle one lands inside the one output.
    y = ops.fused_mean(x, w.expand(1, 1, *[3] * axes), b, [1], [1])
    assert y.item() == 10.0

"""The rewrite of graphs that torch.compile captured, run as they are, with no compiler behind."""

import pytest
import torch
from fusing import Captured, Chain, assert_same, input_of
from torch import nn

SIZES = [(7, 11, 13), (3, 7, 6)]


@pytest.mark.parametrize("body", ["mean", "sum", "flatten", "view", "total", "pool"])
def test_symbolic_sizes_in_every_reduction(body):
    bodies = {
        "mean": lambda m, y: (y * 0.5).mean((2, 3)),
        "sum": lambda m, y: y.sum((2, 3)) / (y.shape[2] * y.shape[3]),
        "flatten": lambda m, y: y.flatten(2).sum(-1),
        "view": lambda m, y: y.view(y.size(0), y.size(1), -1).mean(-1),
        "total": lambda m, y: y.sum(3).sum(),
        "pool": lambda m, y: nn.functional.adaptive_avg_pool2d(y, 1),
    }
    model = Chain(bodies[body]).double()
    captured = Captured(model, dynamic=True)
    for size in SIZES[:2]:
        record = assert_same(model, captured, torch.randn(size[0], 2, *size[1:]).double())
        assert (record.fused, record.convolutions) == (1, 0)
    assert len(captured.reports) == 1


def test_a_window_of_unknown_size_is_refused():
    model = Chain(lambda m, y: nn.functional.avg_pool2d(y, (8, 10))).double()
    captured = Captured(model, dynamic=True)
    x = torch.randn(7, 2, 4, 5, dtype=torch.float64)
    assert assert_same(model, captured, x).fused == 0
    assert "must be known to be the whole output" in captured.reports[0].entries[0].detail


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_output_without_positions_is_refused(dynamic):
    """On some machines PyTorch returns an empty tensor, of which the operator makes an error."""
    layer = nn.ConvTranspose2d(8, 8, 3, padding=(8, 0), groups=8)
    model = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1))
    captured = Captured(model, dynamic=dynamic)
    try:
        model(torch.randn(7, 8, 14, 11))
    except RuntimeError:
        pytest.skip("PyTorch refuses it here")
    captured(torch.randn(7, 8, 14, 11))
    assert "must have an output of at least 1" in captured.reports[0].entries[0].detail
    captured(torch.randn(7, 8, 19, 11))
    assert captured.record.fused == 1


@pytest.mark.parametrize("cost_rule", [True, False])
def test_the_cost_rule(cost_rule):
    model = Chain(lambda m, y: y.mean((2, 3))).double()
    captured = Captured(model, cost_rule=cost_rule)
    record = assert_same(model, captured, input_of())
    assert record.fused == (not cost_rule)
    if cost_rule:
        assert captured.reports[0].entries[0].detail == (
            "'conv_transpose2d' must do enough work to be worth fusing, got 4 inputs of 4x5 with a "
            "3x3 kernel on cpu, which the convolution does as quickly"
        )


def test_several_in_one_graph():
    """The one behind the other takes what the first became as its input."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ConvTranspose2d(2, 3, 3)
            self.second = nn.ConvTranspose2d(3, 2, 3)

        def forward(self, x):
            y = (self.first(x) * 2).mean((2, 3), keepdim=True).mean((2, 3), keepdim=True)
            return self.second(y).sum((2, 3)), self.second(y).relu()

    model = Model().double()
    captured = Captured(model)
    record = assert_same(model, captured, input_of())
    assert (record.fused, record.convolutions) == (2, 1)


def test_capture_under_autocast():
    model = Chain(lambda m, y: (y * 2).mean((2, 3)))
    captured = Captured(model)
    x = input_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want, have = model(x), captured(x)
    assert captured.record.fused == 1
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=0.05, atol=0.05)


def test_a_checkpointed_part():
    """Recomputed in the backward pass, from a graph of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Chain(lambda m, y: (y * m.scale).mean((2, 3)))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.part, x * 2, use_reentrant=False)

    model = Model().double()
    captured = Captured(model)
    record = assert_same(model, captured, input_of())
    assert (record.fused, record.convolutions) == (1, 0)
    assert len(captured.reports[0].fused) == 1

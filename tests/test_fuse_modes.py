"""Gradient modes, autocast and dtypes: a fused model computes in those of the model."""

import pytest
import torch
from fusing import Captured, Up, fused, pooled, same, sample
from torch import nn
from torch.nn import functional as F

from convt_reduce.compiler import fuse_graph

# ---- gradient modes in captured graphs -----------------------------------------------------------


def without_gradient(step):
    def body(m, x):
        y = m.up(x)
        with torch.no_grad():
            return step(y)

    return body


@pytest.mark.parametrize(
    "step",
    [
        lambda y: F.adaptive_avg_pool2d(y, 1),
        lambda y: y.mean((2, 3), keepdim=True),
        lambda y: (y * 2.0).mean((2, 3)),
    ],
)
def test_work_stays_inside_no_grad(step):
    model = Up(lambda m, x: without_gradient(step)(m, x) * x.mean())
    captured = Captured(model)
    x = sample().requires_grad_()
    gradients = []
    for module in (model, captured):
        model.zero_grad()
        module(x).sum().backward()
        gradients.append(model.up.weight.grad)
    assert gradients == [None, None]
    assert "must run in the gradient and autocast modes of" in captured.reports[0].entries[0].detail


def test_a_switch_of_autocast_on_the_way():
    def body(m, x):
        y = m.up(x)
        with torch.autocast("cpu", torch.bfloat16):
            return y.mean((2, 3))

    captured = Captured(Up(body))
    captured(sample())
    assert "modes of" in captured.reports[0].entries[0].detail


def test_an_exported_no_grad():
    program = torch.export.export(Up(without_gradient(lambda y: y.mean((2, 3)))), (sample(),))
    module = program.module()
    fuse_graph(module, cost_rule=False)
    assert not module(sample()).requires_grad


# ---- dtypes and autocast -------------------------------------------------------------------------

NAMED = {
    "mean": lambda m, x: m.up(x).mean((2, 3), dtype=torch.float32),
    "sum": lambda m, x: m.up(x).sum((2, 3), dtype=torch.float32),
    "float": lambda m, x: m.up(x).float().mean((2, 3)),
    "to": lambda m, x: m.up(x).to(torch.float32).mean((2, 3)),
    "function": lambda m, x: F.conv_transpose2d(x, m.up.weight, m.up.bias).float().mean((2, 3)),
    "after": lambda m, x: m.up(x).mean((2, 3), keepdim=True).mean((2, 3), dtype=torch.float32),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_dtype_that_is_named(name):
    """It holds while the convolution has that dtype; else the original runs."""
    model = Up(NAMED[name])
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert same(model, other, sample()).fused == 0
    assert same(model.bfloat16(), other.bfloat16(), sample().bfloat16()).fused == 0


class Volume(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.up, self.pool = nn.ConvTranspose3d(2, 3, 3), pool

    def forward(self, x):
        return self.pool(self.up(x))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("pool", [nn.AvgPool3d(7), nn.AdaptiveAvgPool3d(1)])
def test_pools_return_what_autocast_says(pool, capture):
    model = Volume(pool)
    other = Captured(model) if capture else fused(model)[0]
    with torch.autocast("cpu", torch.bfloat16):
        record = same(model, other, torch.randn(2, 2, 5, 5, 5), tolerance=0.01)
        assert model(torch.randn(2, 2, 5, 5, 5)).dtype == torch.float32
    assert record.fused == 1


def test_a_pool_of_its_own_size_under_autocast():
    def body(m, x):
        y = m.up(x)
        return F.avg_pool2d(y, y.shape[2:])

    model = Up(body)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(model, fused(model)[0], sample(), tolerance=0.01).fused == 1


def test_a_result_made_without_gradients_is_no_view():
    model = Up(pooled)
    for module in (model, fused(model)[0]):
        with torch.no_grad():
            y = module(sample())
        y.mul_(nn.Parameter(torch.ones(6)))
        assert y.requires_grad


@pytest.mark.parametrize("dims", [None, ()])
def test_a_sum_over_everything_keeps_its_dimensions(dims):
    model = Up(lambda m, x: m.up(x).sum(dim=dims, keepdim=True))
    assert same(model, fused(model)[0], sample(), tolerance=1e-4).fused == 1


# ---- steps that enlarge --------------------------------------------------------------------------


def flattened(m, x):
    y = m.up(x) * m.gain
    n, c, _h, _w = y.size(0), y.size(1), y.size(2), y.size(3)
    return y.view(n, c, -1).mean(-1)


def shaped(m, x):
    y = m.up(x) * m.gain
    return y.sum((2, 3)) / (y.shape[0] * y.shape[1] * y.shape[2] * y.shape[3])


@pytest.mark.parametrize("body", [flattened, shaped])
@pytest.mark.parametrize(
    ("shape", "batch", "out"), [((16, 1, 1), 2, 1), ((1, 16, 1, 1), 2, 1), ((8, 1, 1, 1), 1, 6)]
)
def test_an_operand_with_more_channels_or_images(body, shape, batch, out):
    def init(m):
        m.gain = nn.Parameter(torch.randn(shape))

    model = Up(body, init, channels=(4, out))
    x = sample(batch)
    assert same(model, fused(model)[0], x).fused == 1
    same(model, Captured(model), x)


def test_a_view_by_the_layers_channels():
    """view(n, 1, -1) of what has 16 channels by then takes the channels along."""

    def init(m):
        m.gain = nn.Parameter(torch.randn(16, 1, 1))

    model = Up(lambda m, x: (m.up(x) * m.gain).view(2, 1, -1).mean(-1), init, channels=(4, 1))
    for other in (fused(model)[0], Captured(model)):
        same(model, other, sample())

"""Layers that are called twice, used elsewhere or compute their weight, and odd multipliers.

In all of them the layer must be read when it is called, and only the calls that are averaged may
change.
"""

import copy

import pytest
import torch
from fusing import Chain, assert_same, fused, input_of, run
from torch import nn
from torch.nn.utils import parametrizations

# ---- called twice, used elsewhere ----------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.conv = nn.ConvTranspose2d(2, 3, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.body = body

    def forward(self, x, y):
        return self.body(self, x, y)


@pytest.mark.parametrize(
    ("body", "fuses", "convolutions"),
    [
        (lambda m, x, y: (m.conv(x) * 2).mean((2, 3)) + m.conv(y).amax(), 1, 1),
        (lambda m, x, y: (lambda z: ((z * 2).mean((2, 3)), z.amax()))(m.conv(x)), 0, 1),
        (lambda m, x, y: (lambda z: (z.mean((2, 3)), z.sum((2, 3)) + y[0, 0, 0]))(m.conv(x)), 0, 1),
        (lambda m, x, y: (lambda z: (z.mean((2, 3)), z.exp()))(m.conv(x) * 2), 0, 1),
        (lambda m, x, y: m.pool(m.conv(x)) + m.pool(m.conv(y) * 3), 2, 0),
        (lambda m, x, y: m.pool(m.conv(x)) + m.pool(y).sum(), 1, 0),
        (lambda m, x, y: m.pool(m.conv(m.pool(m.conv(x))[:, :2])), 2, 0),
    ],
)
def test_called_twice_or_used_elsewhere(body, fuses, convolutions):
    model = Twice(body).double()
    other, report = fused(model)
    assert len(report.fused) == fuses
    y = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    record = assert_same(model, other, input_of(), y[..., :1] if fuses == 0 else y)
    assert (record.fused, record.convolutions) == (fuses, convolutions)


def test_a_site_across_two_calls_of_one_module():
    """The convolution of the first call and the mean of the second belong to no one call."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 2, 3)

        def forward(self, x):
            return self.conv(x.mean((2, 3), keepdim=True))

    model = nn.Sequential(block := Block(), block).double()
    other, report = fused(model)
    assert [entry.fused for entry in report.entries] == [True, False]
    assert report.entries[1].where == "0.conv (call 2)"
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (1, 1)


# ---- layers that compute their weight ------------------------------------------------------------


@pytest.mark.parametrize(
    "parametrise", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
@pytest.mark.parametrize("train", [True, False])
def test_parametrised_layers(parametrise, train):
    """The weight is computed by the live layer, once per call, and can be trained."""
    model = Chain(lambda m, y: (y * m.scale).mean((2, 3))).double()
    parametrise(model.conv)
    model.train(train)
    reference = copy.deepcopy(model)
    other, report = fused(model)
    assert len(report.fused) == 1
    assert list(other.state_dict()) == list(reference.state_dict())
    for _ in range(3):
        record = assert_same(reference, other, input_of())
        assert (record.fused, record.convolutions) == (1, 0)
    for a, b in zip(reference.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    x = input_of()
    before = other(x).detach()
    optimiser = torch.optim.SGD(other.parameters(), 0.1)
    other(x).sum().backward()
    optimiser.step()
    assert not torch.allclose(other(x), before)


@pytest.mark.filterwarnings("ignore")
def test_old_weight_norm():
    """It works by a hook and cannot even be deep-copied: left alone, and no error."""
    model = Chain(lambda m, y: y.mean((2, 3))).double()
    nn.utils.weight_norm(model.conv)
    model(input_of())
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    other, report = fused(model)
    assert "'conv' must have no hooks, got forward_pre_hooks" in report.entries[0].detail
    assert list(other.state_dict()) == list(model.state_dict())
    x = input_of()
    assert torch.equal(other(x), model(x))
    other.conv.weight_v.data.mul_(3)
    other.conv.weight_g.data.mul_(2)
    assert torch.equal(other(x), model(x))


def test_a_weight_that_is_tied():
    model = Twice(lambda m, x, y: m.conv(x).mean((2, 3)) + m.tied(y).mean((2, 3))).double()
    model.tied = nn.ConvTranspose2d(2, 3, 3).double()
    model.tied.weight = model.conv.weight
    other = fused(model)[0]
    assert other.tied.weight is other.conv.weight
    assert assert_same(model, other, input_of(), input_of()).fused == 2


# ---- multipliers that are no Python number -------------------------------------------------------


@pytest.mark.parametrize(
    ("multiplier", "dtype"),
    [
        (nn.Parameter(torch.tensor(2.0)), torch.float32),
        (nn.Parameter(torch.ones(3, 1, 1) * 3), torch.float32),
        (torch.tensor(2.0, dtype=torch.float64), torch.float32),
        (torch.tensor([2.0], dtype=torch.float64), torch.float64),
        (torch.tensor([[3]]), torch.float32),
        (2, torch.float32),
        (0.1, torch.float32),
        (True, torch.float32),
    ],
)
@pytest.mark.parametrize("how", [lambda y, m: y * m, lambda y, m: m * y, lambda y, m: y / m])
def test_multipliers(multiplier, dtype, how):
    model = Chain(lambda m, y: how(y, m.multiplier).mean((2, 3)))
    model.multiplier = multiplier
    x = input_of(dtype=torch.float32)
    other = fused(model)[0]
    (want, _), (have, record) = run(model, x), run(other, x)
    assert record.fused == 1
    assert have.dtype == want.dtype == dtype
    torch.testing.assert_close(have, want, equal_nan=True)
    if isinstance(multiplier, nn.Parameter):
        assert_same(model, other, x, tolerance=1e-5)

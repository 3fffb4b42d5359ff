"""Results that a forward builds, and classes that do more when they are called."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from fusing import Up, fused, pooled, run, same, sample
from torch import nn


@dataclasses.dataclass
class Result:
    score: torch.Tensor
    other: torch.Tensor = None


@dataclasses.dataclass
class Doubled:
    score: torch.Tensor

    def __post_init__(self):
        self.score = self.score * 2


@dataclasses.dataclass
class Derived:
    score: torch.Tensor
    other: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.other = self.score * 2


@dataclasses.dataclass(init=False)
class Written:
    score: torch.Tensor

    def __init__(self, score):
        self.score = score * 2


class Pair(NamedTuple):
    score: torch.Tensor
    other: torch.Tensor = None


class Halved(collections.namedtuple("Halved", "score")):
    def __new__(cls, score):
        return super().__new__(cls, score / 2)


def with_extra(score):
    result = Result(score)
    result.extra = score * 3
    return result


@pytest.mark.parametrize(
    ("build", "fuses"),
    [
        (Result, 1),
        (Pair, 1),
        (Doubled, 0),
        (Derived, 0),
        (Written, 0),
        (Halved, 0),
        (with_extra, 0),
    ],
)
def test_results_that_are_built(build, fuses):
    """fx writes down the fields and builds it again from them."""
    model = Up(lambda m, x: build(pooled(m, x)))
    other, report = fused(model)
    x = sample()
    want, (have, record) = model(x), run(other, x)
    assert record.fused == fuses
    assert type(have) is type(want)
    fields = vars(want) if dataclasses.is_dataclass(want) else want._asdict()
    for name, value in fields.items():
        if value is not None:
            torch.testing.assert_close(getattr(have, name), value)
    if not fuses:
        assert "which does more than hold values" in report.entries[0].detail


# ---- classes with a __call__ of their own --------------------------------------------------------


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def __call__(self, x):
        return super().__call__(x) * 2

    def forward(self, x):
        return self.layer(x)


class CalledLayer(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class CalledHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3)

    def __call__(self, x):
        return super().__call__(x) * 2

    def forward(self, x):
        return pooled(self, x)


@pytest.mark.parametrize("build", [Called, lambda: CalledLayer(6, 6)])
def test_a_part_with_its_own_call(build):
    """A trace sees what it does besides its forward, and a plan that calls it would do it again."""
    model = Up(lambda m, x: m.last(pooled(m, x)), lambda m: setattr(m, "last", build()))
    other, report = fused(model)
    assert "the class of its part 'last' has its own __call__" in report.entries[0].detail
    assert same(model, other, sample()).fused == 0


def test_a_host_with_its_own_call():
    model = nn.Sequential(CalledHead(), nn.ReLU())
    assert same(model, fused(model)[0], sample()).fused == 1

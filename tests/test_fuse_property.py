"""Random graphs from a small grammar: a fused model gives what the model gives, gradients too.

A graph is a convolution of random settings, steps that are uniform and affine, perhaps one that is
not, and a reduction in a random spelling, perhaps of part of the space. Whether it is fused is
known from how it was drawn, so neither a missed nor a wrong fusion passes.
"""

from dataclasses import dataclass

import torch
from fusing import LAYERS, Captured, assert_same, fused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

STEPS = {
    "scale": lambda m, y: y * m.scale,
    "gain": lambda m, y: m.gain * y,
    "shift": lambda m, y: y + m.shift,
    "number": lambda m, y: y * -0.75,
    "half": lambda m, y: y / 2,
    "from_one": lambda m, y: 1 - y,
    "minus": lambda m, y: y.sub(m.shift, alpha=0.5),
    "neg": lambda m, y: -y,
    "norm": lambda m, y: m.norm(y),
    "drop": lambda m, y: m.drop(y),
    "identity": lambda m, y: m.identity(y),
    "contiguous": lambda m, y: y.contiguous(),
    "double": lambda m, y: y.to(torch.float64),
    "in_place": lambda m, y: y.mul(1.0).add_(m.shift),
}
# These fit a tensor of any shape.
ANYWHERE = ("gain", "number", "half", "from_one", "neg", "drop", "identity", "double")
SPOILERS = {
    "relu": lambda m, y: y.relu(),
    "square": lambda m, y: y * y,
    "tanh": lambda m, y: torch.tanh(y),
}


def reduce(kind, axes):
    positive, negative = tuple(range(2, 2 + axes)), tuple(range(-axes, 0))
    pool = getattr(F, f"adaptive_avg_pool{axes}d")
    return {
        "mean": lambda y: y.mean(positive),
        "mean_keepdim": lambda y: y.mean(negative, keepdim=True),
        "repeated": lambda y: y.mean(positive, keepdim=True).mean(positive),
        "one_by_one": lambda y: one_by_one(y, axes),
        "sum": lambda y: y.sum(negative),
        "sum_and_mean": lambda y: y.sum(2, keepdim=True).mean(positive),
        "all": lambda y: y.mean(),
        "total": lambda y: y.sum(),
        "pool": lambda y: pool(y, 1),
        "flatten": lambda y: y.flatten(2).mean(2),
        "flatten_all": lambda y: y.flatten(1).sum(1, keepdim=True),
        "channels": lambda y: y.mean((0, 1, *positive)),
        "part": lambda y: y.mean(2) if axes > 1 else y.mean(1),
        "none": lambda y: y,
    }[kind]


def one_by_one(y, axes):
    for _ in range(axes):
        y = y.mean(-1)
    return y


WHOLE = [
    *("mean", "mean_keepdim", "repeated", "one_by_one", "sum", "sum_and_mean", "all", "total"),
    *("pool", "flatten", "flatten_all", "channels"),
]


@dataclass(frozen=True)
class Recipe:
    axes: int
    layer: dict
    size: tuple[int, ...]
    before: tuple[str, ...]
    spoiler: str | None
    reduction: str
    after: tuple[str, ...]
    function: bool

    @property
    def fuses(self):
        return self.spoiler is None and self.reduction in WHOLE


@st.composite
def recipes(draw):
    axes = draw(st.integers(1, 3))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kernel = draw(st.integers(1, 3))
    size = tuple(draw(st.integers(2, 4)) for _ in range(axes))
    smallest = (min(size) - 1) * stride + dilation * (kernel - 1) + 1
    layer = {
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": draw(st.integers(0, min(2, (smallest - 1) // 2))),
        "output_padding": draw(st.integers(0, max(stride, dilation) - 1)),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
    }
    steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=4).map(tuple)
    spoiler = draw(st.sampled_from([None, None, None, *SPOILERS]))
    reduction = draw(st.sampled_from([*WHOLE, *WHOLE, "part", "none"]))
    return Recipe(
        axes, layer, size, draw(steps), spoiler, reduction, draw(steps), draw(st.booleans())
    )


class Model(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.conv = LAYERS[recipe.axes](2, 4, **recipe.layer)
        self.scale = nn.Parameter(torch.rand(4, *[1] * recipe.axes) + 0.5)
        self.shift = nn.Parameter(torch.randn(1, 4, *[1] * recipe.axes))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.norm = getattr(nn, f"BatchNorm{recipe.axes}d")(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.drop, self.identity = nn.Dropout(), nn.Identity()
        self.recipe = recipe

    def forward(self, x):
        recipe = self.recipe
        if recipe.function:
            conv = self.conv
            function = getattr(F, f"conv_transpose{recipe.axes}d")
            places = (conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
            y = function(x, conv.weight, conv.bias, *places)
        else:
            y = self.conv(x)
        steps = [STEPS[name] for name in recipe.before]
        if recipe.spoiler is not None:
            steps.insert(len(steps) // 2, SPOILERS[recipe.spoiler])
        for step in steps:
            y = step(self, y)
        y = reduce(recipe.reduction, recipe.axes)(y)
        for name in recipe.after:
            if name in ANYWHERE:
                y = STEPS[name](self, y)
        return y.exp() if recipe.reduction == "mean" else y


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=150, **COMMON)
@given(recipes())
def test_fuse(recipe):
    model = Model(recipe).double().eval()
    x = torch.randn(2, 2, *recipe.size, dtype=torch.float64)
    other, report = fused(model)
    record = assert_same(model, other, x, tolerance=1e-9)
    assert record.fused == recipe.fuses, report
    assert record.convolutions == (not recipe.fuses)


@settings(max_examples=30, **COMMON)
@given(recipes())
def test_the_captured_graph(recipe):
    model = Model(recipe).double().eval()
    x = torch.randn(2, 2, *recipe.size, dtype=torch.float64)
    captured = Captured(model)
    record = assert_same(model, captured, x, tolerance=1e-9)
    assert record.fused == recipe.fuses, captured.reports[0]
    assert record.convolutions == (not recipe.fuses)


@settings(max_examples=40, **COMMON)
@given(recipes())
def test_train_mode(recipe):
    """Batch statistics and dropout in front of the reduction keep the convolution."""
    model = Model(recipe).double()
    x = torch.randn(3, 2, *recipe.size, dtype=torch.float64)
    other, report = fused(model)
    record = assert_same(model, other, x, tolerance=1e-8)
    fuses = recipe.fuses and not {"norm", "drop"} & set(recipe.before)
    assert record.fused == fuses, report

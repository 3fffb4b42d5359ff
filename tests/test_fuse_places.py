"""Where things are in a model, their shapes and types: a plan calls them by name."""

import cProfile
import sys
import threading

import pytest
import torch
from fusing import Up, changed, fused, pooled, run, same, sample, seeded
from torch import nn


def in_order(m, x):
    y = pooled(m, x)
    for layer in m.order:
        y = layer(y)
    return y


def with_order(m):
    m.a, m.b = nn.Linear(6, 6), nn.Linear(6, 6)
    m.order = [m.a, m.b]


def with_gains(m):
    m.a, m.b = nn.Parameter(torch.rand(6, 1, 1)), nn.Parameter(torch.rand(6, 1, 1))
    m.gains = [m.a, m.b]


@pytest.mark.parametrize(
    ("body", "init", "name"),
    [
        (in_order, with_order, "order"),
        (lambda m, x: (m.up(x) * m.gains[0]).mean((2, 3)), with_gains, "gains"),
    ],
)
def test_a_list_of_parts_in_another_order(body, init, name):
    model = Up(body, init)
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, lambda m: getattr(m, name).reverse())
    assert same(reference, other, sample()).fused == 0


def over_space():
    return torch.linspace(0, 1, 17 * 17).view(17, 17)


OPERANDS = {
    "parameter": (
        lambda m: setattr(m, "gain", nn.Parameter(torch.rand(6, 1, 1))),
        lambda m: setattr(m, "gain", nn.Parameter(over_space())),
    ),
    "buffer": (
        lambda m: m.register_buffer("gain", torch.rand(6, 1, 1)),
        lambda m: setattr(m, "gain", over_space()),
    ),
    "attribute": (
        lambda m: setattr(m, "gain", torch.rand(6, 1, 1)),
        lambda m: setattr(m, "gain", over_space()),
    ),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_of_another_shape(name):
    init, change = OPERANDS[name]
    model = Up(lambda m, x: (m.up(x) * m.gain).mean((2, 3)), init)
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, change)
    assert same(reference, other, sample()).fused == 0


def test_a_layer_with_other_channels():
    """view(n, 6, -1) keeps channels while there are 6 of them."""

    def other_channels(m):
        m.up = seeded(lambda: nn.ConvTranspose2d(4, 12, 3, stride=2, padding=1))

    def body(m, x):
        y = m.up(x)
        return y.view(y.shape[0], 6, -1).mean(-1)

    model = Up(body)
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, other_channels)
    assert same(reference, other, sample()).fused == 0


class AlwaysOff(nn.Module):
    """Has no attribute ``training`` of its own."""

    @property
    def training(self):
        return False

    @training.setter
    def training(self, mode):
        pass

    def forward(self, y):
        return y


def test_a_mode_that_is_a_property():
    def body(m, x):
        return pooled(m, x) * (2 if m.last.training else 3)

    model = Up(body, lambda m: setattr(m, "last", AlwaysOff()))
    assert same(model, fused(model)[0], sample()).fused == 1


@pytest.mark.parametrize("question", [nn.Linear, nn.Identity])
def test_the_type_of_a_part(question):
    def body(m, x):
        y = pooled(m, x)
        return m.last(y) if isinstance(m.last, question) else y

    model = Up(body, lambda m: setattr(m, "last", nn.Linear(6, 6)))
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, lambda m: setattr(m, "last", nn.Identity()))
    assert same(reference, other, sample()).fused == 0


@pytest.mark.parametrize(
    "count",
    [
        lambda m: len(list(m.children())),
        lambda m: sum(1 for _ in m.modules()),
        lambda m: len(dict(m.named_modules())),
        lambda m: len(m._modules),
        lambda m: len(m.parts),
        lambda m: len(list(m.parts.items())),
        lambda m: "b" in m.parts,
    ],
)
def test_how_many_parts_there_are(count):
    def init(m):
        m.parts = nn.ModuleDict({"a": nn.ReLU()})

    def change(m):
        m.parts["b"] = nn.ReLU()
        m.c = nn.ReLU()

    model = Up(lambda m, x: pooled(m, x) * (1 + count(m)), init)
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, change)
    assert same(reference, other, sample()).fused == 0


def test_a_part_that_is_looked_up_by_its_path():
    def body(m, x):
        return m.get_submodule("parts.a")(pooled(m, x))

    model = Up(body, lambda m: setattr(m, "parts", nn.ModuleDict({"a": nn.ReLU()})))
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, lambda m: m.parts.update({"a": nn.Tanh()}))
    assert same(reference, other, sample()).fused == 1


@torch.fx.wrap
def finished(y):
    return y * 2 if y.sum() > 0 else y


def test_a_function_that_fx_does_not_look_into():
    model = Up(lambda m, x: finished(pooled(m, x)))
    other = fused(model)[0]
    for x in (sample(), -sample()):
        assert same(model, other, x).fused == 1


def test_only_what_was_read_is_compared():
    """A layer that is called may change as it likes, and the original need not run for it."""
    model = Up(lambda m, x: m.last(pooled(m, x)), lambda m: setattr(m, "last", nn.Linear(6, 6)))

    def change(m):
        m.note = "mine"
        m.unused = nn.Parameter(torch.ones(1))
        m.last = seeded(lambda: nn.Sequential(nn.Linear(6, 2), nn.Tanh()))

    reference, other = changed(model, change)
    assert same(reference, other, sample()).fused == 1


# ---- inputs that the operator is not for ---------------------------------------------------------


class Doubling(torch.Tensor):
    """Decides itself what a transposed convolution of it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "conv_transpose2d":
            args = (args[0] * 2, *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize(("kind", "fuses"), [(Doubling, 0), (Named, 1)])
def test_a_subclass_of_tensor(kind, fuses):
    model = Up(pooled)
    other = fused(model)[0]
    x = sample()
    want = model(x.as_subclass(kind))
    have, record = run(other, x.as_subclass(kind))
    assert type(have) is type(want) is kind
    torch.testing.assert_close(have.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))
    assert record.fused == fuses


def test_an_output_without_positions():
    """PyTorch returns an empty tensor for this one, whose mean is NaN."""
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 3, padding=(8, 0), groups=8), nn.AdaptiveAvgPool2d(1)
    )
    other = fused(model)[0]
    for module in (model, other):
        try:
            result = module(torch.randn(1, 8, 14, 14))
        except RuntimeError as error:
            result = str(error)
        if module is model:
            want = result
    assert type(result) is type(want)
    if isinstance(want, str):
        assert result == want
    else:
        torch.testing.assert_close(result, want, equal_nan=True)
    x = torch.randn(2, 8, 18, 14)
    assert same(model, other, x).fused == 1


# ---- threads -------------------------------------------------------------------------------------


def test_fusing_in_several_threads():
    """A trace patches nn.Module: others may be fused, and run, meanwhile."""
    running = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))
    errors, over = [], threading.Event()

    def call():
        try:
            while not over.is_set():
                running(torch.ones(3))
        except Exception as error:
            errors.append(error)

    def fuse_some():
        try:
            for _ in range(3):
                model = Up(pooled)
                x = torch.randn(1, 4, 5, 5)
                torch.testing.assert_close(fused(model)[0](x), model(x))
        except Exception as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    fusers = [threading.Thread(target=fuse_some) for _ in range(3)]
    for thread in (caller, *fusers):
        thread.start()
    for thread in fusers:
        thread.join()
    over.set()
    caller.join()
    assert not errors
    assert "__getattribute__" not in vars(nn.Module)


def test_under_a_profiler():
    """It is paused for the trace, and goes on."""
    with cProfile.Profile() as profile:
        other = fused(Up(pooled))[0]
        other(sample())
        sum(range(3))
    assert any("sum" in str(entry.code) for entry in profile.getstats())
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        fused(Up(pooled))
        calls.clear()
        other(sample())
    finally:
        sys.setprofile(None)
    assert calls

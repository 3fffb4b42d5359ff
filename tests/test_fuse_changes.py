"""What changes after fusing: what a trace read is compared, and the original runs if it differs.

The change is made to the fused copy and to a copy of the model, which is what it is compared with.
"""

import functools
import types

import pytest
import torch
from fusing import Up, changed, fused, pooled, same, sample, seeded
from torch import nn
from torch.nn import functional as F


def appended(m):
    m.append(nn.Flatten())


def popped(m):
    m.pop(-1)


def inserted(m):
    m.insert(1, nn.ReLU())


@pytest.mark.parametrize("change", [appended, popped, inserted])
def test_a_sequential_that_changes(change):
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Identity(), nn.Sigmoid()
    )
    reference, other = changed(model, change)
    assert same(reference, other, sample()).fused == 0


def heads(m, x):
    return torch.stack([head(pooled(m, x)) for head in m.heads])


def with_heads(m):
    m.heads = nn.ModuleList([nn.Linear(6, 3)])


def with_gain(m):
    m.register_parameter("gain", None)


def gained(m, x):
    y = m.up(x)
    return (y if m.gain is None else y * m.gain).mean((2, 3))


def with_alias(m):
    m.one = m.two = nn.Linear(6, 6)


def with_tie(m):
    m.one, m.two = nn.Linear(6, 6), nn.Linear(6, 6)
    m.two.weight = m.one.weight


def with_settings(m):
    m.norm = nn.BatchNorm2d(6)
    m.config = nn.Module()
    m.config.factor, m.config.steps = 2.0, [1, {"a": 2}]
    m.options = types.SimpleNamespace(factor=3.0, deeper={"b": [1]})
    m.calls = [torch.sigmoid]


def settings(m, x):
    y = m.up(x)
    y = F.batch_norm(y, m.norm.running_mean, m.norm.running_var, eps=m.norm.eps).mean((2, 3))
    for call in m.calls:
        y = call(y)
    factor = getattr(m.config, "other", m.options.factor) + m.options.deeper["b"][0]
    return y * m.config.factor * m.config.steps[1]["a"] + factor


CHANGES = {
    "head": (heads, with_heads, lambda m: m.heads.append(seeded(lambda: nn.Linear(6, 3)))),
    "parameter": (gained, with_gain, lambda m: setattr(m, "gain", nn.Parameter(torch.tensor(3.0)))),
    "alias": (
        lambda m, x: m.two(pooled(m, x)),
        with_alias,
        lambda m: setattr(m, "two", seeded(lambda: nn.Linear(6, 6))),
    ),
    "tie": (
        lambda m, x: F.linear(pooled(m, x), m.two.weight),
        with_tie,
        lambda m: setattr(m.two, "weight", nn.Parameter(torch.ones(6, 6))),
    ),
    "eps": (settings, with_settings, lambda m: setattr(m.norm, "eps", 3.0)),
    "config": (settings, with_settings, lambda m: setattr(m.config, "factor", 9.0)),
    "added": (settings, with_settings, lambda m: setattr(m.config, "other", 9.0)),
    "list": (settings, with_settings, lambda m: m.config.steps[1].update(a=7)),
    "object": (settings, with_settings, lambda m: setattr(m.options, "factor", 9.0)),
    "deep": (settings, with_settings, lambda m: m.options.deeper["b"].__setitem__(0, 5)),
    "callbacks": (settings, with_settings, lambda m: m.calls.append(torch.exp)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_fusing(name):
    body, init, change = CHANGES[name]
    model = Up(body, init)
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, change)
    assert same(reference, other, sample()).fused == 0


def test_a_setting_of_the_class():
    class Scaled(Up):
        factor = 1.0
        more = [1]  # noqa: RUF012

    model = Scaled(lambda m, x: pooled(m, x) * m.factor * len(m.more))
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    for name, value in (("factor", 5.0), ("more", [2])):
        before = getattr(Scaled, name)
        setattr(Scaled, name, value)
        assert same(model, other, sample()).fused == 0
        setattr(Scaled, name, before)
    assert same(model, other, sample()).fused == 1
    Scaled.more.append(1)
    assert same(model, other, sample()).fused == 0


# ---- variables -----------------------------------------------------------------------------------

NUMBER, TABLE = 2.0, {"factor": [1.0]}


def helper(y):
    return y * 2


def with_global(m, x):
    return pooled(m, x) * NUMBER


def with_table(m, x):
    return pooled(m, x) * TABLE["factor"][0]


def with_helper(m, x):
    return helper(pooled(m, x))


GLOBALS = {
    "number": (with_global, "NUMBER", 5.0),
    "table": (with_table, "TABLE", {"factor": [7.0]}),
    "function": (with_helper, "helper", lambda y: y * 3),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_a_global_variable(name, monkeypatch):
    body, variable, value = GLOBALS[name]
    model = Up(body)
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    monkeypatch.setitem(globals(), variable, value)
    assert same(model, other, sample()).fused == 0
    monkeypatch.undo()
    assert same(model, other, sample()).fused == 1


def test_a_closure():
    factor = 2.0

    def body(m, x):
        return pooled(m, x) * factor

    model = Up(body)
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    factor = 3.0
    assert same(model, other, sample()).fused == 0


class Patched(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3)

    def finish(self, y):
        return y * 2

    def forward(self, x):
        return self.finish(pooled(self, x))


@pytest.mark.parametrize("name", ["forward", "finish"])
def test_a_method_that_is_patched(name, monkeypatch):
    """In the class and, unless it is the forward itself, in the object."""
    model = Patched()
    other = fused(model)[0]
    plain = getattr(Patched, name)
    monkeypatch.setattr(Patched, name, lambda self, x: plain(self, x) * 3)
    assert same(model, other, sample()).fused == 0
    again = fused(Patched())[0]
    again.load_state_dict(model.state_dict())
    assert same(model, again, sample()).fused == 1
    monkeypatch.undo()
    assert same(model, other, sample()).fused == 1
    assert same(model, again, sample()).fused == 0
    if name == "finish":
        model.finish = other.finish = lambda y: y * 5
        assert same(model, other, sample()).fused == 0


class Derived(Patched):
    @property
    def factor(self):
        return 2.0

    def forward(self, x):
        return super().forward(x) * self.factor


@pytest.mark.parametrize(("cls", "name"), [(Patched, "forward"), (Derived, "factor")])
def test_what_a_class_inherits_and_its_properties(cls, name, monkeypatch):
    model = Derived()
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    plain = vars(cls)[name]
    value = property(lambda self: 5.0) if name == "factor" else lambda m, x: plain(m, x) * 3
    monkeypatch.setattr(cls, name, value)
    assert same(model, other, sample()).fused == 0


def test_a_part_whose_forward_is_called_by_name():
    """The trace looks into it, as no call of the module is seen."""

    class Doubled(nn.Module):
        def forward(self, y):
            return y * 2

    model = Up(lambda m, x: m.last.forward(pooled(m, x)), lambda m: setattr(m, "last", Doubled()))
    assert same(model, fused(model)[0], sample()).fused == 1
    reference, other = changed(model, lambda m: setattr(m, "last", nn.Tanh()))
    assert same(reference, other, sample()).fused == 0


def wrapping(function):
    """A decorator of the user's: what it wraps is found by way of its closure."""

    @functools.wraps(function)
    def wrapper(y):
        return function(y) + 1

    return wrapper


@wrapping
def wrapped(y):
    return y * 2


class Settings:
    factor = 2.0
    steps = [3.0]  # noqa: RUF012


def by_settings(m, x):
    return wrapped(pooled(m, x)) * Settings.factor * Settings.steps[0]


def test_decorated_functions_and_classes_of_settings(monkeypatch):
    model = Up(by_settings)
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    monkeypatch.setattr(Settings, "factor", 5.0)
    assert same(model, other, sample()).fused == 0
    monkeypatch.undo()
    assert same(model, other, sample()).fused == 1
    Settings.steps.append(1.0)
    assert same(model, other, sample()).fused == 0
    Settings.steps.pop()
    monkeypatch.setitem(globals(), "wrapped", wrapping(lambda y: y * 3))
    assert same(model, other, sample()).fused == 0


def test_something_too_large_to_compare():
    model = Up(lambda m, x: pooled(m, x) * m.table[3], lambda m: setattr(m, "table", [1.0] * 2000))
    other, report = fused(model)
    assert "it reads something that holds more than 1000 values" in report.entries[0].detail
    assert same(model, other, sample()).fused == 0

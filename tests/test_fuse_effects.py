"""What a forward does besides its result, and what it builds: no plan may lose or change it."""

import collections
import types

import numpy
import pytest
from fusing import Up, fused, pooled, same, sample
from torch import nn

from convt_reduce.rewrite import explain, fuse

# ---- effects besides -----------------------------------------------------------------------------


def nested(m, x):
    m.state["stats"]["calls"] += 1
    return pooled(m, x)


def queued(m, x):
    m.queue.append(1)
    return pooled(m, x)


def noted(m, x):
    m.notes.calls += 1
    return pooled(m, x)


def kept(m, x):
    m.state["last"] = [0]
    return pooled(m, x)


@pytest.mark.parametrize("body", [nested, queued, noted, kept])
def test_effects_in_containers(body):
    def init(m):
        m.state, m.queue = {"stats": {"calls": 0}, "last": [0]}, collections.deque(maxlen=9)
        m.notes = types.SimpleNamespace(calls=0)

    model = Up(body, init)
    other, report = fused(model)
    assert "it changes the attribute" in report.entries[0].detail
    for _ in range(3):
        other(sample())
    if body is nested:
        assert other.state["stats"]["calls"] == 3
        assert model.state["stats"]["calls"] == 0


def drawn(m, x):
    return pooled(m, -x if numpy.random.rand() < 0.5 else x)


def drawn_from_its_own(m, x):
    return pooled(m, x * m.generator.random())


@pytest.mark.parametrize("body", [drawn, drawn_from_its_own])
def test_numpys_random_numbers(body):
    def init(m):
        m.generator = numpy.random.default_rng(0)

    model = Up(body, init)
    numpy.random.seed(3)
    before = numpy.random.get_state()[1].tolist()
    report = fused(model)[1]
    why = "draws random numbers" if body is drawn else "changes the attribute 'generator'"
    assert why in report.entries[0].detail
    assert numpy.random.get_state()[1].tolist() == before


# ---- classes that copy themselves ----------------------------------------------------------------


class Registered(nn.Module):
    def __init_subclass__(cls, *, name, **rest):
        super().__init_subclass__(**rest)


class Item(Registered, name="entry"):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3)

    def forward(self, x):
        return self.up(x).mean((2, 3))


def test_a_class_that_registers_its_subclasses():
    model = Item()
    other, report = fused(model)
    assert "its class has its own __init_subclass__" in report.entries[0].detail
    assert same(model, other, sample()).fused == 0


class Meta(type):
    pass


class WithMeta(Up, metaclass=Meta):
    pass


class Reduced(Up):
    def __reduce__(self):
        return rebuilt, (self.state_dict(),)


class Copied(Up):
    def __deepcopy__(self, memo):
        return rebuilt(self.state_dict())


class Sharing(Up):
    def __deepcopy__(self, memo):
        other = type(self)(self.body)
        other.up.load_state_dict(self.up.state_dict())
        other.up.weight, other.up.bias = self.up.weight, self.up.bias
        return other


def rebuilt(state):
    model = Reduced(pooled)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", [Reduced, Copied])
def test_a_class_whose_copies_share_nothing(kind):
    for call in (fuse, explain):
        with pytest.raises(TypeError, match="copies itself"):
            call(kind(pooled))


@pytest.mark.parametrize(("kind", "why"), [(Sharing, "__deepcopy__"), (WithMeta, "metaclass Meta")])
def test_a_class_that_is_left_alone(kind, why):
    model = kind(pooled)
    other, report = fused(model)
    assert why in report.entries[0].detail
    assert other.up.weight is model.up.weight
    assert same(model, other, sample()).fused == 0


# ---- variables, classes and defaults -------------------------------------------------------------

COUNT, CALLS = 0, []


def counted(m, x):
    global COUNT
    COUNT += 1
    return pooled(m, x)


def listed(m, x):
    CALLS.append(1)
    return pooled(m, x)


class Counted(Up):
    count = 0
    calls = []  # noqa: RUF012

    def forward(self, x):
        Counted.count += 1
        return super().forward(x)


class Listed(Counted):
    def forward(self, x):
        self.calls.append(1)
        return Up.forward(self, x)


class Default(Up):
    def forward(self, x, calls=[]):  # noqa: B006
        calls.append(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "why", "count"),
    [
        (lambda: Up(counted), "it sets the global variable 'COUNT'", lambda: COUNT),
        (lambda: Up(listed), "it changes the global variable 'CALLS'", lambda: len(CALLS)),
        (lambda: Counted(pooled), "it changes", lambda: Counted.count),
        (lambda: Listed(pooled), "it changes the attribute 'calls'", lambda: len(Listed.calls)),
        (
            lambda: Default(pooled),
            "it changes the attribute 'forward'",
            lambda: len(Default.forward.__defaults__[0]),
        ),
    ],
)
def test_effects_outside_of_the_model(build, why, count):
    other, report = fused(build())
    assert why in report.entries[0].detail
    before = count()
    other(sample())
    assert count() == before + 1


def test_effects_in_a_closure():
    count = 0

    def body(m, x):
        nonlocal count
        count += 1
        return pooled(m, x)

    other, report = fused(Up(body))
    assert "it changes the attribute 'body'" in report.entries[0].detail
    before = count
    other(sample())
    assert count == before + 1

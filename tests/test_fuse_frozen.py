"""What a trace would freeze, lose or move without a word: it is refused, guarded or left in place.

Each of these gave another result than the model at some time. What is compared is the result
itself, its dtype and whether it carries a gradient, with the original on one side.
"""

import collections
import copy
import types

import numpy
import pytest
import torch
from fusing import Captured, Chain, fused, run
from torch import nn
from torch.nn import functional as F

from convt_reduce.compiler import fuse_graph
from convt_reduce.rewrite import explain, fuse


class Up(nn.Module):
    """A transposed convolution, parts by ``init`` and a forward by ``body``."""

    def __init__(self, body, init=None, channels=(4, 6)):
        super().__init__()
        self.up = nn.ConvTranspose2d(*channels, 3, stride=2, padding=1)
        self.body = body
        if init is not None:
            init(self)

    def forward(self, x):
        return self.body(self, x)


def sample(batch=2, channels=4):
    return torch.randn(batch, channels, 9, 9)


def same(model, other, *inputs, tolerance=1e-5):
    """Compares two modules, dtype and requires_grad too; returns what the second one ran."""
    want = model(*inputs)
    have, record = run(other, *inputs)
    assert (have.dtype, have.requires_grad) == (want.dtype, want.requires_grad)
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    return record


def changed(model, change):
    """The model and its fused copy, both changed afterwards."""
    other, report = fused(model)
    assert report.fused, report
    reference = copy.deepcopy(model)
    change(reference)
    change(other)
    return reference, other


def pooled(m, x):
    return m.up(x).mean((2, 3))


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


# ---- questions about the inputs ------------------------------------------------------------------


def by_type(m, x):
    return pooled(m, x * 2 - 1 if isinstance(x, torch.Tensor) else x)


def by_attribute(m, x):
    return pooled(m, x.tensors if hasattr(x, "tensors") else x)


def by_exact_type(m, x):
    return pooled(m, x * 2 if type(x) is torch.Tensor else x)


def by_dtype(m, x):
    return pooled(m, x.float() if x.dtype is torch.float64 else x)


def by_trial(m, x):
    try:
        x = x.tensors
    except Exception:
        x = x * 2
    return pooled(m, x)


def by_gradient_mode(m, x):
    return pooled(m, x) if torch.is_grad_enabled() else pooled(m, x).sigmoid()


def by_autocast(m, x):
    return pooled(m, x) if torch.is_autocast_enabled("cpu") else pooled(m, x).sigmoid()


def by_parameters(m, x):
    return pooled(m, x.to(next(m.parameters()).dtype))


def by_keys(m, x):
    return pooled(m, x) * len(m.state_dict())


def by_value(m, x):
    return pooled(m, x) * m.held.item()


def by_number(m, x):
    return pooled(m, x) * float(m.held)


def by_size(m, x):
    return pooled(m, x) * m.held.dim() if m.held.dtype.is_complex else pooled(m, x)


QUESTIONS = {
    by_type: "it asks for the type of an input",
    by_attribute: "it uses hasattr()",
    by_exact_type: "it uses type()",
    by_dtype: "it compares by 'is'",
    by_trial: "it asks an input for 'tensors', which tensors may not have",
    by_gradient_mode: "it asks for a gradient or autocast mode",
    by_autocast: "it asks for a gradient or autocast mode",
    by_parameters: "it looks through its parameters or buffers",
    by_keys: "it looks through its state_dict",
    by_value: "it reads the values of a tensor that it holds",
    by_number: "it reads the values of a tensor that it holds",
    by_size: "it reads the values of a tensor that it holds",
}


@pytest.mark.parametrize("body", QUESTIONS)
def test_questions_that_a_trace_would_answer_wrongly(body):
    def init(m):
        m.held = torch.tensor(2.0)

    model = Up(body, init)
    other, report = fused(model)
    assert QUESTIONS[body] in report.entries[0].detail
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert same(model, other, sample()).fused == 0


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3)

    def forward(self, x, mask):
        x = x["image"] if mask is None else x * mask
        return self.up(x).mean((2, 3))


def test_an_argument_that_is_none_or_no_tensor():
    model = Masked()
    other = fused(model)[0]
    x = sample()
    assert same(model, other, x, torch.rand(9, 9)).fused == 1
    assert same(model, other, x, 2.0).fused == 1
    assert same(model, other, {"image": x}, None).fused == 0


@pytest.mark.parametrize(
    "container", [lambda x: [x, x], lambda x: (x, x), lambda x: collections.OrderedDict({-1: x})]
)
def test_lists_of_tensors_are_fused(container):
    model = Up(lambda m, x: pooled(m, x[-1]))
    assert same(model, fused(model)[0], container(sample())).fused == 1


def test_a_list_with_none_in_it():
    model = Up(lambda m, x: pooled(m, x[0] if x[1] is None else x[0] * x[1]))
    other = fused(model)[0]
    assert same(model, other, [sample(), sample()]).fused == 1
    assert same(model, other, [sample(), None]).fused == 0


# ---- what changes afterwards ---------------------------------------------------------------------


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


def seeded(make):
    torch.manual_seed(0)
    return make()


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


# ---- the check -----------------------------------------------------------------------------------


def test_a_check_that_cannot_run():
    model = Up(lambda m, x: pooled(m, x.float()))
    with pytest.raises(RuntimeError, match="the model must run in float64 to be checked, got"):
        fuse(model, example_inputs=sample(), check=True)


def test_an_exported_no_grad():
    program = torch.export.export(Up(without_gradient(lambda y: y.mean((2, 3)))), (sample(),))
    module = program.module()
    fuse_graph(module, cost_rule=False)
    assert not module(sample()).requires_grad


def test_a_chain_is_still_fused():
    assert fused(Chain(lambda m, y: (y * m.scale).mean((2, 3))))[1].fused

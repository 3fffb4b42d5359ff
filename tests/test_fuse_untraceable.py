"""Layers that are not what they look like, and forwards that cannot be traced: left alone.

What surrounds them is looked at all the same, and the report says why they were not.
"""

import pytest
import torch
from fusing import Chain, assert_same, fused, input_of
from test_fuse_refusals import assert_left_alone, model_of, reasons
from torch import nn

# ---- layers that are not what they look like -----------------------------------------------------


class Scaled(nn.ConvTranspose2d):
    def forward(self, x):
        return super().forward(x) * 2


class Named(nn.ConvTranspose2d):
    pass


@pytest.mark.parametrize("kind", [Scaled, Named])
def test_subclasses(kind):
    model = model_of(lambda m, y: y.mean((2, 3)))
    model.conv = kind(2, 3, 3).double()
    assert_left_alone(model, "'conv' must be exactly an nn.ConvTransposeNd, got", input_of())


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks(register):
    model = model_of(lambda m, y: y.mean((2, 3)))
    calls = []
    getattr(model.conv, register)(lambda *arguments: calls.append(1))
    assert_left_alone(model, "'conv' must have no hooks, got", input_of().requires_grad_())
    assert len(calls) == 2


def test_hooks_of_a_step():
    model = model_of(lambda m, y: m.bn(y).mean((2, 3)), bn=nn.BatchNorm2d(3)).eval()
    calls = []
    model.bn.register_forward_hook(lambda *arguments: calls.append(1))
    assert_left_alone(model, "'bn' must have no hooks, got forward_hooks", input_of())
    assert len(calls) == 2


def test_a_forward_of_its_own():
    model = model_of(lambda m, y: y.mean((2, 3)))
    plain = model.conv.forward
    model.conv.forward = lambda x: plain(x) * 3
    assert_left_alone(model, "must have its class's forward, got one of its own", input_of())


def test_uninitialised():
    model = model_of(lambda m, y: y.mean((2, 3)))
    model.conv = nn.LazyConvTranspose2d(3, 3)
    assert "'conv' must be initialised, got LazyConvTranspose2d" in reasons(fused(model)[1])


def test_quantised():
    quantised = pytest.importorskip("torch.ao.nn.quantized")
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without a quantised engine for it")
    model = model_of(lambda m, y: y.mean((2, 3)))
    model.conv = quantised.ConvTranspose2d(2, 3, 3)
    assert "torch.ao.nn.quantized" in reasons(fused(model)[1])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype):
    model = Chain(lambda m, y: y.mean((2, 3))).to(dtype)
    assert "must be of a floating-point dtype, got" in reasons(fused(model)[1])
    x = torch.randn(1, 2, 4, 5, dtype=dtype)
    torch.testing.assert_close(fused(model)[0](x), model(x))


def test_a_dtype_that_comes_later():
    """The model is fused, then made complex: the call falls back on the convolution."""
    model = Chain(lambda m, y: y.mean((2, 3)))
    other = fused(model)[0].to(torch.complex64)
    x = torch.randn(1, 2, 4, 5, dtype=torch.complex64)
    torch.testing.assert_close(other(x), model.to(torch.complex64)(x))


class Subclass(torch.Tensor):
    pass


def test_a_weight_of_another_kind():
    model = model_of(lambda m, y: y.mean((2, 3)))
    model.conv.weight = nn.Parameter(model.conv.weight.detach().as_subclass(Subclass))
    assert "must have plain parameters, got a Subclass" in reasons(fused(model)[1])


# ---- what cannot be traced -----------------------------------------------------------------------


class Untraceable(nn.Module):
    """A forward that fx cannot follow, or would freeze, before a head that it can."""

    def __init__(self, trick):
        super().__init__()
        self.head = Chain(lambda m, y: y.mean((2, 3)))
        self.direct = nn.ConvTranspose2d(2, 3, 3)
        self.trick, self.count, self.seen = trick, 0, []

    def forward(self, x):
        return self.head(self.trick(self, x)), self.direct(x).mean((2, 3))


def branch(m, x):
    return x if x.sum() > 0 else -x


def count(m, x):
    m.count += 1
    return x


def collect(m, x):
    m.seen.append(x)
    return x


def draw(m, x):
    return x + torch.rand(1)


def draw_number(m, x):
    import random

    return x * random.random()


def no_grad(m, x):
    with torch.no_grad():
        return x * 2


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x * 2


def make(m, x):
    return x * torch.tensor([2.0])


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        (branch, "it asks for whether an input, or what it computes from it, is true"),
        (count, "it changes the attribute 'count' of 'the model'"),
        (collect, "it changes the attribute 'seen' of 'the model'"),
        (draw, "it makes a tensor that does not depend on its input"),
        (draw_number, "it draws random numbers that do not depend on its input"),
        (no_grad, "it switches a gradient or autocast mode"),
        (autocast, "it switches a gradient or autocast mode"),
        (make, "it makes a tensor that does not depend on its input"),
    ],
)
def test_what_cannot_be_traced_is_left_and_its_parts_are_not(trick, why):
    model = Untraceable(trick).double()
    other, report = fused(model)
    assert [entry.where for entry in report.fused] == ["head.conv"]
    (left,) = report.left_alone
    assert left.where == "direct"
    assert why in left.detail
    assert 'torch.compile(model, backend="convt_reduce")' in left.detail
    assert any(why in note for note in report.notes)
    assert model.count == 0
    assert model.seen == []
    if trick in (branch, no_grad, make):
        record = assert_same(model, other, input_of())
        assert (record.fused, record.convolutions) == (1, 1)
    if trick is count:
        other(input_of())
        other(input_of())
        assert (other.count, model.count) == (2, 0)


def test_fuse_says_so_when_it_cannot_look():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, 3)

        def forward(self, x):
            return self.conv(branch(self, x)).mean((2, 3))

    with pytest.warns(UserWarning, match=r"fuse changed nothing.*backend=\"convt_reduce\""):
        other, report = fused(Model())
    assert type(other) is Model
    assert "left alone" in str(report)


def test_a_layer_that_nobody_calls():
    model = Chain(lambda m, y: y.mean((2, 3)), spare=nn.ConvTranspose2d(1, 1, 1))
    entries = {entry.where: entry for entry in fused(model)[1].entries}
    assert entries["conv"].fused
    assert entries["spare"].detail == "no forward that was traced calls it"

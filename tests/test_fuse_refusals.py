"""A near miss for every reason to refuse: it stays as it is, and the report says why.

Each row differs in one thing from a model that is fused. The sentence is checked, and that the
model's results, computed with its convolution, are unchanged.
"""

import pytest
import torch
from fusing import Captured, Chain, assert_same, fused, input_of
from torch import nn
from torch.nn import functional as F

# name -> (body, what the sentence of fuse must say)
BODIES = {
    "returned": (lambda m, y: y * 2, "'mul' must be reduced over space, got returned as it is"),
    "not_linear": (
        lambda m, y: y.relu().mean((2, 3)),
        "'relu' must be an affine step that is the same at every position, got relu",
    ),
    "maximum": (lambda m, y: y.amax((2, 3)), "got amax"),
    "standard_deviation": (lambda m, y: y.std((2, 3)), "got std"),
    "power": (lambda m, y: (y**2).mean((2, 3)), "got pow"),
    "not_linear_layer": (lambda m, y: F.gelu(y).mean((2, 3)), "got gelu"),
    "interpolated": (lambda m, y: F.interpolate(y, scale_factor=2.0).mean((2, 3)), "interpolate"),
    "two_users": (
        lambda m, y: (y.mean((2, 3)), y.amax((2, 3))),
        "'conv' must have one user, got 'mean' and 'amax'",
    ),
    "step_with_two_users": (
        lambda m, y: (lambda z: (z.mean((2, 3)), z))(y * 2),
        "'mul' must have one user, got 'mean' and 'output'",
    ),
    "used_twice_in_a_step": (
        lambda m, y: (y * y).mean((2, 3)),
        "'mul' must use 'conv' once, got it several times",
    ),
    "in_place_beside_a_reader": (
        lambda m, y: (y.mul_(2), y.mean((2, 3)))[1],
        "'conv' must have one user",
    ),
    "one_dimension": (
        lambda m, y: y.mean(2),
        "'mean' must be reduced over space, got returned as it is",
    ),
    "one_dimension_then_not_linear": (lambda m, y: y.mean(3).relu().mean(2), "got relu"),
    "channels_only": (lambda m, y: y.mean(1), "got returned as it is"),
    "batch_and_channels": (lambda m, y: y.mean((0, 1)), "got returned as it is"),
    "wrong_flattening": (lambda m, y: y.flatten(0, 1).mean(0), "got returned as it is"),
    "other_dtype": (
        lambda m, y: y.mean((2, 3), dtype=torch.float32),
        "'mean' must keep the dtype torch.float64, got torch.float32",
    ),
    "cast": (
        lambda m, y: y.float().mean((2, 3)),
        "'float_1' must keep the dtype torch.float64, got torch.float32",
    ),
    "cast_by_to": (lambda m, y: y.to(torch.float32).mean((2, 3)), "must keep the dtype"),
    "cast_to_a_buffer": (lambda m, y: y.type_as(m.single).mean((2, 3)), "must keep the dtype"),
    "divided_into": (
        lambda m, y: (1 / y).mean((2, 3)),
        "must have the convolution's result as its numerator",
    ),
    "infinite_number": (
        lambda m, y: (y * float("inf")).mean((2, 3)),
        "'mul' must have a finite number, got inf",
    ),
    "division_by_zero": (
        lambda m, y: (y / 0).mean((2, 3)),
        "'truediv' must divide by a number other than 0, got 0",
    ),
    "rounded_division": (
        lambda m, y: torch.div(y, 2, rounding_mode="floor").mean((2, 3)),
        "must divide without rounding, got floor",
    ),
    "operand_over_space": (
        lambda m, y: (y * m.mask).mean((2, 3)),
        "must have an operand with size 1 on every spatial axis, got 'mask' of shape [8, 10]",
    ),
    "operand_over_one_axis": (lambda m, y: (y + m.row).mean((2, 3)), "of shape [10]"),
    "operand_with_more_axes": (
        lambda m, y: (y * m.fifth).mean((3, 4)),
        "must have an operand of at most 4 dimensions, got shape [2, 1, 1, 1, 1]",
    ),
    "complex_operand": (lambda m, y: (y * (1 + 2j)).mean((2, 3)).abs(), "must have a real operand"),
    "complex_buffer": (lambda m, y: (y * m.turn).mean((2, 3)).abs(), "must have a real operand"),
    "into_another_tensor": (
        lambda m, y: m.other.clone().mul_(y).mean((2, 3)),
        "must overwrite the convolution's result, got another tensor",
    ),
    "dropout_on": (
        lambda m, y: F.dropout(y, 0.5).mean((2, 3)),
        "'dropout' must be a dropout that is switched off, got training=True",
    ),
    "batch_statistics": (
        lambda m, y: F.batch_norm(y, None, None, training=True).mean((2, 3)),
        "must have running statistics, got none",
    ),
    "batch_norm_training": (
        lambda m, y: F.batch_norm(y, m.zero, m.one, training=True).mean((2, 3)),
        "must use its running statistics, got training=True",
    ),
    "batch_norm_of_mixed_axes": (
        lambda m, y: F.batch_norm(y.flatten(1), m.zeros, m.ones).mean(1),
        "must normalise channels, got another axis in their place",
    ),
    "instance_norm": (lambda m, y: F.instance_norm(y).mean((2, 3)), "got instance_norm"),
    "adaptive_pool_to_two": (
        lambda m, y: F.adaptive_avg_pool2d(y, (1, 2)).mean((2, 3)),
        "must pool to size 1, got [1, 2]",
    ),
    "adaptive_pool_to_none": (
        lambda m, y: F.adaptive_avg_pool2d(y, (None, 1)).mean((2, 3)),
        "must pool to size 1, got [None, 1]",
    ),
    "adaptive_max_pool": (lambda m, y: F.adaptive_max_pool2d(y, 1), "got "),
    "padded_pool": (lambda m, y: F.avg_pool2d(y, (8, 10), padding=1), "must pool without padding"),
    "pool_with_divisor": (
        lambda m, y: F.avg_pool2d(y, (8, 10), divisor_override=3),
        "must pool without padding and divisor",
    ),
    "view_with_sizes": (
        lambda m, y: y.view(y.size(0), 3, 80).mean(2),
        "must keep leading sizes and end in -1",
    ),
    "view_of_other_channels": (
        lambda m, y: y.view(y.size(0), 6, -1).mean(2),
        "must keep the size of dimension 1, got 6",
    ),
    "view_that_swaps": (
        lambda m, y: y.view(y.size(1), y.size(0), -1).mean(2),
        "must keep the size of dimension 0",
    ),
    "transposed": (lambda m, y: y.transpose(1, 2).mean((2, 3)), "got transpose"),
    "indexed": (lambda m, y: y[:, :, 1:].mean((2, 3)), "got getitem"),
    "concatenated": (lambda m, y: torch.cat([y, y * 2], 1).mean((2, 3)), "must have one user"),
    "output_argument": (
        lambda m, y: torch.mul(y, 2, out=m.other.new_empty(4, 3, 8, 10)).mean((2, 3)),
        "must have no argument out",
    ),
}
BUFFERS = {
    "mask": (8, 10),
    "row": (10,),
    "fifth": (2, 1, 1, 1, 1),
    "other": (4, 3, 8, 10),
    "zero": (3,),
    "one": (3,),
    "zeros": (240,),
    "ones": (240,),
}


def model_of(body, **parts):
    model = Chain(body, **parts).double()
    for name, shape in BUFFERS.items():
        model.register_buffer(name, torch.rand(shape, dtype=torch.float64) + 0.5)
    model.register_buffer("turn", torch.ones(3, 1, 1, dtype=torch.complex128) * 1j)
    model.register_buffer("single", torch.ones(1))
    return model


def reasons(report):
    return " | ".join(entry.detail for entry in report.left_alone)


def assert_left_alone(model, sentence, *inputs, gradients=True):
    other, report = fused(model)
    assert not report.fused, report
    assert sentence in reasons(report), report
    record = assert_same(model, other, *inputs, with_gradients=gradients)
    assert record.fused == 0
    assert record.convolutions > 0


@pytest.mark.parametrize("name", BODIES)
def test_fuse_refuses(name):
    body, sentence = BODIES[name]
    gradients = name not in ("into_another_tensor", "output_argument")
    if name == "output_argument":
        # It cannot run with gradients at all, so it is only explained.
        assert sentence in reasons(fused(model_of(body))[1])
        return
    assert_left_alone(model_of(body), sentence, input_of(), gradients=gradients)


@pytest.mark.parametrize("name", [n for n in BODIES if n != "output_argument"])
def test_the_captured_graph_refuses(name):
    model = model_of(BODIES[name][0])
    captured = Captured(model)
    record = assert_same(model, captured, input_of())
    assert record.fused == 0
    assert record.convolutions == 1
    (entry,) = captured.reports[0].entries
    assert not entry.fused
    assert entry.detail


def test_an_operand_that_shows_when_it_runs():
    """fuse sees no shape and refuses; the capture sees it, and fuses one and not the other."""

    def gate(x, y):
        return (y * x.mean((2, 3), keepdim=True)[:, :1]).mean((2, 3))

    def mask(x, y):
        return (y * F.interpolate(x, (8, 10))[:, :1]).mean((2, 3))

    for body, fuses in ((gate, 1), (mask, 0)):

        class Model(nn.Module):
            def __init__(self, body):
                super().__init__()
                self.chain = Chain(body)

            def forward(self, x):
                return self.chain.body(x, self.chain.conv(x))

        model = Model(body).double()
        assert_left_alone(model, "must have an operand of known shape, got 'getitem'", input_of())
        record = assert_same(model, Captured(model), input_of())
        assert record.fused == fuses


def test_unbatched_spelling_of_a_batch_of_unknown_rank():
    """y.mean((1, 2)) is over space only without a batch: the call decides."""
    model = Chain(lambda m, y: y.mean((1, 2))).double()
    other, report = fused(model)
    assert "for inputs of 3 dimensions" in report.entries[0].detail
    record = assert_same(model, other, input_of(batched=False))
    assert (record.fused, record.convolutions) == (1, 0)
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (0, 1)


def test_batched_spelling_without_a_batch_raises_as_before():
    model = Chain(lambda m, y: y.mean((2, 3))).double()
    other = fused(model)[0]
    for module in (model, other):
        with pytest.raises(IndexError):
            module(input_of(batched=False))


def test_batch_norm_of_an_unbatched_signal():
    """BatchNorm1d reads [C, L] as [N, C]: not the same at every position."""
    model = Chain(lambda m, y: m.bn(y).mean(-1), 1, bn=nn.BatchNorm1d(18)).double().eval()
    model.bn = nn.BatchNorm1d(18).double().eval()
    other, report = fused(model)
    assert "for inputs of 3 dimensions" in report.entries[0].detail
    record = assert_same(model, other, input_of(1, batched=False))
    assert (record.fused, record.convolutions) == (0, 1)


@pytest.mark.parametrize("kernel", [(8, 9), (4, 5), 8])
def test_a_window_that_is_not_the_output(kernel):
    model = Chain(lambda m, y: F.avg_pool2d(y * m.gain, kernel)).double()
    other, report = fused(model)
    assert "where its output has size" in report.entries[0].detail
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (0, 1)
    captured = Captured(model)
    record = assert_same(model, captured, input_of())
    assert record.fused == 0
    assert "must be known to be the whole output" in reasons(captured.reports[0])


def test_a_window_that_is_the_output_for_some_inputs():
    model = Chain(lambda m, y: F.avg_pool2d(y * m.gain, (8, 10))).double()
    other = fused(model)[0]
    for size, fuses in (((4, 5), 1), ((8, 5), 0), ((4, 9), 0), ((4, 5), 1)):
        x = torch.randn(2, 2, *size, dtype=torch.float64)
        assert assert_same(model, other, x).fused == fuses
    too_small = torch.randn(2, 2, 1, 5, dtype=torch.float64)
    for module in (model, other):
        with pytest.raises(RuntimeError, match="Output size is too small"):
            module(too_small)


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
        (branch, "symbolically traced variables cannot be used as inputs to control flow"),
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

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
    # In float32, the first is infinite and the second 0.
    "number_beyond_float32": (
        lambda m, y: (y * 1e300).mean((2, 3)),
        "'mul' must have a finite number, got 1e+300",
    ),
    "divisor_beyond_float32": (
        lambda m, y: (y / 1e-300).mean((2, 3)),
        "'truediv' must divide by a number other than 0, got 1e-300",
    ),
    "alpha_beyond_float32": (
        lambda m, y: torch.add(y, m.zero[:, None, None], alpha=1e300).mean((2, 3)),
        "'add' must have a finite number, got 1e+300",
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

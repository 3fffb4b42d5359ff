"""Everything that is recognised, spelling by spelling, by `fuse` and inside torch.compile.

Each row is a function of the module and the convolution's result. Both rewrites must replace the
convolution and give the model's own values and gradients.
"""

import pytest
import torch
from fusing import SIZES, Captured, Chain, assert_same, fused, input_of
from torch import nn
from torch.nn import functional as F


def means(axes):
    """The spellings of a mean over the last `axes` dimensions."""
    last = tuple(range(-axes, 0))
    pool = getattr(F, f"adaptive_avg_pool{axes}d")
    return {
        "method": lambda m, y: y.mean(last),
        "keepdim": lambda m, y: y.mean(last, keepdim=True),
        "keepdim_positional": lambda m, y: y.mean(last, True),
        "list": lambda m, y: y.mean(dim=list(last)),
        "axis": lambda m, y: torch.mean(y, axis=last),
        "function": lambda m, y: torch.mean(y, last),
        "input_by_name": lambda m, y: torch.mean(input=y, dim=last),
        "any_order": lambda m, y: y.mean(last[::-1]),
        "one_by_one": lambda m, y: y.mean(-1) if axes == 1 else one_by_one(y, axes),
        "one_by_one_keepdim": lambda m, y: one_by_one(y, axes, keepdim=True),
        "repeated": lambda m, y: y.mean(last, keepdim=True).mean(last, keepdim=True),
        "repeated_without_keepdim": lambda m, y: y.mean(last, True).mean(last),
        "everything": lambda m, y: y.mean(),
        "everything_but_batch": lambda m, y: y.mean((-axes - 1, *last)),
        "channels_first": lambda m, y: y.mean(-axes - 1).mean(last),
        "sum": lambda m, y: y.sum(last),
        "sum_keepdim": lambda m, y: torch.sum(y, last, keepdim=True),
        "sum_of_everything": lambda m, y: y.sum(),
        "sum_then_mean": lambda m, y: y.sum(-1, keepdim=True).mean(last),
        "adaptive_pool": lambda m, y: pool(y, 1),
        "adaptive_pool_tuple": lambda m, y: pool(y, (1,) * axes),
        "flatten": lambda m, y: y.flatten(-axes).mean(-1),
        "flatten_sum": lambda m, y: y.flatten(-axes, -1).sum(-1),
        "flatten_keepdim": lambda m, y: torch.flatten(y, -axes).mean(-1, keepdim=True),
        "same_dtype": lambda m, y: y.mean(last, dtype=torch.float64),
        "then_logsumexp": lambda m, y: y.mean(last, True).logsumexp(-axes - 1),
        "used_twice_after": lambda m, y: (lambda z: z.relu() * z)(y.mean(last)),
    }


def one_by_one(y, axes, keepdim=False):
    for axis in range(axes):
        y = y.mean(-1 - axis if keepdim else -1, keepdim=keepdim)
    return y


def window(axes):
    """The output size of Chain's convolution."""
    return tuple(2 * n for n in SIZES[axes])


# With positive dimensions, which say that there is a batch.
BATCHED = {
    "positive": lambda m, y: y.mean((2, 3)),
    "positive_list": lambda m, y: y.mean([3, 2], keepdim=True),
    "mixed_signs": lambda m, y: y.mean((2, -1)),
    "range": lambda m, y: y.mean(dim=list(range(2, 4))),
    "sum": lambda m, y: y.sum(dim=(2, 3)),
    "batch_as_well": lambda m, y: y.mean((0, 2, 3)),
    "flatten_2": lambda m, y: y.flatten(2).mean(2),
    "flatten_2_3": lambda m, y: torch.flatten(y, 2, 3).mean(-1),
    "flatten_1": lambda m, y: y.flatten(1).mean(1),
    "flatten_1_sum": lambda m, y: y.flatten(1).sum(-1),
    "view": lambda m, y: y.view(y.size(0), y.size(1), -1).mean(-1),
    "reshape_of_shape": lambda m, y: y.reshape(y.shape[0], y.shape[1], -1).mean(2),
    "view_of_known_channels": lambda m, y: y.view(y.size(0), 3, -1).mean(2),
    "layer": lambda m, y: nn.functional.adaptive_avg_pool2d(y, (1, 1)).flatten(1),
    "average_pool": lambda m, y: F.avg_pool2d(y, window(2)),
    "average_pool_stride": lambda m, y: F.avg_pool2d(y, window(2), stride=1, ceil_mode=True),
    "average_pool_of_own_size": lambda m, y: F.avg_pool2d(y, y.shape[2:]),
    "average_pool_of_last_two": lambda m, y: F.avg_pool2d(y, kernel_size=y.size()[-2:]),
    "average_pool_of_sizes": lambda m, y: F.avg_pool2d(y, (y.size(2), y.size(-1))),
    "sum_over_area": lambda m, y: y.sum((2, 3)) / (y.size(2) * y.size(3)),
    "sum_over_shape": lambda m, y: y.sum((2, 3)) / y.shape[-1] / y.shape[2],
}
PARTS = {
    "pool_layer": nn.AdaptiveAvgPool2d(1),
    "pool_layer_tuple": nn.AdaptiveAvgPool2d((1, 1)),
    "average_pool_layer": nn.AvgPool2d(window(2)),
    "pool_then_flatten": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "flatten_layer": nn.Sequential(nn.Flatten(2), nn.AdaptiveAvgPool1d(1)),
    "batch_norm": nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1)),
    "batch_norm_plain": nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.AdaptiveAvgPool2d(1)),
    "dropout": nn.Sequential(nn.Dropout(), nn.AdaptiveAvgPool2d(1)),
    "dropout2d": nn.Sequential(nn.Dropout2d(), nn.Identity(), nn.AdaptiveAvgPool2d(1)),
    "alpha_dropout": nn.Sequential(nn.AlphaDropout(), nn.AdaptiveAvgPool2d(1)),
    "head": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5), nn.ReLU()),
}
STEPS = {
    "mul_number": lambda m, y: y * 0.5,
    "number_mul": lambda m, y: 2 * y,
    "mul_method": lambda m, y: y.mul(-3),
    "multiply": lambda m, y: torch.multiply(y, 0.25),
    "mul_in_place": lambda m, y: y.mul_(0.5),
    "operator_in_place": lambda m, y: in_place(y),
    "two_numbers": lambda m, y: y * 0.5 * 3.0,
    "divide": lambda m, y: y / 4,
    "true_divide": lambda m, y: torch.true_divide(y, 3.0),
    "add": lambda m, y: y + 1,
    "add_alpha": lambda m, y: torch.add(y, m.scale, alpha=2),
    "number_minus": lambda m, y: 1 - y,
    "rsub": lambda m, y: torch.rsub(y, m.scale),
    "sub": lambda m, y: y.sub(m.shift),
    "neg": lambda m, y: -y,
    "positive": lambda m, y: +y,
    "parameter": lambda m, y: y * m.scale,
    "parameter_first": lambda m, y: m.scale * y,
    "learnable_number": lambda m, y: y * m.gain,
    "divide_by_parameter": lambda m, y: y / m.scale,
    "buffer": lambda m, y: y + m.shift,
    "view_of_parameter": lambda m, y: y * m.scale.view(1, -1, 1, 1),
    "function_of_parameter": lambda m, y: y * torch.exp(m.scale) + m.gain.square(),
    "clone": lambda m, y: y.clone(),
    "detach": lambda m, y: y.detach() * m.gain,
    "contiguous": lambda m, y: y.contiguous(),
    "channels_last": lambda m, y: y.contiguous(memory_format=torch.channels_last),
    "to_channels_last": lambda m, y: y.to(memory_format=torch.channels_last),
    "to_dtype": lambda m, y: y.to(torch.float64),
    "double": lambda m, y: y.double(),
    "to_device": lambda m, y: y.to("cpu"),
    "to_own_device": lambda m, y: y.to(y.device),
    "type_as": lambda m, y: y.type_as(m.scale),
    "dropout_off": lambda m, y: F.dropout(y, 0.5, m.training),
    "dropout2d_off": lambda m, y: F.dropout2d(y, training=False),
    "batch_norm": lambda m, y: F.batch_norm(y, m.bn.running_mean, m.bn.running_var, m.bn.weight),
    "many": lambda m, y: ((y * m.scale + m.shift) / 2 - m.gain).neg().contiguous(),
}


def in_place(y):
    y *= 0.5
    y += 1
    y -= 0.25
    y /= 2
    return y


def check(model, *inputs, fuse_it=True, capture=True):
    model = model.double()
    if fuse_it:
        other, report = fused(model)
        assert report.fused, report
        record = assert_same(model, other, *inputs)
        assert (record.fused, record.convolutions) == (1, 0), str(report)
    if capture:
        captured = Captured(model)
        record = assert_same(model, captured, *inputs)
        assert captured.reports[0].fused, captured.reports[0]
        assert (record.fused, record.convolutions) == (1, 0)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", means(2))
def test_reductions(name, axes):
    check(Chain(means(axes)[name], axes), input_of(axes), capture=axes == 2)


@pytest.mark.parametrize("name", means(2))
def test_reductions_of_unbatched_input(name):
    check(Chain(means(2)[name]), input_of(batched=False))


@pytest.mark.parametrize("name", BATCHED)
def test_reductions_in_a_batch(name):
    check(Chain(BATCHED[name]), input_of())


@pytest.mark.parametrize("name", PARTS)
def test_layers(name):
    check(Chain(lambda m, y: m.part(y), part=PARTS[name]).eval(), input_of())


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    step = STEPS[name]
    model = Chain(lambda m, y: step(m, y).mean((2, 3)), bn=nn.BatchNorm2d(3)).eval()
    check(model, input_of())


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_batch_norm_and_dropout_of_every_rank(axes):
    part = nn.Sequential(
        {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[axes](3),
        {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}[axes](),
        {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[axes](1),
    )
    check(Chain(lambda m, y: m.part(y), axes, part=part).eval(), input_of(axes))


class Functional(nn.Module):
    """F.conv_transposeNd with arguments as given, or another function."""

    def __init__(self, axes, call):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, *[3] * axes))
        self.bias = nn.Parameter(torch.randn(6))
        self.call = call

    def forward(self, x):
        return self.call(self, x).mean(-1)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: F.conv_transpose1d(x, m.weight),
        lambda m, x: torch.conv_transpose1d(x, m.weight, m.bias[:3]),
        lambda m, x: F.conv_transpose1d(x, m.weight, bias=None, stride=2, output_padding=1),
        lambda m, x: F.conv_transpose1d(x, m.weight, m.bias, (3,), (1,), [2], 2, 2),
        lambda m, x: F.conv_transpose1d(x, weight=m.weight * 2, bias=m.bias, groups=2),
        lambda m, x: F.conv_transpose1d(x, m.weight, padding=x.shape[-1] - 7),
    ],
)
def test_functions(call):
    check(Functional(1, call), input_of(1))


@pytest.mark.parametrize("axes", [2, 3])
def test_functions_of_more_axes(axes):
    function = getattr(F, f"conv_transpose{axes}d")

    def call(m, x):
        return function(x, m.weight, stride=2).flatten(2)

    check(Functional(axes, call), input_of(axes))


class OutputSize(nn.Module):
    """A call that names its output size, as a constant or as another tensor's."""

    def __init__(self, by_name, size=None):
        super().__init__()
        self.conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
        self.by_name, self.size = by_name, size

    def forward(self, x, skip):
        size = self.size or skip.shape[-2:]
        y = self.conv(x, output_size=size) if self.by_name else self.conv(x, size)
        return y.mean((2, 3)) + skip.mean((2, 3))


@pytest.mark.parametrize("size", [None, (8, 9)])
@pytest.mark.parametrize("by_name", [True, False])
def test_output_size(by_name, size):
    skip = torch.randn(4, 3, 8, 9, dtype=torch.float64)
    check(OutputSize(by_name, size), input_of(), skip)


def test_lazy_layer_once_initialised():
    model = Chain(lambda m, y: y.mean((2, 3)))
    model.conv = nn.LazyConvTranspose2d(3, 3)
    model(input_of(dtype=torch.float32))
    check(model, input_of())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    model = Chain(lambda m, y: (y * m.scale).mean((2, 3))).to(dtype)
    x = input_of(dtype=dtype)
    result = fused(model)[0](x)
    assert result.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), model.double()(x.double()), rtol=bound, atol=bound)


def test_a_model_with_several():
    """Two that fuse, one behind the other, and one between them that does not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ConvTranspose2d(2, 3, 3)
            self.middle = nn.ConvTranspose2d(3, 2, 2)
            self.last = nn.ConvTranspose2d(2, 4, 3, groups=2)

        def forward(self, x):
            gate = self.first(x).mean((2, 3), keepdim=True)
            y = self.middle(gate * gate).relu()
            return self.last(y).mean((2, 3))

    model = Model().double()
    other, report = fused(model)
    assert [entry.fused for entry in report.entries] == [True, False, True]
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (2, 1)

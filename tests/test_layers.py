"""ConvTransposeMean1d, 2d and 3d: the parent layer in everything but what forward returns.

Each claim is held against nn.ConvTransposeNd itself: parameters, state_dict, output_size, errors,
and the chain layer -> times the multiplier -> mean over space for the result.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from convt_reduce.nn import ConvTransposeMean1d, ConvTransposeMean2d, ConvTransposeMean3d

PAIRS = {
    1: (nn.ConvTranspose1d, ConvTransposeMean1d),
    2: (nn.ConvTranspose2d, ConvTransposeMean2d),
    3: (nn.ConvTranspose3d, ConvTransposeMean3d),
}
SIZES = (5, 4, 3)
each_axes = pytest.mark.parametrize("axes", [1, 2, 3])

CONSTRUCTORS = {
    "plain": ((4, 6, 3), {}),
    "positional": ((4, 6, 3, 2, 1, 1, 2, False, 2, "zeros"), {}),
    "named": ((), {"in_channels": 4, "out_channels": 6, "kernel_size": 2, "stride": 3}),
    "groups": ((4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    "no-bias": ((4, 6, 3), {"bias": False, "dilation": 2}),
    "double": ((4, 6, 3), {"dtype": torch.float64, "device": "cpu"}),
}
each_constructor = pytest.mark.parametrize(
    ("args", "kwargs"), CONSTRUCTORS.values(), ids=CONSTRUCTORS.keys()
)


def pair(axes, *args, multiplier=0.5, **kwargs):
    """The parent layer and ours, built from the same seed."""
    parent, own = PAIRS[axes]
    torch.manual_seed(11)
    layer = parent(*args, **kwargs)
    torch.manual_seed(11)
    return layer, own(*args, multiplier=multiplier, **kwargs)


def inputs(axes, dtype=torch.float32, device="cpu", batch=(2,), channels=4):
    x = torch.randn(*batch, channels, *SIZES[:axes], dtype=torch.float64)
    return (x + torch.arange(channels).view(channels, *[1] * axes)).to(device, dtype)


def chained(layer, x, output_size=None, multiplier=0.5):
    axes = len(layer.kernel_size)  # reading layer.weight would compute a parametrised one anew
    return (layer(x, output_size) * multiplier).mean(tuple(range(-axes, 0)), keepdim=True)


def assert_close(found, expected):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- construction and state ---------------------------------------------------------------------


@each_constructor
@each_axes
def test_same_parameters_state_and_result(axes, args, kwargs, device):
    parent, own = pair(axes, *args, **kwargs)
    assert isinstance(own, type(parent))
    assert list(own.state_dict()) == list(parent.state_dict())
    for (name, a), (_, b) in zip(own.named_parameters(), parent.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype
    assert [n for n, _ in own.named_parameters()] == list(own.state_dict())
    x = inputs(axes, own.weight.dtype, device)
    assert_close(own.to(device)(x), chained(parent.to(device), x))
    assert_close(own(x[0]), chained(parent, x[0]))


@each_axes
def test_same_number_of_draws(axes):
    pair(axes, 4, 6, 3)
    after = torch.rand(3)
    torch.manual_seed(11)
    PAIRS[axes][0](4, 6, 3)
    assert torch.equal(torch.rand(3), after)


@each_constructor
@each_axes
def test_state_dict_goes_both_ways(axes, args, kwargs):
    parent, own = pair(axes, *args, **kwargs)
    with torch.no_grad():
        for p in own.parameters():
            p.mul_(2).add_(1)
    assert str(parent.load_state_dict(own.state_dict())) == "<All keys matched successfully>"
    x = inputs(axes, own.weight.dtype)
    assert_close(own(x), chained(parent, x))
    fresh, other = pair(axes, *args, **kwargs)
    own.load_state_dict(fresh.state_dict())
    assert torch.equal(own(x), other(x))


@each_axes
def test_repr_names_the_multiplier(axes):
    parent, own = pair(axes, 4, 6, 3, stride=2, padding=1, multiplier=-0.25)
    inner = repr(parent).removeprefix(type(parent).__name__).removesuffix(")")
    assert repr(own) == f"{type(own).__name__}{inner}, multiplier=-0.25)"


@each_axes
def test_multiplier(axes):
    _, own = PAIRS[axes]
    assert own(4, 6, 3).multiplier == 1.0
    with pytest.raises(TypeError):  # positional arguments are the parent's alone
        own(4, 6, 3, 1, 0, 0, 1, True, 1, "zeros", None, None, 0.5)
    _, layer = pair(axes, 4, 6, 3)
    x = inputs(axes)
    before = layer(x)
    layer.multiplier = 2 * layer.multiplier
    assert torch.equal(layer(x), 2 * before)
    assert "multiplier" not in layer.state_dict()


@each_axes
def test_documented(axes):
    parent, own = PAIRS[axes]
    assert parent.__name__ in own.__doc__
    assert "multiplier" in own.__doc__
    assert "output_size" in inspect.signature(own.forward).parameters


def outcome(function):
    """What a call gives, so that two can be compared: nothing, or the error."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


@each_axes
@pytest.mark.parametrize(
    "kwargs",
    [
        {"padding_mode": "reflect"},
        {"padding_mode": "circular"},
        {"padding": "same"},
        {"groups": 3},
        {"groups": 0},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_constructors_refuse_what_the_parents_refuse(axes, kwargs):
    parent, own = PAIRS[axes]
    theirs = outcome(lambda: parent(4, 6, 3, **kwargs))
    ours = outcome(lambda: own(4, 6, 3, **kwargs))
    if theirs is None:  # padding="same" becomes four letters; it fails in forward, in both
        assert ours is None
        x = inputs(axes)
        assert outcome(lambda: parent(4, 6, 3, **kwargs)(x)) is not None
        assert outcome(lambda: own(4, 6, 3, **kwargs)(x)) is not None
    else:
        assert ours[0] is theirs[0]
        assert ours[1].replace(own.__name__, parent.__name__) == theirs[1]


# ---- output_size --------------------------------------------------------------------------------

OUTPUT_SIZES = {
    1: [(10,), (9,), (11,), (8,), (2, 6, 10), (6, 10), (), 10, [9]],
    2: [(10, 8), (9, 7), (9, 8), (11, 8), (10, 6), (6, 10, 8), (2, 6, 10, 8), (10,), (12, 14)],
    3: [(10, 8, 6), (9, 7, 5), (9, 8, 5), (8, 8, 6), (6, 10, 8, 6), (2, 6, 10, 8, 6), (10, 8)],
}


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("batch", [(2,), ()], ids=["batched", "unbatched"])
@pytest.mark.parametrize(
    ("axes", "size"), [(a, s) for a, sizes in OUTPUT_SIZES.items() for s in sizes], ids=str
)
def test_output_size(axes, size, batch, dilation):
    """Accepted, rejected and understood exactly as by the parent, whose output really has it."""
    parent, own = pair(axes, 4, 6, 3, 2, 1, dilation=dilation)
    if isinstance(size, (list, tuple)):
        size = type(size)(
            n + 2 * (dilation - 1) * (i >= len(size) - axes) for i, n in enumerate(size)
        )
    x = inputs(axes, batch=batch)
    theirs, ours = outcome(lambda: parent(x, size)), outcome(lambda: own(x, size))
    if theirs is not None:
        assert ours == theirs
        return
    assert ours is None
    spatial = list(size[-axes:]) if axes > 1 or not isinstance(size, int) else [size]
    assert list(parent(x, size).shape[-axes:]) == spatial
    assert_close(own(x, size), chained(parent, x, size))
    assert_close(own(x, output_size=size), chained(parent, x, size))


def test_output_size_with_dilation():
    """5x6 with a dilation of 2 reaches 12x14, but not 11x13 and one more at once."""
    parent, own = pair(2, 4, 6, 3, 2, 1, dilation=2)
    x = torch.randn(2, 4, 5, 6)
    for size in ((12, 14), (11, 13), (12, 13)):
        assert_close(own(x, size), chained(parent, x, size))
    with pytest.raises(ValueError, match="requested an output size of"):
        own(x, (13, 14))


def test_output_size_replaces_the_layers_output_padding():
    parent, own = pair(2, 4, 6, 3, 2, 1, 1)
    x = inputs(2)
    assert_close(own(x, (9, 7)), chained(parent, x, (9, 7)))
    assert not torch.allclose(own(x, (9, 7)), own(x))


@each_axes
def test_wrong_inputs_are_refused(axes):
    _, own = pair(axes, 4, 6, 3)
    with pytest.raises(RuntimeError, match="weight must have input's 3 channels"):
        own(inputs(axes, channels=3))
    with pytest.raises(RuntimeError, match="input must have"):
        own(torch.zeros(4))
    with pytest.raises(RuntimeError, match="weight must have input's dtype float64"):
        own(inputs(axes, torch.float64))


# ---- from_conv ----------------------------------------------------------------------------------


@each_constructor
@each_axes
def test_from_conv_shares_the_parameters(axes, args, kwargs, device):
    parent, _ = pair(axes, *args, **kwargs)
    parent = parent.to(device).eval()
    own = PAIRS[axes][1].from_conv(parent, 0.5)
    assert type(own) is PAIRS[axes][1]
    assert own.weight is parent.weight
    assert own.bias is parent.bias
    assert own.multiplier == 0.5
    assert own.training is False
    assert list(own.state_dict()) == list(parent.state_dict())
    assert repr(own).startswith(f"{type(own).__name__}({parent.extra_repr()}, ")
    x = inputs(axes, own.weight.dtype, device)
    assert_close(own(x), chained(parent, x))
    with torch.no_grad():
        parent.weight.zero_()
    assert_close(own(x), chained(parent, x))
    assert PAIRS[axes][1].from_conv(parent).multiplier == 1.0


def test_from_conv_leaves_the_layer_as_it_was():
    parent, _ = pair(2, 4, 6, 3)
    before = dict(vars(parent)), repr(parent)
    own = ConvTransposeMean2d.from_conv(parent, 0.5)
    own.train(False)
    own.stride = (3, 3)
    own.extra = nn.Identity()
    own.register_buffer("more", torch.zeros(1))
    own.weight.requires_grad_(False)
    own.register_forward_hook(lambda *_: None)
    own.bias = nn.Parameter(torch.zeros(6))
    assert (dict(vars(parent)), repr(parent)) == before
    assert parent.training
    assert not parent._forward_hooks
    assert not parent._buffers
    assert not parent._modules
    assert parent.bias is not own.bias
    assert parent(torch.zeros(1, 4, 2, 2)).shape == (1, 6, 4, 4)


class Subclass(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


REFUSED = {
    "subclass": lambda: Subclass(4, 6, 3),
    "of our own": lambda: ConvTransposeMean2d(4, 6, 3),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "other axes": lambda: nn.ConvTranspose1d(4, 6, 3),
    "lazy": lambda: nn.LazyConvTranspose2d(6, 3),
    "parametrised": lambda: parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3)),
    "no layer": lambda: torch.zeros(4, 6, 3, 3),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_from_conv_refuses_other_types(make):
    with pytest.raises(TypeError, match=r"layer must be exactly an nn\.ConvTranspose2d, got \w+$"):
        ConvTransposeMean2d.from_conv(make())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "attach",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m.register_state_dict_pre_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
        weight_norm,
    ],
    ids=["forward", "forward-pre", "backward", "backward-pre", "state-dict", "load", "weight-norm"],
)
def test_from_conv_refuses_hooks(attach):
    layer = nn.ConvTranspose2d(4, 6, 3)
    attach(layer)
    sentence = "layer must have no hooks, buffers, submodules or forward of its own, got _.*hooks"
    with pytest.raises(ValueError, match=sentence):
        ConvTransposeMean2d.from_conv(layer)


def test_from_conv_refuses_what_it_would_lose():
    with_buffer, with_module, with_forward = (nn.ConvTranspose2d(2, 3, 3) for _ in range(3))
    with_buffer.register_buffer("count", torch.ones(1))
    with_module.extra = nn.Identity()
    with_forward.forward = lambda x: x
    for layer, what in (
        (with_buffer, "_buffers"),
        (with_module, "_modules"),
        (with_forward, "forward"),
    ):
        with pytest.raises(ValueError, match=f"got {what}"):
            ConvTransposeMean2d.from_conv(layer)

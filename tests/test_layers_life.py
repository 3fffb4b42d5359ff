"""What happens to a ConvTransposeMean layer after it was made: copied, saved, moved, hooked,
parametrised, trained."""

import copy
import io
import pickle

import pytest
import torch
from test_layers import PAIRS, assert_close, chained, each_axes, inputs, pair
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from convt_reduce.nn import ConvTransposeMean2d


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS.keys())
@pytest.mark.parametrize("shared", [False, True], ids=["constructed", "from_conv"])
@each_axes
def test_copies_are_their_own(axes, shared, copier, device):
    parent, own = pair(axes, 4, 6, 3, 2, 1, 1, groups=2)
    if shared:
        own = PAIRS[axes][1].from_conv(parent, 0.5)
    own = own.to(device).eval()
    other = copier(own)
    assert type(other) is type(own)
    assert repr(other) == repr(own)
    assert not other.training
    x = inputs(axes, device=device)
    assert torch.equal(other(x), own(x))
    with torch.no_grad():
        other.weight.zero_()
        other.bias.fill_(3)
    assert torch.equal(other(x), torch.full_like(other(x), 1.5))
    assert not torch.equal(own(x), other(x))
    own.load_state_dict(other.state_dict())
    assert torch.equal(own(x), other(x))


def test_weights_only_load_of_the_state():
    _, own = pair(2, 4, 6, 3)
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file, weights_only=True)) == ["weight", "bias"]


@each_axes
def test_training_flag_changes_nothing_else(axes):
    _, own = pair(axes, 4, 6, 3)
    x = inputs(axes)
    y = own.train()(x)
    assert own.training
    assert torch.equal(own.eval()(x), y)
    assert not own.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@each_axes
def test_conversions(axes, dtype, device):
    _, own = pair(axes, 4, 6, 3, device=device)
    x = inputs(axes, dtype, device)
    y = own.to(dtype)(x)
    assert y.dtype == dtype
    assert y.device == x.device
    built = PAIRS[axes][1](4, 6, 3, multiplier=0.5, device=device, dtype=dtype)
    assert built.weight.dtype == built.bias.dtype == dtype
    built.load_state_dict(own.state_dict())
    assert torch.equal(built(x), y)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_parameters(memory_format, device):
    """Gradients have the parameters' layout, as DistributedDataParallel wants them."""
    for kernel in (1, 3):
        parent, own = pair(2, 4, 6, kernel, device=device)
        own.to(memory_format=memory_format)
        x = inputs(2, device=device)
        own(x).square().sum().backward()
        chained(parent, x).square().sum().backward()
        assert own.weight.grad.stride() == own.weight.stride()
        assert_close(own.weight.grad, parent.weight.grad)


@each_axes
def test_meta_device_then_to_empty(axes, device):
    own = PAIRS[axes][1](4, 6, 3, multiplier=0.5, device="meta")
    x = inputs(axes)
    y = own(x.to("meta"))
    assert y.is_meta
    own = own.to_empty(device=device)
    _, other = pair(axes, 4, 6, 3)
    own.load_state_dict(other.state_dict())
    found = own(x.to(device))
    assert found.shape == y.shape
    assert_close(found.cpu(), other(x))
    own.reset_parameters()
    assert not torch.equal(own.weight.cpu(), other.weight)


def test_constructed_under_a_device_context():
    with torch.device("meta"):
        own = ConvTransposeMean2d(4, 6, 3)
    assert own.weight.is_meta


def test_loading_with_assign():
    _, own = pair(2, 4, 6, 3)
    with torch.device("meta"):
        empty = ConvTransposeMean2d(4, 6, 3, multiplier=0.5)
    empty.load_state_dict(own.state_dict(), assign=True)
    x = inputs(2)
    assert torch.equal(empty(x), own(x))


def test_hooks_run():
    _, own = pair(2, 4, 6, 3)
    seen = []
    own.register_forward_pre_hook(lambda module, args: seen.append("before"))
    own.register_forward_hook(lambda module, args, y: seen.append(tuple(y.shape)))
    own.register_full_backward_hook(lambda module, gx, gy: seen.append(tuple(gx[0].shape)))
    own(inputs(2).requires_grad_()).sum().backward()
    assert seen == ["before", (2, 6, 1, 1), (2, 4, 5, 4)]


# ---- computed weights ---------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2

    def right_inverse(self, weight):
        return weight * 2


def halved(layer):
    parametrize.register_parametrization(layer, "weight", Halved())
    return layer


COMPUTED = {
    "parametrize": halved,
    "weight_norm": weight_norm,
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("wrap", COMPUTED.values(), ids=COMPUTED.keys())
@each_axes
def test_computed_weights(axes, wrap, device):
    """The weight of each call is the one computed for it, so a step of training shows."""
    parent, own = pair(axes, 4, 6, 3, 2, 1, 1, dtype=torch.float64)
    x = inputs(axes, torch.float64, device)
    outputs = []
    for layer, forward in ((parent, lambda m: chained(m, x)), (own, lambda m: m(x))):
        torch.manual_seed(5)
        layer = wrap(layer.to(device))
        before = forward(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        forward(layer).square().sum().backward()
        assert all(p.grad.count_nonzero() for p in layer.parameters())
        optimizer.step()
        after = forward(layer)
        assert not torch.allclose(before, after)
        outputs.append((before, after, list(layer.state_dict())))
    assert_close(outputs[1][0], outputs[0][0])
    assert_close(outputs[1][1], outputs[0][1])
    assert outputs[1][2] == outputs[0][2]


def test_removing_a_parametrisation():
    _, own = pair(2, 4, 6, 3)
    x = inputs(2)
    y = halved(own)(x)
    parametrize.remove_parametrizations(own, "weight")
    assert_close(own(x), y)
    assert type(own) is ConvTransposeMean2d


@each_axes
def test_there_is_no_lazy_form(axes):
    """in_channels is needed; a lazy parent layer is refused by from_conv, too."""
    with pytest.raises(TypeError):
        PAIRS[axes][1](out_channels=6, kernel_size=3)


@each_axes
def test_trains_like_the_chain(axes, device):
    """Ten steps of Adam, in a model, in float64."""
    results = []
    for own in (False, True):
        torch.manual_seed(1)
        layer = PAIRS[axes][own](4, 6, 3, 2, 1, 1, groups=2, dtype=torch.float64, device=device)
        if own:
            layer.multiplier = 0.5
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        torch.manual_seed(2)
        x = inputs(axes, torch.float64, device)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            y = layer(x) if own else chained(layer, x)
            loss = (y - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-9)

"""What a fused model is besides quick: a copy with the model's parameters that behaves like it.

Training, moving, copying, pickling, modes, attributes and layers that change later, and the model
itself, which must stay as it was.
"""

import copy
import io
import pickle

import pytest
import torch
from fusing import Chain, Head, assert_same, fused, head, input_of, is_fused, run
from torch import nn
from torch.nn import functional as F


def test_a_fused_model_is_of_its_class_and_has_its_keys():
    model = head()
    other = fused(model)[0]
    assert isinstance(other, Head)
    assert type(other).__name__ == "FusedHead"
    assert other is not model
    assert other.describe() == "mine False"
    assert list(other.state_dict()) == list(model.state_dict())
    assert [name for name, _ in other.named_modules()] == [n for n, _ in model.named_modules()]
    for (name, a), (other_name, b) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == other_name
        assert a is b
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert a is b
    assert_same(model, other, input_of())


def test_the_original_is_untouched():
    model = head(train=True)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    versions = [t._version for t in model.state_dict().values()]
    other = fused(model)[0].eval()
    other.note = "other"
    assert type(model) is Head
    assert model.training
    for name, part in model.named_modules():
        now = vars(part)
        assert list(now) == list(before[name])
        assert all(now[key] is before[name][key] for key in now)
    assert [t._version for t in model.state_dict().values()] == versions


def test_nothing_to_fuse_changes_no_class():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    other, report = fused(model)
    assert type(other) is nn.Sequential
    assert str(report) == "no transposed convolution was found"


def test_only_the_module_that_holds_the_site_changes():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(head(), nn.ReLU())).double().eval()
    other = fused(model)[0]
    changed = [n for n, part in other.named_modules() if type(part).__name__.startswith("Fused")]
    assert changed == ["1.0"]
    assert is_fused(other, input_of())
    assert_same(model, other, input_of())


def test_a_site_across_modules():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.ConvTranspose2d(2, 3, 3))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).double()
    other, report = fused(model)
    assert [entry.where for entry in report.fused] == ["0.1.0"]
    assert is_fused(other, input_of())
    assert other[0][1][0].weight is model[0][1][0].weight
    assert_same(model, other, input_of())


@pytest.mark.parametrize("start", [True, False])
def test_modes_that_change_later(start):
    """Fused in one mode and used in both: dropout and batch statistics are never skipped."""
    model = head(start)
    reference = copy.deepcopy(model)
    other, report = fused(model)
    assert bool(report.fused) is not start
    if start:
        assert "fused once in eval mode" in report.entries[0].detail
    else:
        assert "while 'up.1' and 'drop' are in eval mode" in report.entries[0].detail
    for mode in (False, True, False, True):
        other.train(mode)
        reference.train(mode)
        record = assert_same(reference, other, input_of())
        assert record.fused == (not mode)
    assert torch.equal(reference.up[1].running_mean, model.up[1].running_mean)


@pytest.mark.parametrize("part", ["drop", "up.1"])
def test_one_layer_that_is_put_into_train_mode(part):
    model = head()
    other = fused(model)[0]
    other.get_submodule(part).train()
    reference = copy.deepcopy(model)
    reference.get_submodule(part).train()
    record = assert_same(reference, other, input_of())
    assert record.fused == 0


def test_a_mode_that_the_forward_reads():
    """F.dropout(y, training=self.training) is frozen by a trace: each mode has its own."""
    model = Chain(lambda m, y: F.dropout(y.mean((2, 3)), 0.5, m.training)).double()
    other = fused(model)[0]
    for mode in (True, False, True):
        record = assert_same(model.train(mode), other.train(mode), input_of())
        assert record.fused == 1
    torch.manual_seed(0)
    assert (other.train()(input_of()) == 0).any()


def test_optional_arguments_run_the_original_forward():
    model = head()
    other = fused(model)[0]
    x = input_of()
    result, record = run(other, x, True)
    assert record.fused == 0
    assert torch.equal(result, model(x, True))
    torch.testing.assert_close(other(x=x), model(x))
    assert run(lambda x: other(x=x), x)[1].fused == 1
    with pytest.raises(TypeError):
        other()


def test_training_moves_both():
    model = head()
    other = fused(model)[0]
    optimiser = torch.optim.SGD(other.parameters(), 0.1)
    before = other(input_of()).detach()
    for _ in range(3):
        loss = other(input_of()).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert model.scale.grad is not None
    assert model.unused.grad is None
    assert not torch.allclose(other(input_of()), before)
    assert_same(model, other, input_of())


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: saved(m),
    "deepcopy_of_pickle": lambda m: copy.deepcopy(pickle.loads(pickle.dumps(m))),
    "fused_again": lambda m: fused(m)[0],
    "copied_then_fused": lambda m: fused(copy.deepcopy(m))[0],
}


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_copies(name):
    """They are fused, and use their own weights."""
    model = nn.Sequential(head(), nn.ReLU()).eval()
    other = fused(model)[0]
    again = COPIES[name](other)
    assert list(again.state_dict()) == list(model.state_dict())
    assert is_fused(again, input_of())
    assert_same(model, again, input_of())
    if name == "fused_again":
        return
    with torch.no_grad():
        again[0].up[0].weight.mul_(2)
    assert not torch.allclose(again[0](input_of()), other[0](input_of()))
    model.load_state_dict(again.state_dict(), strict=True)
    assert_same(model, again, input_of())
    again.train()
    assert run(again, input_of())[1].fused == 0


def test_to_and_half():
    other = fused(head())[0]
    copied = copy.deepcopy(other).to(torch.float32)
    result, record = run(copied, input_of(dtype=torch.float32))
    assert result.dtype == torch.float32
    assert record.fused == 1
    meta = copy.deepcopy(other).to("meta")
    assert meta(torch.empty(4, 2, 4, 5, device="meta", dtype=torch.float64)).shape == (4, 4)


@pytest.mark.gpu
def test_a_copy_on_the_gpu():
    model = head()
    other = fused(model)[0]
    copied = copy.deepcopy(other).cuda()
    x = input_of()
    result, record = run(copied, x.cuda())
    assert record.fused == 1
    torch.testing.assert_close(result.cpu(), model(x))


def test_old_state_dicts_load():
    model, other = head(), fused(head())[0]
    other.load_state_dict(model.state_dict(), strict=True)
    assert_same(model, other, input_of())


def test_data_parallel_replicas_use_their_own_weights():
    other = fused(head())[0]
    replica = other._replicate_for_data_parallel()
    replica._modules = {k: copy.deepcopy(v) for k, v in other._modules.items()}
    for name, parameter in other._parameters.items():
        setattr(replica, name, parameter.detach().clone())
    replica._buffers = dict(other._buffers)
    with torch.no_grad():
        replica.up[0].weight.zero_()
    assert not torch.allclose(replica(input_of()), other(input_of()))


def test_changes_after_fusing_are_seen():
    """A hook, another layer in its place, other settings: read, or run as the original would."""
    x = input_of()
    other = fused(head())[0]
    calls = []
    handle = other.up[0].register_forward_hook(lambda *arguments: calls.append(1))
    assert is_fused(other, x) == 0
    assert calls == [1]
    handle.remove()
    assert is_fused(other, x) == 1
    other.up[0] = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh()).double()
    assert is_fused(other, x) == 0

    model = head()
    other = fused(model)[0]
    other.up[0].stride = (3, 1)
    reference = copy.deepcopy(model)
    reference.up[0].stride = (3, 1)
    assert assert_same(reference, other, x).fused == 1


def test_global_hooks_are_not_bypassed():
    other = fused(head())[0]
    names = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *arguments: names.append(type(module).__name__)
    )
    try:
        other(input_of())
    finally:
        handle.remove()
    assert "ConvTranspose2d" in names


def test_hooks_on_the_model_and_around_still_run():
    model = nn.Sequential(head(), nn.ReLU()).eval()
    calls = []
    model[0].register_forward_hook(lambda *arguments: calls.append("head"))
    model.register_forward_pre_hook(lambda *arguments: calls.append("model"))
    other = fused(model)[0]
    assert is_fused(other, input_of()) == 1
    assert calls == ["model", "head"]


def test_hooks_on_a_container_inside_a_site():
    """The container is called as it is, so the site ends there."""
    model = head()
    model.up.register_forward_hook(lambda module, args, y: y * 2)
    other, report = fused(model)
    assert not report.fused
    assert_same(model, other, input_of())

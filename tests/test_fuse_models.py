"""What a fused model is besides quick: a copy with the model's parameters that behaves like it.

Training, moving, copying, pickling, modes that change later, layers that compute their weight,
parts that are called twice, and the model itself, which must stay as it was.
"""

import copy
import io
import pickle

import pytest
import torch
from fusing import Chain, assert_same, fused, input_of, run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import convt_reduce
from convt_reduce.rewrite import explain, fuse


class Head(nn.Module):
    """At the top of the file, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(2, 2, 3, padding=1)
        self.unused = nn.Parameter(torch.randn(3))
        self.up = nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.BatchNorm2d(3))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))
        self.register_buffer("offset", torch.randn(3, 1, 1))
        self.last = nn.Linear(3, 4)
        self.note = "mine"

    def forward(self, x, twice: bool = False):
        y = self.drop(self.up(self.before(x).relu()) * self.scale + self.offset)
        y = self.last(y.mean((2, 3)))
        return y * 2 if twice else y

    def describe(self):
        return f"{self.note} {self.training}"


def head(train=False):
    model = Head().double().train(train)
    model.up[1].running_mean.normal_()
    return model


def is_fused(model, x):
    return run(model, x)[1].fused


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


# ---- called twice, used elsewhere ----------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.conv = nn.ConvTranspose2d(2, 3, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.body = body

    def forward(self, x, y):
        return self.body(self, x, y)


@pytest.mark.parametrize(
    ("body", "fuses", "convolutions"),
    [
        (lambda m, x, y: (m.conv(x) * 2).mean((2, 3)) + m.conv(y).amax(), 1, 1),
        (lambda m, x, y: (lambda z: ((z * 2).mean((2, 3)), z.amax()))(m.conv(x)), 0, 1),
        (lambda m, x, y: (lambda z: (z.mean((2, 3)), z.sum((2, 3)) + y[0, 0, 0]))(m.conv(x)), 0, 1),
        (lambda m, x, y: (lambda z: (z.mean((2, 3)), z.exp()))(m.conv(x) * 2), 0, 1),
        (lambda m, x, y: m.pool(m.conv(x)) + m.pool(m.conv(y) * 3), 2, 0),
        (lambda m, x, y: m.pool(m.conv(x)) + m.pool(y).sum(), 1, 0),
        (lambda m, x, y: m.pool(m.conv(m.pool(m.conv(x))[:, :2])), 2, 0),
    ],
)
def test_called_twice_or_used_elsewhere(body, fuses, convolutions):
    model = Twice(body).double()
    other, report = fused(model)
    assert len(report.fused) == fuses
    y = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    record = assert_same(model, other, input_of(), y[..., :1] if fuses == 0 else y)
    assert (record.fused, record.convolutions) == (fuses, convolutions)


def test_a_site_across_two_calls_of_one_module():
    """The convolution of the first call and the mean of the second belong to no one call."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 2, 3)

        def forward(self, x):
            return self.conv(x.mean((2, 3), keepdim=True))

    model = nn.Sequential(block := Block(), block).double()
    other, report = fused(model)
    assert [entry.fused for entry in report.entries] == [True, False]
    assert report.entries[1].where == "0.conv (call 2)"
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (1, 1)


# ---- layers that compute their weight ------------------------------------------------------------


@pytest.mark.parametrize(
    "parametrise", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
@pytest.mark.parametrize("train", [True, False])
def test_parametrised_layers(parametrise, train):
    """The weight is computed by the live layer, once per call, and can be trained."""
    model = Chain(lambda m, y: (y * m.scale).mean((2, 3))).double()
    parametrise(model.conv)
    model.train(train)
    reference = copy.deepcopy(model)
    other, report = fused(model)
    assert len(report.fused) == 1
    assert list(other.state_dict()) == list(reference.state_dict())
    for _ in range(3):
        record = assert_same(reference, other, input_of())
        assert (record.fused, record.convolutions) == (1, 0)
    for a, b in zip(reference.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    x = input_of()
    before = other(x).detach()
    optimiser = torch.optim.SGD(other.parameters(), 0.1)
    other(x).sum().backward()
    optimiser.step()
    assert not torch.allclose(other(x), before)


@pytest.mark.filterwarnings("ignore")
def test_old_weight_norm():
    """It works by a hook and cannot even be deep-copied: left alone, and no error."""
    model = Chain(lambda m, y: y.mean((2, 3))).double()
    nn.utils.weight_norm(model.conv)
    model(input_of())
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    other, report = fused(model)
    assert "'conv' must have no hooks, got forward_pre_hooks" in report.entries[0].detail
    assert list(other.state_dict()) == list(model.state_dict())
    x = input_of()
    assert torch.equal(other(x), model(x))
    other.conv.weight_v.data.mul_(3)
    other.conv.weight_g.data.mul_(2)
    assert torch.equal(other(x), model(x))


def test_a_weight_that_is_tied():
    model = Twice(lambda m, x, y: m.conv(x).mean((2, 3)) + m.tied(y).mean((2, 3))).double()
    model.tied = nn.ConvTranspose2d(2, 3, 3).double()
    model.tied.weight = model.conv.weight
    other = fused(model)[0]
    assert other.tied.weight is other.conv.weight
    assert assert_same(model, other, input_of(), input_of()).fused == 2


# ---- multipliers that are no Python number -------------------------------------------------------


@pytest.mark.parametrize(
    ("multiplier", "dtype"),
    [
        (nn.Parameter(torch.tensor(2.0)), torch.float32),
        (nn.Parameter(torch.ones(3, 1, 1) * 3), torch.float32),
        (torch.tensor(2.0, dtype=torch.float64), torch.float32),
        (torch.tensor([2.0], dtype=torch.float64), torch.float64),
        (torch.tensor([[3]]), torch.float32),
        (2, torch.float32),
        (0.1, torch.float32),
        (True, torch.float32),
    ],
)
@pytest.mark.parametrize("how", [lambda y, m: y * m, lambda y, m: m * y, lambda y, m: y / m])
def test_multipliers(multiplier, dtype, how):
    model = Chain(lambda m, y: how(y, m.multiplier).mean((2, 3)))
    model.multiplier = multiplier
    x = input_of(dtype=torch.float32)
    other = fused(model)[0]
    (want, _), (have, record) = run(model, x), run(other, x)
    assert record.fused == 1
    assert have.dtype == want.dtype == dtype
    torch.testing.assert_close(have, want, equal_nan=True)
    if isinstance(multiplier, nn.Parameter):
        assert_same(model, other, x, tolerance=1e-5)


# ---- the door ------------------------------------------------------------------------------------


def test_explain_and_the_table():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 3, 3)
            self.decoder = nn.ConvTranspose2d(3, 2, 3)

        def forward(self, x):
            return (self.up(x) * 2).mean((2, 3), keepdim=True), self.decoder(self.up(x)).relu()

    report = convt_reduce.explain(Model())
    assert str(report).splitlines() == [
        "up           fused       mul -> mean, for inputs of 4 dimensions",
        "up (call 2)  left alone  'decoder' must be an affine step that is the same at every "
        "position, got ConvTranspose2d",
        "decoder      left alone  'relu' must be an affine step that is the same at every "
        "position, got relu",
    ]
    assert [entry.where for entry in report.fused] == ["up"]
    assert [entry.where for entry in report.left_alone] == ["up (call 2)", "decoder"]
    assert not report.notes


def test_what_fuse_returns():
    model = head()
    assert isinstance(convt_reduce.fuse(model), Head)
    other, report = convt_reduce.fuse(model, return_report=True)
    assert isinstance(other, Head)
    assert len(report.entries) == 1


def test_wrong_calls():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        fuse(lambda x: x)
    with pytest.raises(TypeError, match="model must not be compiled yet"):
        explain(torch.compile(head()))
    with pytest.raises(ValueError, match="example_inputs must be given where check=True, got None"):
        fuse(head(), check=True)


@pytest.mark.parametrize("train", [True, False])
def test_the_check_passes(train):
    model = head(train).float()
    versions = [t._version for t in model.state_dict().values()]
    other = fuse(model, example_inputs=input_of(dtype=torch.float32), check=True, cost_rule=False)
    assert [t._version for t in model.state_dict().values()] == versions
    assert is_fused(other.eval(), input_of(dtype=torch.float32))
    fuse(model, example_inputs=(input_of(dtype=torch.float32), True), check=True)


def test_the_check_fails(monkeypatch):
    """An operator that is wrong by one part in a million is noticed."""
    from convt_reduce import _site

    right = _site.layer_mean
    monkeypatch.setattr(_site, "layer_mean", lambda *a, **k: right(*a, **k) * (1 + 1e-6))
    with pytest.raises(RuntimeError, match="check: result 0 must agree with the model's"):
        fuse(head(), example_inputs=(input_of(),), check=True)
    fuse(head(), example_inputs=(input_of(),))


def test_the_cost_rule():
    """One input position does not pay on the CPU; a whole image does."""
    model = Chain(lambda m, y: y.mean((2, 3)))
    other = fuse(model)
    few, many = torch.randn(1, 2, 1, 1), torch.randn(4, 2, 64, 64)
    assert is_fused(other, few) == 0
    assert is_fused(other, many) == 1
    assert is_fused(fuse(model, cost_rule=False), few) == 1
    assert is_fused(copy.deepcopy(other), few) == 0
    torch.testing.assert_close(other(few), model(few))


def test_symbolic_tracing_of_a_fused_model():
    """fx sees the original computation."""
    model = Chain(lambda m, y: (y * m.scale).sum((2, 3))).double()
    traced = torch.fx.symbolic_trace(fused(model)[0])
    assert assert_same(model, traced, input_of(), with_gradients=False).convolutions == 1


def test_autocast():
    model = Chain(lambda m, y: (y * 2).mean((2, 3)))
    other = fused(model)[0]
    x = input_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want, (have, record) = model(x), run(other, x)
    assert record.fused == 1
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=0.05, atol=0.05)


def test_vmap_and_grad():
    model = Chain(lambda m, y: (y * m.scale).mean((2, 3))).double()
    other = fused(model)[0]
    x = torch.randn(3, 4, 2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(other)(x), torch.vmap(model)(x))
    want, have = (torch.func.grad(lambda x, m=m: m(x).sum())(x[0]) for m in (model, other))
    torch.testing.assert_close(have, want)

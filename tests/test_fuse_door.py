"""fuse and explain as functions: reports, errors, the check, the cost rule, and transforms."""

import copy

import pytest
import torch
from fusing import (
    Chain,
    Head,
    Up,
    assert_same,
    fused,
    head,
    input_of,
    is_fused,
    pooled,
    run,
    sample,
)
from torch import nn

import convt_reduce
from convt_reduce.rewrite import explain, fuse


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


def test_a_check_that_cannot_run():
    model = Up(lambda m, x: pooled(m, x.float()))
    with pytest.raises(RuntimeError, match="the model must run in float64 to be checked, got"):
        fuse(model, example_inputs=sample(), check=True)

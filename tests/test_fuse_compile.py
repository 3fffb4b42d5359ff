"""torch.compile(backend="convt_reduce"), inductor's hook, export, and fused models under compilers.

The rewrite of captured graphs is tested spelling by spelling elsewhere, without a compiler; here is
what only a compiler shows: the backend's name, its options, sizes that change, training through it.
"""

import logging
import subprocess
import sys

import pytest
import torch
from fusing import Chain, Record, assert_same, fused, input_of
from torch import nn

from convt_reduce import compiler


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def reports(caplog):
    """The reports that were logged. No caches: what comes out of them passes no hook."""
    caplog.set_level(logging.INFO, logger="convt_reduce.compiler")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield lambda: [r.args[0] for r in caplog.records if r.name == "convt_reduce.compiler"]


def model_of(**parts):
    return Chain(
        lambda m, y: ((m.norm(y) * m.scale + m.shift).mean((2, 3)), m.gain),
        norm=nn.BatchNorm2d(3),
        **parts,
    )


# Apart from each other and from the channels: torch.compile takes equal numbers in its first call
# for the same symbol.
SIZES = [(7, 11, 13), (3, 7, 6), (5, 9, 14)]
EVERYTHING = {"convt_reduce.cost_rule": False}


def test_the_name_needs_no_import(empty_folder):
    """After pip install alone: the entry point is found, the package imported, the model fused."""
    script = """
import sys, logging, torch
model = torch.nn.Sequential(torch.nn.ConvTranspose2d(2, 3, 3), torch.nn.AdaptiveAvgPool2d(1))
assert not any(name.startswith("convt_reduce") for name in sys.modules)
logging.basicConfig()
logging.getLogger("convt_reduce.compiler").setLevel(logging.INFO)
x = torch.randn(4, 2, 32, 32)
with torch.no_grad():
    y = torch.compile(model, backend="convt_reduce")(x)
    torch.testing.assert_close(y, model(x))
assert "convt_reduce" in sys.modules
"""
    path = empty_folder / "script.py"
    path.write_text(script)
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "fused       adaptive_avg_pool2d" in result.stderr


def test_the_entry_point_is_ours():
    backend = torch._dynamo.lookup_backend("convt_reduce")
    assert backend is compiler.backend
    assert "convt_reduce" in torch._dynamo.list_backends()


@pytest.mark.parametrize("train", [False, True])
def test_training_through_it(train, reports):
    """Values and gradients; in train mode the batch statistics keep the convolution."""
    model = model_of().train(train)
    other = torch.compile(model, backend="convt_reduce", options=EVERYTHING, fullgraph=True)
    x = input_of(dtype=torch.float32)
    assert_same(model, Plain(other), x, tolerance=1e-4)
    (report,) = reports()
    assert len(report.fused) == (not train)


class Plain:
    """A compiled model, called outside a dispatch mode, in which torch.compile steps back."""

    def __init__(self, call):
        self.call, self.record = call, Record()

    def __call__(self, *inputs):
        return self.call(*inputs)


@pytest.fixture(autouse=True)
def plain_is_not_recorded(monkeypatch):
    import fusing

    recorded = fusing.run

    def run(module, *inputs):
        if isinstance(module, Plain):
            return module(*inputs), module.record
        return recorded(module, *inputs)

    monkeypatch.setattr(fusing, "run", run)


def test_sizes_that_change(reports):
    model = Chain(lambda m, y: (y * m.scale).sum((2, 3))).eval()
    other = torch.compile(
        model, backend="convt_reduce", dynamic=True, options=EVERYTHING, fullgraph=True
    )
    for size in SIZES:
        x = torch.randn(size[0], 2, *size[1:])
        assert_same(model, Plain(other), x, tolerance=1e-4)
    assert len(reports()) == 1
    assert reports()[0].fused


def test_modes_and_options_are_passed_on():
    model = Chain(lambda m, y: y.mean((2, 3)))
    x = input_of(dtype=torch.float32)
    for settings in ({"mode": "reduce-overhead"}, {"options": {"epilogue-fusion": False}}):
        torch._dynamo.reset()
        other = torch.compile(model, backend="convt_reduce", **settings)
        torch.testing.assert_close(other(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(model, backend="convt_reduce", options={"no_such_option": 1})(x)


def test_the_pass_in_inductors_hook(reports):
    model = model_of().eval()
    chosen = compiler.InductorPass(cost_rule=False)
    other = torch.compile(model, options={"pre_grad_custom_pass": chosen}, fullgraph=True)
    assert_same(model, Plain(other), input_of(dtype=torch.float32), tolerance=1e-4)
    assert len(reports()[0].fused) == 1
    assert chosen.uuid() == compiler.InductorPass(cost_rule=False).uuid()
    assert chosen.uuid() != compiler.inductor_pass.uuid()


def test_the_pass_set_for_all(reports):
    model = Chain(lambda m, y: y.mean((2, 3)))
    x = torch.randn(4, 2, 32, 32)
    with torch._inductor.config.patch(pre_grad_custom_pass=compiler.inductor_pass):
        torch.testing.assert_close(torch.compile(model)(x), model(x))
    assert len(reports()[0].fused) == 1


def test_a_graph_break_leaves_two_graphs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = Chain(lambda m, y: y.mean((2, 3)))

        def forward(self, x):
            if x.sum() > 0:  # control flow on a value: symbolic tracing cannot see past it
                x = x * 2
            return self.chain(x)

    model = Model()
    other = torch.compile(model, backend="convt_reduce", options=EVERYTHING)
    for x in (torch.ones(1, 2, 4, 5), -torch.ones(1, 2, 4, 5)):
        torch.testing.assert_close(other(x), model(x))


def test_an_exported_program():
    model = Chain(lambda m, y: ((y * m.scale).flatten(2).mean(-1), m.gain)).double().eval()
    x = input_of()
    module = torch.export.export(model, (x,)).module()
    report = compiler.fuse_graph(module, cost_rule=False)
    assert len(report.fused) == 1
    assert_same(model, module, x, with_gradients=False)


@pytest.mark.parametrize("how", ["compile", "dynamic", "export"])
def test_a_fused_model_under_compilers(how):
    """One graph, with the operator in it: the conditions become guards."""
    model = Chain(lambda m, y: (y * m.scale).sum((2, 3))).double()
    other = fused(model)[0]
    x = input_of()
    if how == "export":
        program = torch.export.export(other, (x,))
        assert "convt_reduce.fused_mean" in str(program.graph)
        torch.testing.assert_close(program.module()(x), model(x))
        return
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True, dynamic=how == "dynamic")
    assert_same(model, Plain(compiled), x)
    graphs = []
    counted = torch.compile(
        other, backend=lambda gm, inputs: graphs.append(gm) or gm, dynamic=True, fullgraph=True
    )
    for size in SIZES:
        x = torch.randn(size[0], 2, *size[1:], dtype=torch.float64)
        torch.testing.assert_close(counted(x), model(x))
    assert len(graphs) == 1
    assert "fused_mean" in graphs[0].code


@pytest.mark.gpu
def test_on_the_gpu():
    model = model_of().cuda().eval()
    other = torch.compile(model, backend="convt_reduce", fullgraph=True)
    assert_same(model, Plain(other), input_of(dtype=torch.float32).cuda(), tolerance=1e-4)
    quick = torch.compile(model, backend="convt_reduce", mode="reduce-overhead")
    x = input_of(dtype=torch.float32).cuda()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(quick(x)[0].clone(), model(x)[0], rtol=1e-4, atol=1e-4)

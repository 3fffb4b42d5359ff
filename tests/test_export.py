"""Graphs that leave the process that made them: torch.export, AOTInductor, torch.jit.trace; and the
compiler's modes, layers and shape inference that lead there.

tests/test_compile.py counts graphs and compares layouts; here are whole models and what is saved.
"""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

import convt_reduce
from convt_reduce.kernelbench import ModelNew
from convt_reduce.nn import ConvTransposeMean1d, ConvTransposeMean2d, ConvTransposeMean3d

# Distinct from each other and from every channel count: equal first sizes become one symbol.
SIZES = [
    (7, 11, 13),
    (2, 5, 6),
    (3, 9, 8),
    (5, 12, 4),
    (4, 33, 17),
    (8, 6, 6),
    (2, 31, 64),
    (16, 4, 5),
    (9, 3, 21),
    (6, 17, 3),
]


class Net(nn.Module):
    """A layer of ours between two of PyTorch's.

    The first mixes channels by nn.Linear: Inductor pins the sizes of an nn.Conv2d that it trains.
    """

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.head = ConvTransposeMean2d(
            4, 10, 3, 2, 1, 1, groups=2, bias=bias, dilation=(1, 2), multiplier=0.5
        )
        self.last = nn.Linear(10, 5)

    def forward(self, x):
        mixed = self.first(x.movedim(1, -1)).relu().movedim(-1, 1)
        return self.last(self.head(mixed).flatten(1))


each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def net(bias=True, device="cpu"):
    return Net(bias).double().to(device)


def images(sizes, device="cpu"):
    batch, height, width = sizes
    return torch.randn(batch, 3, height, width, dtype=torch.float64, device=device)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def python(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True
    )


# ---- the compiler's modes -----------------------------------------------------------------------


@pytest.mark.slow
@each_bias
def test_one_graph_of_a_model_for_ten_sizes(bias, device):
    """Lowered by Inductor, trained, batch and both spatial sizes changing."""
    model = net(bias, device)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, dynamic=True)
    for sizes in SIZES:
        x = images(sizes, device)
        results = []
        for forward, parameters in ((model, model.parameters()), (compiled, other.parameters())):
            y = forward(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(parameters))])
        for a, b in zip(*results, strict=True):
            assert_close(b, a)
    # Not by a counting backend: it is handed the graph a second time once the compiler has seen
    # that the operator takes the multiplier, an attribute of the layer, as a plain number.
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes(mode, device):
    """On the CPU the latter two have no CUDA graphs to make; on CUDA outputs are cloned, as they
    are overwritten by the next replay."""
    model = ModelNew(4, 6, 3, 2, 1, 1, 0.5).double().to(device)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, mode=mode, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for _ in range(4):
        x = torch.randn(2, 4, 9, 7, dtype=torch.float64, device=device)
        outputs = []
        for optimizer, forward in zip(optimizers, (model, compiled), strict=True):
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            leaf = x.clone().requires_grad_()
            y = forward(leaf)
            outputs.append(y.detach().clone())
            y.square().sum().backward()
            outputs.append(leaf.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        assert_close(outputs[2], outputs[0])
        assert_close(outputs[3], outputs[1])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(b, a)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_for_inference(mode, device):
    """Results of calls that are alive at once, cloned, as the modes ask; weights that change."""
    model = ModelNew(4, 6, 3, 2, 1, 1, 0.5).double().to(device)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    inputs = [torch.randn(2, 4, 9, 7, dtype=torch.float64, device=device) for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            found = [compiled(x).clone() for x in inputs]
            for x, y in zip(inputs, found, strict=True):
                assert_close(y, model(x))
            model.conv_transpose.weight.mul_(-2)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(ConvTransposeMean1d, (5,)), (ConvTransposeMean2d, (5, 7)), (ConvTransposeMean3d, (5, 7, 6))],
)
@pytest.mark.parametrize("unbatched", [False, True])
def test_layers_have_no_graph_breaks(kind, size, unbatched, device):
    layer = kind(4, 6, 3, 2, 1, multiplier=0.5).double().to(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(2, 4, *size, dtype=torch.float64, device=device)
    x = x[0] if unbatched else x
    assert_close(compiled(x), layer(x))
    doubled = [2 * n for n in size]
    assert_close(compiled(x, output_size=doubled), layer(x, output_size=doubled))


# ---- torch.export -------------------------------------------------------------------------------


def exported(model, dynamic=True, device="cpu"):
    dimensions = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    return torch.export.export(
        model.eval(),
        (images(SIZES[0], device),),
        dynamic_shapes={"x": dimensions} if dynamic else None,
    )


def operators_in(program):
    return [n.target for n in program.graph.nodes if "convt_reduce" in str(n.target)]


@each_bias
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_export(bias, dynamic, device):
    model = net(bias, device)
    program = exported(model, dynamic, device)
    assert operators_in(program) == [torch.ops.convt_reduce.fused_mean.default]
    lowered = program.run_decompositions()
    assert operators_in(lowered) == [torch.ops.convt_reduce.fused_mean.default]
    for p in (program, lowered):
        for sizes in SIZES if dynamic else SIZES[:1]:
            x = images(sizes, device)
            assert_close(p.module()(x), model(x))
    if not dynamic:
        with pytest.raises(Exception, match=r"Guard failed|Expected input"):
            program.module()(images(SIZES[1], device))


@pytest.mark.parametrize("sizes", [(1, 5, 6), (2, 1, 9), (1, 1, 1)], ids=str)
def test_export_holds_for_sizes_of_one(sizes, device):
    model = net(True, device)
    x = images(sizes, device)
    assert_close(exported(model, True, device).module()(x), model(x))


def test_exported_graph_trains(device):
    """Exported for training, the graph records gradients for the parameters."""
    model = net(True, device)
    module = exported(model, True, device).module()
    x = images(SIZES[1], device)
    for m in (model, module):
        m.zero_grad()
        m(x).square().sum().backward()
    for (name, a), (_, b) in zip(
        sorted(model.named_parameters()), sorted(module.named_parameters()), strict=True
    ):
        assert a.grad.count_nonzero(), name
        assert_close(b.grad, a.grad)


LOAD = """
import sys, torch
program, tensors, package = sys.argv[1:]
if package != "none":
    __import__(package)
x, y = torch.load(tensors)
found = torch.export.load(program).module()(x)
torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
"""


@each_bias
def test_saved_and_loaded_in_a_new_process(bias, device, empty_folder):
    model = net(bias, device)
    torch.export.save(exported(model, True, device), "model.pt2")
    x = images(SIZES[3], device)
    torch.save((x, model(x).detach()), "tensors.pt")
    loaded = python(LOAD, "model.pt2", "tensors.pt", "convt_reduce")
    assert loaded.returncode == 0, loaded.stderr


def test_loading_without_the_import_says_what_is_missing(empty_folder):
    torch.export.save(exported(net()), "model.pt2")
    torch.save((images(SIZES[3]), None), "tensors.pt")
    unaware = python(LOAD, "model.pt2", "tensors.pt", "none")
    assert unaware.returncode != 0
    assert "torch.ops.convt_reduce.fused_mean" in unaware.stderr


# ---- AOTInductor --------------------------------------------------------------------------------

RUN_PACKAGE = """
import sys, torch, convt_reduce
package, tensors = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for x, y in torch.load(tensors):
    torch.testing.assert_close(model(x), y, rtol=1e-10, atol=1e-10)
"""


@pytest.mark.slow
@each_bias
def test_aot_inductor_package(bias, device, empty_folder):
    """Compiled to a shared library, run here and in a process of its own."""
    model = net(bias, device)
    with torch.no_grad():
        program = exported(model, True, device)
        package = str(empty_folder / "model.pt2")
        path = torch._inductor.aoti_compile_and_package(program, package_path=package)
        pairs = [(x := images(sizes, device), model(x)) for sizes in SIZES]
        loaded = torch._inductor.aoti_load_package(path)
        for x, y in pairs:
            assert_close(loaded(x), y)
    torch.save(pairs, "tensors.pt")
    result = python(RUN_PACKAGE, path, "tensors.pt")
    assert result.returncode == 0, result.stderr


# ---- torch.jit.trace ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@each_bias
def test_traced(bias, device, empty_folder):
    model = net(bias, device).eval()
    traced = torch.jit.trace(model, images(SIZES[0], device))
    assert "convt_reduce::fused_mean" in str(traced.inlined_graph)
    traced.save("model.pt")
    loaded = torch.jit.load("model.pt")
    for sizes in SIZES:
        x = images(sizes, device)
        for module in (traced, loaded):
            assert_close(module(x), model(x))
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        for p, m in ((a, model), (b, loaded)):
            (p.grad,) = torch.autograd.grad(m(x).square().sum(), p)
        assert_close(b.grad, a.grad)


# ---- shape inference ----------------------------------------------------------------------------


def test_meta(device):
    """Forward and backward on meta tensors: shapes, dtypes and strides of the real run."""
    model = net(True, device)
    shadow = copy.deepcopy(model).to("meta")
    for m in (model, shadow):
        m(images((3, 9, 8), next(m.parameters()).device)).square().sum().backward()
    for a, b in zip(model.parameters(), shadow.parameters(), strict=True):
        assert b.grad.is_meta
        assert (b.grad.shape, b.grad.dtype, b.grad.stride()) == (
            a.grad.shape,
            a.grad.dtype,
            a.grad.stride(),
        )


def test_fake_tensors(device):
    """A forward and backward that allocate nothing; the device is the one pretended."""
    with FakeTensorMode():
        x = torch.empty(2, 4, 9, 7, device=device, requires_grad=True)
        layer = ConvTransposeMean2d(4, 6, 3, 2, 1, 1, device=device)
        y = layer(x)
        y.sum().backward()
    assert y.shape == (2, 6, 1, 1)
    assert y.device.type == x.grad.device.type == layer.weight.grad.device.type == device
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape


def test_fake_tensors_of_a_device_that_is_not_there():
    """Planning for a GPU without one, as torch.compile's tools do; a terabyte costs nothing."""
    with FakeTensorMode():
        x = torch.empty(2**14, 64, 2**10, 2**10, device="meta")
        w = torch.empty(64, 32, 3, 3, device="meta")
        assert convt_reduce.fused_mean(x, w).shape == (2**14, 32, 1, 1)


def test_make_fx(device):
    """The traced graph holds our operators by name and runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = net(True, device)
    x = images(SIZES[1], device)
    gradient = torch.func.grad(lambda x: model(x).sum())
    graph = make_fx(gradient, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    names = {n.target._opname for n in graph.graph.nodes if "convt_reduce" in str(n.target)}
    assert names == {"_fused_mean_with_sums", "_tap_spread"}
    for sizes in SIZES[2:4]:
        x = images(sizes, device).requires_grad_()
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        assert_close(graph(x.detach()), expected)

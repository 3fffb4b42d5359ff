"""torch.compile of whole models: its modes, layers, training, changing sizes; and shape inference.

tests/test_compile.py counts graphs of the bare operator and compares layouts.
"""

import copy

import pytest
import torch
from test_export import SIZES, assert_close, each_bias, images, net
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

import convt_reduce
from convt_reduce.kernelbench import ModelNew
from convt_reduce.nn import ConvTransposeMean1d, ConvTransposeMean2d, ConvTransposeMean3d


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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

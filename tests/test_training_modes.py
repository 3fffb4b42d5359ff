"""Training under PyTorch's modes: CUDA graphs, deterministic algorithms, inference mode.

And the wrong calls that only training can make.
"""

import os
import subprocess
import sys

import pytest
import torch
from test_training import NAMES, assert_equal, leaves, ours

from convt_reduce.kernelbench import ModelNew

# ---- CUDA graphs --------------------------------------------------------------------------------

CAPTURE_FIRST = """
import torch, convt_reduce
from torch.nn import functional
x, w, b = (
    torch.randn(s, device="cuda", dtype=torch.float64).requires_grad_()
    for s in ((2, 4, 9, 7), (4, 3, 3, 2), (6,))
)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    y = convt_reduce.fused_mean(x, w, b, 2, 1, 1, 2, 1, 0.5)
for _ in range(3):
    with torch.no_grad():
        x.normal_()
    graph.replay()
    expected = (functional.conv_transpose2d(x, w, b, 2, 1, 1, 2) * 0.5).mean((2, 3), keepdim=True)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
"""


@pytest.mark.gpu
def test_the_very_first_call_may_be_captured(empty_folder):
    """Nothing is set up lazily that a capture forbids."""
    result = subprocess.run([sys.executable, "-c", CAPTURE_FIRST], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graph_of_forward_and_backward(dtype):
    """The recipe of PyTorch's notes: warm up on a side stream, capture, replay with new inputs."""
    x, w, b = leaves(dtype=dtype, device="cuda")

    def step():
        y = ours(x, w, b)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, w, b))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for i in range(4):
        with torch.no_grad():
            x.normal_(mean=i)
            w.normal_()
        graph.replay()
        kept = [t.clone() for t in captured]
        for a, t in zip(kept, step(), strict=True):
            torch.testing.assert_close(a, t)
            assert t.count_nonzero()
        graph.replay()
        assert_equal(captured, kept)


@pytest.mark.gpu
def test_make_graphed_callables():
    """Forward and backward of a module as two graphs, in a training loop."""
    results = []
    for graphed in (False, True):
        torch.manual_seed(4)
        model = ModelNew(4, 6, 3, 2, 1, 1, 0.5).cuda()
        forward = model
        if graphed:
            sample = torch.randn(2, 4, 9, 7, device="cuda", requires_grad=True)
            forward = torch.cuda.make_graphed_callables(model, (sample,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        losses = []
        for _ in range(5):
            x = torch.randn(2, 4, 9, 7, device="cuda", requires_grad=True)
            loss = (forward(x) - 1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), x.grad.clone()]
        results.append([*losses, *(p.detach() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# ---- deterministic mode -------------------------------------------------------------------------

DETERMINISTIC = """
import sys, torch, convt_reduce
device = sys.argv[1]
torch.use_deterministic_algorithms(True)
x, w, b = (torch.randn(s).to(device).requires_grad_() for s in ((8, 4, 33, 65), (4, 3, 3, 3), (6,)))
results = []
for _ in range(3):
    y = convt_reduce.fused_mean(x, w, b, 2, 1, 1, 2)
    gradients = torch.autograd.grad(y.square().sum(), (x, w, b), create_graph=True)
    second = torch.autograd.grad(gradients[0].square().sum(), (x, w))
    results.append([y, *gradients, *second])
for other in results[1:]:
    assert all(torch.equal(p, q) for p, q in zip(other, results[0]))
"""


def test_deterministic_mode(device, empty_folder):
    """Nothing to alert of, in either direction; in a process that asks cuBLAS for no workspace."""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    result = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC, device],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


# ---- inference tensors --------------------------------------------------------------------------
#
# PyTorch forbids saving one for backward. The convolution saves its input, so it refuses an input
# made in inference mode; nothing of ours needs the input, so it is welcome. A weight made there is
# refused wherever it would be saved.


def inference(*tensors):
    with torch.inference_mode():
        return [t.detach().clone() for t in tensors]


def test_input_from_inference_mode(device):
    x, w, b = leaves(("weight", "bias"), device=device)
    y = ours(*inference(x), w, b)
    assert not y.is_inference()
    plain = ours(x, w, b)
    assert torch.equal(y, plain)
    found, expected = (torch.autograd.grad(t.square().sum(), (w, b)) for t in (y, plain))
    assert_equal(found, expected)


def test_weight_from_inference_mode(device):
    x, w, b = leaves(("input",), device=device)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(x, *inference(w), b)
    with torch.no_grad():
        y = ours(x, *inference(w), b)
    assert torch.equal(y, ours(x, w, b).detach())


def test_within_inference_mode(device):
    tensors = leaves(device=device)
    with torch.inference_mode():
        y = ours(*tensors)
        assert y.is_inference()
    assert not y.requires_grad
    assert torch.equal(y, ours(*tensors).detach())
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


def test_compiled_within_inference_mode(device):
    tensors = leaves(device=device)
    torch._dynamo.reset()
    with torch.inference_mode():
        y = torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors)
        z = torch.compile(ours, fullgraph=True, backend="aot_eager")(*inference(*tensors))
    assert not y.requires_grad
    assert torch.equal(y, ours(*tensors).detach())
    assert torch.equal(z, y)


# ---- wrong calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 2], ids=NAMES)
@pytest.mark.parametrize("other", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gradient", [True, False], ids=["gradient", "inference"])
def test_mixed_devices(moved, other, gradient):
    tensors = [t.detach().requires_grad_(gradient) for t in leaves()]
    tensors[moved] = tensors[moved].to(other)
    name = "weight" if moved < 2 else "bias"
    here = torch.device(
        other if moved == 0 else "cpu", 0 if moved == 0 and other == "cuda" else None
    )
    with pytest.raises(RuntimeError) as caught:
        ours(*tensors)
    assert str(caught.value).startswith(f"fused_mean: {name} must be on input's device {here}, got")


def test_parameters_on_the_wrong_device():
    model = ModelNew(4, 6, 3, 2, 1, 1, 0.5).to("meta")
    with pytest.raises(RuntimeError, match="weight must be on input's device cpu, got meta"):
        model(torch.zeros(2, 4, 5, 5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_have_no_gradients(dtype, device):
    """PyTorch refuses the request itself; a call with a trained weight is refused by us."""
    x, w, b = leaves(("weight",), device=device)
    x = x.detach().to(dtype)
    with pytest.raises(RuntimeError, match="floating point"):
        x.requires_grad_()
    name = str(dtype).removeprefix("torch.")
    for call in (ours, torch.func.grad(lambda *t: ours(*t).sum(), argnums=1)):
        with pytest.raises(RuntimeError, match=f"input must be float32.*got {name}"):
            call(x, w, b)
    with pytest.raises(RuntimeError, match=f"weight must have input's dtype float64, got {name}"):
        ours(leaves(device=device)[0], w.detach().to(dtype), b)


def test_gradients_of_the_wrong_shape(device):
    y = ours(*leaves(device=device))
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(torch.zeros(y.shape[0], device=device, dtype=y.dtype))

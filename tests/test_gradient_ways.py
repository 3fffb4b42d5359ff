"""Which way a gradient takes: _combine_backward where it is small, else matrix products.

Both give the same, and only matrix products serve what may be differentiated again.
"""

import contextlib

import pytest
import torch
from cases import DTYPES, VARIED, dtype_id, some
from test_combine_backward import SHAPES, assert_near, backward, tensors_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from convt_reduce import _products

ops = torch.ops.convt_reduce


class Names(TorchDispatchMode):
    """Collects the names of our operators."""

    def __init__(self):
        self.names = []
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "convt_reduce":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def limits(monkeypatch, **limit_of):
    """Sets how many multiplications are small, per device."""
    with monkeypatch.context() as patch:
        patch.setattr(_products, "_MOST_MULTIPLICATIONS", limit_of)
        yield


def gradients(case, leaves):
    y = ops.fused_mean(*leaves, *case.op_settings)
    g = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    return torch.autograd.grad(y, [t for t in leaves if t is not None], g)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)
def test_both_ways_agree(case, dtype, device, monkeypatch):
    leaves = [None if t is None else t.requires_grad_() for t in case.tensors(dtype, device)]
    with limits(monkeypatch, cpu=2**30, cuda=2**30), Names() as seen:
        native = gradients(case, leaves)
    assert "_combine_backward" in seen.names
    with limits(monkeypatch), Names() as seen:
        products = gradients(case, leaves)
    assert "_combine_backward" not in seen.names
    for a, b in zip(native, products, strict=True):
        assert a.stride() == b.stride()
        assert_near(a, b.cpu().double(), dtype)


CASE = some("2d-all-unequal")[0]


def leaves_of(case, device):
    tensors = case.tensors(torch.float64, device)
    return [None if t is None else t.requires_grad_() for t in tensors]


def test_second_derivatives_go_through_products(device):
    leaves = leaves_of(CASE, device)
    y = ops.fused_mean(*leaves, *CASE.op_settings)
    with Names() as seen:
        torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    assert "_combine_backward" not in seen.names


def test_it_has_no_derivative_of_its_own(device):
    grad, weight, sums = tensors_of(SHAPES[0], torch.float32, device)
    with pytest.raises(RuntimeError, match="must need no derivative"):
        backward(SHAPES[0], grad.requires_grad_(), weight, sums)
    with torch.no_grad():
        assert not backward(SHAPES[0], grad, weight, sums)[0].requires_grad


def test_batched_gradients_go_through_products(device):
    leaves = leaves_of(CASE, device)
    y = ops.fused_mean(*leaves, *CASE.op_settings)
    many = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    batched = torch.autograd.grad(y, leaves, many, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(many):
        for a, b in zip(
            torch.autograd.grad(y, leaves, one, retain_graph=True), batched, strict=True
        ):
            torch.testing.assert_close(b[i], a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "c_in", "c_out", "native"),
    [
        (8, 8, 8, True),
        (1024, 1, 1, True),
        (1025, 1, 1, False),  # images
        (1, 1, 1024, True),
        (1, 1, 1025, False),  # output channels
        (64, 512, 512, False),  # multiplications: 9 * 2**24
    ],
)
def test_small_problems_take_it(batch, c_in, c_out, native, device):
    x = torch.zeros(batch, c_in, 1, 1, device=device, requires_grad=True)
    w = torch.zeros(c_in, c_out, 3, 3, device=device)
    y = ops.fused_mean(x, w)
    with Names() as seen:
        y.sum().backward()
    assert ("_combine_backward" in seen.names) == native


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_what_make_fx_traces_can_be_differentiated(mode):
    def backward_of(*tensors):
        *leaves, g = tensors
        y = ops.fused_mean(*leaves, *CASE.op_settings)
        return torch.autograd.grad(y, leaves, g)

    leaves = leaves_of(CASE, "cpu")
    g = torch.randn(CASE.output_shape[: -CASE.axes] + (1,) * CASE.axes, dtype=torch.float64)
    graph = make_fx(backward_of, tracing_mode=mode)(*leaves, g)
    assert "_combine_backward" not in str(graph.graph)
    for a, b in zip(graph(*leaves, g), backward_of(*leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_deterministic_mode_keeps_the_bits_of_an_element_alone():
    x, w = torch.randn(8, 16, 5, 6, device="cuda"), torch.randn(16, 24, 3, 3, device="cuda")

    def gradient(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(ops.fused_mean(leaf, w).sum(), leaf)[0]

    torch.use_deterministic_algorithms(True)
    try:
        with Names() as seen:
            together = gradient(x)
        assert "_combine_backward" not in seen.names
        assert torch.equal(gradient(x[3:4]), together[3:4])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch", [128, 1024])
def test_equal_gradients_keep_their_digits(batch, device):
    """Of the bias, whose sum is the longest; the rest is as long as a matrix product's."""
    grad = torch.full((batch, 3, 1), 0.1, device=device)
    _, _, bias = ops._combine_backward(grad, None, None, [1], 1, 1.0, 1.0, True, False)
    expected = grad.double().sum(0).flatten()
    assert ((bias - expected).abs() <= 16 * torch.finfo(torch.float32).eps * expected).all()

"""Tensors that are not plain memory are refused with one sentence, on every path that sees them.

Sparse, quantized, nested and mkldnn tensors, None, and tensors whose memory was freed or is too
small. test_fuzz.py crosses all of them with every argument; here are the sentences.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import convt_reduce

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = {
    "layout sparse_coo": lambda t: t.to_sparse(),
    "layout sparse_csr": lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(),
    "layout _mkldnn": lambda t: t.to_mkldnn(),
    "a quantized one": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "a nested one": lambda t: torch.nested.nested_tensor([t, t]),
}


def tensors():
    return {
        "input": torch.ones(2, 4, 5, 6),
        "weight": torch.ones(4, 3, 3, 3),
        "bias": torch.ones(3),
    }


def sentence(call, *arguments, **named):
    with pytest.raises(RuntimeError) as caught:
        call(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize("argument", ["input", "weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, argument):
    given = tensors()
    given[argument] = KINDS[kind](given[argument])
    expected = f"fused_mean: {argument} must be a dense, strided tensor, got {kind}"
    assert sentence(ops.fused_mean, **given) == expected
    assert sentence(convt_reduce.fused_mean, **given) == expected
    assert sentence(ops._fused_mean_with_sums, **given) == expected
    with torch.inference_mode():
        assert sentence(ops.fused_mean, *given.values()) == expected
    leaves = {n: t if n == argument else t.requires_grad_() for n, t in given.items()}
    assert sentence(ops.fused_mean, **leaves) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tap_operators(kind):
    odd = KINDS[kind](torch.ones(2, 4, 3, 3))
    must = f"must be a dense, strided tensor, got {kind}"
    assert sentence(ops._tap_sums, odd, [3, 3]) == f"_tap_sums: input {must}"
    spread = sentence(ops._tap_spread, odd, [5, 6], torch.float32)
    assert spread == f"_tap_spread: tap_grads {must}"
    rest = (None, [3, 3], 1, 1.0, 1.0, True, False)
    assert sentence(ops._combine_backward, odd, None, *rest) == f"_combine_backward: grad {must}"
    plain = torch.ones(2, 4, 1, 1)
    backward = sentence(ops._combine_backward, plain, odd, *rest)
    assert backward == f"_combine_backward: weight {must}"


def test_sparse_fake_tensor():
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) for t in tensors().values()]
        given[0] = mode.from_tensor(torch.ones(2, 4, 5, 6).to_sparse())
        text = sentence(ops.fused_mean, *given)
    assert text == "fused_mean: input must be a dense, strided tensor, got layout sparse_coo"


@pytest.mark.parametrize("argument", ["input", "weight"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_none(argument, device):
    given = {name: t.to(device) for name, t in tensors().items()}
    given[argument] = None
    expected = f"fused_mean: {argument} must be a tensor, got None"
    assert sentence(ops.fused_mean, **given) == expected


@pytest.mark.parametrize("argument", ["input", "weight", "bias"])
@pytest.mark.parametrize("left", [0, 1])
def test_memory_that_was_freed(argument, left, device):
    """untyped_storage().resize_() is how some programs free a parameter between two uses."""
    given = {name: t.to(device) for name, t in tensors().items()}
    t = given[argument]
    before = ops.fused_mean(**given)
    full, less = t.nbytes, left and t.nbytes - 4
    t.untyped_storage().resize_(less)
    expected = (
        f"fused_mean: {argument} must have memory for all of its elements, "
        f"got a storage of {less} bytes where {full} are needed"
    )
    assert sentence(ops.fused_mean, **given) == expected
    t.untyped_storage().resize_(full)
    t.fill_(1)
    assert torch.equal(ops.fused_mean(**given), before)


def test_memory_of_the_tap_operators(device):
    t = torch.ones(2, 4, 3, 3, device=device)
    t.untyped_storage().resize_(16)
    must = (
        "must have memory for all of its elements, got a storage of 16 bytes where 288 are needed"
    )
    assert sentence(ops._tap_sums, t, [3, 3]) == f"_tap_sums: input {must}"
    spread = sentence(ops._tap_spread, t, [5, 6], torch.float32)
    assert spread == f"_tap_spread: tap_grads {must}"


def test_memory_is_counted_from_the_offset_and_with_strides(device):
    """The last element of a view decides, not the number of elements."""
    base = torch.ones(1000, device=device)
    view = base.as_strided((1, 1, 3, 4), (0, 0, 100, 2), 7)  # its last element is number 213
    w = torch.ones(1, 1, 1, 1, device=device)
    base.untyped_storage().resize_(4 * 214)
    assert ops.fused_mean(view, w).item() == 1
    base.untyped_storage().resize_(4 * 213)
    assert "a storage of 852 bytes where 856 are needed" in sentence(ops.fused_mean, view, w)
    empty = torch.ones(0, 1, 3, 4, device=device)
    empty.untyped_storage().resize_(0)
    assert ops.fused_mean(empty, w).shape == (0, 1, 1, 1)
    # One number for a plane needs one number's memory.
    one = torch.ones(1, device=device)
    assert ops.fused_mean(one.expand(1, 1, 5, 6), w).item() == 1


@pytest.mark.parametrize("multiplier", [torch.tensor(2.0), torch.tensor([2.0, 3.0])])
def test_a_tensor_for_a_multiplier(multiplier):
    """Taken as a number it would silently lose its gradient."""
    x, w, _ = tensors().values()
    expected = (
        "fused_mean: multiplier must be a Python number, got a tensor; multiply the result by it"
    )
    assert sentence(convt_reduce.fused_mean, x, w, multiplier=multiplier) == expected

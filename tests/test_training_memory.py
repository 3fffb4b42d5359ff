"""What training keeps in memory.

The claim: between forward and backward the operator keeps the weight and the tap sums, never the
input, and nothing at all for what is frozen; nothing outlives its graph.
"""

import gc
import itertools

import pytest
import torch
from cases import dtype_id
from test_training import assert_equal, gradients, leaves, ours
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import convt_reduce
from convt_reduce.kernelbench import ModelNew

SUMS_SHAPE = (2, 4, 3, 2)
NAMES = ("input", "weight", "bias")
SUBSETS = [s for r in (1, 2, 3) for s in itertools.combinations(NAMES, r)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def storage_of(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_saved_tensors(wanted, dtype, device):
    """The weight for input's gradient, the tap sums for the weight's; nothing for the bias."""
    x, w, b = leaves(wanted, dtype, device)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x, w, b)
    expected = {}
    if "input" in wanted:
        expected[w.shape] = dtype
    if "weight" in wanted:
        expected[torch.Size(SUMS_SHAPE)] = torch.promote_types(dtype, torch.float32)
    assert {t.shape: t.dtype for t in saved} == expected
    assert len(saved) == len(expected)
    if "input" in wanted:
        assert storage_of(w) in [storage_of(t) for t in saved], "the weight was copied"


def test_the_input_is_freed(device):
    """A control stands beside it: the convolution keeps its input."""
    for function, kept in ((ours, False), (functional.conv_transpose2d, True)):
        x, w, _ = leaves(("weight",), device=device)
        x = x + 0  # a tensor that only this line and the graph could keep
        y = function(x, w, None)
        storage = storage_of(x)
        del x
        assert storage.expired() != kept
        y.sum().backward()
        assert w.grad is not None


def test_an_intermediate_input_is_freed(device):
    """In a model: the activation before the layer goes once it is used."""
    first = torch.nn.Conv2d(3, 4, 3, device=device)
    x = torch.randn(2, 3, 8, 8, device=device)
    _, w, _ = leaves(dtype=torch.float32, device=device)
    activation = first(x)
    storage = storage_of(activation)
    y = convt_reduce.fused_mean(activation, w, None, 2, 1, 1, 2)
    del activation
    assert storage.expired()
    y.sum().backward()
    assert first.weight.grad.count_nonzero()


def test_backward_frees_what_was_saved(device):
    x, w, b = leaves(device=device)
    storages = []
    with saved_tensors_hooks(lambda t: storages.append(storage_of(t)) or t, lambda t: t):
        y = ours(x, w, b)
    own = storage_of(w)
    sums = [s for s in storages if s != own]
    assert len(sums) == 1
    assert not sums[0].expired()
    y.sum().backward()
    assert sums[0].expired()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_retained_graph(device):
    x, w, b = leaves(device=device)
    y = ours(x, w, b).square().sum()
    first = torch.autograd.grad(y, (x, w, b), retain_graph=True)
    assert_equal(torch.autograd.grad(y, (x, w, b)), first)


@pytest.mark.parametrize("change", ["input", "weight"])
def test_changes_in_place_between_forward_and_backward(change, device):
    """The input may be overwritten, it is not needed any more; the weight may not."""
    x, w, b = leaves(device=device)
    expected = gradients(device=device)
    y = ours(x, w, b)
    with torch.no_grad():
        (x if change == "input" else w).zero_()
    loss = y.square().sum()
    if change == "input":
        assert_equal(torch.autograd.grad(loss, (x, w, b)), expected[1:])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_nothing_grows_without_backward(device):
    """500 forwards whose graphs are dropped, without the cycle collector's help."""
    tensors = leaves(device=device)
    storages = []

    def pack(tensor):
        storages.append(storage_of(tensor))
        return tensor.detach()  # itself, an output of the graph that keeps it, it would be a cycle

    for _ in range(3):
        ours(*tensors)
    gc.collect()
    gc.disable()
    try:
        objects = len(gc.get_objects())
        memory = torch.cuda.memory_allocated() if device == "cuda" else 0
        for _ in range(500):
            ours(*tensors)
        # The measuring itself makes some; a graph that stayed would leave several per forward.
        assert len(gc.get_objects()) - objects < 250
        if device == "cuda":
            assert torch.cuda.memory_allocated() == memory
        with saved_tensors_hooks(pack, lambda t: t):
            for _ in range(20):
                ours(*tensors)
    finally:
        gc.enable()
    weight = storage_of(tensors[1])
    alive = {s.cdata for s in storages if not s.expired()}
    assert alive == {weight.cdata}


@pytest.mark.gpu
def test_nothing_grows_while_training_on_the_gpu():
    model = ModelNew(4, 6, 3, 2, 1, 1, 0.5).cuda()
    x = torch.randn(2, 4, 32, 32, device="cuda", requires_grad=True)

    def step():
        x.grad = None
        model.zero_grad()
        model(x).square().sum().backward()

    for _ in range(3):
        step()
    memory = torch.cuda.memory_allocated()
    for _ in range(100):
        step()
    assert torch.cuda.memory_allocated() == memory


@pytest.mark.gpu
def test_peak_of_forward_and_backward_is_the_gradient():
    """On the benchmark's shape: beside input's gradient, 5 % of it."""
    model = ModelNew(64, 128, 3, 2, 1, 1, 0.5).cuda()
    x = torch.randn(16, 64, 128, 128, device="cuda", requires_grad=True)
    for _ in range(2):  # the first call of the matrix product allocates its workspace
        x.grad = None
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.05 * x.numel() * x.element_size()

"""What autograd keeps, and what the backward does not do.

The backward needs the weight and the tap sums, never the input; it does no work for tensors that
asked for no gradient; and a call without gradients does not even make the tap sums.
"""

import gc
import itertools
import warnings

import pytest
import reference
import torch
from cases import VARIED, some
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import convt_reduce
from convt_reduce import _autograd

ops = torch.ops.convt_reduce
each_varied_case = pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)
SUBSETS = [s for r in (1, 2, 3) for s in itertools.combinations(("input", "weight", "bias"), r)]


def leaves_of(case, device):
    tensors = case.tensors(torch.float64, device)
    return [None if t is None else t.requires_grad_() for t in tensors]


def call(case, leaves):
    return ops.fused_mean(*leaves, *case.op_settings)


def test_nothing_warns(device):
    case = some("2d-all-unequal")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(case, leaves_of(case, device)).sum().backward()


class Kept:
    """Collects what autograd saves."""

    def __enter__(self):
        self.tensors = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self.tensors

    def pack(self, t):
        self.tensors.append(t)
        return t

    def __exit__(self, *exception):
        self.hooks.__exit__(*exception)


@each_varied_case
def test_only_weight_and_tap_sums_are_kept(case, device):
    x, w, b = leaves_of(case, device)
    with Kept() as kept:
        call(case, (x, w, b))
    sums_shape = (*case.input_shape[: -case.axes], *case.kernel)
    addresses = [t.data_ptr() for t in kept]
    assert x.data_ptr() not in addresses
    others = [t for t in kept if t.data_ptr() != w.data_ptr()]
    assert len(kept) == 2
    assert [tuple(t.shape) for t in others] == [sums_shape]
    sums = reference.tap_sums(x.detach().cpu(), case.kernel, *case.tap_settings)
    torch.testing.assert_close(others[0].detach().cpu(), sums, rtol=1e-12, atol=1e-12)


def test_input_and_result_are_freed(device):
    """An activation may go as soon as the caller drops it; a dropped result takes all with it."""
    case = some("2d-benchmark-small")[0]
    x, w, b = leaves_of(case, device)
    gc.collect()
    gc.disable()
    try:
        activation = x * 1
        held = StorageWeakRef(activation.untyped_storage())
        y = call(case, (activation, w, b))
        # Not through a hook: one that returns the tensor itself makes a cycle of its own.
        sums = next(t for t in y.grad_fn.saved_tensors if t.data_ptr() != w.data_ptr())
        sums_held = StorageWeakRef(sums.untyped_storage())
        del activation, sums
        assert held.expired()
        assert not sums_held.expired()
        del y
        assert sums_held.expired(), "a reference cycle keeps the tap sums"
    finally:
        gc.enable()


def test_saved_tensors_may_be_moved_away(device):
    case = some("2d-all-unequal")[0]
    plain, moved = leaves_of(case, device), leaves_of(case, device)
    call(case, plain).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.numpy(force=True), lambda a: torch.from_numpy(a).to(device)
    ):
        y = call(case, moved)
    y.sum().backward()
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_changes_in_place_after_the_call(device):
    """The input may change, for it is not kept; the weight may not, and autograd must say so."""
    case = some("2d-all-unequal")[0]
    plain, changed = leaves_of(case, device), leaves_of(case, device)
    call(case, plain).sum().backward()
    y = call(case, changed)
    with torch.no_grad():
        changed[0].fill_(float("nan"))
        changed[2].fill_(float("nan"))
    y.sum().backward()
    for a, b in zip(plain, changed, strict=True):
        assert torch.equal(a.grad, b.grad)

    y = call(case, changed)
    with torch.no_grad():
        changed[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_result_may_be_changed_in_place(device):
    case = some("2d-all-unequal")[0]
    plain, scaled = leaves_of(case, device), leaves_of(case, device)
    (call(case, plain) * 4).sum().backward()
    call(case, scaled).mul_(4).sum().backward()
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a.grad, b.grad)


class Seen(TorchDispatchMode):
    """Names of our operators that ran, and the shapes of everything that was computed."""

    def __init__(self):
        super().__init__()
        self.names, self.shapes = [], set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function.namespace == "convt_reduce":
            self.names.append(function.name().removeprefix("convt_reduce::").split(".")[0])
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor):
                self.shapes.add(tuple(t.shape))
        return result


def test_no_work_for_what_is_frozen():
    """Shapes tell which gradient was computed; all of them differ here."""
    x_shape, w_shape, b_shape = (2, 4, 6, 7), (4, 5, 3, 2), (10,)
    for wanted in SUBSETS:
        x, w, b = (
            torch.randn(s).requires_grad_(n in wanted)
            for n, s in (("input", x_shape), ("weight", w_shape), ("bias", b_shape))
        )
        y = ops.fused_mean(x, w, b, [2], [1], [1], 2)
        g = torch.ones_like(y)
        with Seen() as seen:
            torch.autograd.backward(y, g)
        spread = ["_tap_spread"] if "input" in wanted else []
        assert seen.names == ["_combine_backward", *spread], wanted
        assert (x_shape in seen.shapes) == ("input" in wanted), wanted
        assert (w_shape in seen.shapes) == ("weight" in wanted), wanted
        assert (b_shape in seen.shapes) == ("bias" in wanted), wanted


def test_inference_computes_no_tap_sums():
    x, w = torch.randn(2, 4, 6, 7), torch.randn(4, 5, 3, 2)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context(), Seen() as seen:
            ops.fused_mean(x, w)
        assert seen.names == ["fused_mean"]
    w.requires_grad_()
    with torch.no_grad(), Seen() as seen:
        assert not ops.fused_mean(x, w).requires_grad
    assert seen.names == ["fused_mean"]
    with Seen() as seen:
        ops.fused_mean(x, w)
    assert seen.names == ["_fused_mean_with_sums"]


def test_the_function_asks_autograd_only_where_it_may_matter(monkeypatch):
    """The Autograd kernel is Python; without derivatives the function goes past it."""
    asked = []

    def wanted(*tensors):
        asked.append(tensors)
        return False

    monkeypatch.setattr(_autograd, "_wanted", wanted)
    x, w = torch.randn(2, 4, 6, 7), torch.nn.Parameter(torch.randn(4, 5, 3, 2))
    with torch.no_grad():
        plain = convt_reduce.fused_mean(x, w)
    assert not asked
    for call in (
        lambda: convt_reduce.fused_mean(x, w),
        lambda: torch.func.vmap(convt_reduce.fused_mean, (0, None))(x[:, None], w),
    ):
        call()
        assert asked.pop()
    with forward_ad.dual_level():
        convt_reduce.fused_mean(x, w)
    assert asked
    assert torch.equal(plain, ops.fused_mean(x, w.detach()))

"""First-order gradients through torch.ops itself, for every subset of input, weight and bias.

Value in every dtype, gradcheck in double, every form of the call, and incoming gradients as
autograd really makes them: stride 0 after a sum, rows with gaps after a cat.
"""

import itertools

import pytest
import reference
import torch
from cases import CASES, DTYPES, VARIED, dtype_id, some

ops = torch.ops.convt_reduce
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
each_varied_case = pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)
SUBSETS = [s for r in (1, 2, 3) for s in itertools.combinations(("input", "weight", "bias"), r)]
each_subset = pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
CHECKED = some(
    "1d-small",
    "1d-output-padding-by-dilation",
    "2d-all-unequal",
    "2d-cropped-to-one-output",
    "2d-unbatched",
    "3d-kernel-longer-than-input",
)


def leaves_of(case, wanted=("input", "weight", "bias"), dtype=torch.float64, device="cpu"):
    named = zip(("input", "weight", "bias"), case.tensors(dtype, device), strict=True)
    return [None if t is None else t.requires_grad_(name in wanted) for name, t in named]


def call(case, leaves):
    return ops.fused_mean(*leaves, *case.op_settings)


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_value_of_all_three(case, dtype, device):
    leaves = leaves_of(case, dtype=dtype, device=device)
    y = call(case, leaves)
    assert y.grad_fn is not None
    g = torch.randn(y.shape, generator=case.generator(), dtype=torch.float64).to(dtype)
    y.backward(g.to(device))
    plain = case.tensors(dtype)
    expected = reference.gradients(reference.torch_chain, g, *plain, *case.settings)
    magnitudes = reference.gradient_magnitudes(g, *plain, *case.settings)
    # A gradient's element adds up over batch, channels and taps; weight's over the plane as well.
    terms = g.numel() * case.terms
    given = [t for t in leaves if t is not None]
    for name, leaf, theirs, magnitude in zip(
        ("input", "weight", "bias"), given, expected, magnitudes, strict=False
    ):
        assert leaf.grad.device == leaf.device
        reference.assert_within(leaf.grad, theirs, magnitude, terms, dtype, name)


@each_subset
@pytest.mark.parametrize(
    "case", some("1d-small", "2d-all-unequal", "3d-unbatched"), ids=lambda case: case.id
)
def test_each_subset_gets_the_same_gradients(case, wanted, device):
    everything = leaves_of(case, device=device)
    call(case, everything).square().sum().backward()
    some_of_them = leaves_of(case, wanted, device=device)
    y = call(case, some_of_them)
    assert y.requires_grad
    y.square().sum().backward()
    for name, whole, part in zip(
        ("input", "weight", "bias"), everything, some_of_them, strict=True
    ):
        if name in wanted:
            assert torch.equal(part.grad, whole.grad)
        else:
            assert part.grad is None


@each_subset
@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.id)
def test_gradcheck(case, wanted, device):
    leaves = leaves_of(case, wanted, device=device)
    assert torch.autograd.gradcheck(lambda *t: call(case, t), leaves)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.id)
def test_gradcheck_of_the_tap_operators(case, device):
    """Each is the other's backward, so the second derivative checks the pair in both directions."""
    x = case.tensors(device=device)[0].requires_grad_()
    shape = (*case.input_shape[: -case.axes], *case.kernel)
    g = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    def sums(t):
        return ops._tap_sums(t, case.kernel, *case.op_tap_settings)

    def spread(t):
        return ops._tap_spread(t, case.size, torch.float64, *case.op_tap_settings)

    for function, argument in ((sums, x), (spread, g)):
        assert torch.autograd.gradcheck(function, (argument,))
        assert torch.autograd.gradgradcheck(function, (argument,))


def test_forms_of_the_call(device):
    """Left-out arguments must not change how many gradients the backward is asked for."""
    x, w = torch.randn(2, 4, 5, 6, device=device), torch.randn(4, 3, 3, 2, device=device)
    b = torch.randn(3, device=device)
    calls = {
        "two": lambda x, w, b: ops.fused_mean(x, w),
        "three": lambda x, w, b: ops.fused_mean(x, w, b),
        "none": lambda x, w, b: ops.fused_mean(x, w, None),
        "stride": lambda x, w, b: ops.fused_mean(x, w, b, [2]),
        "all": lambda x, w, b: ops.fused_mean(x, w, b, [1], [0], [0], 1, [1], 1.0),
        "named": lambda x, w, b: ops.fused_mean(weight=w, input=x, multiplier=2.0, bias=b),
        "one named": lambda x, w, b: ops.fused_mean(x, w, padding=[1, 0]),
    }
    for name, form in calls.items():
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        form(*leaves).sum().backward()
        assert leaves[0].grad.shape == x.shape, name
        assert leaves[1].grad.shape == w.shape, name


def test_empty_batch_gives_zero_gradients(device):
    for axes in (1, 2, 3):
        x = torch.zeros(0, 4, *(5,) * axes, device=device, requires_grad=True)
        w = torch.randn(4, 3, *(3,) * axes, device=device, requires_grad=True)
        b = torch.randn(6, device=device, requires_grad=True)
        ops.fused_mean(x, w, b, [2], [1], [1], 2).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.equal(w.grad, torch.zeros_like(w))
        assert torch.equal(b.grad, torch.zeros_like(b))


# ---- incoming gradients as autograd makes them --------------------------------------------------


@each_dtype
@pytest.mark.parametrize("case", some("1d-small", "2d-groups-2", "3d-small"), ids=lambda c: c.id)
def test_gradient_of_a_sum_has_stride_zero(case, dtype, device):
    seen, results = [], []
    for reduce in (torch.sum, lambda y: (y * torch.ones_like(y)).sum()):
        leaves = leaves_of(case, dtype=dtype, device=device)
        y = call(case, leaves)
        y.register_hook(lambda g: seen.append(g.stride()))
        reduce(y).backward()
        results.append([t.grad for t in leaves])
    assert not any(seen[0]), "this was to be the expanded gradient"
    assert any(seen[1])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@each_dtype
def test_gradient_of_a_cat_has_strided_rows(dtype, device):
    def run(split):
        g = torch.Generator().manual_seed(3)
        x, w3, w5 = (
            torch.randn(s, generator=g, dtype=torch.float64).to(dtype).to(device).requires_grad_()
            for s in ((4, 3, 5, 6), (3, 3, 3, 3), (3, 5, 3, 3))
        )
        weights = torch.randn(4, 8, 1, 1, generator=g).to(dtype).to(device)
        first, second = (ops.fused_mean(x, w, None, [2], [1], [1]) for w in (w3, w5))
        strides = []
        second.register_hook(lambda g: strides.append(g.stride()))
        if split:
            torch.autograd.backward(
                (first, second), (weights[:, :3].clone(), weights[:, 3:].clone())
            )
        else:
            (torch.cat([first, second], 1) * weights).sum().backward()
        return strides[0][:2], x.grad, w3.grad, w5.grad

    stride, *ours = run(split=False)
    dense_stride, *dense = run(split=True)
    assert (stride, dense_stride) == ((8, 1), (5, 1))
    for a, b in zip(ours, dense, strict=True):
        assert torch.equal(a, b)


def test_backward_twice_and_accumulation(device):
    case = some("2d-groups-2")[0]
    leaves = leaves_of(case, device=device)
    y = call(case, leaves)
    y.sum().backward(retain_graph=True)
    first = [t.grad.clone() for t in leaves]
    y.sum().backward()
    for leaf, once in zip(leaves, first, strict=True):
        assert torch.equal(leaf.grad, once + once)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_have_the_layout_of_their_tensors(layout, device):
    x, w, b = leaves_of(some("2d-groups-of-many")[0], (), device=device)
    format = getattr(torch, f"{layout}_format" if layout == "contiguous" else layout)
    x, w = (t.to(memory_format=format).detach().requires_grad_() for t in (x, w))
    ops.fused_mean(x, w, b.requires_grad_(), [2], [1], [1], 4).sum().backward()
    for t in (x, w, b):
        assert t.grad.stride() == t.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kernel", list(itertools.product((1, 3), (1, 2))))
@pytest.mark.parametrize(("c_in", "group_out", "groups"), [(4, 3, 2), (4, 1, 4), (1, 5, 1)])
def test_weight_gradients_have_the_weights_strides(
    c_in, group_out, groups, kernel, channels_last, dtype, device
):
    """To the letter: along sizes of 1 a weight may be contiguous and channels_last at once."""
    shape = (c_in, group_out, *kernel)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    w = torch.randn(shape).to(device, dtype).clone(memory_format=memory_format).requires_grad_()
    x = torch.randn(2, c_in, 5, 4).to(device, dtype)
    g = torch.randn(2, group_out * groups, 1, 1).to(device, dtype)
    (grad,) = torch.autograd.grad(ops.fused_mean(x, w, None, groups=groups), w, g)
    assert grad.stride() == w.stride()
    given = (g.cpu(), x.cpu(), w.cpu(), None, 1, 0, 0, groups)
    expected = reference.gradients(reference.closed_form, *given)[1]
    magnitude = reference.gradient_magnitudes(*given)[1]
    reference.assert_within(grad, expected, magnitude, 2 * 20, dtype)

"""torch.autocast, on the CPU and on CUDA: the dtypes are those of PyTorch's own chain.

The chain runs under the same autocast, for its dtypes and for what it refuses; its values are
compared in float64, because it rounds its operands and ours are read as they are.
"""

import itertools

import pytest
import reference
import torch
from cases import BY_ID, dtype_id
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import convt_reduce
from convt_reduce.kernelbench import Model, ModelNew

CASE = BY_ID["2d-all-unequal"]
SETTINGS = CASE.settings
LOWER = (torch.float16, torch.bfloat16)
each_lower = pytest.mark.parametrize("lower", LOWER, ids=dtype_id)


def ours(x, w, b):
    return convt_reduce.fused_mean(x, w, b, *SETTINGS)


def eager_chain(x, w, b):
    """The chain in the dtypes that it is given: what a user's model runs."""
    *settings, multiplier = SETTINGS
    y = functional.conv_transpose2d(x, w, b, *settings) * multiplier
    return y.mean((2, 3), keepdim=True)


def tensors_of(*dtypes, device="cpu"):
    """input, weight and bias in dtypes of their own."""
    exact = CASE.tensors()
    return [t.to(d).to(device) for t, d in zip(exact, dtypes, strict=True)]


def assert_value(y, tensors, operands, result):
    """y is the mean of the operands, each first rounded to `operands` if that is not None.

    Operands that are read as they are give a result in their own dtype, and that is then rounded
    to autocast's: one rounding to each.
    """
    assert y.dtype == result
    first = operands or tensors[0].dtype
    rounded = [t.cpu() if operands is None else t.cpu().to(operands) for t in tensors]
    expected = reference.torch_chain(*rounded, *SETTINGS)
    magnitude = reference.magnitude_of(*rounded, *SETTINGS)
    bound = reference.error_bound(expected, magnitude, first, CASE.terms)
    bound += torch.finfo(result).eps * expected.abs() * (first != result)
    assert ((y.cpu().double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "dtypes",
    [
        *((d,) * 3 for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64)),
        *itertools.product((torch.float32, torch.float16), (torch.float32, torch.float16), LOWER),
    ],
    ids=lambda dtypes: "-".join(map(dtype_id, dtypes)),
)
@each_lower
def test_dtype_and_value(lower, dtypes, device):
    """Tensors of one dtype are not rounded on the way in; float64 is left alone."""
    tensors = tensors_of(*dtypes, device=device)
    with torch.autocast(device, lower):
        y, theirs = ours(*tensors), eager_chain(*tensors)
    assert y.dtype == theirs.dtype
    assert y.shape == theirs.shape
    operands = None if len(set(dtypes)) == 1 else lower
    assert_value(y, tensors, operands, theirs.dtype)


@each_lower
def test_without_a_bias(lower, device):
    x, w, _ = tensors_of(torch.float16, torch.float32, torch.float32, device=device)
    with torch.autocast(device, lower):
        y = convt_reduce.fused_mean(x, w, None, *SETTINGS)
        short = torch.ops.convt_reduce.fused_mean(x, w, groups=2)
    assert y.dtype == short.dtype == lower
    expected = reference.torch_chain(x.to(lower).cpu(), w.to(lower).cpu(), None, *SETTINGS)
    tolerance = 4 * torch.finfo(lower).eps
    torch.testing.assert_close(y.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float64),
        (torch.float64, torch.float16, torch.float64),
    ],
    ids=lambda dtypes: "-".join(map(dtype_id, dtypes)),
)
def test_float64_among_others_is_refused_as_by_the_chain(dtypes, device):
    tensors = tensors_of(*dtypes, device=device)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError):
            eager_chain(*tensors)
        with pytest.raises(RuntimeError, match=r"fused_mean: \w+ must have input's dtype"):
            ours(*tensors)


def test_integers_are_refused(device):
    x, w, b = tensors_of(*(torch.float32,) * 3, device=device)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError, match="fused_mean: input must be float32"):
            ours(x.long(), w, b)
        with pytest.raises(RuntimeError, match="fused_mean: weight must"):
            ours(x, w.long(), b)


def test_mixed_dtypes_are_refused_without_autocast(device):
    tensors = tensors_of(torch.float16, torch.float32, torch.float32, device=device)
    with pytest.raises(RuntimeError):
        eager_chain(*tensors)
    with pytest.raises(RuntimeError, match="fused_mean: weight must have input's dtype float16"):
        ours(*tensors)


@each_lower
def test_disabled_inside(lower, device):
    tensors = tensors_of(*(torch.float32,) * 3, device=device)
    mixed = tensors_of(torch.float16, torch.float32, torch.float32, device=device)
    plain = ours(*tensors)
    with torch.autocast(device, lower):
        with torch.autocast(device, enabled=False):
            assert torch.equal(ours(*tensors), plain)
            with pytest.raises(RuntimeError, match="must have input's dtype"):
                ours(*mixed)
            with torch.autocast(device, torch.bfloat16):
                assert ours(*tensors).dtype == torch.bfloat16
        assert ours(*tensors).dtype == lower
    assert torch.equal(ours(*tensors), plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    tensors = tensors_of(*(torch.float32,) * 3, device=device)
    with torch.autocast(device, torch.bfloat16):
        with_gradients = ours(*[t.clone().requires_grad_() for t in tensors])
        with mode():
            y = ours(*tensors)
    assert torch.equal(y, with_gradients)


@pytest.mark.gpu
def test_another_devices_autocast_changes_nothing():
    for region, device in (("cpu", "cuda"), ("cuda", "cpu")):
        tensors = tensors_of(*(torch.float32,) * 3, device=device)
        with torch.autocast(region, torch.bfloat16):
            assert torch.equal(ours(*tensors), ours(*tensors).float())
            assert ours(*tensors).dtype == eager_chain(*tensors).dtype == torch.float32


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [True, False], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,) * 3,
        (torch.float16,) * 3,
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.float64,) * 3,
    ],
    ids=lambda dtypes: "-".join(map(dtype_id, dtypes)),
)
@each_lower
def test_gradients_have_the_parameters_dtypes(lower, dtypes, outside, device):
    leaves = [t.requires_grad_() for t in tensors_of(*dtypes, device=device)]
    with torch.autocast(device, lower):
        y = ours(*leaves)
        g = torch.ones_like(y)
        if not outside:
            y.backward(g)
    if outside:
        y.backward(g)
    operands = leaves if len(set(dtypes)) == 1 else [t.to(lower) for t in leaves]
    exact = [t.detach().cpu() for t in operands]
    expected = reference.gradients(reference.torch_chain, g.cpu(), *exact, *SETTINGS)
    magnitudes = reference.gradient_magnitudes(g.cpu(), *exact, *SETTINGS)
    for leaf, operand, theirs, magnitude in zip(
        leaves, operands, expected, magnitudes, strict=True
    ):
        assert leaf.grad.dtype == leaf.dtype
        # Once to the operand's dtype; what is cast from there to a wider one is exact.
        narrow = min((operand.dtype, leaf.dtype), key=lambda d: -torch.finfo(d).eps)
        error = (leaf.grad.cpu().double() - theirs).abs()
        roundings = torch.finfo(narrow).eps * theirs.abs()
        bound = reference.error_bound(theirs, magnitude, operand.dtype, theirs.numel() * CASE.terms)
        assert (error <= bound + roundings + torch.finfo(torch.float16).tiny).all()


@each_lower
def test_one_training_step(lower, device):
    """As models are trained: forward and loss under autocast, backward outside, float32 weights."""
    results = []
    for kind in (Model, ModelNew):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), kind(4, 6, 3, 2, 1, 1, 0.5))
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 2, 2 * 3 * 9 * 7, device=device).view(2, 3, 9, 7)
        with torch.autocast(device, lower):
            loss = (model(x) - 1).square().sum()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        results.append([loss.detach(), *(p.detach() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        tolerance = 8 * torch.finfo(lower).eps
        torch.testing.assert_close(b.float(), a.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mixed", [False, True])
@each_lower
def test_checkpoint_inside(lower, mixed, device):
    """Called twice: the second recomputation finds autocast's cache of casts in another state."""
    dtypes = (lower if mixed else torch.float32, torch.float32, torch.float32)

    def gradients(wrapper):
        x, w, b = (t.requires_grad_() for t in tensors_of(*dtypes, device=device))
        with torch.autocast(device, lower):
            y = wrapper(lambda x: ours(x, w, b), x) + wrapper(lambda x: ours(x, w, b) * 2, x)
        y.float().square().sum().backward()
        return y.detach(), x.grad, w.grad, b.grad

    plain = gradients(lambda f, x: f(x))
    saved = gradients(lambda f, x: checkpoint(f, x, use_reentrant=False))
    for a, b in zip(saved, plain, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---- with the other transforms ------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False], ids=["region-inside", "region-outside"])
def test_compiled(inside, device):
    def region(*t):
        with torch.autocast(device, torch.bfloat16):
            return ours(*t)

    torch._dynamo.reset()
    mixed = (torch.bfloat16, torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in tensors_of(*mixed, device=device)]
    if inside:
        y = torch.compile(region, fullgraph=True, backend="aot_eager")(*leaves)
    else:
        with torch.autocast(device, torch.bfloat16):
            y = torch.compile(ours, fullgraph=True, backend="aot_eager")(*leaves)
    expected = region(*leaves)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    found, truth = (torch.autograd.grad(r.float().sum(), leaves) for r in (y, expected))
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_vmap_and_func(device):
    x, w, b = tensors_of(*(torch.float32,) * 3, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = torch.vmap(ours, in_dims=(0, None, None))(x.unsqueeze(1), w, b)
        assert torch.equal(y.squeeze(1), ours(x, w, b))
        gradient = torch.func.grad(lambda w: ours(x, w, b).float().sum())(w)
        tangent = torch.func.jvp(lambda x: ours(x, w, b), (x,), (x,))[1]
    assert y.dtype == tangent.dtype == torch.bfloat16
    assert gradient.dtype == torch.float32
    expected = reference.gradients(
        reference.torch_chain, torch.ones(3, 6, 1, 1), x.cpu(), w.cpu(), b.cpu(), *SETTINGS
    )
    torch.testing.assert_close(gradient.cpu().double(), expected[1], rtol=1e-5, atol=1e-5)


def test_meta(device):
    """Shape inference under autocast agrees with the run."""
    from torch._subclasses import FakeTensorMode

    tensors = tensors_of(torch.float16, torch.float32, torch.float32, device=device)
    with FakeTensorMode() as mode, torch.autocast(device, torch.bfloat16):
        y = ours(*[mode.from_tensor(t) for t in tensors])
    assert y.dtype == torch.bfloat16
    assert y.device.type == device

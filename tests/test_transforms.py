"""Derivatives of every kind and order: double backward, forward mode, torch.func.

Everything is held to PyTorch's own chain in float64, derivative by derivative, and to finite
differences. Where the chain's derivative is not zero ours must not be either: a rule that is
missing in forward mode shows as a tangent of zeros, not as an error.
"""

import itertools

import pytest
import reference
import torch
from cases import Case, dtype_id, some
from torch.autograd import forward_ad
from torch.utils import _pytree

import convt_reduce

ops = torch.ops.convt_reduce
NAMES = ("input", "weight", "bias")
SUBSETS = [s for r in (1, 2, 3) for s in itertools.combinations(NAMES, r)]
each_subset = pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)

GROUPS = Case("groups-of-two", 2, 4, (3, 3), 4, (3, 3), 2, 1, 1, groups=2)
# Only the dilation makes this output padding legal, and most taps miss the output.
ONE_INPUT = Case("one-input-dilated", 1, 2, (1, 1), 3, (3, 3), 1, 0, 1, dilation=2)
HALF_MISSES = Case("one-input-taps-miss", 2, 2, (1, 1), 3, (3, 3), 2, 1, 1, dilation=2)
UNBATCHED = Case("unbatched", None, 4, (3, 2), 2, (2, 3), (2, 1), 1, (1, 0), 2, (1, 2))
SMALL = (
    GROUPS,
    ONE_INPUT,
    HALF_MISSES,
    Case("1d", 2, 2, (4,), 4, (3,), 2, 1, 1, groups=2, multiplier=-1.5),
    UNBATCHED,
    Case("3d", 2, 2, (2, 1, 3), 2, (2, 1, 3), 2, (1, 0, 1), 1, dilation=(1, 1, 2)),
)
each_small = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)


def ours(case):
    return lambda *tensors: convt_reduce.fused_mean(*tensors, *case.settings)


def chain(case):
    return lambda *tensors: reference.torch_chain(*tensors, *case.settings)


def leaves(case, wanted=NAMES, device="cpu"):
    tensors = case.tensors(device=device)
    return [t.requires_grad_(name in wanted) for name, t in zip(NAMES, tensors, strict=True)]


def assert_same(found, expected):
    """Two results of any nesting, leaf by leaf; and the chain's is worth comparing with."""
    found, form = _pytree.tree_flatten(found)
    expected, expected_form = _pytree.tree_flatten(expected)
    assert form == expected_form
    assert any(t.count_nonzero() for t in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- finite differences -------------------------------------------------------------------------


@each_small
def test_gradgradcheck(case, device):
    assert torch.autograd.gradgradcheck(ours(case), leaves(case, device=device))


@each_subset
def test_gradgradcheck_of_each_subset(wanted, device):
    """The incoming gradient is always among what is differentiated."""
    assert torch.autograd.gradgradcheck(ours(GROUPS), leaves(GROUPS, wanted, device))


@pytest.mark.filterwarnings("error:.*performance drop")
@each_small
def test_forward_mode_and_batches_of_gradients(case, device):
    """check_batched_grad runs backward under vmap, where a missing rule would only warn."""
    assert torch.autograd.gradcheck(
        ours(case),
        leaves(case, device=device),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("case", SMALL[:2], ids=lambda case: case.id)
def test_forward_over_reverse(case, device):
    assert torch.autograd.gradgradcheck(
        ours(case), leaves(case, device=device), check_fwd_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("case", SMALL[:2], ids=lambda case: case.id)
def test_forward_mode_of_the_tap_operators(case, device):
    x = case.tensors(device=device)[0].requires_grad_()
    shape = (*case.input_shape[: -case.axes], *case.kernel)
    g = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    options = {"check_forward_ad": True, "check_batched_grad": True}

    def sums(t):
        return ops._tap_sums(t, case.kernel, *case.op_tap_settings)

    def spread(t):
        return ops._tap_spread(t, case.size, torch.float64, *case.op_tap_settings)

    assert torch.autograd.gradcheck(sums, (x,), **options)
    assert torch.autograd.gradcheck(spread, (g,), **options)


# ---- second derivatives -------------------------------------------------------------------------


@each_small
def test_second_derivatives_are_the_chains(case, device):
    """Mixed ones of input and weight are not zero, all others are."""

    def second(function):
        hessian = torch.func.hessian(lambda *t: function(*t).sum(), argnums=(0, 1, 2))
        rows = itertools.chain(*hessian(*case.tensors(device=device)))
        return dict(zip(itertools.product(NAMES, repeat=2), rows, strict=True))

    found, expected = second(ours(case)), second(chain(case))
    assert_same(found, expected)
    for pair, derivative in found.items():
        assert bool(derivative.count_nonzero()) == (set(pair) == {"input", "weight"}), pair


def test_gradient_penalty(device):
    """The usual reason for a double backward: a loss on the norm of input's gradient."""

    def penalty(function):
        x, w, b = leaves(GROUPS, device=device)
        (g,) = torch.autograd.grad(function(x, w, b).square().sum(), x, create_graph=True)
        (g.norm() - 1).square().backward()
        return x.grad, w.grad, b.grad

    assert_same(penalty(ours(GROUPS)), penalty(chain(GROUPS)))


def test_batches_of_incoming_gradients(device):
    """The older vmap, behind is_grads_batched and vectorize=True, knows fewer operators."""

    def batched(function):
        x, w, b = leaves(UNBATCHED, device=device)
        y = function(x, w, b)
        g = torch.stack([y.detach(), y.detach() + 1, -y.detach()])
        return torch.autograd.grad(y, (x, w, b), g, is_grads_batched=True)

    def forward_jacobian(function):
        return torch.autograd.functional.jacobian(
            function, UNBATCHED.tensors(device=device), vectorize=True, strategy="forward-mode"
        )

    for derivative in (batched, forward_jacobian):
        assert_same(derivative(ours(UNBATCHED)), derivative(chain(UNBATCHED)))


# ---- forward mode -------------------------------------------------------------------------------


@each_subset
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    "case",
    some("1d-small", "2d-all-unequal", "2d-unbatched", "3d-all-unequal"),
    ids=lambda case: case.id,
)
def test_dual_numbers(case, mode, wanted, device):
    """Any subset may carry a tangent, whether or not a gradient is wanted as well."""
    generator = torch.Generator().manual_seed(7)
    tensors = case.tensors(device=device)
    tangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]

    def dual(function):
        with mode(), forward_ad.dual_level():
            given = [
                forward_ad.make_dual(t, d.to(device)) if name in wanted else t
                for name, t, d in zip(NAMES, tensors, tangents, strict=True)
            ]
            return tuple(forward_ad.unpack_dual(function(*given)))

    found = dual(ours(case))
    assert found[1] is not None
    assert_same(found, dual(chain(case)))


def test_a_level_without_tangents_yields_none(device):
    tensors = GROUPS.tensors(device=device)
    with forward_ad.dual_level():
        y = ours(GROUPS)(*tensors)
        assert forward_ad.unpack_dual(y).tangent is None
    assert torch.equal(y, ours(GROUPS)(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_tangents_have_the_results_dtype(dtype, device):
    tensors = GROUPS.tensors(dtype, device)
    y, tangent = torch.func.jvp(ours(GROUPS), tensors, tuple(torch.ones_like(t) for t in tensors))
    exact = [t.double() for t in tensors]
    ones = tuple(torch.ones_like(t) for t in exact)
    expected = torch.func.jvp(chain(GROUPS), tuple(exact), ones)[1]
    assert tangent.dtype == y.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tangent.double(), expected, rtol=tolerance, atol=tolerance)


def test_tangent_and_gradient_of_one_call(device):
    """Forward mode on the input while the weight records for backward: a directional derivative
    that is trained through."""

    def trained(function):
        x, w, b = leaves(GROUPS, ("weight", "bias"), device)
        with forward_ad.dual_level():
            y = function(forward_ad.make_dual(x, x.square()), w, b)
            primal, tangent = forward_ad.unpack_dual(y)
            return torch.autograd.grad((primal * tangent).sum(), (w, b))

    assert_same(trained(ours(GROUPS)), trained(chain(GROUPS)))


# ---- torch.func ---------------------------------------------------------------------------------

func = torch.func
ALL = (0, 1, 2)


def loss(function):
    return lambda *tensors: function(*tensors).pow(3).sum()


def of_input(function, tensors):
    return lambda x: function(x, *tensors[1:])


TRANSFORMS = {
    "grad": lambda f, t: func.grad(loss(f), ALL)(*t),
    "grad_and_value": lambda f, t: func.grad_and_value(loss(f), ALL)(*t),
    "vjp": lambda f, t: func.vjp(f, *t)[1](f(*t) + 1),
    "jvp": lambda f, t: func.jvp(f, t, tuple(v.square() + 1 for v in t)),
    "jacrev": lambda f, t: func.jacrev(f, ALL)(*t),
    "jacrev chunked": lambda f, t: func.jacrev(f, ALL, chunk_size=2)(*t),
    "jacfwd": lambda f, t: func.jacfwd(f, ALL)(*t),
    "hessian": lambda f, t: func.hessian(loss(f), ALL)(*t),
    "reverse over reverse": lambda f, t: func.jacrev(func.jacrev(loss(f), ALL), ALL)(*t),
    "reverse over forward": lambda f, t: func.jacrev(func.jacfwd(loss(f), ALL), ALL)(*t),
    "forward over forward": lambda f, t: func.jacfwd(func.jacfwd(loss(f), ALL), ALL)(*t),
    "grad of grad": lambda f, t: func.grad(
        lambda x: func.grad(of_input(loss(f), t))(x).square().sum()
    )(t[0]),
    "grad of grad of grad": lambda f, t: func.grad(
        lambda w: (
            func.grad(lambda x: func.grad(lambda b: loss(f)(x, w, b))(t[2]).square().sum())(t[0])
            .square()
            .sum()
        )
    )(t[1]),
    "grad of jvp": lambda f, t: func.grad(
        lambda x: func.jvp(lambda w: f(x, w, t[2]).pow(3), (t[1],), (t[1] + 1,))[1].sum()
    )(t[0]),
    "jvp of grad": lambda f, t: func.jvp(func.grad(loss(f), ALL), t, tuple(v + 1 for v in t)),
    "jvp of jvp": lambda f, t: func.jvp(
        lambda x: func.jvp(lambda w: f(x, w, t[2]).pow(2), (t[1],), (t[1] + 1,)),
        (t[0],),
        (t[0] - 1,),
    ),
    "linearize": lambda f, t: func.linearize(f, *t)[1](*(v + 1 for v in t)),
}


@pytest.mark.parametrize("case", [GROUPS, UNBATCHED], ids=lambda case: case.id)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_torch_func(transform, case, device):
    tensors = case.tensors(device=device)
    assert_same(transform(ours(case), tensors), transform(chain(case), tensors))


def test_functional_call_of_a_module(device):
    """Gradients for a module's parameters, the way torch.func takes them."""
    from convt_reduce.nn import ConvTransposeMean2d

    layer = ConvTransposeMean2d(4, 6, 3, 2, 1, 1, groups=2, multiplier=0.5)
    layer = layer.to(device, torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64, device=device)

    def by_module(p):
        return func.functional_call(layer, p, (x,)).pow(3).sum()

    def by_chain(p):
        settings = (2, 1, 1, 2, 1, 0.5)
        return reference.torch_chain(x, p["weight"], p["bias"], *settings).pow(3).sum()

    assert_same(func.grad(by_module)(parameters), func.grad(by_chain)(parameters))
    assert all(p.grad is None for p in layer.parameters())


def test_transforms_leave_no_gradient_mode_behind(device):
    """An error inside a transform, too."""
    x, w, b = GROUPS.tensors(device=device)
    with pytest.raises(RuntimeError, match="bias must have shape"):
        func.grad(loss(ours(GROUPS)))(x, w, b[:1])
    func.grad(loss(ours(GROUPS)))(x, w, b)
    assert torch.is_grad_enabled()
    assert not ours(GROUPS)(x, w, b).requires_grad
    assert ours(GROUPS)(x, w.requires_grad_(), b).requires_grad

"""torch.vmap over any of the tensors, in one call.

Held to a Python loop over PyTorch's own chain in float64. That no rule loops is seen twice: a
missing one makes PyTorch warn of a performance drop, here an error; and the calls are counted.
"""

import itertools

import pytest
import reference
import torch
from cases import Case, dtype_id
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import convt_reduce

pytestmark = pytest.mark.filterwarnings("error:.*performance drop")

ops = torch.ops.convt_reduce
BATCH = 3

# Unequal sizes everywhere, so that an exchanged pair of dimensions cannot pass; BATCH differs from
# each of them but for C_out/groups of the first.
CASES = (
    Case("2d", 2, 4, (5, 2), 3, (3, 2), 2, 1, 1),
    Case("2d-groups", 2, 4, (5, 2), 10, (3, 2), (2, 3), 1, 1, 2, (1, 2)),
    Case("2d-groups-no-bias", 2, 4, (5, 2), 10, (3, 2), 2, 1, 1, 2, bias=False),
    Case("2d-unbatched", None, 4, (5, 2), 7, (3, 2), 2, 1, 1),
    Case("2d-unbatched-groups", None, 4, (5, 2), 10, (3, 2), 2, 1, 1, 2),
    Case("2d-depthwise-unbatched-no-bias", None, 4, (5, 2), 8, (3, 2), 2, 1, 1, 4, bias=False),
    Case("1d-groups", 2, 6, (5,), 4, (4,), 3, 1, 2, 2),
    Case("3d", 2, 2, (3, 4, 1), 5, (2, 1, 3), 2, 0, 1),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
MASKS = [m for m in itertools.product((True, False), repeat=3) if any(m)]


def mask_id(mask):
    return "-".join(n for n, m in zip(("input", "weight", "bias"), mask, strict=True) if m)


each_mask = pytest.mark.parametrize("mask", MASKS, ids=mask_id)


def ours(case):
    return lambda *tensors: convt_reduce.fused_mean(*tensors, *case.settings)


def chain(case):
    return lambda *tensors: reference.torch_chain(*tensors, *case.settings)


def batched(case, mask, dim, device="cpu", dtype=torch.float64):
    """The case's tensors, those of the mask BATCH times, and their in_dims."""
    tensors, dims = [], []
    for tensor, wanted in zip(case.tensors(dtype, device), mask, strict=True):
        wanted = wanted and tensor is not None
        if wanted:
            tensor = torch.stack([tensor, tensor.square(), 1 - tensor], dim)
        tensors.append(tensor)
        dims.append(dim if wanted else None)
    if not any(d is not None for d in dims):
        pytest.skip("nothing to batch over")
    return tensors, tuple(dims)


def looped(function, tensors, dims):
    """What vmap means."""
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)))
        for i in range(BATCH)
    ]
    return _pytree.tree_map(lambda *each: torch.stack(each), *results)


def assert_same(found, expected):
    found, expected = _pytree.tree_leaves(found), _pytree.tree_leaves(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Calls(TorchDispatchMode):
    """Counts the calls that reach this package's backends."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "convt_reduce":
            self.names.append(function._opname)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("dim", [0, 1, -1])
@each_mask
@each_case
def test_every_subset(case, mask, dim, device):
    tensors, dims = batched(case, mask, dim, device)
    with Calls() as calls:
        y = torch.vmap(ours(case), in_dims=dims)(*tensors)
    assert calls.names == ["fused_mean"]
    assert_same(y, looped(chain(case), tensors, dims))


@pytest.mark.parametrize("dim", [0, -1])
@each_mask
@each_case
def test_gradients_per_sample(case, mask, dim, device):
    """Every tensor's gradient for every batch element, in one forward and one spread."""
    tensors, dims = batched(case, mask, dim, device)
    wanted = tuple(i for i, t in enumerate(tensors) if t is not None)

    def gradients(function):
        return torch.func.grad(lambda *t: function(*t).pow(3).sum(), argnums=wanted)

    with Calls() as calls:
        found = torch.vmap(gradients(ours(case)), in_dims=dims)(*tensors)
    assert calls.names == ["_fused_mean_with_sums", "_tap_spread"]
    assert_same(found, looped(gradients(chain(case)), tensors, dims))


@each_mask
@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.id)
def test_gradients_of_a_batch(case, mask, device):
    """The other order: autograd through vmap."""
    tensors, dims = batched(case, mask, 0, device)

    def gradients(by):
        leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
        y = by(leaves)
        given = [t for t in leaves if t is not None]
        return torch.autograd.grad(y.pow(3).sum(), given)

    found = gradients(lambda leaves: torch.vmap(ours(case), in_dims=dims)(*leaves))
    assert_same(found, gradients(lambda leaves: looped(chain(case), leaves, dims)))


@each_mask
def test_forward_mode(mask, device):
    case = CASES[1]
    tensors, dims = batched(case, mask, 0, device)

    def derivative(function):
        return lambda *t: torch.func.jvp(function, t, tuple(v + 1 for v in t))

    found = torch.vmap(derivative(ours(case)), in_dims=dims)(*tensors)
    assert_same(found, looped(derivative(chain(case)), tensors, dims))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ((0, None, None), (None, 0, None)),
        ((None, 0, None), (0, None, None)),
        ((None, 0, 0), (0, 0, None)),
        ((-1, 1, None), (1, -1, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((None, None, 0), (None, 0, None)),
    ],
)
@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=lambda case: case.id)
def test_nested(case, outer, inner, device):
    tensors = list(case.tensors(device=device))
    for dims in (inner, outer):
        for i, dim in enumerate(dims):
            if dim is not None:
                t = tensors[i]
                tensors[i] = torch.stack([t, t.square(), 1 - t], dim)
    with Calls() as calls:
        y = torch.vmap(torch.vmap(ours(case), in_dims=inner), in_dims=outer)(*tensors)
    assert calls.names == ["fused_mean"]
    assert_same(y, looped(lambda *t: looped(chain(case), t, inner), tensors, outer))


def test_per_sample_gradients_of_a_layer(device):
    """The usual recipe, with functional_call: one gradient of the parameters per sample."""
    from convt_reduce.nn import ConvTransposeMean2d

    layer = ConvTransposeMean2d(4, 6, 3, 2, 1, 1, groups=2).to(device, torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(5, 4, 3, 2, dtype=torch.float64, device=device)

    def loss(p, sample):
        return torch.func.functional_call(layer, p, (sample,)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        gradients = torch.autograd.grad(layer(sample).square().sum(), list(layer.parameters()))
        for (name, _), g in zip(layer.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(found[name][i], g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    case = CASES[1]
    tensors, dims = batched(case, (True, True, True), 0, device)
    tensors = [t.requires_grad_() for t in tensors]
    with mode():
        y = torch.vmap(ours(case), in_dims=dims)(*tensors)
    assert not y.requires_grad
    assert_same(y, looped(chain(case), tensors, dims).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_dtypes(dtype, device):
    """The roundings that docs/reliability.md counts: half a unit each for a cell sum, the folded
    weight, its scale, their product and the result. For 16 bits only the last is of that size."""
    case = CASES[1]
    tensors, dims = batched(case, (True, True, True), 0, device, dtype)
    y = torch.vmap(ours(case), in_dims=dims)(*tensors)
    assert y.dtype == dtype
    exact = looped(chain(case), tensors, dims)
    scale = looped(lambda *t: reference.magnitude_of(*t, *case.settings), tensors, dims)
    units = 2.5 if dtype == torch.float32 else 1.0
    assert ((y.double() - exact).abs() <= units * torch.finfo(dtype).eps * scale).all()


def test_out_dims_chunks_and_randomness(device):
    case = CASES[1]
    tensors, dims = batched(case, (True, False, True), 0, device)
    expected = torch.vmap(ours(case), in_dims=dims)(*tensors)
    last = torch.vmap(ours(case), in_dims=dims, out_dims=-1)(*tensors)
    assert torch.equal(last, expected.movedim(0, -1))
    chunked = torch.vmap(ours(case), in_dims=dims, chunk_size=2)(*tensors)
    torch.testing.assert_close(chunked, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_tap_operators(dim, device):
    case = CASES[1]
    x = batched(case, (True, False, False), dim, device)[0][0]

    def sums(t):
        return ops._tap_sums(t, case.kernel, *case.op_tap_settings)

    def spread(t):
        return ops._tap_spread(t, case.size, torch.float64, *case.op_tap_settings)

    for function in (sums, spread):
        with Calls() as calls:
            y = torch.vmap(function, in_dims=dim)(x)
        assert len(calls.names) == 1
        assert_same(y, looped(function, [x], [dim]))
        x = y.movedim(0, dim)


def test_an_empty_batch(device):
    """vmap itself refuses a batch dimension of size 0; an N of 0 inside one is no error."""
    w = torch.randn(4, 3, 3, 3, device=device)
    y = torch.vmap(convt_reduce.fused_mean)(
        torch.randn(2, 0, 4, 5, 5, device=device), w.expand(2, *w.shape)
    )
    assert y.shape == (2, 0, 3, 1, 1)


def test_wrong_calls_are_refused_as_without_vmap(device):
    x = torch.randn(BATCH, 2, 4, 5, 5, device=device)
    w = torch.randn(3, 3, 3, 3, device=device)
    with pytest.raises(RuntimeError, match="fused_mean: weight must have input's 4 channels"):
        torch.vmap(convt_reduce.fused_mean, in_dims=(0, None))(x, w)
    w = torch.randn(4, 3, 3, 3, device=device)
    with pytest.raises(RuntimeError, match="fused_mean: groups must divide"):
        torch.vmap(lambda x: convt_reduce.fused_mean(x, w, groups=3))(x)
    with pytest.raises(RuntimeError, match="fused_mean: bias must have shape"):
        torch.vmap(lambda x: convt_reduce.fused_mean(x, w, torch.zeros(2, device=device)))(x)


@pytest.mark.parametrize(
    ("mask", "sizes", "argument"),
    [
        ((True, True, True), {"groups": 3}, "groups"),
        ((False, True, True), {"groups": 3}, "groups"),
        ((False, False, True), {"groups": 0}, "groups"),
        ((True, True, True), {"bias": (4,)}, "bias"),
        ((False, True, False), {"bias": (4,)}, "bias"),
        ((False, False, True), {"bias": (4,)}, "bias"),
        # As many numbers as BATCH biases have, or as one has, but not in their shape.
        ((False, True, True), {"bias": (1,)}, "bias"),
        ((False, True, False), {"bias": (3 * BATCH,)}, "bias"),
        ((True, True, False), {"bias": (3 * BATCH,)}, "bias"),
        ((True, True, True), {"bias": (1,)}, "bias"),
        ((True, True, False), {"weight": (3, 3, 3, 3)}, "weight"),
        ((False, True, False), {"weight": (4, 3)}, "weight"),
        ((True, True, False), {"input": (4,)}, "input"),
    ],
)
def test_wrong_calls_with_batched_weights(mask, sizes, argument):
    """The rule must not trip over them itself, nor reshape them into something legal."""
    shapes = {"input": (2, 4, 5, 5), "weight": (4, 3, 3, 3), "bias": (3,)}
    groups = sizes.get("groups", 1)
    shapes |= {name: size for name, size in sizes.items() if name in shapes}
    tensors = [torch.zeros(*((BATCH,) * m), *s) for m, s in zip(mask, shapes.values(), strict=True)]
    dims = tuple(0 if m else None for m in mask)

    def call(*t):
        return convt_reduce.fused_mean(*t, groups=groups)

    with pytest.raises(RuntimeError, match=f"fused_mean: {argument} must"):
        torch.vmap(call, in_dims=dims)(*tensors)


def test_a_batch_of_none():
    x, w = torch.ones(2, 3, 5), torch.ones(3, 4, 2)
    op = torch.ops.convt_reduce.fused_mean
    assert torch.vmap(lambda a: op(a, w))(torch.ones(0, 2, 3, 5)).shape == (0, 2, 4, 1)
    assert torch.vmap(lambda a: op(x, a))(torch.ones(0, 3, 4, 2)).shape == (0, 2, 4, 1)

"""One function per direction: computes a right call both ways and raises where they differ."""

import itertools

import reference
import torch

import convt_reduce
from fuzz.compare import (
    absolute_settings,
    demand,
    demand_same_bits,
    magnitude_of,
    oracle,
    plain,
)
from fuzz.problem import DTYPES, Problem, fill, place, tensors

ops = torch.ops.convt_reduce


def check(problem: Problem, device: str = "cpu") -> None:
    """Raises where the call's result is wrong, or whatever it raises itself."""
    _CHECKS[problem.direction](problem, device)


def incoming(problem: Problem, shape, device, seed=1):
    """A gradient or tangent of the problem's third layout."""
    generator = torch.Generator().manual_seed(problem.seed + seed)
    g = fill("normal", shape, DTYPES[problem.dtype], generator)
    return place(problem.layouts[2], g.to(device))


def value(problem: Problem, device):
    given = tensors(problem, device)
    before = [None if t is None else t.clone() for t in given]
    how = problem.seed % 4
    if how == 0:
        with torch.inference_mode():
            y = ops.fused_mean(*given, *problem.settings)
    elif how == 1:
        y = convt_reduce.fused_mean(*given, *problem.settings)
    elif how == 2:
        y, sums = ops._fused_mean_with_sums(*given, *problem.settings)
        _demand_sums(problem, given[0], sums)
    else:
        y = ops.fused_mean(*given, *problem.settings)
    if not y.is_contiguous():
        raise AssertionError(f"result is not contiguous: {y.shape} {y.stride()}")
    copies = [plain(t) for t in given]
    expected = oracle(problem)(*copies, *problem.settings)
    magnitude = magnitude_of(problem, copies)
    demand(y, expected, magnitude, problem.terms, given[0].dtype, "value")
    demand_same_bits(y, ops.fused_mean(*given, *problem.settings), "value")
    for old, new in zip(before, given, strict=True):
        if old is not None:
            demand_same_bits(old, new, "an argument after the call")


def taps(problem: Problem, device):
    x = tensors(problem, device)[0]
    sums = ops._tap_sums(x, list(problem.kernel), *problem.tap_settings)
    _demand_sums(problem, x, sums)
    accumulate = reference.accumulation_dtype(x.dtype)
    g = incoming(problem, sums.shape, device).to(accumulate)
    spread = ops._tap_spread(g, list(problem.size), x.dtype, *problem.tap_settings)
    arguments = (problem.size, *problem.tap_settings)
    expected = reference.tap_spread(plain(g), *arguments)
    magnitude = reference.tap_spread(plain(g).abs(), *arguments)
    demand(spread, expected, magnitude, problem.terms, x.dtype, "spread")


def _demand_sums(problem, x, sums):
    arguments = (problem.kernel, *problem.tap_settings)
    expected = reference.tap_sums(plain(x), *arguments)
    magnitude = reference.tap_sums(plain(x).nan_to_num(0, 0, 0).abs(), *arguments)
    accumulate = reference.accumulation_dtype(x.dtype)
    demand(sums, expected, magnitude, problem.terms, accumulate, "tap sums")


# ---- derivatives --------------------------------------------------------------------------------


def _leaves(problem, given):
    """The tensors as leaves, and which of them require a gradient; at least one does."""
    wanted = [t is not None and bool(w) for t, w in zip(given, problem.wanted, strict=True)]
    if not any(wanted):
        wanted[0] = True
    leaves = [
        None if t is None else t.detach().requires_grad_(w)
        for t, w in zip(given, wanted, strict=True)
    ]
    return leaves, wanted


def _copied(leaves):
    return [None if t is None else plain(t).requires_grad_(t.requires_grad) for t in leaves]


def _absolute(leaves):
    return [None if t is None else plain(t).abs().requires_grad_(t.requires_grad) for t in leaves]


def _chosen(leaves, wanted):
    return [t for t, w in zip(leaves, wanted, strict=True) if w]


def backward(problem: Problem, device):
    leaves, wanted = _leaves(problem, tensors(problem, device))
    y = ops.fused_mean(*leaves, *problem.settings)
    g = incoming(problem, y.shape, device)
    found = torch.autograd.grad(y, _chosen(leaves, wanted), g)

    def gradients(function, copies, grad, settings):
        return torch.autograd.grad(function(*copies, *settings), _chosen(copies, wanted), grad)

    expected = gradients(oracle(problem), _copied(leaves), plain(g), problem.settings)
    magnitudes = gradients(
        reference.closed_form, _absolute(leaves), plain(g).abs(), absolute_settings(problem)
    )
    names = itertools.compress(("input", "weight", "bias"), wanted)
    terms = problem.terms * max(1, g.numel())
    for name, ours, theirs, magnitude in zip(names, found, expected, magnitudes, strict=True):
        demand(ours, theirs, magnitude, terms, ours.dtype, f"gradient of {name}")


def double(problem: Problem, device):
    """The gradient of <gradients, v>, with respect to the tensors and the incoming gradient."""
    leaves, _ = _leaves(problem.replace(wanted=(True,) * 3), tensors(problem, device))
    y = ops.fused_mean(*leaves, *problem.settings)
    g = incoming(problem, y.shape, device).detach().requires_grad_()
    vectors = [
        incoming(problem, t.shape, device, 5 + i) for i, t in enumerate(leaves) if t is not None
    ]

    def twice(function, tensors, grad, vs, settings):
        inputs = [t for t in tensors if t is not None]
        firsts = torch.autograd.grad(function(*tensors, *settings), inputs, grad, create_graph=True)
        total = sum((f * v).sum() for f, v in zip(firsts, vs, strict=True))
        return torch.autograd.grad(total, [*inputs, grad], allow_unused=True)

    found = twice(ops.fused_mean, leaves, g, vectors, problem.settings)
    expected = twice(
        oracle(problem),
        _copied(leaves),
        plain(g).requires_grad_(),
        [plain(v) for v in vectors],
        problem.settings,
    )
    magnitudes = twice(
        reference.closed_form,
        _absolute(leaves),
        plain(g).abs().requires_grad_(),
        [plain(v).abs() for v in vectors],
        absolute_settings(problem),
    )
    # <gradients, v> itself is a sum over all of them.
    terms = problem.terms * max(1, g.numel()) * max(1, leaves[0].numel() + leaves[1].numel())
    for i, (ours, theirs, magnitude) in enumerate(zip(found, expected, magnitudes, strict=True)):
        if theirs is None or magnitude is None:
            if ours is not None and ours.abs().max() > 0:
                raise AssertionError(f"second derivative {i} must be zero or absent, got {ours}")
            continue
        ours = torch.zeros_like(theirs, dtype=g.dtype) if ours is None else ours
        # The first gradients are rounded to the dtype before they are differentiated.
        demand(ours, theirs, 2 * magnitude, terms, g.dtype, f"second derivative {i}")


def jvp(problem: Problem, device):
    # PyTorch makes no dual tensor of one whose elements share memory.
    given = [
        t.contiguous() if 0 in t.stride() else t for t in tensors(problem, device) if t is not None
    ]
    tangents = [incoming(problem, t.shape, device, 3 + i) for i, t in enumerate(given)]

    def call(function, settings):
        return lambda *ts: function(*ts, *[None] * (3 - len(ts)), *settings)

    _, found = torch.func.jvp(call(ops.fused_mean, problem.settings), tuple(given), tuple(tangents))
    copies, wide = tuple(map(plain, given)), tuple(map(plain, tangents))
    _, expected = torch.func.jvp(call(_differentiable(problem), problem.settings), copies, wide)
    absolutes = tuple(t.abs() for t in copies), tuple(t.abs() for t in wide)
    _, magnitude = torch.func.jvp(
        call(reference.closed_form, absolute_settings(problem)), *absolutes
    )
    demand(found, expected, magnitude, 2 * problem.terms, given[0].dtype, "tangent")


def _differentiable(problem):
    """The definition in forward mode, which PyTorch's convolution has for batches only."""
    return reference.closed_form if problem.batch is None else oracle(problem)


# ---- transforms ---------------------------------------------------------------------------------

COPIES = 3  # elements of the dimension that is mapped over


def _batched(problem, device):
    """The tensors with a mapped dimension where `wanted` says, and in_dims."""
    dims, stacked = [], []
    variants = [tensors(problem.replace(seed=problem.seed + i), device) for i in range(COPIES)]
    if not any(w and t is not None for w, t in zip(problem.wanted, variants[0], strict=True)):
        problem = problem.replace(wanted=(True, False, False))
    for i, batched in enumerate(problem.wanted):
        first = variants[0][i]
        if first is None or not batched:
            stacked.append(first)
            dims.append(None)
            continue
        dim = problem.seed % (first.dim() + 1)
        stacked.append(torch.stack([v[i] for v in variants], dim))
        dims.append(dim)
    return stacked, tuple(dims)


def _element(stacked, dims, i):
    return [t if d is None else t.select(d, i) for t, d in zip(stacked, dims, strict=True)]


def vmap(problem: Problem, device):
    stacked, dims = _batched(problem, device)
    present = [t is not None for t in stacked]

    def call(*ts):
        return ops.fused_mean(*ts, *[None] * (3 - len(ts)), *problem.settings)

    mapped = torch.vmap(call, tuple(d for d, p in zip(dims, present, strict=True) if p))
    found = mapped(*[t for t in stacked if t is not None])
    for i in range(COPIES):
        copies = [plain(t) for t in _element(stacked, dims, i)]
        expected = oracle(problem)(*copies, *problem.settings)
        magnitude = magnitude_of(problem, copies)
        demand(found[i], expected, magnitude, problem.terms, found.dtype, f"vmap element {i}")


def vmap_grad(problem: Problem, device):
    """Gradients of each element, as for per-sample gradients."""
    stacked, dims = _batched(problem, device)
    count = sum(t is not None for t in stacked)
    given, dims = stacked[:count], dims[:count]

    def loss(function, settings):
        return lambda *ts: function(*ts, *[None] * (3 - len(ts)), *settings).sum()

    numbers = tuple(range(count))
    found = torch.vmap(torch.func.grad(loss(ops.fused_mean, problem.settings), numbers), dims)(
        *given
    )
    terms = problem.terms * max(1, problem.batch or 1) * problem.groups * problem.group_out
    for i in range(COPIES):
        copies = [plain(t) for t in _element(given, dims, i)]
        expected = torch.func.grad(loss(oracle(problem), problem.settings), numbers)(*copies)
        absolutes = [t.abs() for t in copies]
        magnitudes = torch.func.grad(
            loss(reference.closed_form, absolute_settings(problem)), numbers
        )(*absolutes)
        for number in numbers:
            demand(
                found[number][i],
                expected[number],
                magnitudes[number],
                terms,
                found[number].dtype,
                f"gradient {number} of vmap element {i}",
            )


def compiled(problem: Problem, device):
    """Forward and backward through torch.compile, for this shape and with symbols for sizes."""
    torch._dynamo.reset()
    leaves, wanted = _leaves(problem, tensors(problem, device))
    backend = "aot_eager" if problem.seed % 8 else "inductor"

    @torch.compile(fullgraph=True, dynamic=bool(problem.seed % 2), backend=backend)
    def step(x, w, b):
        return ops.fused_mean(x, w, b, *problem.settings)

    y = step(*leaves)
    g = incoming(problem, y.shape, device)
    found = torch.autograd.grad(y, _chosen(leaves, wanted), g)
    plain_y = ops.fused_mean(*leaves, *problem.settings)
    eager = torch.autograd.grad(plain_y, _chosen(leaves, wanted), g)
    demand_same_bits(y, plain_y, "compiled value")
    for ours, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    backward(problem, device)
    value(problem, device)


_CHECKS = {
    "value": value,
    "taps": taps,
    "backward": backward,
    "double": double,
    "jvp": jvp,
    "vmap": vmap,
    "vmap_grad": vmap_grad,
    "compile": compiled,
}

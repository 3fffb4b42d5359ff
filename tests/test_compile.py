"""torch.compile: one graph, no breaks, for changing sizes and settings, forward and backward.

Graphs are counted with a backend that runs them as they are; a few are lowered by Inductor, which
asserts the strides and dtypes that the fake kernels promised.
"""

import pytest
import torch
from cases import some
from layouts import channels_last, reversed_axes, sliced

import convt_reduce

ops = torch.ops.convt_reduce


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Count:
    """A backend that counts the graphs it is given and hands them to AOTAutograd."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def compiled(function, **options):
    count = Count()
    return torch.compile(function, fullgraph=True, backend=count, **options), count


def mean(x, w, b):
    return convt_reduce.fused_mean(x, w, b, 2, 1, 1, 2, (1, 2), 0.5)


# The first sizes differ from each other and from the weight's: torch.compile takes equal numbers in
# its first call for the same symbol.
SIZES = [
    (7, 11, 13),
    (2, 5, 6),
    (3, 7, 9),
    (5, 12, 4),
    (4, 33, 17),
    (8, 6, 6),
    (2, 31, 128),
    (16, 4, 5),
]


def problem(sizes, device, gradients):
    batch, *size = sizes
    tensors = (
        torch.randn(batch, 4, *size, dtype=torch.float64, device=device),
        torch.randn(4, 3, 3, 2, dtype=torch.float64, device=device),
        torch.randn(6, dtype=torch.float64, device=device),
    )
    return [t.requires_grad_(gradients) for t in tensors]


def compare(function, by_compiler, tensors):
    """Value, and gradients where they are wanted, bit for bit: it is the same kernel."""
    expected, y = function(*tensors), by_compiler(*tensors)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    if y.requires_grad:
        g = torch.randn_like(y)
        found, truth = (torch.autograd.grad(r, tensors, g) for r in (y, expected))
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
def test_one_graph_for_all_sizes(gradients, device):
    f, count = compiled(mean, dynamic=True)
    for sizes in SIZES:
        compare(mean, f, problem(sizes, device, gradients))
    assert count.graphs == 1


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
def test_sizes_that_change_are_learnt(gradients, device):
    """Without dynamic=True the second size makes one more graph, and that one serves the rest."""
    f, count = compiled(mean)
    for sizes in SIZES:
        compare(mean, f, problem(sizes, device, gradients))
    assert count.graphs == 2


def test_marked_dynamic_does_not_specialise(device):
    """mark_dynamic raises if anything, checks included, pins the size to a number."""
    f, count = compiled(mean)
    x, w, b = problem((3, 7, 9), device, True)
    for dimension in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dimension)
    compare(mean, f, [x, w, b])
    compare(mean, f, problem((6, 20, 11), device, True))
    assert count.graphs == 1


def test_settings_may_be_symbols(device):
    """A stride or padding computed from a size stays symbolic: the schema takes SymInt."""

    def with_symbols(x, w, b):
        n = x.shape[-1]
        return convt_reduce.fused_mean(x, w, b, n, (n - 2, 1), 1, 2, 1, 0.5)

    f, count = compiled(with_symbols, dynamic=True)
    for sizes in SIZES:
        compare(with_symbols, f, problem(sizes, device, True))
    assert count.graphs == 1


@pytest.mark.parametrize("multiplier", [0.5, 2])
def test_changing_multiplier(multiplier, device):
    f, _ = compiled(lambda x, w, m: convt_reduce.fused_mean(x, w, multiplier=m))
    x, w, _ = problem((2, 5, 6), device, False)
    for m in (multiplier, -1.25, 3.0):
        assert torch.equal(f(x, w, m), convt_reduce.fused_mean(x, w, multiplier=m))


@pytest.mark.parametrize("layout", [None, channels_last, reversed_axes, sliced])
@pytest.mark.parametrize(
    "case",
    some("1d-small", "1d-one-element", "2d-all-unequal", "2d-unbatched", "2d-no-bias", "3d-small"),
    ids=lambda case: case.id,
)
def test_layouts_and_axes(case, layout, device):
    tensors = case.tensors(torch.float64, device)
    tensors = [None if t is None else t for t in tensors]
    if layout is not None:
        tensors[0] = layout(tensors[0])

    def call(*given):
        given = (*given, None)[:3]
        return ops.fused_mean(*given, *case.op_settings)

    given = [t.detach().requires_grad_() for t in tensors if t is not None]
    f, count = compiled(call)
    compare(call, f, given)
    assert count.graphs == 1


@pytest.mark.parametrize("layout", [None, channels_last])
def test_inductor(layout, device):
    """Pointwise work around the operator is fused; the operator's own strides are asserted."""

    def model(x, w, b):
        y = mean(torch.relu(x), w, b)
        return (y * 2 + 1).flatten(1)

    f = torch.compile(model, fullgraph=True, dynamic=True)
    for sizes in SIZES[:3]:
        tensors = problem(sizes, device, True)
        if layout is not None:
            tensors[0] = layout(tensors[0]).detach().requires_grad_()
        expected = model(*tensors)
        y = f(*tensors)
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        found, truth = (torch.autograd.grad(r.sum(), tensors) for r in (y, expected))
        for a, b in zip(found, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_under_no_grad_and_inference_mode(device):
    tensors = problem((3, 7, 9), device, True)
    for context in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        f, count = compiled(mean)
        with context():
            y = f(*tensors)
        assert not y.requires_grad
        assert torch.equal(y, mean(*tensors).detach())
        assert count.graphs == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stride": 0}, "stride must be at least 1 on every axis, got [0]"),
        ({"groups": 3}, "groups must divide input's 4 channels, got 3"),
        (
            {"padding": (8, 1)},
            "padding must leave an output of at least 1 on every axis, got output size -9 on "
            "spatial axis 0",
        ),
        (
            {"output_padding": 1},
            "output_padding must be smaller than stride or dilation on every axis, got "
            "output_padding 1 with stride 1 and dilation 1 on spatial axis 0",
        ),
    ],
    ids=["stride", "groups", "padding", "output_padding"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_refuse_what_eager_ones_refuse(settings, sentence, dynamic):
    x, w = torch.zeros(2, 4, 5, 6), torch.zeros(4, 3, 3, 3)
    f, _ = compiled(lambda x, w: convt_reduce.fused_mean(x, w, **settings), dynamic=dynamic)
    with pytest.raises(Exception, match="fused_mean") as caught:
        f(x, w)
    if not dynamic:  # with symbols, sizes are printed as such
        assert f"fused_mean: {sentence}" in str(caught.value)

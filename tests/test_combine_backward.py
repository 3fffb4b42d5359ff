"""_combine_backward, the kernel behind the gradients of small problems.

Element by element against float64 products written down from its definition; its strides, its fake
kernel, its refusals. test_gradient_ways.py has when it is taken.
"""

import itertools
import math

import pytest
import torch
from cases import DTYPES, dtype_id
from layouts import LAYOUTS
from test_errors import PLACES
from test_errors_of_taps import holding
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.convt_reduce
SCALE, MULTIPLIER = 0.37, -1.5

# batch (None: unbatched), C_in, C_out, groups, kernel
SHAPES = [
    (3, 4, 6, 2, (3, 2)),
    (None, 4, 6, 2, (3, 2)),
    (5, 6, 9, 3, (4,)),
    (None, 6, 9, 3, (5,)),
    (2, 4, 10, 2, (2, 3, 4)),
    (17, 5, 7, 1, (3, 3)),  # more rows than a block has, and no multiple
    (9, 3, 131, 1, (1, 5)),  # more terms than a warp takes
    (70, 2, 4, 2, (7, 7)),
    (1, 1, 1, 1, (1, 1)),
    (0, 4, 6, 2, (3, 3)),
    (300, 33, 2, 1, (1,)),
]


def tensors_of(shape, dtype, device, layout=None):
    batch, c_in, c_out, groups, kernel = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(3)
    lead = [] if batch is None else [batch]

    def random(sizes, dtype):
        return torch.randn(sizes, generator=g, dtype=torch.float64).to(dtype).to(device)

    grad = random([*lead, c_out, *[1] * len(kernel)], dtype)
    weight = random([c_in, c_out // groups, *kernel], dtype)
    if layout is not None:
        grad, weight = layout(grad), layout(weight)
    return grad, weight, random([*lead, c_in, *kernel], wide)


def oracle(shape, grad, weight, sums):
    batch, c_in, c_out, groups, kernel = shape
    n, per = 1 if batch is None else batch, c_out // groups
    g = grad.cpu().double().reshape(n, groups, per)
    taps = math.prod(kernel)
    w = weight.cpu().double().reshape(groups, c_in // groups, per, taps)
    s = sums.cpu().double().reshape(n, groups, c_in // groups, taps)
    by_tap = SCALE * torch.einsum("ngo,gcot->ngct", g, w)
    by_weight = SCALE * torch.einsum("ngo,ngct->gcot", g, s)
    return (
        by_tap.reshape(sums.shape),
        by_weight.reshape(weight.shape),
        MULTIPLIER * g.sum(0).reshape(-1),
    )


def backward(shape, grad, weight, sums, bias=True, channels_last=False):
    _, _, _, groups, kernel = shape
    return ops._combine_backward(
        grad, weight, sums, kernel, groups, SCALE, MULTIPLIER, bias, channels_last
    )


# Of the largest element: a rounding of the result, and those of up to 300 products in float32.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def assert_near(result, expected, dtype):
    assert result.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0.0
    difference = (result.cpu().double() - expected).abs()
    assert (difference <= TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_its_definition(shape, dtype, channels_last, device):
    grad, weight, sums = tensors_of(shape, dtype, device)
    results = backward(shape, grad, weight, sums, channels_last=channels_last)
    assert [r.dtype for r in results] == [sums.dtype, dtype, dtype]
    for result, expected, of in zip(
        results, oracle(shape, grad, weight, sums), (sums.dtype, dtype, dtype), strict=True
    ):
        assert_near(result, expected, of)
    assert results[0].is_contiguous()
    assert results[2].is_contiguous()
    last = results[1].movedim(1, -1)
    assert (last if channels_last else results[1]).is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_any_strides(shape, layout, device):
    grad, weight, sums = tensors_of(shape, torch.float32, device, layout)
    expected = oracle(shape, grad, weight, sums)
    for result, right in zip(backward(shape, grad, weight, sums), expected, strict=True):
        assert_near(result, right, torch.float32)


@pytest.mark.parametrize("rows", ["all one", "rows of one", "transposed"])
def test_gradients_as_autograd_hands_them_over(rows, device):
    """What sum() gives has stride 0; what a linear layer gives may lie the other way round."""
    shape = (5, 4, 6, 2, (3, 2))
    _, weight, sums = tensors_of(shape, torch.float32, device)
    grad = {
        "all one": torch.tensor(2.0).expand(5, 6, 1, 1),
        "rows of one": torch.randn(6, 1, 1).expand(5, 6, 1, 1),
        "transposed": torch.randn(6, 5).t()[:, :, None, None],
    }[rows].to(device)
    expected = oracle(shape, grad, weight, sums)
    for result, right in zip(backward(shape, grad, weight, sums), expected, strict=True):
        assert_near(result, right, torch.float32)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_what_is_wanted(wanted, device):
    shape = SHAPES[0]
    grad, weight, sums = tensors_of(shape, torch.float32, device)
    everything = backward(shape, grad, weight, sums)
    taps, by_weight, bias = wanted
    results = backward(shape, grad, weight if taps else None, sums if by_weight else None, bias)
    for result, full, is_wanted in zip(results, everything, wanted, strict=True):
        if is_wanted:
            assert torch.equal(result, full)
        else:
            assert result.numel() == 0


def test_the_scale_meets_the_gradient_first(device):
    """Where grad * weight alone would pass the largest float32, and scale * grad * weight not."""
    grad = torch.full((1, 1, 1), 1e38, device=device)
    weight = torch.full((1, 1, 1), 1e3, device=device)
    taps, by_weight, _ = ops._combine_backward(
        grad, weight, weight.clone(), [1], 1, 1e-3, 1.0, False, False
    )
    assert taps.item() == pytest.approx(1e38, rel=1e-6)
    assert by_weight.item() == pytest.approx(1e38, rel=1e-6)


def test_the_same_bits_every_time(device):
    shape = (37, 6, 40, 2, (3, 5))
    tensors = tensors_of(shape, torch.float32, device)
    first = backward(shape, *tensors)
    for _ in range(5):
        assert all(map(torch.equal, backward(shape, *tensors), first))


# ---- fake tensors and opcheck -------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_fake_results_look_like_real_ones(shape, channels_last, device):
    tensors = tensors_of(shape, torch.float16, device)
    for chosen in itertools.product([True, False], repeat=2):
        some_of = [
            tensors[0],
            *(t if c else None for t, c in zip(tensors[1:], chosen, strict=True)),
        ]
        mode = FakeTensorMode()
        fakes = [None if t is None else mode.from_tensor(t) for t in some_of]
        real = backward(shape, *some_of, channels_last=channels_last)
        with mode:
            fake = backward(shape, *fakes, channels_last=channels_last)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_opcheck(shape, device):
    _, _, _, groups, kernel = shape
    tensors = tensors_of(shape, torch.float32, device)
    rest = (list(kernel), groups, SCALE, MULTIPLIER, True)
    for channels_last in (False, True):
        torch.library.opcheck(ops._combine_backward.default, (*tensors, *rest, channels_last))


# ---- wrong calls --------------------------------------------------------------------------------

WRONG = [
    ({"grad": None}, "grad", "None"),
    ({"grad": torch.zeros(2, 6, 1, 1, dtype=torch.int32)}, "grad", "int32"),
    ({"grad": torch.zeros(2, 6, 1, 2)}, "grad", "[2, 6, 1, 2]"),
    ({"grad": torch.zeros(2, 0, 1, 1)}, "grad", "[2, 0, 1, 1]"),
    ({"grad": torch.zeros(6)}, "grad", "[6]"),
    ({"kernel_size": []}, "kernel_size", "0 entries"),
    ({"kernel_size": [3, 3, 3, 3]}, "kernel_size", "4 entries"),
    ({"kernel_size": [3, 0]}, "kernel_size", "[3, 0]"),
    ({"kernel_size": [3, 3]}, "weight", "[4, 3, 3, 2]"),
    ({"groups": 0}, "groups", "0"),
    ({"groups": 4}, "groups", "4"),
    ({"groups": 3}, "weight", "[4, 3, 3, 2]"),
    ({"weight": torch.zeros(())}, "weight", "[]"),
    ({"weight": torch.zeros(0, 3, 3, 2)}, "weight", "[0, 3, 3, 2]"),
    ({"weight": torch.zeros(3, 3, 3, 2), "tap_sums": None}, "weight", "[3, 3, 3, 2]"),
    ({"weight": torch.zeros(4, 3, 3, 2, dtype=torch.float64)}, "weight", "float64"),
    ({"tap_sums": torch.zeros(2, 4, 3, 2, dtype=torch.float64)}, "tap_sums", "float64"),
    ({"tap_sums": torch.zeros(3, 4, 3, 2)}, "tap_sums", "[3, 4, 3, 2]"),
    ({"tap_sums": torch.zeros(4, 3, 2)}, "tap_sums", "[4, 3, 2]"),
    ({"tap_sums": torch.zeros(2), "weight": None}, "tap_sums", "[2]"),
    ({"tap_sums": torch.zeros(2, 4, 2, 3).transpose(2, 3)}, "tap_sums", "strides"),
]


def wrong_call(change, device):
    arguments = {
        "grad": torch.zeros(2, 6, 1, 1),
        "weight": torch.zeros(4, 3, 3, 2),
        "tap_sums": torch.zeros(2, 4, 3, 2),
        "kernel_size": [3, 2],
        "groups": 2,
    } | change
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
    return ops._combine_backward(*arguments.values(), 1.0, 1.0, True, False)


def sentence(change, place):
    with holding(place) as device, pytest.raises(RuntimeError) as caught:
        wrong_call(change, device)
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("change", "argument", "came"), WRONG, ids=range(len(WRONG)))
def test_wrong_calls(change, argument, came, place):
    text = sentence(change, place)
    assert text.startswith(f"_combine_backward: {argument}")
    assert came in text
    assert "\n" not in text
    assert text == sentence(change, "cpu")


@pytest.mark.parametrize("place", PLACES)
def test_the_call_is_right_but_for_the_fault(place):
    with holding(place) as device:
        taps, weight, bias = wrong_call({}, device)
    assert (taps.shape, weight.shape, bias.shape) == ((2, 4, 3, 2), (4, 3, 3, 2), (6,))

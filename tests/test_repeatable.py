"""Same inputs, same bits: run after run, whatever the threads, the batch around or the memory.

Results are compared bit for bit, gradients included. Inputs are unchanged by a call, and nothing
depends on what memory held before.
"""

import pytest
import torch
from cases import BY_ID, DTYPES, VARIED, dtype_id, some

ops = torch.ops.convt_reduce
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
# Large enough to be split among threads and blocks, in every way a split can go.
LARGE = some(
    "1d-n4099",
    "2d-one-large-plane",
    "2d-benchmark-small",
    "2d-many-in",
    "2d-many-out",
    "2d-batch-67",
    "2d-tiny-planes",
    "3d-w129",
)
each_large_case = pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)


def everything(case, tensors):
    """Value and gradients, in one list."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors if t is not None]
    y = ops.fused_mean(*(*leaves, None)[:3], *case.op_settings)
    g = torch.randn(y.shape, generator=case.generator(), dtype=torch.float64).to(y)
    with torch.no_grad():
        plain = ops.fused_mean(*tensors, *case.op_settings)
    return [plain, y.detach(), *torch.autograd.grad(y, leaves, g)]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@each_dtype
@each_large_case
def test_same_bits_on_every_run(case, dtype, device):
    tensors = case.tensors(dtype, device)
    first = everything(case, tensors)
    assert all(same(everything(case, tensors), first) for _ in range(5))


@each_dtype
@each_large_case
def test_with_and_without_gradients(case, dtype, device):
    """Not so for large batches of small planes with few output channels: see README's Limits."""
    plain, with_gradients, *_ = everything(case, case.tensors(dtype, device))
    assert torch.equal(plain, with_gradients)


@each_dtype
@each_large_case
def test_same_bits_for_any_number_of_threads(case, dtype):
    tensors = case.tensors(dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y, sums = ops._fused_mean_with_sums(*tensors, *case.op_settings)
            spread = ops._tap_spread(sums, case.size, sums.dtype, *case.op_tap_settings)
            results.append([y, sums, spread])
    finally:
        torch.set_num_threads(threads)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@each_dtype
@pytest.mark.parametrize(
    "case",
    some("1d-n4099", "2d-benchmark-small", "2d-groups-of-many", "2d-w33", "3d-w129"),
    ids=lambda case: case.id,
)
def test_a_sample_alone_and_inside_a_batch(case, dtype, device):
    """For batches of up to 128: larger ones go through a matrix product on the GPU."""
    x, w, b = case.tensors(dtype, device)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    for n in {0, 1, case.batch - 1}:
        alone = ops.fused_mean(x[n : n + 1].clone(), w, b, *case.op_settings)
        assert torch.equal(alone[0], y[n])
        unbatched = ops.fused_mean(x[n].clone(), w, b, *case.op_settings)
        assert torch.equal(unbatched, y[n])


@each_dtype
@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id)
def test_inputs_are_unchanged(case, dtype, device):
    tensors = case.tensors(dtype, device)
    given = [t for t in tensors if t is not None]
    copies = [t.clone() for t in given]
    everything(case, tensors)
    assert same(given, copies)
    x = tensors[0]
    sums = ops._tap_sums(x, case.kernel, *case.op_tap_settings)
    copy = sums.clone()
    ops._tap_spread(sums, case.size, dtype, *case.op_tap_settings)
    assert torch.equal(sums, copy)
    assert same(given, copies)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [*VARIED, BY_ID["2d-stride-over-kernel"], BY_ID["2d-taps-that-miss"], BY_ID["3d-cropped"]],
    ids=lambda case: case.id,
)
def test_nothing_depends_on_what_memory_held(case, dtype, device):
    """Before each call the allocator is left with freed blocks full of one value."""
    tensors = case.tensors(dtype, device)
    results = []
    for value in (0.0, 1e3, float("nan")):
        sizes = [2**k for k in range(4, 16)] * 2
        poison = [torch.full((size,), value, device=device) for size in sizes]
        del poison
        results.append(everything(case, tensors))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert all(torch.isfinite(t).all() for t in results[2])


def test_right_at_the_fiftieth_call(device):
    case = BY_ID["2d-all-unequal"]
    tensors = case.tensors(torch.float32, device)
    first = everything(case, tensors)
    for call in range(50):
        x = torch.randn(1 + call % 5, 3, 4 + call % 7, 5, device=device)
        ops.fused_mean(x, torch.ones(3, 2, 2, 1 + call % 4, device=device))
    assert same(everything(case, tensors), first)


def test_changes_in_place_are_seen(device):
    """Nothing of one call is kept for the next."""
    case = BY_ID["2d-all-unequal"]
    x, w, b = case.tensors(torch.float64, device)
    for t in (x, w, b):
        ops.fused_mean(x, w, b, *case.op_settings)
        t.mul_(-2).add_(1)
        fresh = [t.clone() for t in (x, w, b)]
        assert torch.equal(
            ops.fused_mean(x, w, b, *case.op_settings), ops.fused_mean(*fresh, *case.op_settings)
        )


def test_under_the_deterministic_flag(device):
    """Nothing is refused, and bits repeat; gradients may take another way than without the flag."""
    case = BY_ID["2d-groups-of-many"]
    tensors = case.tensors(torch.float32, device)
    free = everything(case, tensors)
    torch.use_deterministic_algorithms(True)
    try:
        first = everything(case, tensors)
        assert same(everything(case, tensors), first)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first, free)


@each_dtype
def test_a_sample_of_a_channel_slice(dtype, device):
    """Batch elements that are not adjacent in memory: alone, in their batch and unbatched."""
    base = torch.randn(4, 6, 7, 7, device=device).to(dtype)
    x, w = base[:, 1:4], torch.randn(3, 5, 3, 3, device=device).to(dtype)
    settings = (None, [2], [1], [1])
    y = ops.fused_mean(x, w, *settings)
    assert torch.equal(ops.fused_mean(x.contiguous(), w, *settings), y)
    for n in range(4):
        assert torch.equal(ops.fused_mean(x[n : n + 1], w, *settings), y[n : n + 1])
        assert torch.equal(ops.fused_mean(x[n], w, *settings), y[n])


@pytest.mark.parametrize("batch", [1, 65, 128])
def test_large_weights_and_a_batch(batch, device):
    """Weights so large that they are folded once for all batch elements, however few."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(batch, 512, 2, 2, generator=g).to(device)
    w = torch.randn(512, 2048, 2, 2, generator=g).to(device)
    y = ops.fused_mean(x, w, None, [1], [0], [0])
    exact = torch.einsum("nc,co->no", x.double().sum((2, 3)), w.double().sum((2, 3))) / 9
    scale = (
        torch.einsum("nc,co->no", x.double().abs().sum((2, 3)), w.double().abs().sum((2, 3))) / 9
    )
    assert (
        (y.double()[..., 0, 0] - exact).abs() <= 4 * torch.finfo(torch.float32).eps * scale
    ).all()
    for n in {0, batch // 2, batch - 1}:
        assert torch.equal(ops.fused_mean(x[n : n + 1], w, None, [1], [0], [0])[0], y[n])


def test_large_weights_and_no_batch(device):
    x = torch.zeros(0, 512, 8, 8, device=device)
    w = torch.zeros(512, 512, 3, 3, device=device)
    assert ops.fused_mean(x, w, None, [2], [1], [1]).shape == (0, 512, 1, 1)

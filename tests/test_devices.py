"""Several GPUs in one process: a call belongs to its tensors' GPU, whichever one is current.

The GPUs stand in a ring, however many there are, and each is used while its neighbour is current.
The first call of a process is test_devices_first.py's business, threads and streams are
test_devices_threads.py's, several processes test_distributed.py's.
"""

import contextlib
import copy

import pytest
import reference
import torch
from cases import DTYPES, dtype_id, some
from fusing import Chain, run
from test_cuda_limits import KERNELS
from torch import nn

import convt_reduce.nn

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.multi_gpu

COUNT = max(2, torch.cuda.device_count())  # where there are fewer, the tests say so and skip
DEVICES = [torch.device("cuda", index) for index in range(COUNT)]
each_pair = pytest.mark.parametrize(
    ("current", "other"),
    [(DEVICES[index - 1], DEVICES[index]) for index in range(COUNT)],
    ids=[f"cuda{index}-while-cuda{(index - 1) % COUNT}" for index in range(COUNT)],
)
# The three forms of stats, bands in a table, combine for large batches, all numbers of axes.
CASES = (
    *some("1d-small", "1d-many-bands", "2d-all-unequal", "2d-many-cells-k7-s2", "2d-batch-67"),
    *some("2d-benchmark-plane", "2d-unbatched", "2d-groups-of-many", "3d-all-unequal"),
    *(case for case in KERNELS if case.id in ("1d-2101-bands", "2d-k111")),
)


# ---- what the tests share -----------------------------------------------------------------------


class Oracle:
    """The operators in plain torch, under the names and with the arguments of the real ones."""

    fused_mean = staticmethod(reference.closed_form)
    _tap_sums = staticmethod(reference.tap_sums)

    @staticmethod
    def _tap_spread(g, size, dtype, *settings):
        return reference.tap_spread(g, size, *settings)

    @staticmethod
    def _fused_mean_with_sums(x, w, b, stride, padding, extra, groups, dilation, multiplier):
        settings = (stride, padding, extra, groups, dilation, multiplier)
        sums = reference.tap_sums(x, w.shape[2:], stride, padding, extra, dilation)
        return reference.closed_form(x, w, b, *settings), sums


def everything(ops, case, device, dtype=torch.float64):
    """All four operators on one GPU, and the first and second derivatives of fused_mean."""
    x, w, b = (t.requires_grad_() for t in case.tensors(dtype, device))
    with torch.no_grad():
        value = ops.fused_mean(x, w, b, *case.op_settings)
        pair = ops._fused_mean_with_sums(x, w, b, *case.op_settings)
        sums = ops._tap_sums(x, case.kernel, *case.op_tap_settings)
        spread = ops._tap_spread(sums, case.size, dtype, *case.op_tap_settings)
    y = ops.fused_mean(x, w, b, *case.op_settings)
    g = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(device, dtype)
    g.requires_grad_()
    first = torch.autograd.grad(y, (x, w, b), g, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), (x, w, g))
    return [t.detach() for t in (value, *pair, sums, spread, y, *first, *second)]


def allocations(device):
    """How often memory of a GPU was ever asked for, of torch and of the driver."""
    stats = torch.cuda.memory_stats(device)
    return [stats.get(f"{what}.all.allocated", 0) for what in ("allocation", "segment")]


@contextlib.contextmanager
def left_alone(current):
    """Makes a GPU the current one; what runs inside must take no memory of it and leave it so."""
    with torch.cuda.device(current):
        before = allocations(current)
        yield
        assert torch.cuda.current_device() == current.index
        assert allocations(current) == before


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-11, atol=1e-11 * scale)


# ---- eager calls --------------------------------------------------------------------------------


@each_pair
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_operator_and_derivative(case, current, other):
    before = allocations(other)
    with left_alone(current):
        found = everything(ops, case, other)
    assert allocations(other)[0] > before[0], "and so the count is one"
    assert all(t.device == other for t in found)
    assert_close(found, everything(Oracle, case, "cpu"))


@each_pair
def test_transforms(current, other):
    """Gradients for each sample, and a derivative along a direction."""
    case = some("2d-all-unequal")[0]

    def results(fused_mean, device):
        def loss(x, w, b):
            return fused_mean(x, w, b, *case.op_settings).square().sum()

        x, w, b = case.tensors(torch.float64, device)
        gradient = torch.func.grad(loss, (0, 1, 2))
        per_sample = torch.func.vmap(gradient, (0, None, None))(x.unsqueeze(1), w, b)
        _, tangent = torch.func.jvp(loss, (x, w, b), (x.cos(), w.cos(), b.cos()))
        return [*per_sample, tangent]

    with left_alone(current):
        found = results(ops.fused_mean, other)
    assert_close(found, results(reference.closed_form, "cpu"))


@each_pair
def test_kernels_run_on_the_tensors_gpu(current, other):
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    case = CASES[0]
    everything(ops, case, other)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        with left_alone(current):
            everything(ops, case, other)
        torch.cuda.synchronize(other)
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    places = {(event.device_index, event.name) for event in events}
    ours = [name for _, name in places if "convt_reduce" in name]
    assert len(ours) >= 3, "stats, combine and spread at least were recorded"
    assert {index for index, _ in places} == {other.index}, places


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_gpu_gives_the_same_bits(case, dtype):
    """Also of what is known about each GPU and remembered: a first call and one after all others.

    Matrix products of the derivatives are the operator's own here; cuBLAS promises no such thing.
    """
    if len({torch.cuda.get_device_name(device) for device in DEVICES}) > 1:
        pytest.skip("the GPUs are not alike")
    torch.use_deterministic_algorithms(True)
    try:
        results = [everything(ops, case, device, dtype) for device in (*DEVICES, *DEVICES)]
    finally:
        torch.use_deterministic_algorithms(False)
    for found in results[1:]:
        for ours, first in zip(found, results[0], strict=True):
            # In half precision second derivatives may overflow, and NaN does not equal itself.
            assert torch.equal(ours.cpu().nan_to_num(), first.cpu().nan_to_num())


@each_pair
def test_a_failed_call_leaves_the_current_device(current, other):
    """Here the fault, no memory, is found after the tensors' GPU was made current."""
    g = torch.ones(1, 1, 3, device=other)
    with left_alone(current):
        with pytest.raises(RuntimeError):
            ops._tap_spread(g, [2**45], torch.float32)
        spread = ops._tap_spread(g, [2], torch.float32)
    assert spread.tolist() == [[[3.0, 3.0]]]


# ---- tensors that do not belong together --------------------------------------------------------


@each_pair
@pytest.mark.parametrize("mode", ["plain", "inference_mode", "requires_grad"])
@pytest.mark.parametrize("elsewhere", ["weight", "bias", "both"])
def test_mixed_gpus(elsewhere, mode, current, other):
    """The check is made whichever of the GPUs is current."""
    for here, there in ((current, other), (other, current)):
        named = {
            name: torch.zeros(shape, device=there if elsewhere in (name, "both") else here)
            for name, shape in (("weight", (4, 3, 3, 3)), ("bias", (3,)))
        }
        named["input"] = torch.zeros(2, 4, 5, 6, device=here)
        for t in named.values():
            t.requires_grad_(mode == "requires_grad")
        with (
            left_alone(current),
            torch.inference_mode(mode == "inference_mode"),
            pytest.raises(RuntimeError) as caught,
        ):
            ops.fused_mean(**named)
        wrong = "weight" if elsewhere == "both" else elsewhere
        sentence = f"{wrong} must be on input's device {here}, got {there}"
        assert str(caught.value) == f"fused_mean: {sentence}"


@each_pair
def test_a_gradient_from_another_gpu(current, other):
    """PyTorch's own check; nothing of ours may run before it."""
    x = torch.zeros(2, 4, 5, 6, device=other, requires_grad=True)
    y = ops.fused_mean(x, torch.zeros(4, 3, 3, 3, device=other))
    g = torch.zeros(y.shape, device=current)
    with left_alone(current), pytest.raises(RuntimeError):
        y.backward(g)
    assert x.grad is None


# ---- models -------------------------------------------------------------------------------------


def model_on(device):
    torch.manual_seed(3)
    layer = convt_reduce.nn.ConvTransposeMean2d(4, 6, (3, 2), stride=2, padding=1, groups=2)
    return (
        nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.Linear(6, 2)).double().to(device)
    )


def batch_on(device):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(5, 3, 7, 6, generator=generator, dtype=torch.float64).to(device)


def results_of(model, x):
    """The output and all gradients."""
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


@each_pair
def test_a_model_spread_over_gpus(current, other):
    """Its backward goes from GPU to GPU, on a thread of each."""
    model, expected = model_on(current), results_of(model_on("cpu"), batch_on("cpu"))
    first, rest = model[:1], model[1:].to(other)
    x = batch_on(current).requires_grad_()
    with torch.cuda.device(current):
        y = rest(first(x).to(other))
        grads = torch.autograd.grad(y.square().sum(), (x, *model.parameters()))
        assert torch.cuda.current_device() == current.index
    assert_close([y.detach(), *grads], expected)
    assert [t.device for t in grads] == [current] * 3 + [other] * 4


def test_data_parallel():
    """Replicas on all GPUs, each called by a thread of its own."""
    model = model_on(DEVICES[0])
    parallel = nn.DataParallel(model, DEVICES)
    x = batch_on(DEVICES[0]).repeat(COUNT, 1, 1, 1)
    assert_close(results_of(parallel, x), results_of(model, x))


@each_pair
def test_fused_model(current, other):
    torch.manual_seed(6)
    original = Chain(lambda module, y: (y * module.scale).mean((2, 3))).double().to(other)
    fused = convt_reduce.fuse(copy.deepcopy(original), cost_rule=False)
    x = torch.randn(4, 2, 4, 5, dtype=torch.float64).to(other).requires_grad_()
    with left_alone(current):
        y, record = run(fused, x)
        grads = torch.autograd.grad(y.sum(), (x, fused.conv.weight, fused.scale))
    assert record.fused == 1
    assert record.convolutions == 0
    want = original(x)
    leaves = (x, original.conv.weight, original.scale)
    assert_close([y.detach(), *grads], [want.detach(), *torch.autograd.grad(want.sum(), leaves)])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_model(mode):
    """One compiled function for the same model on each GPU in turn, another one being current."""
    torch._dynamo.reset()

    @torch.compile(mode=mode)
    def compiled(model, x):
        return model(x)

    try:
        for index, device in enumerate(DEVICES):
            model, x = model_on(device), batch_on(device)
            current = DEVICES[index - 1]
            for step in range(3):  # the first compiles, and the second may record a graph
                torch.compiler.cudagraph_mark_step_begin()
                with left_alone(current) if step == 2 else torch.cuda.device(current):
                    leaf = x.detach().requires_grad_()
                    y = compiled(model, leaf)
                    leaves = (leaf, *model.parameters())
                    grads = torch.autograd.grad(y.square().sum(), leaves)
                    found = [t.clone() for t in (y.detach(), *grads)]
                    assert torch.cuda.current_device() == current.index
            assert all(t.device == device for t in found)
            assert_close(found, results_of(model, x))
    finally:
        torch._dynamo.reset()

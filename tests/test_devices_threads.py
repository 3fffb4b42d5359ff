"""Several GPUs at once: streams of a GPU that is not current, graphs, and a thread for each GPU."""

import threading

import pytest
import torch
from test_cuda import LONG, SETTINGS
from test_devices import DEVICES, each_pair, left_alone

ops = torch.ops.convt_reduce
pytestmark = pytest.mark.multi_gpu


def tensors_on(device, seed=5):
    """input, weight, bias and the gradient of the result."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((3, 64, 40, 41), (64, 128, 3, 3), (128,), (3, 128, 1, 1))
    return [torch.randn(shape, generator=g).to(device) for shape in shapes]


def step(x, w, b, g):
    """A value without gradients, one with, and the gradients, on the current streams."""
    with torch.no_grad():
        value = ops.fused_mean(x, w, b, *SETTINGS)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y = ops.fused_mean(*leaves, *SETTINGS)
    return [value, y.detach(), *torch.autograd.grad(y, leaves, g)]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


# ---- streams ------------------------------------------------------------------------------------


@each_pair
def test_work_goes_to_the_stream_of_the_tensors_gpu(current, other):
    """On any other stream, that of the current GPU for one, x would be read before it is filled."""
    x, w, b, g = tensors_on(other)
    filled = x.clone()
    expected = step(x, w, b, g)
    x.fill_(1.0)
    torch.cuda.synchronize(other)
    side = torch.cuda.Stream(other)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(filled)
        with left_alone(current):
            found = step(x, w, b, g)
            assert torch.cuda.current_stream(other) == side
        found = [t.clone() for t in found]
    side.synchronize()
    assert_equal(found, expected)


@each_pair
def test_a_busy_current_gpu_holds_nothing_up(current, other):
    """The call is over while the current GPU still sleeps: nothing of it is queued there."""
    given = tensors_on(other)
    expected = step(*given)  # and with it, whatever is done once
    step(*given)  # leaves memory behind: to get some from the driver might wait
    torch.cuda.synchronize(other)
    with torch.cuda.device(current):
        torch.cuda.synchronize(current)
        torch.cuda._sleep(5 * LONG)
        woken = torch.cuda.Event()
        woken.record()
        found = step(*given)
        torch.cuda.current_stream(other).synchronize()
        asleep = not woken.query()
        torch.cuda.synchronize(current)
    assert asleep
    assert_equal(found, expected)


@each_pair
def test_capture(current, other):
    """Inside the capture another GPU is the current one, and again at each replay."""
    given = tensors_on(other)
    step(*given)  # cuBLAS, which the backward uses through torch, must not start inside a capture
    torch.cuda.synchronize(current)
    torch.cuda.synchronize(other)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(other)  # torch's own for captures is on the GPU that had the first
    with torch.cuda.graph(graph, stream=stream), left_alone(current):
        captured = step(*given)
    for scale in (1.0, -2.0, 0.5):
        for t in given:
            t.mul_(scale)
        with left_alone(current):
            graph.replay()
        replayed = [t.clone() for t in captured]
        expected = step(*given)
        assert_equal(replayed[:2], expected[:2])
        for ours, theirs in zip(replayed[2:], expected[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- threads ------------------------------------------------------------------------------------


def in_threads(work, arguments):
    """Calls work with each tuple of arguments, each in a thread, and raises what they raise."""
    errors = []
    barrier = threading.Barrier(len(arguments))

    def body(*given):
        try:
            barrier.wait(timeout=60)
            work(*given)
        except BaseException as error:  # a failed assert must reach the test
            errors.append(error)

    threads = [threading.Thread(target=body, args=given, daemon=True) for given in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error


@pytest.mark.parametrize("current", ["own", "first", "next"])
@pytest.mark.parametrize("streams", [False, True], ids=["default-stream", "own-stream"])
def test_a_thread_for_each_gpu(streams, current):
    """Two for each, in fact, whatever GPU is current in them: same bits as one thread gives."""
    peers = []
    for index, device in enumerate(DEVICES):
        following = DEVICES[(index + 1) % len(DEVICES)]
        chosen = {"own": device, "first": DEVICES[0], "next": following}[current]
        for seed in (5, 6):
            given = tensors_on(device, seed)
            peers.append((chosen, given, step(*given)))
    for device in DEVICES:
        torch.cuda.synchronize(device)

    def work(chosen, given, expected):
        device = given[0].device
        torch.cuda.set_device(chosen)
        stream = torch.cuda.Stream(device) if streams else torch.cuda.default_stream(device)
        with torch.cuda.stream(stream), torch.cuda.device(chosen):
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(100):
                # Counted on the GPU: waiting for an answer at each turn would keep the peers apart.
                for ours, theirs in zip(step(*given), expected, strict=True):
                    wrong += (ours != theirs).sum()
        assert torch.cuda.current_device() == chosen.index
        stream.synchronize()
        assert wrong.item() == 0

    in_threads(work, peers)


@each_pair
def test_backward_from_another_thread(current, other):
    """The thread that asks for gradients has never used the GPU that they are on."""
    x, w, b, g = tensors_on(other)
    expected = step(x, w, b, g)[2:]
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = ops.fused_mean(*leaves, *SETTINGS)
    torch.cuda.synchronize(other)

    def work():
        with left_alone(current):
            y.backward(g)
        torch.cuda.synchronize(other)

    in_threads(work, [()])
    assert_equal([t.grad for t in leaves], expected)
    assert [t.grad.stride() for t in leaves] == [t.stride() for t in leaves]

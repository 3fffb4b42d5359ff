"""The first call of a process, for tensors on cuda:1: cuda:0, the current GPU, is not touched.

Not even a context is made there, without which nothing can be allocated or launched on it. Each
step has a process of its own, since what is done once may be done at any of them.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi_gpu

BEFORE = """
import torch, convt_reduce
ops = torch.ops.convt_reduce
far = torch.device("cuda", 1)
settings = [2], [1], [1]

def has_context():
    return torch._C._cuda_hasPrimaryContext(0)

def given(device):
    g = torch.Generator().manual_seed(1)
    shapes = (2, 3, 5, 6), (3, 4, 3, 3), (4,)
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [t.to(device) for t in tensors]

def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device == far, ours.device
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)

assert not torch.cuda.is_initialized()
tensors = given(far)
assert torch.cuda.current_device() == 0
assert not has_context(), "torch itself used cuda:0 to make the tensors"
"""

AFTER = """
torch.cuda.synchronize(far)
assert torch.cuda.current_device() == 0
assert has_context() == allowed, "cuda:0 was used"
stats = torch.cuda.memory_stats(0)
for key in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.peak"):
    assert stats.get(key, 0) == 0, (key, stats[key])
assert torch.cuda.memory_stats(far)["allocation.all.allocated"] > 0
"""

INFERENCE = """
allowed = False
def call(x, w, b):
    return [ops.fused_mean(x, w, b, *settings)]
with torch.inference_mode():
    compare(call(*tensors), call(*given("cpu")))
"""

OPERATORS = """
allowed = False
def call(x, w, b):
    y, sums = ops._fused_mean_with_sums(x, w, b, *settings)
    again = ops._tap_sums(x, (3, 3), *settings)
    return [y, sums, again, ops._tap_spread(sums, (5, 6), torch.float64, *settings)]
compare(call(*tensors), call(*given("cpu")))
"""

# What autograd itself and cuBLAS do to cuda:0 is not ours; we may add nothing to it.
DERIVATIVES = """
a = torch.ones(2, 3, 3, device=far, requires_grad=True)
torch.bmm(a, a).sum().backward()
allowed = has_context()
def call(x, w, b):
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = ops.fused_mean(*leaves, *settings)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
    return [t.detach() for t in (y, *first, *second)]
compare(call(*tensors), call(*given("cpu")))
print("a context on cuda:0 before the first call:", allowed)
"""

# What torch.cuda.graph itself does to cuda:0 is not ours either.
CAPTURE = """
x, w, b = tensors
plain = torch.cuda.CUDAGraph()
with torch.cuda.device(far), torch.cuda.graph(plain, stream=torch.cuda.Stream(far)):
    x + 1
plain.replay()
allowed = has_context()
graph = torch.cuda.CUDAGraph()
with torch.cuda.device(far), torch.cuda.graph(graph, stream=torch.cuda.Stream(far)):
    y = ops.fused_mean(x, w, b, *settings)
for scale in (1.0, 3.0):
    x.mul_(scale)
    graph.replay()
    compare([y], [ops.fused_mean(x.cpu(), w.cpu(), b.cpu(), *settings)])
"""

STEPS = {
    "inference": INFERENCE,
    "operators": OPERATORS,
    "derivatives": DERIVATIVES,
    "capture": CAPTURE,
}


@pytest.mark.parametrize("step", list(STEPS))
def test_first_call(step, empty_folder):
    result = subprocess.run(
        [sys.executable, "-c", BEFORE + STEPS[step] + AFTER],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)

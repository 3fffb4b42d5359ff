"""What training meets besides plain backward: saved-tensor hooks, checkpoints, frozen layers,
threads, and the example.

Every test compares with the same gradients taken plainly, and one of them compares those with
PyTorch's chain.
"""

import itertools
import math
import subprocess
import sys

import pytest
import reference
import torch
from cases import Case
from conftest import ROOT
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import convt_reduce
from convt_reduce.kernelbench import ModelNew

CASE = Case("training", 2, 4, (9, 7), 6, (3, 2), 2, 1, 1, groups=2)
NAMES = ("input", "weight", "bias")


def leaves(wanted=NAMES, dtype=torch.float64, device="cpu"):
    tensors = CASE.tensors(dtype, device)
    return [t.requires_grad_(name in wanted) for name, t in zip(NAMES, tensors, strict=True)]


def ours(x, w, b):
    return convt_reduce.fused_mean(x, w, b, *CASE.settings)


def gradients(function=ours, device="cpu"):
    """function's value and all its gradients, from the same tensors each time."""
    tensors = leaves(device=device)
    y = function(*tensors)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), tensors)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# ---- saved-tensor hooks and checkpoints ---------------------------------------------------------


def test_offload_to_the_host(device):
    expected = gradients(device=device)
    with save_on_cpu(pin_memory=device == "cuda"):
        found = gradients(device=device)
    assert_equal(found, expected)


def test_offload_to_disk(tmp_path, device):
    names = map(str, itertools.count())

    def pack(tensor):
        path = tmp_path / next(names)
        torch.save(tensor, path)
        return path

    expected = gradients(device=device)
    with saved_tensors_hooks(pack, torch.load):
        assert_equal(gradients(device=device), expected)
    assert len(list(tmp_path.iterdir())) >= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    def checkpointed(*tensors):
        return checkpoint(ours, *tensors, use_reentrant=reentrant)

    if not reentrant:
        assert_equal(gradients(checkpointed, device), gradients(device=device))
        return
    for t in (found := leaves(device=device)):
        assert t.grad is None
    checkpointed(*found).square().sum().backward()
    assert_equal([t.grad for t in found], gradients(device=device)[1:])


def test_nested_checkpoints(device):
    def inner(x, w, b):
        return checkpoint(ours, x.relu(), w, b, use_reentrant=False)

    def outer(*tensors):
        return checkpoint(inner, *tensors, use_reentrant=False)

    def plain(x, w, b):
        return ours(x.relu(), w, b)

    assert_equal(gradients(outer, device), gradients(plain, device))


def test_checkpoint_that_keeps_our_results(device):
    """Selective checkpointing sees the operator by name and need not run it again."""
    runs = []

    def policy(context, function, *args, **kwargs):
        if function.namespace == "convt_reduce":
            runs.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def selective(x, w, b):
        return checkpoint(
            lambda *t: ours(*t).exp(),
            x,
            w,
            b,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    found = gradients(selective, device)
    assert_equal(found, gradients(lambda *t: ours(*t).exp(), device))
    assert runs.count(False) == 1


def test_frozen_layers_in_a_model(device):
    """Only what is trained gets a gradient, and the frozen layer still hands one down."""
    first = torch.nn.Conv2d(3, 4, 3, device=device)
    head = ModelNew(4, 6, 3, 2, 1, 1, 0.5).to(device).requires_grad_(False)
    head(first(torch.randn(2, 3, 8, 8, device=device))).sum().backward()
    assert first.weight.grad.count_nonzero()
    assert all(p.grad is None for p in head.parameters())


def test_accumulated_gradients(device):
    """Four parts of a batch give the gradient of the whole."""
    x, w, b = leaves(device=device)
    ours(x, w, b).square().sum().backward()
    whole = w.grad.clone(), b.grad.clone()
    w.grad = b.grad = None
    for part in x.detach():
        ours(part[None], w, b).square().sum().backward()
    for a, t in zip((w.grad, b.grad), whole, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-12, atol=1e-12)


def test_anomaly_mode(device):
    expected = gradients(device=device)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_equal(gradients(device=device), expected)
    x, w, b = leaves(device=device)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values"):
        (ours(x, w, b) * math.nan).sum().backward()


def test_multithreaded_backward(device):
    """Several graphs in backward at once, from threads that know nothing of each other."""
    from concurrent.futures import ThreadPoolExecutor

    expected = gradients(device=device)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: gradients(device=device), range(16)):
            assert_equal(found, expected)


def test_value_of_it_all(device):
    """The gradients that everything above is compared with are the chain's."""
    found = gradients(device=device)
    x, w, b = CASE.tensors()
    y = reference.torch_chain(x, w, b, *CASE.settings)
    expected = reference.gradients(reference.torch_chain, 2 * y, x, w, b, *CASE.settings)
    for a, t in zip(found, (y, *expected), strict=True):
        torch.testing.assert_close(a.cpu(), t, rtol=1e-12, atol=1e-12)


# ---- the example --------------------------------------------------------------------------------


def test_example(empty_folder):
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "train.py"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    losses = [(float(a), float(b)) for _, a, b in rows]
    assert len(losses) >= 3
    assert losses[-1][0] < losses[0][0] / 2
    assert all(a == pytest.approx(b, rel=1e-3) for a, b in losses)

"""Several processes: DDP, FSDP2 and DTensor against one process, on gloo and the CPU.

Two processes run every check below once, since starting them takes longer than all of it; each test
then looks at what became of its check. Results and gradients are compared with those of one process
on the whole batch.
"""

import copy
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import convt_reduce.nn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

WORLD = 2
DOUBLE = torch.float64


def start(rank, folder, names):
    """One of the processes: runs the named checks and writes down what each raised, if anything."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(minutes=1),  # a process whose check failed may leave the other waiting
    )
    for name in names:
        torch.manual_seed(0)  # the same in every process
        try:
            body, *arguments = checks()[name]
            body(rank, *arguments)
            text = ""
        except Exception:
            text = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(text)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(start, (folder, list(checks())), WORLD)
    return folder


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def small_model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        convt_reduce.nn.ConvTransposeMean2d(
            4, 6, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 0), groups=2, multiplier=0.5
        ),
        nn.Flatten(),
        nn.Linear(6, 2),
    ).to(DOUBLE)


def train(model, batches, steps=3):
    """A few steps of SGD with momentum; the mean over the local batch is the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batches[step]).square().mean().backward()
        optimizer.step()


# ---- data parallel ------------------------------------------------------------------------------


def ddp_equals_one_process(rank, channels_last):
    model = small_model()
    if channels_last:  # a weight whose strides its gradient has to follow
        model = model.to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    batches = torch.randn(3, 4, 3, 7, 6, dtype=DOUBLE)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Gg]rad strides.*")
        train(nn.parallel.DistributedDataParallel(model), batches[:, 2 * rank : 2 * rank + 2])
    train(alone, batches)
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine, whole)
        assert mine.grad.stride() == mine.stride()


def fsdp_equals_one_process(rank):
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    alone = copy.deepcopy(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = torch.randn(3, 4, 3, 7, 6, dtype=DOUBLE)
    train(model, batches[:, 2 * rank : 2 * rank + 2])
    train(alone, batches)
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.full_tensor(), whole)


# ---- DTensor ------------------------------------------------------------------------------------


def tensors(groups):
    x = torch.randn(3, 4, 3, 5, dtype=DOUBLE)
    weight = torch.randn(4, 6 // groups, 4, 2, dtype=DOUBLE)
    return x, weight, torch.randn(6, dtype=DOUBLE)


def call(x, weight, bias, groups):
    return torch.ops.convt_reduce.fused_mean(
        x, weight, bias, [2], [1], [1], groups, [1], multiplier=0.5
    )


def dtensor_equals_one_process(rank, placements, expected, groups, backward=True):
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    whole = [t.requires_grad_() for t in tensors(groups) if t is not None]
    split = [
        distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
        for t, placement in zip(whole, placements, strict=True)
    ]
    y, reference = call(*split, groups), call(*whole, groups)
    if expected is not None:
        assert y.placements == (expected,)
    close(y.full_tensor(), reference)
    with torch.no_grad():
        close(call(*split, groups).full_tensor(), reference)
    if not backward:
        return
    grad = torch.randn_like(reference)
    y.full_tensor().backward(grad)
    reference.backward(grad)
    for mine, theirs in zip(split, whole, strict=True):
        close(mine.grad.full_tensor(), theirs.grad)


def dtensor_without_bias(rank):
    from torch.distributed.tensor import Partial, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    x, weight, _ = tensors(1)
    y = call(
        distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)]), None, 1
    )
    assert y.placements == (Partial(),)
    close(y.full_tensor(), call(x, weight, None, 1))


# ---- all checks, by name -------------------------------------------------------------------------


def checks():
    from torch.distributed.tensor import Partial, Replicate, Shard

    copies = Replicate()
    dtensor = {  # placements of input, weight and bias; of the result, if it must be so; groups
        "replicated": ((copies, copies, copies), copies, 1),
        "batch": ((Shard(0), copies, copies), Shard(0), 1),
        "batch-with-groups": ((Shard(0), copies, copies), Shard(0), 2),
        "input-channels": ((Shard(1), Shard(0), copies), Partial(), 1),  # the bias counts once
        "output-channels": ((copies, Shard(1), Shard(0)), Shard(1), 1),
        # Redistributed: no split of these placements is a sum of local results.
        "rows": ((Shard(2), copies, copies), None, 1),
        # Its gradient reshapes a split kernel, which not every release of DTensor does.
        "kernel": ((copies, Shard(2), copies), None, 1, False),
        "input-channels-with-groups": ((Shard(1), copies, copies), None, 2),
    }
    return {
        "ddp": (ddp_equals_one_process, False),
        "ddp-channels-last": (ddp_equals_one_process, True),
        "fsdp2": (fsdp_equals_one_process,),
        "dtensor-without-bias": (dtensor_without_bias,),
        **{f"dtensor-{k}": (dtensor_equals_one_process, *v) for k, v in dtensor.items()},
    }


@pytest.mark.parametrize("name", list(checks()) if dist.is_available() else [])
def test_equals_one_process(outcomes, name):
    failures = [
        text for rank in range(WORLD) if (text := (outcomes / f"{name}.{rank}").read_text())
    ]
    assert not failures, failures[0]


def test_channels_are_split_only_where_each_device_gets_one():
    from types import SimpleNamespace

    from convt_reduce._sharding import _splits

    three = SimpleNamespace(shape=(3,))
    assert [channels for channels in range(1, 10) if _splits(three, channels)] == [3, 5, 6, 7, 8, 9]

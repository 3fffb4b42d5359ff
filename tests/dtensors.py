"""What each of several processes does with DTensors; processes.py lists it among its checks.

A call on split tensors is compared with the same call on whole ones, and so are its gradients.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

DOUBLE = torch.float64


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def tensors(process, groups):
    world = process.world
    x = torch.randn(2 * world - 1, 2 * world, 3, 2 * world + 1, dtype=DOUBLE)
    weight = torch.randn(2 * world, 3 * world // groups, world + 2, 2, dtype=DOUBLE)
    bias = torch.randn(3 * world // groups * groups, dtype=DOUBLE)
    return [t.to(process.device) for t in (x, weight, bias)]


def call(x, weight, bias, groups):
    return torch.ops.convt_reduce.fused_mean(
        x, weight, bias, [2], [1], [1], groups, [1], multiplier=0.5
    )


def dtensor(process, placements, expected, groups, backward=True):
    mesh = process.mesh()
    whole = [t.requires_grad_() for t in tensors(process, groups)]
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
    dist.broadcast(grad, 0)  # whatever each process has drawn before
    y.full_tensor().backward(grad)
    reference.backward(grad)
    for mine, theirs in zip(split, whole, strict=True):
        close(mine.grad.full_tensor(), theirs.grad)
        assert mine.grad.to_local().device == process.device


def dtensor_without_bias(process):
    mesh = process.mesh()
    x, weight, _ = tensors(process, 1)
    y = call(
        distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)]), None, 1
    )
    assert y.placements == (Partial(),)
    close(y.full_tensor(), call(x, weight, None, 1))


def checks():
    copies = Replicate()
    placements = {  # of input, weight and bias; of the result, if it must be so; groups
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
        "dtensor-without-bias": (dtensor_without_bias,),
        **{f"dtensor-{k}": (dtensor, *v) for k, v in placements.items()},
    }

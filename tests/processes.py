"""What each of several processes does in test_distributed.py, one function per check.

Every process holds the same whole batch and the same model, trains or calls on its share, and
compares with what one process makes of the whole, in float64. The sizes grow with the number of
processes: shares are uneven, and everybody gets a channel.
"""

import copy
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from fusing import run
from torch import nn

import convt_reduce.nn

DOUBLE = torch.float64


@dataclass(frozen=True)
class Process:
    """One of `world` processes; on nccl each has the GPU of its rank."""

    rank: int
    world: int
    backend: str

    @property
    def device(self):
        if self.backend == "nccl":
            return torch.device("cuda", self.rank)
        return torch.device("cpu")

    @property
    def device_ids(self):
        return [self.rank] if self.backend == "nccl" else None

    @property
    def compiler(self):
        """Inductor compiles for a GPU in seconds; for the CPU it takes the longest of all."""
        return "inductor" if self.backend == "nccl" else "aot_eager"

    def mesh(self):
        return dist.device_mesh.init_device_mesh(self.device.type, (self.world,))

    def share(self, batches):
        """Of each whole batch, the two samples of this process."""
        return batches[:, 2 * self.rank : 2 * self.rank + 2]


def start(rank, world, backend, folder, names):
    """One of the processes: runs the named checks and writes down what each raised, if anything."""
    process = Process(rank, world, backend)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(process.device)
    dist.init_process_group(
        backend,
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=1),  # a process whose check failed may leave the others waiting
        device_id=process.device if backend == "nccl" else None,
    )
    for name in names:
        torch.manual_seed(0)  # the same in every process
        try:
            body, *arguments = checks(world)[name]
            body(process, *arguments)
            text = ""
        except Exception:
            text = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(text)
    dist.destroy_process_group()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def small_model(process):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        convt_reduce.nn.ConvTransposeMean2d(
            4, 6, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 0), groups=2, multiplier=0.5
        ),
        nn.Flatten(),
        nn.Linear(6, 2),
    ).to(process.device, DOUBLE)


class Chain(nn.Module):
    """What fuse() finds: a transposed convolution that only gets averaged."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last((self.up(self.before(x).relu()) * 0.5).mean((2, 3)))


def batches_of(process, steps=3):
    return torch.randn(steps, 2 * process.world, 3, 7, 6, dtype=DOUBLE).to(process.device)


def train(model, batches):
    """A few steps of SGD with momentum; the mean over the local batch is the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def train_without_warnings(model, batches):
    """Warnings that are about the operators, or about strides that a gradient should have had."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Gg]rad strides.*")
        warnings.filterwarnings("error", message=".*convt_reduce.*")
        warnings.filterwarnings("error", module=r"convt_reduce(\..*)?$")
        train(model, batches)


def assert_same_parameters(model, alone):
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine, whole)
        close(mine.grad, whole.grad)
        assert mine.grad.device == mine.device
        assert mine.grad.stride() == mine.stride()


# ---- data parallel ------------------------------------------------------------------------------


def ddp(process, memory_format=torch.contiguous_format, **options):
    """With channels_last, a weight has strides that its gradient has to follow."""
    model = small_model(process).to(memory_format=memory_format)
    alone, batches = copy.deepcopy(model), batches_of(process)
    parallel = nn.parallel.DistributedDataParallel(model, process.device_ids, **options)
    train_without_warnings(parallel, process.share(batches))
    train(alone, batches)
    assert_same_parameters(model, alone)


def ddp_of_fused(process):
    original = Chain().to(process.device, DOUBLE)
    fused = copy.deepcopy(convt_reduce.fuse(original, cost_rule=False))
    batches = batches_of(process)
    parallel = nn.parallel.DistributedDataParallel(fused, process.device_ids)
    _, record = run(parallel, batches[0])
    assert record.fused == 1
    assert record.convolutions == 1, "only the one before it is left"
    train_without_warnings(parallel, process.share(batches))
    train(original, batches)
    assert_same_parameters(fused, original)


def ddp_compiled(process, outside):
    """torch.compile around DDP, and around the model inside it."""
    torch._dynamo.reset()
    model = small_model(process)
    alone, batches = copy.deepcopy(model), batches_of(process)
    inner = model if outside else torch.compile(model, backend=process.compiler)
    parallel = nn.parallel.DistributedDataParallel(inner, process.device_ids)
    outer = torch.compile(parallel, backend=process.compiler) if outside else parallel
    train_without_warnings(outer, process.share(batches))
    train(alone, batches)
    assert_same_parameters(model, alone)


# ---- FSDP2 --------------------------------------------------------------------------------------


def fsdp(process, compiled=False):
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model = small_model(process)
    alone, batches, mesh = copy.deepcopy(model), batches_of(process), process.mesh()
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    forward = torch.compile(model, backend=process.compiler) if compiled else model
    train_without_warnings(forward, process.share(batches))
    train(alone, batches)
    assert_same_shards(model, alone)


def fsdp_of_fused(process):
    from torch.distributed.fsdp import fully_shard

    original = Chain().to(process.device, DOUBLE)
    fused, batches = (
        copy.deepcopy(convt_reduce.fuse(original, cost_rule=False)),
        batches_of(process),
    )
    fully_shard(fused, mesh=process.mesh())
    train_without_warnings(fused, process.share(batches))
    train(original, batches)
    assert_same_shards(fused, original)


def assert_same_shards(model, alone):
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.full_tensor(), whole)
        close(mine.grad.full_tensor(), whole.grad)
        assert mine.grad.placements == mine.placements
        assert mine.grad.to_local().device == mine.to_local().device
        assert mine.grad.to_local().stride() == mine.to_local().stride()


# ---- DTensor ------------------------------------------------------------------------------------


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
    from torch.distributed.tensor import distribute_tensor

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
    dist.broadcast(grad, 0)  # on GPUs each process draws its own
    y.full_tensor().backward(grad)
    reference.backward(grad)
    for mine, theirs in zip(split, whole, strict=True):
        close(mine.grad.full_tensor(), theirs.grad)
        assert mine.grad.to_local().device == process.device


def dtensor_without_bias(process):
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = process.mesh()
    x, weight, _ = tensors(process, 1)
    y = call(
        distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)]), None, 1
    )
    assert y.placements == (Partial(),)
    close(y.full_tensor(), call(x, weight, None, 1))


# ---- all checks, by name ------------------------------------------------------------------------


def checks(world):
    from torch.distributed.tensor import Partial, Replicate, Shard

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
        "ddp": (ddp,),
        "ddp-channels-last": (ddp, torch.channels_last),
        "ddp-of-fused": (ddp_of_fused,),
        "ddp-compiled": (ddp_compiled, True),
        "ddp-of-compiled": (ddp_compiled, False),
        "fsdp2": (fsdp,),
        "fsdp2-compiled": (fsdp, True),
        "fsdp2-of-fused": (fsdp_of_fused,),
        "dtensor-without-bias": (dtensor_without_bias,),
        **{f"dtensor-{k}": (dtensor, *v) for k, v in placements.items()},
    }

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

import dtensors
import torch
import torch.distributed as dist
from dtensors import DOUBLE, close
from fusing import run
from torch import nn

import convt_reduce.nn


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
            body, *arguments = checks()[name]
            body(process, *arguments)
            text = ""
        except Exception:
            text = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(text)
    dist.destroy_process_group()


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


def ddp(process, memory_format=torch.contiguous_format, views=False):
    """With channels_last, a weight has strides that its gradient has to follow."""
    model = small_model(process).to(memory_format=memory_format)
    alone, batches = copy.deepcopy(model), batches_of(process)
    parallel = nn.parallel.DistributedDataParallel(
        model, process.device_ids, gradient_as_bucket_view=views
    )
    train_without_warnings(parallel, process.share(batches))
    train(alone, batches)
    assert_same_parameters(model, alone)


def ddp_layouts(process):
    """Weights with dimensions of size 1, where strides that mean the same can be spelled apart."""
    for channels_last in (False, True):
        for c_in, c_out, kernel, groups in (
            (4, 6, 1, 2),
            (4, 4, 1, 4),
            (4, 4, 3, 4),
            (1, 5, (1, 3), 1),
            (5, 1, (3, 1), 1),
        ):
            layer = convt_reduce.nn.ConvTransposeMean2d(c_in, c_out, kernel, groups=groups)
            layer = layer.to(process.device, DOUBLE)
            x = torch.randn(2 * process.world, c_in, 5, 4, dtype=DOUBLE).to(process.device)
            if channels_last:
                layer, x = (t.to(memory_format=torch.channels_last) for t in (layer, x))
            alone = copy.deepcopy(layer)
            parallel = nn.parallel.DistributedDataParallel(layer, process.device_ids)
            train_without_warnings(parallel, process.share(x[None]))
            train(alone, x[None])
            assert_same_parameters(layer, alone)


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


# ---- all checks, by name ------------------------------------------------------------------------


def checks():
    """The name of each check, its function, and what that is given besides the process."""
    return {
        "ddp": (ddp,),
        "ddp-channels-last": (ddp, torch.channels_last),
        "ddp-bucket-views": (ddp, torch.contiguous_format, True),
        "ddp-layouts": (ddp_layouts,),
        "ddp-of-fused": (ddp_of_fused,),
        "ddp-compiled": (ddp_compiled, True),
        "ddp-of-compiled": (ddp_compiled, False),
        "fsdp2": (fsdp,),
        "fsdp2-compiled": (fsdp, True),
        "fsdp2-of-fused": (fsdp_of_fused,),
        **dtensors.checks(),
    }

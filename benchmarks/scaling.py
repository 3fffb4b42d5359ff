"""Weak scaling: the same batch on each of 1, 2, .. GPUs, forward and backward.

    python benchmarks/scaling.py --json scaling.json

Two steps are timed, in turn, in one process per GPU: `alone`, a forward and a backward of the layer
on every GPU at once with nothing sent, and `ddp`, the same under DistributedDataParallel, which
adds the all-reduce of the weight's and the bias's gradients. A step's time is that of the slowest
process, the median over the repeats; the ratio is the fewest GPUs' time over this one, so 1 is
perfect. One process per GPU runs on one GPU too, and so does DDP: the ratio compares like with
like. `--device cpu` tries the whole of it without a GPU, on gloo; its figures mean nothing.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import convt_reduce.nn

STEPS = ("alone", "ddp")
# More bytes than any GPU's second-level cache: inputs are rotated past it, so each read is cold.
COLD_BYTES = 2**28


@dataclass(frozen=True)
class Options:
    """What one step computes, per GPU, and how often it is timed."""

    device: str = "cuda"
    batch: int = 256
    channels: int = 64
    out_channels: int = 128
    size: int = 128  # of each of two axes
    dtype: str = "float32"
    calls: int = 20  # of a repeat, between two readings of the clock
    repeats: int = 30

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.batch, self.channels, self.size, self.size

    @property
    def input_bytes(self) -> int:
        return torch.Size(self.input_shape).numel() * getattr(torch, self.dtype).itemsize


# ---- in each process ----------------------------------------------------------------------------


def work(rank: int, gpus: int, options: Options, folder: str) -> None:
    """Times both steps on one GPU, and leaves the microseconds per step in a file."""
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=gpus,
        timeout=timedelta(minutes=2),
        device_id=device if on_gpu else None,
    )
    torch.manual_seed(rank)
    dtype = getattr(torch, options.dtype)
    layer = convt_reduce.nn.ConvTransposeMean2d(
        options.channels, options.out_channels, 3, stride=2, padding=1, output_padding=1
    ).to(device, dtype)
    parallel = nn.parallel.DistributedDataParallel(
        copy.deepcopy(layer), device_ids=[rank] if on_gpu else None
    )
    inputs = [
        torch.randn(options.input_shape, device=device, dtype=dtype).requires_grad_()
        for _ in range(1 + COLD_BYTES // options.input_bytes if on_gpu else 1)
    ]
    grad = torch.randn(options.batch, options.out_channels, 1, 1, device=device, dtype=dtype)

    def run(module: nn.Module) -> None:
        for call in range(options.calls):
            x = inputs[call % len(inputs)]
            x.grad = None
            module.zero_grad()
            module(x).backward(grad)

    modules = dict(zip(STEPS, (layer, parallel), strict=True))
    times: dict[str, list[float]] = {name: [] for name in modules}
    for repeat in range(options.repeats + 2):
        for name, module in modules.items():
            dist.barrier()
            elapsed = timed(run, module, on_gpu) / options.calls
            if repeat >= 2:  # the first fetch memory and start the libraries
                times[name].append(elapsed)
    Path(folder, f"times.{rank}").write_text(json.dumps(times))
    dist.destroy_process_group()


def timed(run, module: nn.Module, on_gpu: bool) -> float:
    """Microseconds from the first call to the end of the last kernel."""
    if not on_gpu:
        started = time.perf_counter()
        run(module)
        return (time.perf_counter() - started) * 1e6
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(module)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


# ---- in the program -----------------------------------------------------------------------------


def measure(gpus: int, options: Options) -> dict[str, list[float]]:
    """For each step, the microseconds of each repeat: those of the slowest of the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (gpus, options, folder), gpus)
        ranks = [json.loads(Path(folder, f"times.{rank}").read_text()) for rank in range(gpus)]
    return {
        name: [max(turn) for turn in zip(*(times[name] for times in ranks), strict=True)]
        for name in STEPS
    }


def summary(times: list[float], base: float | None, options: Options) -> dict[str, float]:
    """Median and spread, and what they come to per GPU. Bytes: input read, its gradient written."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    median = statistics.median(times)
    return {
        "median_us": median,
        "p10_us": tenths[0],
        "p90_us": tenths[-1],
        "gb_per_s_per_gpu": 2 * options.input_bytes / median / 1e3,
        "ratio": (base or median) / median,
    }


def scaling(counts: list[int], options: Options) -> dict:
    """The whole measurement, as it goes into the JSON file; prints a line for each step."""
    rows: list[dict] = []
    print(f"{'gpus':>4} {'step':6} {'median us':>10} {'p10':>9} {'p90':>9} {'GB/s/gpu':>9} ratio")
    for gpus in sorted(counts):
        for name, times in measure(gpus, options).items():
            first = next((row["median_us"] for row in rows if row["step"] == name), None)
            row = {"gpus": gpus, "step": name, **summary(times, first, options)}
            rows.append(row)
            print(
                f"{gpus:4} {name:6} {row['median_us']:10.1f} {row['p10_us']:9.1f} "
                f"{row['p90_us']:9.1f} {row['gb_per_s_per_gpu']:9.1f} {row['ratio']:.3f}",
                flush=True,
            )
    return {"options": asdict(options), "machine": machine(options), "rows": rows}


def machine(options: Options) -> dict:
    facts = {
        "convt_reduce": convt_reduce.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if options.device == "cuda":
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def default_counts(available: int) -> list[int]:
    """1, 2, 4, .. and all."""
    return sorted({*(2**k for k in range(available.bit_length())), available})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", help="how many; default 1, 2, 4, .. and all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    counts, path = arguments.pop("gpus"), arguments.pop("json")
    options = Options(**arguments)
    available = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.device not in ("cuda", "cpu"):
        parser.error(f"--device must be cuda or cpu, got {options.device}")
    if available == 0:
        parser.error("--device cuda needs a GPU, got none; --device cpu only tries the program")
    counts = counts or default_counts(available)
    if min(counts) < 1 or (options.device == "cuda" and max(counts) > available):
        parser.error(f"--gpus must be from 1 to the {available} that torch sees, got {counts}")
    if options.repeats < 2 or options.calls < 1:
        parser.error("--repeats must be at least 2 and --calls at least 1")
    result = scaling(counts, options)
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

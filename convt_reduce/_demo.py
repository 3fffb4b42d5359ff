"""``python -m convt_reduce demo``: KernelBench level 2 problem 44, PyTorch against this package.

Both modules get the same weights and the same input at the problem's full size, on the CPU and on
the GPU if there is one. Each is timed, its extra memory is read off, and its result is compared
with PyTorch's own chain in float64. The exit status says whether ours was right.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from convt_reduce.kernelbench import Model, ModelNew, get_init_inputs, get_inputs

# Ours may be off by this share of the largest result: some roundings of float32, whose unit is
# 6e-8. Leaving out one border row of this problem changes results by about a hundred times more.
TOLERANCE = 2e-6
FLUSH_BYTES = 256 * 2**20  # written before each timed GPU call, more than any second-level cache


class Measurement(NamedTuple):
    """One module on one device."""

    seconds: float
    extra_bytes: int | None  # above input, weights and result; None where the system does not tell
    result: Tensor


def main() -> int:
    """Prints the table; returns 0 if ours is right everywhere, else 1."""
    torch.manual_seed(0)
    arguments = get_init_inputs()
    reference = Model(*arguments)
    ours = ModelNew(*arguments)
    ours.load_state_dict(reference.state_dict())
    (x,) = get_inputs()
    print(f"KernelBench level 2 problem 44: input {list(x.shape)}, Model{tuple(arguments)}")
    print("time: median of single calls (GPU: between events, after the caches were overwritten);")
    print("error: largest difference from PyTorch's chain in float64; memory: extra, at the peak")
    print()
    header = ("device", "module", "time", "ratio", "error", "memory")
    print("{:28} {:12} {:>11} {:>8} {:>9} {:>11}".format(*header))
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    verdicts = [compare(reference, ours, x, device) for device in devices]
    right = all(verdicts)
    if not torch.cuda.is_available():
        print("\nno GPU: torch.cuda.is_available() is False, so only the CPU was compared")
    print("\nours is right" if right else "\nours is WRONG")
    return 0 if right else 1


def compare(reference: Model, ours: ModelNew, x: Tensor, device: torch.device) -> bool:
    """Prints both modules' rows for one device; returns whether ours is within the tolerance."""
    reference, ours, x = reference.to(device), ours.to(device), x.to(device)
    exact = oracle(reference, x)
    measure = measure_on_gpu if device.type == "cuda" else measure_on_cpu
    tf32 = torch.backends.cudnn.allow_tf32
    theirs = measure(reference, x)
    mine = measure(ours, x)
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    label = "PyTorch" + (" (TF32)" if device.type == "cuda" and tf32 else "")
    print(row(name, label, theirs, 1.0, exact))
    print(row("", "convt_reduce", mine, theirs.seconds / mine.seconds, exact), flush=True)
    error = (mine.result.double() - exact).abs().max().item()
    return error <= TOLERANCE * exact.abs().max().item()


@torch.inference_mode()
def oracle(model: Model, x: Tensor) -> Tensor:
    """PyTorch's own chain in float64, one batch element at a time to spare memory."""
    model = copy.deepcopy(model).double()
    return torch.cat([model(part.double()) for part in x.split(1)])


@torch.inference_mode()
def measure_on_gpu(model: nn.Module, x: Tensor) -> Measurement:
    """Time between events around single calls, and the allocator's peak above what was there."""
    for _ in range(5):
        model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = model(x)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - result.nbytes
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=x.device)
    seconds = []
    for _ in range(50):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(x)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return Measurement(statistics.median(seconds), extra, result)


@torch.inference_mode()
def measure_on_cpu(model: nn.Module, x: Tensor) -> Measurement:
    """Wall time of single calls, about two seconds of them, and the process's peak memory."""
    result, extra = peak_memory(lambda: model(x))
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 2 and len(seconds) < 50):
        start = time.perf_counter()
        model(x)
        seconds.append(time.perf_counter() - start)
    return Measurement(
        statistics.median(seconds),
        extra if extra is None else max(0, extra - result.nbytes),
        result,
    )


def peak_memory(call: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
    """What a call returns, and how far the process's resident memory rose above its start.

    Linux keeps the highest resident size and resets it on request (man 5 proc, clear_refs).
    """
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = status_bytes("VmHWM")
        result = call()
        return result, status_bytes("VmHWM") - before
    except (OSError, KeyError):
        return call(), None


def status_bytes(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return int(fields[field].split()[0]) * 1024


def cpu_name() -> str:
    """The processor's name and how many threads torch uses of it."""
    name = "CPU"
    try:
        with open("/proc/cpuinfo") as info:
            names = [
                line.split(":", 1)[1].strip() for line in info if line.startswith("model name")
            ]
        name = names[0] if names else name
    except OSError:
        pass
    return f"{name[:18].strip()}, {torch.get_num_threads()} threads"


def row(device: str, module: str, it: Measurement, ratio: float, exact: Tensor) -> str:
    """One line of the table."""
    error = (it.result.double() - exact).abs().max().item()
    duration = f"{it.seconds * 1e6:.1f} us" if it.seconds < 1e-3 else f"{it.seconds * 1e3:.1f} ms"
    memory = "?" if it.extra_bytes is None else f"{it.extra_bytes / 2**20:.2f} MiB"
    return f"{device:28} {module:12} {duration:>11} {ratio:7.1f}x {error:9.1e} {memory:>11}"

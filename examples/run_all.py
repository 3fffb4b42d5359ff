"""Runs the examples: the report of each, then one table of their times, in Markdown.

    python examples/run_all.py [--small] [--device cpu|cuda] [--no-compile] [name ...]

The table has the model in eager mode and under inductor, and both of ours: the fused copy in eager
mode, and the backend. Times are medians of single calls without gradients; on a GPU between events,
after 256 MiB were written, so that inputs come from memory. Every result is compared with the
model's own, computed in float64.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import convt_reduce

NAMES = ("two_means", "logsumexp_score", "volume", "auxiliary_head", "audio_score")
VARIANTS = ("eager", "inductor", "fuse()", "backend")
sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    """Prints a block per example and device; returns 0 if all results agree, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    parser.add_argument("--small", action="store_true", help="small sizes, and few repetitions")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one device instead of all")
    parser.add_argument("--no-compile", action="store_true", help="eager mode only")
    arguments = parser.parse_args()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = [arguments.device] if arguments.device else devices
    right, rows = True, []
    for name in arguments.names or NAMES:
        module = importlib.import_module(name)
        print(f"== {name}")
        print(convt_reduce.explain(module.build(arguments.small)[0]), end="\n\n", flush=True)
        for device in devices:
            seconds, agree = compare(
                module.build, device, arguments.small, not arguments.no_compile
            )
            rows.append(row(name, device, seconds))
            right &= agree
    print("| example | device | " + " | ".join(VARIANTS) + " |")
    print("|---" * (2 + len(VARIANTS)) + "|")
    print("\n".join(rows), end="\n\n")
    print("all results agree" if right else "some results DIFFER")
    return 0 if right else 1


def row(name: str, device: str, seconds: dict[str, float]) -> str:
    """A line of the table: times, and how many times as fast as the model in eager mode."""
    cells = [name, device]
    for variant in VARIANTS:
        if variant in seconds:
            ratio = seconds["eager"] / seconds[variant]
            cells.append(f"{seconds[variant] * 1e6:.0f} us ({ratio:.1f}x)")
        else:
            cells.append("")
    return f"| {' | '.join(cells)} |"


@torch.inference_mode()
def compare(
    build: Callable, device: str, small: bool, compiled: bool
) -> tuple[dict[str, float], bool]:
    """The seconds that each variant takes, and whether every one gives the model's result."""
    torch.manual_seed(0)
    model, x = build(small)
    model, x = model.to(device), x.to(device)
    torch._dynamo.reset()
    variants: dict[str, Callable[[Tensor], object]] = {"eager": model}
    if compiled:
        variants["inductor"] = torch.compile(model)
    variants["fuse()"] = convt_reduce.fuse(model)
    if compiled:
        variants["backend"] = torch.compile(model, backend="convt_reduce")
    expected = model.double()(x.double())  # in place, and undone: variants share the parameters
    model.float()
    seconds, right = {}, True
    for name, call in variants.items():
        right &= agrees(call(x), expected)
        seconds[name] = median_seconds(call, x, 3 if small else 20)
    return seconds, right


def agrees(result: object, expected: object) -> bool:
    """Whether float32 results are those of float64, up to TF32's and float32's roundings."""
    pairs = zip(flat(result), flat(expected), strict=True)
    return all((a.double() - b).abs().max() <= 2e-3 * b.abs().max() for a, b in pairs)


def flat(result: object) -> list[Tensor]:
    """The tensors of a result."""
    return [result] if isinstance(result, Tensor) else list(result)


def median_seconds(call: Callable, x: Tensor, repetitions: int) -> float:
    """The median of single calls, after two to warm up."""
    for _ in range(2):
        call(x)
    seconds = []
    cache = torch.empty(2**28, dtype=torch.uint8, device=x.device) if x.is_cuda else None
    for _ in range(repetitions):
        if cache is not None:
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(x)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            start_time = time.perf_counter()
            call(x)
            seconds.append(time.perf_counter() - start_time)
            if sum(seconds) > 3:
                break
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())

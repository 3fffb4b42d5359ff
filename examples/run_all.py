"""Runs the examples: the report of each, and its time in eager mode, inductor and both of ours.

    python examples/run_all.py [--small] [--device cpu|cuda] [--no-compile] [name ...]

Times are medians of single calls without gradients; on a GPU between events, after 256 MiB were
written, so that inputs come from memory. Every result is compared with the model's own.
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
    right = True
    for name in arguments.names or NAMES:
        module = importlib.import_module(name)
        print(f"== {name}")
        print(convt_reduce.explain(module.build(arguments.small)[0]))
        for device in devices:
            right &= compare(module.build, device, arguments.small, not arguments.no_compile)
        print(flush=True)
    print("all results agree" if right else "some results DIFFER")
    return 0 if right else 1


@torch.inference_mode()
def compare(build: Callable, device: str, small: bool, compiled: bool) -> bool:
    """Prints one device's line; returns whether every variant gives the model's result."""
    torch.manual_seed(0)
    model, x = build(small)
    model, x = model.to(device), x.to(device)
    torch._dynamo.reset()
    variants: dict[str, Callable[[Tensor], object]] = {"eager": model}
    variants["fuse"] = convt_reduce.fuse(model)
    if compiled:
        variants["inductor"] = torch.compile(model)
        variants["backend"] = torch.compile(model, backend="convt_reduce")
    expected = model.double()(x.double())  # in place, and undone: variants share the parameters
    model.float()
    cells, right, base = [], True, 0.0
    for name, call in variants.items():
        right &= agrees(call(x), expected)
        seconds = median_seconds(call, x, 3 if small else 20)
        base = base or seconds
        cells.append(f"{name} {seconds * 1e6:.0f} us ({base / seconds:.1f}x)")
    print(f"   {device:5} {', '.join(cells)}{'' if right else '  WRONG'}")
    return right


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

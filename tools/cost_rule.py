"""Measures where fusing pays, beside what the cost rule says: for whoever sets its prices.

    python tools/cost_rule.py [--device cpu|cuda] [--threads N]

A line per shape: microseconds of the convolution with its mean and of the operator, forward alone
and with gradients, and the rule's verdict. WRONG is a verdict that costs more than a tenth. At
the end, the prices that lose least on the forward times. On a GPU, times are between events.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import convt_reduce
from convt_reduce import _cost

# batch, c_in, c_out, size, kernel, stride, padding: heads on tiny maps, many channels, long
# kernels, large batches of single positions, and ordinary upsampling.
SHAPES = [
    *[(n, c, c, 1, 4, 1, 0) for n, c in ((1, 8), (1, 64), (1, 512), (16, 512), (256, 1024))],
    *[(n, 512, 512, s, 4, 2, 1) for n, s in ((1, 2), (16, 2), (1, 4), (16, 4), (1, 16), (16, 16))],
    *[(n, 256, 256, 1, 1, 1, 0) for n in (1, 256, 1024)],
    *[(1, 64, 64, s, 31, 1, 0) for s in (1, 8, 32)],
    *[(n, 64, 32, s, 3, 2, 1) for n, s in ((1, 8), (1, 32), (64, 8), (16, 64), (256, 2))],
    *[(n, 64, 64, s, 3, 2, 1) for n, s in ((1, 20), (4, 16), (512, 3))],
    *[(n, c, c, s, 4, 2, 1) for n, c, s in ((1, 512, 24), (64, 128, 4), (256, 32, 4))],
    *[(n, 3, 3, s, 3, 2, 1) for n, s in ((1, 4), (1, 32), (16, 16), (256, 4))],
    (1, 1, 1, 1, 1, 1, 0),
    (16, 64, 128, 64, 3, 2, 1),
]
LOSS = 1.1


def main() -> int:
    """Prints the table and the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    print("| shape | conv | fused | ratio | conv, trained | fused, trained | ratio | rule |")
    print("|---|---|---|---|---|---|---|---|")
    measured = []
    for shape in SHAPES:
        forward, trained = measure(shape, device)
        batch, _, _, size, kernel, *_ = shape
        verdict = _cost.pays(batch, (size, size), (kernel, kernel), device)
        measured.append((shape, forward))
        cells = [str(shape)]
        for conv, fused in (forward, trained):
            cells += [f"{conv * 1e6:.0f}", f"{fused * 1e6:.0f}", f"{conv / fused:.2f}"]
        wrong = is_wrong(verdict, forward)
        print(f"| {' | '.join(cells)} | {'fuse' if verdict else 'keep'}{' WRONG' * wrong} |")
    now = _cost.PRICES[device]
    print(f"\n{now}: {loss(measured, now):.3f} times as long as the better way, on average")
    steps = (0, *(m * 10**e for e in range(4) for m in (1, 2, 3, 5, 7)))
    tried = itertools.starmap(_cost.Prices, itertools.product(steps, steps[:12]))
    best = min(tried, key=lambda prices: (loss(measured, prices), *prices))
    print(f"{best}: {loss(measured, best):.3f}, the least")
    return 0


def is_wrong(verdict: bool, times: tuple[float, float]) -> bool:
    """Whether a verdict chose the slower way, by more than the tolerated loss."""
    conv, fused = times
    return fused > LOSS * conv if verdict else conv > LOSS * fused


def loss(measured: list, prices: _cost.Prices) -> float:
    """The geometric mean of what these prices' verdicts take, over the better way."""
    logarithms, now = [], _cost.PRICES["cpu"]
    _cost.PRICES["cpu"] = prices
    for (batch, _, _, size, kernel, *_), (conv, fused) in measured:
        verdict = _cost.pays(batch, (size, size), (kernel, kernel), "cpu")
        logarithms.append(math.log((fused if verdict else conv) / min(conv, fused)))
    _cost.PRICES["cpu"] = now
    return math.exp(statistics.fmean(logarithms))


def measure(shape: tuple[int, ...], device: str) -> tuple[tuple[float, float], ...]:
    """Seconds of (convolution and mean, operator), forward and then with gradients."""
    batch, c_in, c_out, size, kernel, stride, padding = shape
    x = torch.randn(batch, c_in, size, size, device=device)
    weight = torch.randn(c_in, c_out, kernel, kernel, device=device)
    bias = torch.randn(c_out, device=device)

    def reference() -> torch.Tensor:
        y = functional.conv_transpose2d(x, weight, bias, stride, padding)
        return y.mean((2, 3), keepdim=True)

    def fused() -> torch.Tensor:
        return convt_reduce.fused_mean(x, weight, bias, stride, padding)

    with torch.inference_mode():
        forward = (seconds(reference, device), seconds(fused, device))
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    trained = [seconds(lambda f=f: f().sum().backward(), device) for f in (reference, fused)]
    return forward, (trained[0], trained[1])


def seconds(call: Callable[[], object], device: str) -> float:
    """The median of single calls, after three to warm up."""
    for _ in range(3):
        call()
    found: list[float] = []
    while len(found) < 30 and (len(found) < 5 or sum(found) < 0.3):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())

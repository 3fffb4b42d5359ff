"""Errors in units in the last place, ours beside PyTorch's chain: the table of docs/reliability.md.

    python tools/numerics.py [--device cpu|cuda] [--largest 24]      about 3 minutes on two cores

Every row is one shape, every column one kind of values, every field the largest error of ours and
of the chain. Both run in the table's dtype (TF32 off) and are compared with the closed form in
float64, or in 80-bit numbers where the dtype is float64 itself. The unit is the spacing of the
dtype's numbers at the magnitude of the result, which is the same computation on absolute values:
for inputs of one sign that is the result's own last place, and where terms cancel it is what was
there to lose.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch.nn import functional

# The closed form in float64 has one home, with the tests.
sys.path[0] = str(Path(__file__).resolve().parent.parent / "tests")
import reference  # noqa: E402

import convt_reduce  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What anyone may lose: half a unit each for a cell sum, the folded weight, its scale, their product
# and the result.
FREE = 2.5


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    c_in: int
    size: tuple[int, ...]
    c_out: int = 4
    kernel: int = 3
    stride: int = 2
    padding: int = 1
    output_padding: int = 1
    channels_last: bool = False

    @property
    def settings(self):
        return (self.stride, self.padding, self.output_padding)


SHAPES = (
    Shape("7x7", 4, 16, (7, 7)),
    Shape("4x4, 1024 channels", 4, 1024, (4, 4)),
    Shape("128x128", 2, 16, (128, 128)),
    Shape("128x128, channels_last", 2, 16, (128, 128), channels_last=True),
    Shape("20001x7", 1, 2, (20001, 7)),
    Shape("300x300x3", 1, 2, (300, 300, 3)),
    Shape("1-D, 10**6", 1, 2, (10**6,)),
)


def plane(log2: int) -> Shape:
    """One square plane of 2**log2 elements. The kernel has one tap, or PyTorch would need 9x."""
    side = 2 ** (log2 // 2)
    size = (side, 2**log2 // side)
    return Shape(f"{size[0]}x{size[1]} = 2**{log2}", 1, 1, size, 2, 1, 1, 0, 0)


# ---- values -------------------------------------------------------------------------------------


def random(shape, g):
    return torch.randn(shape, generator=g)


def positive(shape, g):
    return torch.rand(shape, generator=g)


def ramp(shape, g):
    count = math.prod(shape)
    return torch.arange(count, dtype=torch.float32).div_(count).view(shape)


def constant(shape, g):
    return torch.full(shape, 0.1)


def cancelling(shape, g):
    """1000 and -1000 by turns, and on top what is left of them."""
    t = torch.randn(shape, generator=g)
    t.view(-1)[::2] += 1000
    t.view(-1)[1::2] -= 1000
    return t


def mixed(shape, g):
    """Of both signs, from 0.001 to 1000."""
    t = torch.randn(shape, generator=g)
    return t.mul_(torch.rand(shape, generator=g).mul_(6).sub_(3).mul_(math.log(10)).exp_())


KINDS = (random, positive, ramp, constant, cancelling, mixed)

# ---- measuring ----------------------------------------------------------------------------------


def chain(x, w, b, shape: Shape):
    conv = getattr(functional, f"conv_transpose{len(shape.size)}d")
    return conv(x, w, b, *shape.settings).mean(tuple(range(2, x.dim())), keepdim=True)


def ours(x, w, b, shape: Shape):
    return convt_reduce.fused_mean(x, w, b, *shape.settings)


def exact_and_magnitude(x, w, b, shape: Shape):
    """The closed form of the tensors and of their absolute values, as arrays of wide numbers."""
    if x.dtype != torch.float64:
        arguments = reference.absolute(x, w, b)
        exact = reference.closed_form(x, w, b, *shape.settings)
        return exact.numpy(), reference.closed_form(*arguments, *shape.settings)
    found = []
    for tensors in ((x, w, b), (x.abs(), w.abs(), b.abs())):
        sums, weight, bias = (t.numpy().astype(numpy.longdouble) for t in tensors)
        count = 1
        settings = reference.axis_settings(shape.size, w.shape[2:], *shape.settings, 1)
        for axis, setting in zip(range(-len(shape.size), 0), settings, strict=True):
            parts = [
                sums.take(range(lo, hi), axis).sum(axis) for lo, hi in reference.runs(*setting)
            ]
            sums = numpy.stack(parts, axis)
            count *= reference.output_size(*setting)
        sums = sums.reshape(*sums.shape[:2], -1)
        y = numpy.einsum("nct,cot->no", sums, weight.reshape(*weight.shape[:2], -1))
        y = y / numpy.longdouble(count) + bias
        found.append(y.reshape(*y.shape, *[1] * len(shape.size)))
    return found[0], torch.from_numpy(found[1].astype(numpy.float64))


def errors(shape: Shape, kind, dtype, device):
    """The largest error of ours and of the chain, in units in the last place."""
    g = torch.Generator().manual_seed(1)
    x = kind((shape.batch, shape.c_in, *shape.size), g).to(dtype)
    w_shape = (shape.c_in, shape.c_out, *[shape.kernel] * len(shape.size))
    w = (kind if kind in (positive, constant) else random)(w_shape, g).to(dtype)
    b = random((shape.c_out,), g).to(dtype) * 0.01
    exact, magnitude = exact_and_magnitude(x, w, b, shape)
    if shape.channels_last:
        x = x.to(memory_format=torch.channels_last)
    info = torch.finfo(dtype)
    unit = (2.0 ** magnitude.clamp(min=info.smallest_normal).log2().floor() * info.eps).numpy()
    found = []
    for compute in (ours, chain):
        y = compute(*(t.to(device) for t in (x, w, b)), shape).double().cpu().numpy()
        found.append(float(abs((y - exact) / unit).max()))
        del y
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--largest", type=int, default=24, help="log2 of the largest plane")
    parser.add_argument("--dtypes", nargs="*", default=[], help="only these, like float32")
    parser.add_argument("--only", default="", help="part of an input's name")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    print(f"torch {torch.__version__}, {options.device}; fused_mean / PyTorch's chain")
    worse = []
    planes = [plane(n) for n in (20, 24, 28) if n <= options.largest]
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if options.dtypes and name not in options.dtypes:
            continue
        print(f"\n| {name} | " + " | ".join(kind.__name__ for kind in KINDS) + " |")
        print("|---" * (1 + len(KINDS)) + "|")
        for shape in (*SHAPES, *planes):
            if options.only not in shape.name:
                continue
            # The largest plane's float64 reference alone takes 2 GiB; one dtype stands for all.
            if math.prod(shape.size) >= 2**26 and dtype != torch.float32:
                continue
            fields = []
            for kind in KINDS:
                most, most_chain = errors(shape, kind, dtype, options.device)
                fields.append(f"{most:.2f} / {most_chain:.2f}")
                if most > max(FREE, most_chain):
                    worse.append(f"{name}, {shape.name}, {kind.__name__}: {most:.2f}")
            print(f"| {shape.name} | " + " | ".join(fields) + " |", flush=True)
    print(f"\noff by more than {FREE:g} units and by more than the chain: {len(worse)}")
    print("\n".join(worse))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

"""A right call as plain data: every parameter, dtype, layout, kind of values and direction.

Plain data can be printed, compared and made smaller one field at a time. Tensors are made from it
on demand, from a seed that is one of its fields.
"""

import dataclasses
import math
import random
from dataclasses import dataclass

import layouts
import reference
import torch

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}
LAYOUTS = {
    maker.__name__: maker
    for maker in (*layouts.LAYOUTS, *(layouts.shifted(n) for n in (2, 3, 5, 7)))
}
# How often each is drawn. Derivatives of derivatives and vmap cost the most.
DIRECTIONS = {
    "value": 8,
    "backward": 6,
    "taps": 2,
    "double": 2,
    "jvp": 2,
    "vmap": 2,
    "vmap_grad": 1,
}
COMPILE_EVERY = 4000  # cases; one takes about a second
VALUES = ("normal", "offset", "integers", "ramp", "cancelling", "wide", "constant", "special")


@dataclass(frozen=True)
class Problem:
    batch: int | None  # None is an unbatched input
    groups: int
    group_in: int
    group_out: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool = True
    multiplier: float = 1.0
    dtype: str = "float32"
    values: str = "normal"
    layouts: tuple[str, str, str] = ("contiguous",) * 3  # of input, weight and incoming gradient
    direction: str = "value"
    wanted: tuple[bool, bool, bool] = (True, True, True)  # who requires a gradient or is batched
    seed: int = 0

    @property
    def axes(self):
        return len(self.size)

    @property
    def settings(self):
        lists = (self.stride, self.padding, self.output_padding)
        return (*map(list, lists), self.groups, list(self.dilation), self.multiplier)

    @property
    def tap_settings(self):
        lists = (self.stride, self.padding, self.output_padding, self.dilation)
        return tuple(map(list, lists))

    @property
    def shapes(self):
        """Of input, weight and bias."""
        c_in, c_out = self.groups * self.group_in, self.groups * self.group_out
        lead = () if self.batch is None else (self.batch,)
        return (*lead, c_in, *self.size), (c_in, self.group_out, *self.kernel), (c_out,)

    @property
    def outputs(self):
        """The sizes of the output that is averaged."""
        each = zip(self.size, self.kernel, *self.tap_settings, strict=True)
        return [reference.output_size(*setting) for setting in each]

    @property
    def terms(self):
        """How many products one result adds up, for the tolerance."""
        return self.group_in * math.prod(self.size) * math.prod(self.kernel)

    @property
    def work(self):
        """About how many multiplications PyTorch's way takes."""
        return max(1, self.batch or 1) * self.groups * self.group_out * self.terms

    def is_right(self):
        """Whether the contract allows the call: for smaller versions made by shrinking."""
        counts = (self.groups, self.group_in, self.group_out, *self.size, *self.kernel)
        return (
            min(*counts, *self.stride, *self.dilation) >= 1
            and min(*self.padding, *self.output_padding, self.batch or 0) >= 0
            and all(
                o < max(s, d)
                for o, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True)
            )
            and min(self.outputs) >= 1
        )

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


# ---- drawing ------------------------------------------------------------------------------------


def draw(rng: random.Random, compiled: bool = False) -> Problem:
    """One right call. `compiled` asks for the direction that goes through torch.compile."""
    while True:
        problem = _draw_any(rng)
        if problem.is_right() and problem.work < (2e7 if rng.random() < 0.1 else 1e6):
            break
    if compiled:
        problem = problem.replace(direction="compile", values="normal")
    if problem.direction == "double":
        # Halves round what lies between the two derivatives, and no bound here knows how much.
        problem = problem.replace(dtype=rng.choice(("float32", "float64")))
    if problem.direction not in ("value", "taps") and problem.values == "special":
        problem = problem.replace(values="normal")
    if problem.values == "special" and rng.random() < 0.1:
        problem = problem.replace(multiplier=math.nan)
    return problem


def _draw_any(rng: random.Random) -> Problem:
    axes = rng.randint(1, 3)
    large = rng.random() < 0.25
    longest = (3000, 150, 24)[axes - 1] if large else 9
    most_taps = 9 if rng.random() < 0.15 else 4
    most_padding = 12 if rng.random() < 0.15 else 3

    def each(low, high):
        return tuple(rng.randint(low, high) for _ in range(axes))

    stride, dilation = each(1, 5 if rng.random() < 0.2 else 3), each(1, 3)
    extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
    kinds = list(LAYOUTS)
    return Problem(
        batch=rng.choice((None, 0, 1, 1, 2, 2, 3, 5, 65, 130)),
        groups=rng.choice((1, 1, 1, 2, 3, 4)),
        group_in=rng.choice((1, 2, 3, 5, 8, 33)) if rng.random() < 0.5 else rng.randint(1, 4),
        group_out=rng.choice((1, 2, 3, 5, 17)) if rng.random() < 0.5 else rng.randint(1, 4),
        size=each(1, longest),
        kernel=each(1, most_taps),
        stride=stride,
        padding=each(0, most_padding),
        output_padding=extra,
        dilation=dilation,
        bias=rng.random() < 0.7,
        multiplier=rng.choice((1.0, 1.0, 0.5, -2.0, 0.0, 1e-3, 300.0, 1 / 3)),
        dtype=rng.choice(list(DTYPES)),
        values=rng.choice(VALUES),
        layouts=tuple(rng.choice(kinds) if rng.random() < 0.6 else "contiguous" for _ in range(3)),
        direction=rng.choices(list(DIRECTIONS), list(DIRECTIONS.values()))[0],
        wanted=rng.choice(
            [(True, True, True)] * 3
            + [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1) if a + b + c]
        ),
        seed=rng.randrange(2**31),
    )


# ---- tensors ------------------------------------------------------------------------------------


def fill(kind: str, shape, dtype: torch.dtype, generator) -> torch.Tensor:
    """A contiguous CPU tensor of `dtype` with values of one kind."""
    t = torch.randn(shape, generator=generator, dtype=torch.float64)
    count = t.numel()
    if kind == "offset":  # an answer that takes another plane's sum is then far off
        t += 3 * torch.randn(*shape[:2], *[1] * (len(shape) - 2), generator=generator)
    elif kind == "integers":
        t = (2 * t).round()
    elif kind == "ramp":
        t = torch.arange(count, dtype=torch.float64).view(shape) / max(1, count)
    elif kind == "cancelling":  # what is left is far below what is added
        sign = 1 - 2 * (torch.arange(count, dtype=torch.float64).view(shape) % 2)
        t = 1000 * sign + t
    elif kind == "wide":
        reach = 3 if dtype == torch.float16 else 6
        exponent = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        t = t * 10 ** (reach * exponent)
    elif kind == "constant":
        t = torch.full(shape, 0.1, dtype=torch.float64)
    elif kind == "special" and count:
        at = torch.randint(count, (3,), generator=generator)
        odd = torch.tensor([math.nan, 0.0, -0.0, math.inf, -math.inf], dtype=torch.float64)
        t.view(-1)[at] = odd[torch.randint(len(odd), (3,), generator=generator)]
    return t.to(dtype)


def place(layout: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory layout of that name, where its shape allows one."""
    if tensor.numel() == 0 or tensor.dim() < 2:
        return tensor
    return LAYOUTS[layout](tensor)


def tensors(problem: Problem, device: str = "cpu"):
    """input, weight and bias (or None), laid out as the problem says.

    Special values are in the input, NaN sometimes in the weight: an infinite weight meets sums that
    no longer show their terms' signs, which the README's Limits tell.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    dtype = DTYPES[problem.dtype]
    x, w, b = problem.shapes
    special = problem.values == "special"
    x = fill(problem.values, x, dtype, generator)
    w = fill("normal" if special else problem.values, w, dtype, generator)
    if special and problem.seed % 3 == 0:
        w.view(-1)[problem.seed % w.numel()] = math.nan
    b = fill("normal", b, dtype, generator) if problem.bias else None
    x = place(problem.layouts[0], x.to(device))
    w = place(problem.layouts[1], w.to(device))
    return x, w, None if b is None else b.to(device)

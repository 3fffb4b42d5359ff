"""The contract, read anew: which arguments of a call are wrong, and the shape of a right one.

Nothing here looks at the package's own checks, so that a rule which is missing there is missed.
"""

from dataclasses import dataclass, field

import torch

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LISTS = ("stride", "padding", "output_padding", "dilation")
LIMIT = 2**62


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    elsewhere: bool = False  # on another device than the rest


@dataclass(frozen=True)
class Call:
    tensors: dict  # name -> Spec, bias only where there is one
    settings: dict = field(default_factory=dict)

    def __str__(self):
        tensors = ", ".join(
            f"{name} {list(t.shape)} {t.dtype}{' elsewhere' if t.elsewhere else ''}"
            for name, t in self.tensors.items()
        )
        return f"{tensors}; {self.settings}"


def faults(call: Call) -> set[str]:
    """The arguments that are wrong, each by a rule of its own."""
    x, w, b = (call.tensors.get(name) for name in ("input", "weight", "bias"))
    found = set()
    if x.dtype not in FLOATING:
        found.add("input")
    for name, t in call.tensors.items():
        if t.dtype != x.dtype or t.elsewhere:
            found.add(name)
    if len(w.shape) not in (3, 4, 5):
        return found | {"weight"}
    spatial = len(w.shape) - 2
    if len(x.shape) not in (spatial + 1, spatial + 2):
        return found | {"input"}
    channels, *size = x.shape[-spatial - 1 :]
    if 0 in (channels, *size):
        found.add("input")
    if 0 in w.shape or w.shape[0] != channels:
        found.add("weight")
    groups = call.settings["groups"]
    if groups < 1 or channels % groups:
        found.add("groups")
    if b is not None and b.shape != (w.shape[1] * groups,):
        found.add("bias")
    lists = {}
    for name in LISTS:
        values = call.settings[name]
        if len(values) not in (1, spatial) or min(values) < (name in ("stride", "dilation")):
            found.add(name)
        elif len(values) == 1:
            lists[name] = values * spatial
        else:
            lists[name] = values
    if set(LISTS) & found:
        return found
    for n, k, s, p, o, d in zip(size, w.shape[2:], *(lists[name] for name in LISTS), strict=True):
        if o >= max(s, d):
            found.add("output_padding")
        reach = (n - 1) * s + d * (k - 1) + o + 1
        if reach >= LIMIT:
            found |= {"stride", "dilation"}
        if reach - 2 * p < 1:
            found.add("padding")
    return found


def shape_of(call: Call) -> tuple[int, ...]:
    x, w = call.tensors["input"].shape, call.tensors["weight"].shape
    spatial = len(w) - 2
    return (*x[: -spatial - 1], w[1] * call.settings["groups"], *[1] * spatial)

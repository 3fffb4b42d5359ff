"""Where a match stands: the labels of the tensor's axes, and the steps so far.

A label is the set of the convolution's axes that live in an axis of the current tensor: "n", "c" or
the number of a spatial one. Flattening unites labels and averaging empties them; when none is
spatial any more, the reduction is complete.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from convt_reduce._report import Refusal
from convt_reduce._standin import unpack

Label = frozenset


@dataclass(frozen=True)
class Step:
    """One node of a site, and what becomes of it.

    ``kind`` is "keep": it stays and works on the reduced tensor; "scale": a number, which the
    operator multiplies by; "mean": it stays as well, and averages over axes of size 1; "sum": it
    stays, and is multiplied by the number of positions of ``axes``; "pool": an average pooling
    whose window is the whole output, which becomes one of the reduced tensor.
    """

    node: Node
    kind: str = "keep"
    axes: tuple[int, ...] = ()
    window: tuple[int, ...] | None = None  # of a pooling; None: read off the tensor itself
    settings: tuple = ()  # of a pooling, from its stride on
    name: str = ""  # of the layer or the operation, for the report


@dataclass
class Walk:
    """Where a walk from one convolution has come to, under one assumption about its batch axis."""

    root: nn.Module
    node: Node
    labels: list[Label]
    spatial: int
    dtype: torch.dtype | None
    channels: int | None = None
    captured: bool = False  # whether the graph records sizes
    steps: list[Step] = field(default_factory=list)
    eval_only: list[str] = field(default_factory=list)
    kernel: tuple[int, ...] | None = None  # the output size that a pooling needs
    multiplier: float = 1.0
    sized: bool = False  # whether a step relies on the number of channels
    pinned: torch.dtype | None = None  # the convolution's dtype, where a step names one

    def live(self) -> bool:
        return any(is_spatial(label) for label in self.labels)

    def full(self) -> bool:
        """Whether the tensor still has the convolution's own axes."""
        tail = [Label([axis]) for axis in range(self.spatial)]
        return self.labels[-self.spatial - 1 :] == [Label("c"), *tail]


def is_spatial(label: Label) -> bool:
    return any(isinstance(axis, int) for axis in label)


def same_dtype(walk: Walk, user: Node, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or dtype != walk.dtype:
        raise Refusal(f"'{user}' must keep the dtype {walk.dtype}, got {dtype}")
    walk.pinned = dtype


def read_size(node: Node) -> tuple[Node, int | None] | None:
    """The tensor whose size a node reads, and of which dimension; None: of all."""
    if node.op == "call_method" and node.target == "size":
        return node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if node.op == "call_function" and node.target is getattr and node.args[1] == "shape":
        return node.args[0], None
    if node.op == "call_function" and node.target is operator.getitem:
        of = node.args[0]
        if isinstance(of, Node) and of.target is unpack:
            of = of.args[0]
        of = read_size(of) if isinstance(of, Node) else None
        if of is not None and of[1] is None and isinstance(node.args[1], int):
            return of[0], node.args[1]
    return None

"""The rules for reductions, and for the changes of shape that lead to them.

They move the labels of `_walk`. A reduction may take the spatial axes one by one, in any spelling,
and may take others along; what it may not do is to weigh positions differently.
"""

import operator
from typing import Any

from torch.fx import Node

from convt_reduce._facts import facts_of
from convt_reduce._report import Refusal
from convt_reduce._spelling import Call
from convt_reduce._walk import Label, Step, Walk, is_spatial, read_size, same_dtype


def _axis(walk: Walk, user: Node, dim: Any) -> int:
    """A dimension as a position in the labels."""
    rank = len(walk.labels)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise Refusal(f"'{user}' must reduce dimensions below {rank} given as numbers, got {dim}")
    return dim % rank


def _reduce(walk: Walk, user: Node, call: Call) -> Step:
    """mean and sum, over any axes."""
    if call.get("dtype") is not None:
        same_dtype(walk, user, call.get("dtype"))
    keepdim, dims = call.get("keepdim", False), call.get("dim")
    if not isinstance(keepdim, bool):
        raise Refusal(f"'{user}' must have True or False for keepdim, got {keepdim}")
    rank = len(walk.labels)
    listed = [dims] if isinstance(dims, (int, Node)) else list(dims or ())
    axes = sorted({_axis(walk, user, dim) for dim in listed}) or list(range(rank))
    gone = Label().union(*(walk.labels[axis] for axis in axes))
    summed = tuple(sorted(axis for axis in gone if isinstance(axis, int)))
    only_space = all(isinstance(axis, int) for axis in gone)
    if keepdim:
        walk.labels = [Label() if i in axes else label for i, label in enumerate(walk.labels)]
    else:
        walk.labels = [label for i, label in enumerate(walk.labels) if i not in axes]
    if call.name == "sum":
        return Step(user, "sum", summed)
    return Step(user, "mean" if only_space and listed else "keep")


def _as_tuple(value: Any, length: int) -> tuple:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * length if len(values) == 1 else values


def _last_axes(walk: Walk, user: Node, count: int) -> None:
    tail = walk.labels[-count:]
    if count > len(walk.labels) or not all(isinstance(a, int) for label in tail for a in label):
        raise Refusal(f"'{user}' must pool the {walk.spatial} spatial axes, got {count}")


def _adaptive_pool(walk: Walk, user: Node, call: Call) -> Step:
    count = int(call.name[-2])
    size = _as_tuple(call.get("output_size"), count)
    if any(type(s) is not int or s != 1 for s in size):
        raise Refusal(f"'{user}' must pool to size 1, got {list(size)}")
    _last_axes(walk, user, count)
    walk.labels[-count:] = [Label()] * count
    return Step(user, "mean")


def _pool(walk: Walk, user: Node, call: Call) -> Step:
    """Average pooling with one window: that the output has its size is for the caller to see to."""
    count = int(call.name[-2])
    if any(_as_tuple(call.get("padding", 0), count)) or call.get("divisor_override") is not None:
        raise Refusal(f"'{user}' must pool without padding and divisor, got some")
    if count != walk.spatial or not walk.full():
        raise Refusal(f"'{user}' must pool the {walk.spatial} spatial axes, got other ones")
    kernel = _as_tuple(call.get("kernel_size"), count)
    if _is_whole(walk, call.get("kernel_size")):
        walk.labels[-count:] = [Label()] * count
        return Step(user, "pool")
    if not all(type(k) is int for k in kernel):
        raise Refusal(f"'{user}' must have a window of constant size, got {list(kernel)}")
    walk.labels[-count:] = [Label()] * count
    walk.kernel = kernel
    defaults = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
    settings = tuple(call.get(n, d) for n, d in defaults.items())
    return Step(user, "pool", window=kernel, settings=settings)


def _is_whole(walk: Walk, size: Any) -> bool:
    """Whether a size is read off the very tensor: y.shape[2:] or (y.size(2), y.size(3))."""
    rank, tail = len(walk.labels), len(walk.labels) - walk.spatial
    if not walk.full():
        return False
    if isinstance(size, (tuple, list)):
        reads = [read_size(entry) if isinstance(entry, Node) else None for entry in size]
        if any(read is None or read[1] is None for read in reads):
            return False
        expected = [(walk.node, axis) for axis in range(tail, rank)]
        return [(of, axis % rank) for of, axis in reads] == expected
    if not isinstance(size, Node) or size.target is not operator.getitem:
        return False
    of, index = size.args
    whole = isinstance(of, Node) and read_size(of) == (walk.node, None)
    return whole and index in (slice(tail, None, None), slice(-walk.spatial, None, None))


def _flatten(walk: Walk, user: Node, call: Call) -> Step:
    # The layer's own default, 1, was filled in with its settings.
    start = _axis(walk, user, call.get("start_dim", 0))
    end = _axis(walk, user, call.get("end_dim", -1))
    merged = Label().union(*walk.labels[start : end + 1])
    walk.labels[start : end + 1] = [merged]
    return Step(user)


def _view(walk: Walk, user: Node, call: Call) -> Step:
    """view and reshape that only flatten: the leading sizes as they are, then -1."""
    args, kwargs = call.get("rest")
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    kept = len(sizes) - 1
    if kwargs or not sizes or sizes[-1] != -1 or kept >= len(walk.labels):
        raise Refusal(f"'{user}' must keep leading sizes and end in -1, got {list(sizes)}")
    for axis, size in enumerate(sizes[:-1]):
        if is_spatial(walk.labels[axis]) or not _is_size(walk, axis, size):
            raise Refusal(f"'{user}' must keep the size of dimension {axis}, got {size}")
    walk.labels[kept:] = [Label().union(*walk.labels[kept:])]
    return Step(user)


def _is_size(walk: Walk, axis: int, size: Any) -> bool:
    """Whether a size in a view is that of the given axis, for all that is known."""
    if isinstance(size, Node):
        of = read_size(size)
        if of is not None and of[1] is not None:
            rank = len(walk.labels)
            return of[0] is walk.node and of[1] in (axis, axis - rank)
        size = size.meta.get("example_value", size.meta.get("val"))
    if type(size) is int and walk.labels[axis] == Label("c") and walk.full():
        walk.sized = True
        return size == walk.channels
    facts = facts_of(walk.node, walk.root)
    if facts is None or size is None:
        return False
    known = facts.shape[axis]
    return type(known) is type(size) and (
        known == size if isinstance(size, int) else str(known) == str(size)
    )


REDUCTIONS = {
    **dict.fromkeys(("mean", "sum"), _reduce),
    **{f"adaptive_avg_pool{n}d": _adaptive_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _pool for n in (1, 2, 3)},
    **dict.fromkeys(("view", "reshape"), _view),
    "flatten": _flatten,
}

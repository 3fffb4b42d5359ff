"""The rules: which steps between a convolution and a reduction commute with averaging over space.

A step may pass if it is affine and does the same at every position: its other operand must have
size 1 wherever a label is still spatial. Each rule checks one step and either moves the walk on or
refuses with one sentence. Nothing is computed here and no graph is changed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from convt_reduce._facts import facts_of
from convt_reduce._reductions import REDUCTIONS
from convt_reduce._report import Refusal
from convt_reduce._spelling import Call
from convt_reduce._walk import Label, Step, Walk, is_spatial, same_dtype

# Numbers meet all dtypes but float64 as float32, and a model may change its dtype later.
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).smallest_normal


def _mentions(value: Any, node: Node) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_mentions(v, node) for v in value)
    if isinstance(value, dict):
        return sum(_mentions(v, node) for v in value.values())
    return int(value is node)


def _binary(walk: Walk, user: Node, call: Call) -> Step:
    first, second = call.get("input"), call.get("other")
    if call.name == "div" and second is walk.node:
        raise Refusal(f"'{user}' must have the convolution's result as its numerator, got it below")
    if call.inplace and first is not walk.node:
        raise Refusal(f"'{user}' must overwrite the convolution's result, got another tensor")
    if call.get("rounding_mode") is not None:
        raise Refusal(f"'{user}' must divide without rounding, got {call.get('rounding_mode')}")
    operand = second if first is walk.node else first
    # Either would turn finite results of both signs into infinities that no longer cancel.
    for value in (operand, call.get("alpha", 1)):
        if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
            raise Refusal(f"'{user}' must have a finite number, got {value}")
    if call.name == "div" and isinstance(operand, (int, float)) and abs(operand) < _SMALLEST:
        raise Refusal(f"'{user}' must divide by a number other than 0, got {operand}")
    for value in (operand, call.get("alpha", 1)):
        _uniform(walk, user, value)
    factor = _foldable(call, operand)
    if factor is not None and not walk.steps:
        walk.multiplier = factor
        return Step(user, "scale")
    return Step(user)


def _foldable(call: Call, operand: Any) -> float | None:
    """The number that the step multiplies by, if it is one: no tensor, and exact as a float."""
    if call.name == "mul" and type(operand) in (int, float) and abs(operand) <= 2**53:
        return float(operand)
    return None


def _uniform(walk: Walk, user: Node, operand: Any) -> None:
    """Refuses an operand that is not known to be the same at every position."""
    facts = facts_of(operand, walk.root)
    if facts is None:
        raise Refusal(
            f"'{user}' must have an operand of known shape, got '{operand}', whose shape shows "
            'only when the model runs: torch.compile(model, backend="convt_reduce") sees it'
        )
    if facts.dtype is not None and facts.dtype.is_complex:
        raise Refusal(f"'{user}' must have a real operand, got {operand} of {facts.dtype}")
    if len(facts.shape) > len(walk.labels):
        raise Refusal(
            f"'{user}' must have an operand of at most {len(walk.labels)} dimensions, "
            f"got shape {list(facts.shape)}"
        )
    for size, label in zip(reversed(facts.shape), reversed(walk.labels), strict=False):
        if (is_spatial(label) or not label) and not (isinstance(size, int) and size == 1):
            raise Refusal(
                f"'{user}' must have an operand with size 1 on every spatial axis, "
                f"got '{operand}' of shape {list(facts.shape)}"
            )
        if not is_spatial(label) and not (isinstance(size, int) and size == 1):
            walk.channels = None  # one channel may have become several
    if len(facts.shape) > 0 and facts.dtype != walk.dtype:
        walk.dtype = None  # the result may have been promoted


def _unary(walk: Walk, user: Node, call: Call) -> Step:
    return Step(user)


def _cast(walk: Walk, user: Node, call: Call) -> Step:
    """to() and its relatives: of the device or the memory format, or to the dtype that is there."""
    args, kwargs = call.get("rest")
    values = [*args, *(v for k, v in kwargs.items() if k not in ("copy", "non_blocking"))]
    named = {"float": torch.float32, "double": torch.float64, "half": torch.float16}
    named["bfloat16"] = torch.bfloat16
    if call.name in named:
        values.append(named[call.name])
    for value in values:
        if isinstance(value, torch.dtype):
            same_dtype(walk, user, value)
        elif isinstance(value, Node) and not _is_device(value):
            facts = facts_of(value, walk.root)
            same_dtype(walk, user, facts and facts.dtype)
        elif isinstance(value, str) and call.name == "type":
            raise Refusal(f"'{user}' must keep the dtype {walk.dtype}, got {value}")
    return Step(user)


def _is_device(value: Node) -> bool:
    return value.op == "call_function" and value.target is getattr and value.args[1] == "device"


def _dropout(walk: Walk, user: Node, call: Call) -> Step:
    training = call.get("training", True)
    if training is not False:
        raise Refusal(f"'{user}' must be a dropout that is switched off, got training={training}")
    return Step(user)


def _batch_norm(walk: Walk, user: Node, call: Call) -> Step:
    if call.get("input") is not walk.node:
        raise Refusal(f"'{user}' must normalise the convolution's result, got it as a parameter")
    if call.get("running_mean") is None or call.get("running_var") is None:
        raise Refusal(f"'{user}' must have running statistics, got none")
    training = call.get("training", False)
    if training is not False:
        raise Refusal(
            f"'{user}' must use its running statistics, got training={training}: those of a batch "
            "come from the tensor that fusing avoids"
        )
    if len(walk.labels) < 2 or walk.labels[1] != Label("c"):
        raise Refusal(f"'{user}' must normalise channels, got another axis in their place")
    return Step(user)


RULES = {
    **dict.fromkeys(("mul", "div", "add", "sub", "rsub"), _binary),
    **dict.fromkeys(("neg", "positive", "clone", "detach", "contiguous"), _unary),
    **dict.fromkeys(("to", "float", "double", "half", "bfloat16"), _cast),
    **dict.fromkeys(("type", "type_as", "cuda", "cpu"), _cast),
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    **REDUCTIONS,
}


def take(walk: Walk, user: Node, call: Call) -> None:
    """Moves the walk over one node, or refuses it."""
    rule = RULES.get(call.name)
    if rule is None:
        raise Refusal(
            f"'{user}' must be an affine step that is the same at every position, got {call.name}"
        )
    if _mentions((user.args, user.kwargs), walk.node) != 1:
        raise Refusal(f"'{user}' must use '{walk.node}' once, got it several times")
    step = rule(walk, user, call)
    if call.module is not None and call.name in ("batch_norm", "dropout"):
        walk.eval_only.append(call.path)
    walk.steps.append(replace(step, name=call.path or call.name))
    walk.node = user

"""What is known of a value in a graph before it runs: its sizes and dtype.

A graph from torch.compile or torch.export carries them at every node. One from symbolic tracing
carries none, so there only parameters, buffers and what is made of them alone are known: those are
followed on meta tensors, which cost nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node, map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Facts(NamedTuple):
    """``shape`` and ``dtype`` of a tensor; a number has shape () and no dtype.

    ``wrapper`` names the class of a tensor that holds others, such as a quantised weight.
    """

    shape: tuple
    dtype: torch.dtype | None
    device: torch.device | None = None
    wrapper: str = ""


class _Unknown(Exception):
    pass


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _stand_in(value: Any, root: nn.Module) -> Any:
    """A value with the same facts: what the capture recorded, or a meta tensor."""
    if not isinstance(value, Node):
        return value
    for key in ("example_value", "val"):
        if key in value.meta:
            return value.meta[key]
    if value.op == "get_attr":
        attribute = _attribute(root, value.target)
        if isinstance(attribute, torch.Tensor):
            return torch.empty_like(attribute, device="meta", requires_grad=False)
    elif value.op == "call_method":
        self, *args = (_stand_in(argument, root) for argument in value.args)
        if isinstance(self, torch.Tensor) and not value.target.startswith("_"):
            kwargs = {k: _stand_in(v, root) for k, v in value.kwargs.items()}
            return getattr(self, value.target)(*args, **kwargs)
    elif value.op == "call_function" and _is_of_torch(value.target):
        args, kwargs = map_arg((value.args, value.kwargs), lambda node: _stand_in(node, root))
        return value.target(*args, **kwargs)
    raise _Unknown


def evaluate(node: Node, root: nn.Module) -> Any:
    """The value of a node of a captured graph, from what is recorded of its inputs."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _stand_in(n, root))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    raise AssertionError(f"no step is a {node.op}")


def _is_of_torch(function: Any) -> bool:
    """Whether calling it on meta tensors has no effect: torch's own functions and operators."""
    module = getattr(function, "__module__", None) or ""
    return module in ("_operator", "torch") or module.startswith(
        ("torch.nn.functional", "torch._C")
    )


def facts_of(value: Any, root: nn.Module) -> Facts | None:
    """The facts of a node or constant of a graph whose attributes ``root`` holds; None: unknown."""
    try:
        value = _stand_in(value, root)
    except Exception:  # whatever torch raises for a meta tensor it cannot follow
        return None
    if isinstance(value, torch.Tensor):
        wrapper = type(value).__name__ if is_traceable_wrapper_subclass(value) else ""
        return Facts(tuple(value.shape), value.dtype, value.device, wrapper)
    if isinstance(value, complex):
        return Facts((), torch.complex64)
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return Facts((), None)
    return None

"""Spellings: what one node of a graph computes, whichever way the model writes it.

`y * 2`, `y.mul_(2)`, `torch.multiply(y, 2)` and aten.mul.Tensor are one step, as are a layer and
its function. Each node becomes a Call: a plain name and arguments by name, so that the rules that
judge steps are written once, for modules, functions, methods and aten operators alike. Functions
are recognised by identity and modules by their exact type, never by what they are called.
"""

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from convt_reduce._report import Refusal

_POOL = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
_CONV = "input weight bias stride padding output_padding groups dilation"
_DROPOUT = "input p training inplace"
# Plain name -> its arguments in positional order.
SIGNATURES = {
    "mul": "input other",
    "div": "input other rounding_mode",
    "add": "input other alpha",
    "sub": "input other alpha",
    "rsub": "input other alpha",
    "neg": "input",
    "positive": "input",
    "clone": "input memory_format",
    "detach": "input",
    "contiguous": "input memory_format",
    "dropout": _DROPOUT,
    "batch_norm": "input running_mean running_var weight bias training momentum eps",
    "flatten": "input start_dim end_dim",
    "mean": "input dim keepdim dtype",
    "sum": "input dim keepdim dtype",
    **{f"adaptive_avg_pool{n}d": "input output_size" for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _POOL for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _CONV for n in (1, 2, 3)},
}
_ALIASES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "subtract": "sub",
    "__rsub__": "rsub",
    "negative": "neg",
    "pos": "positive",
    "alpha_dropout": "dropout",
    "feature_alpha_dropout": "dropout",
    **{f"dropout{n}d": "dropout" for n in (1, 2, 3)},
}
_INPLACE_OPERATORS = {"imul": "mul", "iadd": "add", "isub": "sub", "itruediv": "div"}
# Their arguments come in several forms, which the rules sort out.
VARIADIC = {
    *("to", "float", "double", "half", "bfloat16", "type", "type_as", "cuda", "cpu"),
    *("view", "reshape"),
}
# Not a step, but its name is told apart from a function of somebody's own.
_KEYWORDS = {"axis": "dim", "self": "input", "train": "training", "tensor": "input"}


@dataclass(frozen=True)
class Call:
    """What a node computes.

    Attributes:
        name: the plain name, or the node's own where it is none that the rules know.
        arguments: by name; of a variadic call, ``input`` and ``rest``.
        inplace: whether it overwrites its input.
        module: the layer, where the node calls one, and ``path``, its name in the root.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    inplace: bool = False
    module: nn.Module | None = None
    path: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)


@functools.cache
def _functions() -> dict[Any, tuple[str, bool]]:
    """Function -> plain name, and whether it works in place."""
    table: dict[Any, tuple[str, bool]] = {}
    for name, plain in {**{n: n for n in (*SIGNATURES, *VARIADIC)}, **_ALIASES}.items():
        for suffix in ("", "_"):
            for space in (operator, torch, functional, torch.Tensor):
                function = getattr(space, name + suffix, None)
                # torch.batch_norm has another order of arguments than the functional one.
                if function is not None and function is not torch.batch_norm:
                    table.setdefault(function, (plain, suffix == "_"))
    for name, plain in _INPLACE_OPERATORS.items():
        table[getattr(operator, name)] = (plain, True)
    return table


def _layer_settings(layer: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The functional call that a layer of exactly a known type makes, less its input."""
    kind = type(layer)
    name = kind.__name__
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        names = ("running_mean", "running_var", "training")
        return "batch_norm", {n: getattr(layer, n) for n in names}
    if kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout) or (
        kind is nn.FeatureAlphaDropout
    ):
        return "dropout", {"training": layer.training}
    if kind is nn.Identity:
        return "positive", {}
    if kind is nn.Flatten:
        return "flatten", {"start_dim": layer.start_dim, "end_dim": layer.end_dim}
    if kind in (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d):
        return f"adaptive_avg_pool{name[-2]}d", {"output_size": layer.output_size}
    if kind in (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d):
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
        settings = {n: getattr(layer, n) for n in names}
        settings["divisor_override"] = getattr(layer, "divisor_override", None)
        return f"avg_pool{name[-2]}d", settings
    return None


def settings_of(layer: nn.Module) -> list[str]:
    """The attributes of a layer that decide what its call is, where it is one of `spell`'s."""
    settings = _layer_settings(layer)
    return [name for name in settings[1] if hasattr(layer, name)] if settings else []


def hooks_of(module: nn.Module) -> str | None:
    """The name of a kind of hooks that a call of the module would run, or None."""
    for name, value in vars(module).items():
        if name.endswith("_hooks") and "state_dict" not in name and value:
            return name.strip("_")
    return None


def _bind(name: str, node: Node) -> dict[str, Any]:
    """Arguments by name; raises a Refusal for one that the rules do not know."""
    if name in VARIADIC:
        return {"input": node.args[0] if node.args else None, "rest": (node.args[1:], node.kwargs)}
    names = SIGNATURES[name].split()
    if len(node.args) > len(names):
        raise Refusal(f"'{node}' must have at most {len(names)} arguments, got {len(node.args)}")
    bound = dict(zip(names, node.args, strict=False))
    for keyword, value in node.kwargs.items():
        keyword = _KEYWORDS.get(keyword, keyword)
        if keyword not in names:
            raise Refusal(f"'{node}' must have no argument {keyword}, got {value}")
        bound[keyword] = value
    return bound


def _bind_aten(node: Node) -> Call:
    """An aten operator's arguments, named by its schema."""
    schema = node.target._schema
    name = schema.name.split("::")[1]
    inplace = name.endswith("_")
    name = name.rstrip("_")
    values: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        value = argument.default_value if argument.has_default_value() else None
        value = node.args[position] if position < len(node.args) else value
        value = node.kwargs.get(argument.name, value)
        values[_KEYWORDS.get(argument.name, argument.name)] = value
    if name == "convolution" and values["transposed"]:
        name = f"conv_transpose{len(values['stride'])}d"
    if name in ("view", "reshape"):
        size = values.get("size", values.get("shape"))
        values = {"input": values["input"], "rest": ((size,), {})}
    if name == "alias":
        name = "positive"
    if not schema.name.startswith("aten::") or name in VARIADIC - {"view", "reshape"}:
        return Call(str(node.target))
    return Call(_ALIASES.get(name, name), values, inplace)


def spell(node: Node, root: nn.Module) -> Call:
    """What the node computes.

    Raises:
        Refusal: it calls a layer with hooks, or has an argument that no rule knows.
    """
    if node.op == "call_module":
        layer = root.get_submodule(node.target)
        settings = _layer_settings(layer)
        if settings is None:
            return Call(type(layer).__name__, {}, module=layer, path=node.target)
        hooks = hooks_of(layer)
        if hooks is not None:
            raise Refusal(f"'{node.target}' must have no hooks, got {hooks}")
        bound = {"input": node.args[0] if node.args else node.kwargs.get("input")}
        return Call(settings[0], {**bound, **settings[1]}, False, layer, node.target)
    if node.op == "call_method":
        plain = node.target[:-1] if node.target.endswith("_") else node.target
        plain = _ALIASES.get(node.target, _ALIASES.get(plain, plain))
        if plain not in SIGNATURES and plain not in VARIADIC:
            return Call(node.target)
        return Call(plain, _bind(plain, node), node.target.endswith("_") and plain != "rsub")
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return _bind_aten(node)
        found = _functions().get(node.target)
        if found is not None:
            return Call(found[0], _bind(found[0], node), found[1])
        return Call(getattr(node.target, "__name__", str(node.target)))
    return Call(node.op)

"""Which calls of a forward a plan may serve: those that give its required arguments, as tensors.

A trace runs with stand-ins for the required arguments and with the defaults of the others, so that
it says nothing about calls that give something else.
"""

import collections
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from convt_reduce._report import Untraceable


def required_parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of the forward's arguments that have no default.

    Raises:
        Untraceable: it takes any number of arguments, so that no trace stands for every call.
    """
    names = []
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise Untraceable(f"its forward takes *{parameter.name}")
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return tuple(names)


_DICTS = (dict, collections.OrderedDict)


def gives_tensors(args: tuple, kwargs: dict) -> bool:
    """Whether a call gives tensors, or lists and dictionaries of tensors and numbers.

    Nothing else: a trace answers ``x is None`` with no, whatever will come.
    """
    for value in args:
        if not _is_input(value):
            return False
    return not kwargs or all(_is_input(value) for value in kwargs.values())


def _is_input(value: Any) -> bool:
    if isinstance(value, Tensor) or type(value) in (int, float):
        return True
    if type(value) in (tuple, list, torch.Size):
        return all(_is_input(v) for v in value)
    return type(value) in _DICTS and all(_is_input(v) for v in value.values())


def gives_only(names: tuple[str, ...], args: tuple, kwargs: dict) -> bool:
    """Whether a call gives exactly the required arguments."""
    if not kwargs:
        return len(args) == len(names)
    return len(args) + len(kwargs) == len(names) and all(k in names[len(args) :] for k in kwargs)

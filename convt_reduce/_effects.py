"""What a forward did besides computing its result, seen by comparing before and after.

A plan repeats none of that: an attribute that is set, a list that grows, a number that is drawn.
"""

import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from convt_reduce._frozen import ATOMS, SEQUENCES, attributes_of, cells_of, is_torchs, variables_of


class _Itself:
    """An object that equals itself alone, and is kept alive so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    __hash__ = None


def content(value: Any, seen: set[int] | None = None) -> Any:
    """What compares equal as long as nothing in ``value`` is changed, however deep."""
    itself = _Itself(value)
    seen = set() if seen is None else seen
    if issubclass(type(value), (Proxy, nn.Module, nn.parameter.UninitializedTensorMixin)):
        return itself
    if not isinstance(value, ATOMS):
        if id(value) in seen:
            return itself
        seen.add(id(value))
    if issubclass(type(value), Tensor):
        # A tensor of inference mode counts no versions.
        return itself, None if value.is_inference() else value._version
    if isinstance(value, ATOMS):
        return type(value), value
    if isinstance(value, random.Random):
        return itself, value.getstate()
    if isinstance(value, torch.Generator):
        return itself, value.get_state().tolist()
    if hasattr(type(value), "bit_generator"):  # NumPy's
        return itself, str(value.bit_generator.state)
    if isinstance(value, (type, types.ModuleType)):
        return itself
    if isinstance(value, dict):
        return itself, [(_Itself(k), content(v, seen)) for k, v in value.items()]
    if isinstance(value, SEQUENCES):
        return itself, [content(v, seen) for v in value]
    if isinstance(value, (set, frozenset)):
        return itself, len(value), [_Itself(v) for v in value]
    if isinstance(value, types.FunctionType):
        return itself, [content(v, seen) for v in cells_of(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return itself, value.tobytes()
    own = attributes_of(value)
    return itself if own is None else (itself, [(k, content(v, seen)) for k, v in own.items()])


def state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What a forward may change without fx noticing: attributes, of the modules' classes too."""
    state = {
        (path, name): content(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }
    for cls in {cls: None for module in model.modules() for cls in type(module).__mro__}:
        if not is_torchs(cls):
            for name, value in vars(cls).items():
                if not name.startswith("__") or isinstance(value, types.FunctionType):
                    state[cls.__qualname__, name] = content(value)
    return state


def first_change(before: dict, after: dict) -> Any:
    """The first (module, attribute) that is not what it was, or None."""
    for key in {**before, **after}:
        if key not in before or key not in after or before[key] != after[key]:
            return key
    return None


def changed_globals(seen: Iterable[tuple[Any, str, Any]]) -> str | None:
    """The name of a global variable that is not what it was; seen: holder, name, `content`."""
    for owner, name, before in seen:
        variables = variables_of(owner)
        if name not in variables or content(variables[name]) != before:
            return name
    return None


def draws() -> list:
    """The states of the generators that everybody shares, NumPy's only if it is loaded."""
    states = [random.getstate(), torch.get_rng_state().tolist()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tolist(), *rest))
    return states


def redraw(states: list) -> None:
    """Puts the generators back."""
    random.setstate(states[0])
    torch.set_rng_state(torch.tensor(states[1], dtype=torch.uint8))
    if len(states) > 2:
        sys.modules["numpy"].random.set_state(states[2])

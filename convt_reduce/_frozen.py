"""Values that a trace froze into a plan: written down once, compared with what is there at a call.

A value is frozen by content, not by identity, because copies of a model share its plans: atoms by
value, containers and plain objects element by element, functions by their code, closure and
defaults, and whatever the model itself holds by its place in the model.
"""

import collections
import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convt_reduce._report import Untraceable

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# A plan compares everything that it read at every call.
MOST = 1000
SEQUENCES = (tuple, list, collections.deque)
Path = tuple[str, ...]


def find(root: nn.Module, path: Sequence[str]) -> Any:
    """The module at a path, or None."""
    module: Any = root
    for name in path:
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def held(root: nn.Module, path: Sequence[str]) -> Any:
    """The module, parameter, buffer or attribute at a path, or None."""
    owner = find(root, path[:-1]) if path else None
    if owner is None:
        return root if not path else None
    for place in (owner._modules, owner._parameters, owner._buffers, owner.__dict__):
        if path[-1] in place:
            return place[path[-1]]
    return None


class Frozen:
    """A value as it was; ``same`` says whether another one reads the same."""

    def same(self, now: Any, root: nn.Module) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class Atom(Frozen):
    kind: type
    value: Any

    def same(self, now: Any, root: nn.Module) -> bool:
        # NaN is itself and equals nothing.
        return now is self.value or (type(now) is self.kind and now == self.value)


@dataclass(frozen=True)
class Itself(Frozen):
    """What no copy of a model copies: a class, a function of torch, a module of Python."""

    value: Any

    def same(self, now: Any, root: nn.Module) -> bool:
        return now is self.value


@dataclass(frozen=True)
class Place(Frozen):
    """What the model itself holds at a path."""

    path: Path

    def same(self, now: Any, root: nn.Module) -> bool:
        return held(root, self.path) is now


@dataclass(frozen=True)
class Facts(Frozen):
    """A tensor that is neither parameter nor buffer: a plan reads it where it is."""

    kind: type
    shape: tuple
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def same(self, now: Any, root: nn.Module) -> bool:
        return type(now) is self.kind and self == facts_of_held(now)


@dataclass(frozen=True)
class Items(Frozen):
    """A sequence, or a set."""

    kind: type
    items: tuple | frozenset

    def same(self, now: Any, root: nn.Module) -> bool:
        if type(now) is not self.kind or len(now) != len(self.items):
            return False
        if isinstance(self.items, frozenset):
            return self.items == frozenset(now)
        return all(was.same(v, root) for was, v in zip(self.items, now, strict=True))


@dataclass(frozen=True)
class Entries(Frozen):
    """A dictionary, or the attributes of an object of class ``kind``."""

    kind: type
    entries: tuple[tuple[Any, Frozen], ...]
    of_object: bool = False

    def same(self, now: Any, root: nn.Module) -> bool:
        if type(now) is not self.kind:
            return False
        mapping = attributes_of(now) if self.of_object else now
        if len(mapping) != len(self.entries):
            return False
        pairs = zip(self.entries, mapping.items(), strict=True)
        # Keys that are tensors equal nothing but themselves.
        return all(
            (key is name or (key == name) is True) and was.same(v, root)
            for (key, was), (name, v) in pairs
        )


@dataclass(frozen=True)
class Function(Frozen):
    code: types.CodeType
    cells: tuple[Frozen, ...]

    def same(self, now: Any, root: nn.Module) -> bool:
        if getattr(now, "__code__", None) is not self.code:
            return False
        if not self.cells:
            return True
        cells = cells_of(now)
        return len(cells) == len(self.cells) and all(
            was.same(v, root) for was, v in zip(self.cells, cells, strict=True)
        )


@dataclass(frozen=True)
class Array(Frozen):
    """NumPy's arrays and numbers."""

    kind: type
    shape: tuple
    dtype: str
    content: bytes

    def same(self, now: Any, root: nn.Module) -> bool:
        return type(now) is self.kind and self == _array(now)


@dataclass(frozen=True)
class Kind(Frozen):
    """An object of which only the class is looked at."""

    kind: type

    def same(self, now: Any, root: nn.Module) -> bool:
        return type(now) is self.kind


@dataclass(frozen=True)
class Method(Frozen):
    function: Frozen
    owner: Frozen

    def same(self, now: Any, root: nn.Module) -> bool:
        return (
            type(now) is types.MethodType
            and self.function.same(now.__func__, root)
            and self.owner.same(now.__self__, root)
        )


def cells_of(function: types.FunctionType) -> list[Any]:
    """What a function carries besides its code: its closure and its defaults."""
    values = list(function.__defaults__ or ())
    values += (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            values.append(None)
    return values


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object; None: it is none that can be looked into."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    own = getattr(value, "__dict__", None)
    slots = [s for cls in type(value).__mro__ for s in vars(cls).get("__slots__", ())]
    if type(own) is not dict and not slots:
        return None
    attributes = dict(own) if type(own) is dict else {}
    attributes |= {s: getattr(value, s) for s in slots if s != "__dict__" and hasattr(value, s)}
    return attributes


def variables_of(owner: Any) -> Mapping[str, Any]:
    """The variables of a class, or of a dictionary of global ones."""
    return vars(owner) if isinstance(owner, type) else owner


def is_torchs(value: Any) -> bool:
    """Whether a class or function belongs to torch or to Python itself."""
    name = (getattr(value, "__module__", None) or "").split(".")[0]
    return name in ("torch", "builtins", "typing", "abc", "math", "operator", "functools")


def places_of(root: nn.Module, attributes: Mapping[Tensor, str] | None = None) -> dict[int, Path]:
    """By the id of a module, parameter, buffer or traced attribute, its first path in the model."""
    places: dict[int, Path] = {}
    for named in (root.named_modules(), root.named_parameters(), root.named_buffers()):
        for name, value in named:
            places.setdefault(id(value), tuple(name.split(".")) if name else ())
    for tensor, name in (attributes or {}).items():
        places.setdefault(id(tensor), tuple(name.split(".")))
    return places


def facts_of_held(tensor: Tensor) -> Facts:
    shape = tuple(tensor.shape)
    return Facts(type(tensor), shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _array(value: Any) -> Array:
    return Array(type(value), tuple(value.shape), str(value.dtype), value.tobytes())


_SHARED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, property)


def freezer(places: Mapping[int, Path]) -> Callable[[Any], Frozen]:
    """A function that freezes values of a model whose parts are at ``places``."""

    def freeze(value: Any, inside: tuple[int, ...] = (), count: list[int] | None = None) -> Frozen:
        count = [0] if count is None else count
        count[0] += 1
        if count[0] > MOST:
            raise Untraceable(f"it reads something that holds more than {MOST} values")
        if isinstance(value, ATOMS):
            return Atom(type(value), value)
        if id(value) in places:
            return Place(places[id(value)])
        if isinstance(value, Tensor):
            return facts_of_held(value)
        if isinstance(value, _SHARED):
            return Itself(value)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return _array(value)
        if id(value) in inside or isinstance(value, nn.Module):
            return Kind(type(value))
        deeper = ((*inside, id(value)), count)
        if isinstance(value, types.FunctionType):
            if is_torchs(value):
                return Itself(value)
            return Function(value.__code__, tuple(freeze(v, *deeper) for v in cells_of(value)))
        if isinstance(value, types.MethodType):
            parts = (freeze(value.__func__, *deeper), freeze(value.__self__, *deeper))
            return Method(*parts)
        if isinstance(value, dict):
            entries = tuple((k, freeze(v, *deeper)) for k, v in value.items())
            return Entries(type(value), entries)
        if isinstance(value, SEQUENCES):
            return Items(type(value), tuple(freeze(v, *deeper) for v in value))
        if isinstance(value, (set, frozenset)):
            return Items(type(value), frozenset(value))
        own = attributes_of(value)
        if own is None:
            return Kind(type(value))
        entries = tuple((k, freeze(v, *deeper)) for k, v in own.items())
        return Entries(type(value), entries, True)

    return freeze

"""What must still hold for a plan to stand in for a forward: what its trace read, and no more.

A call pays for the guards, so a module that is only called, and read at every call, has none. Those
that have one are the modules whose forwards were traced through, those that the plan does without,
and those of which the forward, or a rule that took a step, read an attribute.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from convt_reduce._frozen import (
    Frozen,
    Path,
    facts_of_held,
    find,
    freezer,
    is_torchs,
    places_of,
    variables_of,
)
from convt_reduce._report import Untraceable

BASE = "_convt_reduce_base"  # in the class of a fused module: the user's own class
_MISSING = object()
_DICTS = ("_modules", "_parameters", "_buffers")


def has_hooks(module: nn.Module) -> bool:
    """As `hooks_of`, for those that a call runs; written out because it runs in every forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


@dataclass(frozen=True)
class Guard:
    """What must hold of one module.

    Attributes:
        path: the way to it from the fused module, which has an empty one.
        kind: its exact class, or that of which a fused class was made; None: any.
        forward: its class's forward; None: any.
        inherited: the forwards that this one may call, by the base class that has them.
        training: its mode; None: any.
        hooks: whether it may have hooks; the fused module itself may, for they run as ever.
        attributes: by name, of its own.
        settings: by name, of its class; none of its own hides them.
        absent: names of attributes that neither has.
        present: dictionaries and names of parts that are there, and whether they are None.
        shapes: of parameters and buffers, by dictionary and name.
        same: parts that are to be found elsewhere as well, by dictionary and name.
        listed: by the name of a dictionary of parts, all the names in it.
    """

    path: Path
    kind: type | None = None
    forward: Frozen | None = None
    inherited: tuple[tuple[type, Any], ...] = ()
    training: bool | None = None
    hooks: bool = True
    attributes: tuple[tuple[str, Frozen], ...] = ()
    settings: tuple[tuple[str, Frozen], ...] = ()
    absent: tuple[str, ...] = ()
    present: tuple[tuple[str, str, bool], ...] = ()
    shapes: tuple[tuple[str, str, torch.Size], ...] = ()
    same: tuple[tuple[str, str, Frozen], ...] = ()
    listed: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def holds(self, root: nn.Module) -> bool:
        module = find(root, self.path) if self.path else root
        if module is None or not (self.hooks or not has_hooks(module)):
            return False
        own = module.__dict__
        if self.training is not None and module.training is not self.training:
            return False
        for holder, name, is_none in self.present:
            part = own[holder].get(name, _MISSING)
            if part is _MISSING or (part is None) is not is_none:
                return False
        for name, was in self.attributes:
            now = own.get(name, _MISSING)
            if now is _MISSING or not was.same(now, root):
                return False
        for holder, name, shape in self.shapes:
            if own[holder][name].shape != shape:
                return False
        for holder, name, was in self.same:
            if not was.same(own[holder][name], root):
                return False
        for holder, names in self.listed:
            if tuple(own[holder]) != names:
                return False
        for name in self.absent:
            if name in own or hasattr(module, name):
                return False
        return self._holds_of_class(module, own, root)

    def _holds_of_class(self, module: nn.Module, own: dict, root: nn.Module) -> bool:
        kind = type(module)
        if self.kind is not None and kind is not self.kind:
            kind = kind.__dict__.get(BASE)
            if kind is not self.kind:
                return False
        if self.forward is not None:
            base = kind.__dict__.get(BASE, kind)
            if not self.forward.same(base.forward, root):
                return False
            for cls, forward in self.inherited:
                if cls.__dict__.get("forward") is not forward:
                    return False
        for name, was in self.settings:
            if name in own or not was.same(getattr(kind, name, _MISSING), root):
                return False
        return True


class Scope:
    """Who holds variables: a class, or a dictionary of global ones; it equals itself alone."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.variables = variables_of(owner)

    def __eq__(self, other: object) -> bool:
        return type(other) is Scope and other.owner is self.owner

    __hash__ = None


@dataclass(frozen=True)
class Guards:
    """All that must hold.

    Attributes:
        modules: of modules.
        variables: global variables: where they are, and name.
        answers: functions of torch without arguments, and what they answered.
    """

    modules: tuple[Guard, ...]
    variables: tuple[tuple[Scope, str, Frozen], ...]
    answers: tuple[tuple[Callable[[], Any], Any], ...]

    def hold(self, root: nn.Module) -> bool:
        for guard in self.modules:
            if not guard.holds(root):
                return False
        for scope, name, was in self.variables:
            if not was.same(scope.variables.get(name, _MISSING), root):
                return False
        return all(function() == answer for function, answer in self.answers)

    def loose(self) -> "Guards":
        """The same for any mode."""
        return replace(self, modules=tuple(replace(g, training=None) for g in self.modules))

    def either(self, other: "Guards") -> "Guards":
        """What holds of both: where their modes differ, any."""
        pairs = zip(self.modules, other.modules, strict=True)
        modules = tuple(a if a == b else replace(a, training=None) for a, b in pairs)
        return replace(self, modules=modules)


class Collector:
    """Makes the guards of one plan.

    Args:
        root: the module whose forward is to be replaced, as it was when it was traced.
        attributes: the tensors among its attributes, by the names that the graph has for them.
        asks_types: whether the forward may have asked for the types of modules.
    """

    def __init__(self, root: nn.Module, attributes: Mapping[Tensor, str], asks_types: bool) -> None:
        self.root, self.asks_types = root, asks_types
        self.places = places_of(root, attributes)
        self.freeze = freezer(self.places)
        self.found: dict[Path, dict[str, Any]] = {}

    def _of(self, path: Path) -> dict[str, Any]:
        return self.found.setdefault(path, {"path": path})

    def _add(self, path: Path, field: str, value: tuple) -> None:
        known = self._of(path).setdefault(field, ())
        if value not in known:
            self._of(path)[field] = (*known, value)

    def replaces(self, path: Path, traced: bool) -> None:
        """A module whose hooks would be lost, traced through or not."""
        module = find(self.root, path)
        if path:
            self._of(path).update(kind=type(module), hooks=False)
        if traced:
            bases = [c for c in type(module).__mro__[1:] if "forward" in vars(c)]
            inherited = tuple((c, vars(c)["forward"]) for c in bases if not is_torchs(c))
            self._of(path).update(forward=self.freeze(type(module).forward), inherited=inherited)

    def mode(self, path: Path, training: bool) -> None:
        self._of(path)["training"] = training

    def shape(self, target: str) -> None:
        """A parameter or buffer whose shape was read."""
        *way, name = target.split(".")
        module = find(self.root, way)
        for holder in ("_parameters", "_buffers"):
            part = module.__dict__[holder].get(name) if module is not None else None
            if part is not None:
                self._add(tuple(way), "present", (holder, name, False))
                self._add(tuple(way), "shapes", (holder, name, part.shape))

    def read(self, module: nn.Module, name: str) -> None:
        """An attribute that was read of a module, or asked for."""
        path = self.places.get(id(module))
        if path is None or find(self.root, path) is not module:
            raise Untraceable(f"it reads '{name}' of a module that is no part of it")
        own = module.__dict__
        if name == "training":
            return self.mode(path, module.training)
        if name == "forward":
            return self.replaces(path, traced=True)
        if name in _DICTS:
            self._add(path, "listed", (name, tuple(own[name])))
            for part in own[name]:
                self._part(path, name, part, own[name][part])
            return None
        if name in own:
            if name != "_compiled_call_impl":
                self._attribute(path, name, own[name])
            return None
        for holder in _DICTS:
            if name in own[holder]:
                return self._part(path, holder, name, own[holder][name])
        base = type(module).__dict__.get(BASE, type(module))
        if not hasattr(base, name):
            self._add(path, "absent", name)
        elif not is_torchs(base) and getattr(base, name) is not getattr(nn.Module, name, None):
            self._add(path, "settings", (name, self.freeze(getattr(base, name))))
        return None

    def _attribute(self, path: Path, name: str, value: Any) -> None:
        """An attribute in the narrow sense; of a tensor, what a trace knows of it."""
        place = self.places.get(id(value))
        if not isinstance(value, Tensor) or place is None:
            self._add(path, "attributes", (name, self.freeze(value)))
            return
        if place != (*path, name):
            self._add(path, "attributes", (name, self.freeze(value)))
        owner = find(self.root, place[:-1])
        if place[-1] in owner.__dict__:
            self._add(place[:-1], "attributes", (place[-1], facts_of_held(value)))

    def _part(self, path: Path, holder: str, name: str, part: Any) -> None:
        self._add(path, "present", (holder, name, part is None))
        place = self.places.get(id(part))
        if place is not None and place != (*path, name):
            self._add(path, "same", (holder, name, self.freeze(part)))
        if self.asks_types and isinstance(part, nn.Module) and place is not None:
            self._of(place)["kind"] = type(part)

    def guards(
        self,
        variables: Iterable[tuple[Any, str]],
        answers: Mapping[Callable[[], Any], Any],
    ) -> Guards:
        """All of them; global variables are taken as they are now."""
        return Guards(
            tuple(Guard(**fields) for fields in self.found.values()),
            tuple((Scope(o), n, self.freeze(variables_of(o)[n])) for o, n in variables),
            tuple(answers.items()),
        )

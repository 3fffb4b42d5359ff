"""The forward of a fused module, and when it may stand in for the module's own.

A fused module is a copy of the user's, of a subclass of its class, so that its methods, state_dict
and hooks are there. Its forward runs one of its plans, each traced in one setting of train and eval
modes, and only while everything that the trace took for granted still holds; otherwise it runs the
original forward, on the same layers. Plans know their modules by name, never by reference: copies
share them, and what is unpickled makes them anew.
"""

import functools
import itertools
import linecache
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Proxy

from convt_reduce._trace import ATOMS, DEPTH, SEQUENCES, gives_only, gives_tensors

_has_global_hook: Callable[[], Any] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", lambda: False
)
_numbers = itertools.count()
PLANS = "_convt_reduce_plans"  # in a fused module
_BASE = "_convt_reduce_base"  # in its class


@dataclass(frozen=True)
class Guard:
    """What must hold of one module: its exact type and parts, no hooks, its mode and settings.

    ``path`` is the way to it from the fused module. That one itself, where it is empty, may have
    hooks, which run as ever, and is of another type by then; one inside it may be fused as well.
    ``parts`` names its modules, parameters and buffers, and which are None. ``alias`` is another
    way to the same module, and ``tied`` are other ways to its parameters and buffers.
    ``attributes`` are values, ``contents`` what `_plain` says of others, ``settings`` what it says
    of its class's.
    """

    path: tuple[str, ...]
    type: type
    training: bool | None
    hooks: bool  # whether hooks may be there
    parts: tuple[tuple[str, bool], ...]
    alias: tuple[str, ...] | None = None
    tied: tuple[tuple[str, tuple[str, ...]], ...] = ()
    names: tuple[str, ...] | None = None  # of all its attributes
    attributes: tuple[tuple[str, Any], ...] = ()
    contents: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def holds(self, root: nn.Module) -> bool:
        module = _find(root, self.path)
        if module is None or (self.alias is not None and _find(root, self.alias) is not module):
            return False
        if self.training is not None and module.training is not self.training:
            return False
        if _parts(module) != self.parts:
            return False
        for name, (*way, last) in self.tied:
            other = _find(root, way)
            if other is None or _tensor(other, last) is not _tensor(module, name):
                return False
        own = module.__dict__
        for name, value in self.attributes:
            if name not in own:
                return False
            now = own[name]  # NaN is itself and equals nothing
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        for name, value in self.contents:
            if name not in own or _plain(own[name]) != value:
                return False
        for name, value in self.settings:
            if _plain(getattr(type(module), name, None)) != value:
                return False
        if self.names is not None and _names(module) != self.names:
            return False
        if not self.path:
            return True
        kind = type(module)
        if kind is not self.type and kind.__dict__.get(_BASE) is not self.type:
            return False
        return self.hooks or not has_hooks(module)


def _find(root: nn.Module, path: Sequence[str]) -> Any:
    module: Any = root
    for name in path:
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def _tensor(module: nn.Module, name: str) -> Any:
    return module._parameters.get(name, module._buffers.get(name))


def _parts(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    parts = []
    for held in (module._modules, module._parameters, module._buffers):
        for name, value in held.items():
            parts.append((name, value is None))
    return tuple(parts)


def _names(module: nn.Module) -> tuple[str, ...]:
    return tuple([name for name in module.__dict__ if name not in _MODULE_ATTRIBUTES])


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
class Plan:
    """One rewritten forward: ``function(module, *parameters)``, made from ``source``."""

    parameters: tuple[str, ...]
    guards: tuple[Guard, ...]
    source: str
    function: Callable = field(compare=False)

    def fits(self, root: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether the plan may serve this call."""
        if not (gives_only(self.parameters, args, kwargs) and gives_tensors(args, kwargs)):
            return False
        return all(g.holds(root) for g in self.guards)


def make_plan(graph: Graph, parameters: tuple[str, ...], guards: Sequence[Guard]) -> Plan:
    """Turns a rewritten graph into a plan; its code shows in tracebacks."""
    code = graph.python_code("self")
    name = f"<convt_reduce plan {next(_numbers)}>"
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(True), name)
    return Plan(parameters, tuple(guards), code.src, scope["forward"])


def merge(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """One plan for those that have the same code: what differs between their modes is free."""
    merged: list[Plan] = []
    for plan in plans:
        for index, other in enumerate(merged):
            loose = [tuple(replace(g, training=None) for g in p.guards) for p in (plan, other)]
            if plan.source == other.source and loose[0] == loose[1]:
                pairs = zip(plan.guards, other.guards, strict=True)
                guards = tuple(a if a == b else replace(a, training=None) for a, b in pairs)
                merged[index] = replace(other, guards=guards)
                break
        else:
            merged.append(plan)
    return tuple(merged)


class Plans:
    """The plans of one fused module, as they are tried, and what it takes to remake them."""

    def __init__(self, cost_rule: bool, plans: tuple[Plan, ...], remake: bool = False) -> None:
        self.cost_rule = cost_rule
        self.plans = plans
        self.remake = remake

    def __deepcopy__(self, memo: dict) -> "Plans":
        return self

    def __reduce__(self) -> tuple:
        return Plans, (self.cost_rule, (), True)


def _is_traced(args: tuple, kwargs: dict) -> bool:
    """Whether somebody's symbolic tracing is under way; it gets to see the original."""
    return any(isinstance(value, Proxy) for value in (*args, *kwargs.values()))


def _forward(base: type) -> Callable:
    original = base.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _has_global_hook() and not _is_traced(args, kwargs):
            # A state of the user's making may have come without them.
            for plan in self.__dict__[PLANS].plans if PLANS in self.__dict__ else ():
                if plan.fits(self, args, kwargs):
                    return plan.function(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _reduce(self: nn.Module, protocol: int) -> tuple:
    """As the base class's own, for an object of a class that no import can find."""
    reduced = super(type(self), self).__reduce_ex__(protocol)
    return (_empty, (fused_base(self),), *reduced[2:])


def _empty(base: type) -> nn.Module:
    cls = fused_class(base)
    return cls.__new__(cls)


def _set_state(self: nn.Module, state: dict) -> None:
    super(type(self), self).__setstate__(state)
    plans = self.__dict__.get(PLANS)
    if plans is not None and plans.remake:
        from convt_reduce.rewrite import plans_for

        self.__dict__[PLANS] = Plans(plans.cost_rule, ())
        self.__dict__[PLANS] = Plans(plans.cost_rule, plans_for(self, plans.cost_rule))


@functools.cache
def fused_class(base: type) -> type:
    """The subclass of a module's class whose forward runs plans."""
    body = {
        "forward": _forward(base),
        "__reduce_ex__": _reduce,
        "__setstate__": _set_state,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        _BASE: base,
    }
    return types.new_class(f"Fused{base.__name__}", (base,), {}, lambda scope: scope.update(body))


def fused_base(module: nn.Module) -> type | None:
    """The user's class of a fused module; None: it is not fused."""
    return type(module).__dict__.get(_BASE)


def install(module: nn.Module, plans: Plans) -> None:
    """Makes a module fused, in place."""
    module.__class__ = fused_class(type(module))
    module.__dict__[PLANS] = plans


def uninstall(module: nn.Module) -> None:
    """Gives a fused module, and those in it, their own forwards back, in place."""
    for part in module.modules():
        base = fused_base(part)
        if base is not None:
            part.__class__ = base
            part.__dict__.pop(PLANS, None)


def guards_of(
    root: nn.Module,
    modes: dict[str, bool | None],
    called: frozenset[str] | set[str],
    free: frozenset[str] | set[str],
) -> tuple[Guard, ...]:
    """The guards that hold now, one for each module of a tree.

    Args:
        root: the module whose forward is to be replaced.
        modes: by the names of modules, the mode that is taken for granted.
        called: the names of the modules that the plan no longer calls, so that hooks would be lost.
        free: the names of those whose settings and parameters are read at every call.
    """
    first: dict[int, tuple[str, ...]] = {}
    guards = []
    for path, module in root.named_modules(remove_duplicate=False):
        way = tuple(path.split(".")) if path else ()
        alias = first.setdefault(id(module), way)
        tied = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                other = first.setdefault(id(tensor), (*way, name))
                if other != (*way, name) and alias == way:
                    tied.append((name, other))
        names, values, contents, settings = None, [], [], []
        if path not in free:
            names = _names(module)
            for name in names:
                value = module.__dict__[name]
                if type(value) in ATOMS:
                    values.append((name, value))
                else:
                    contents.append((name, _plain(value)))
            settings = _class_settings(type(module))
        guards.append(
            Guard(
                way,
                type(module),
                modes.get(path),
                path not in called,
                _parts(module),
                alias if alias != way else None,
                tuple(tied),
                names,
                tuple(values),
                tuple(contents),
                tuple(settings),
            )
        )
    return tuple(guards)


def _class_settings(cls: type) -> list[tuple[str, Any]]:
    """The plain values among the attributes of a user's classes, and what containers hold."""
    kinds = (*ATOMS, *SEQUENCES, dict, set)
    found = {
        name: _plain(getattr(cls, name))
        for base in cls.__mro__
        if base.__module__.split(".")[0] not in ("torch", "builtins", "typing", "abc")
        for name, value in vars(base).items()
        if not name.startswith("__") and type(value) in kinds
    }
    return list(found.items())


# torch.compile leaves a note on a module.
_MODULE_ATTRIBUTES = {*vars(nn.Module()), PLANS, "_is_torch_compile", "_compiled_call_impl"}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value that compares equal for what a forward would read the same from."""
    if isinstance(value, ATOMS):
        return type(value), value
    if depth > DEPTH or isinstance(value, (Tensor, nn.Module)):
        return type(value)
    if isinstance(value, dict):
        items = tuple((_plain(k, depth + 1), _plain(v, depth + 1)) for k, v in value.items())
        return type(value), items
    if isinstance(value, SEQUENCES):
        return type(value), tuple(_plain(v, depth + 1) for v in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_plain(v, depth + 1) for v in value)
    if callable(value):
        return getattr(value, "__module__", ""), getattr(value, "__code__", None) or type(value)
    own = getattr(value, "__dict__", None)
    return (type(value), _plain(own, depth + 1)) if type(own) is dict else type(value)

"""The forward of a fused module, and when it may stand in for the module's own.

A fused module is a copy of the user's, of a subclass of its class, so that its methods, state_dict
and hooks are there. Its forward runs one of its plans, each traced in one setting of train and eval
modes, and only while everything that the trace took for granted still holds; otherwise it runs the
original forward, on the same layers. Plans know their modules by name, never by reference: copies
share them, and what is unpickled makes them anew.
"""

import copy
import functools
import itertools
import linecache
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Proxy

from convt_reduce._trace import gives_only

_has_global_hook: Callable[[], Any] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", lambda: False
)
_numbers = itertools.count()
PLANS = "_convt_reduce_plans"  # in a fused module
_BASE = "_convt_reduce_base"  # in its class


@dataclass(frozen=True)
class Guard:
    """What must hold of one module: its exact type, no hooks, perhaps its mode and its settings.

    ``path`` is the way to it from the fused module. That one itself, where it is empty, may have
    hooks, which run as ever, and is of another type by then; one inside it may be fused as well.
    """

    path: tuple[str, ...]
    type: type
    training: bool | None
    attributes: tuple[tuple[str, Any], ...] = ()

    def holds(self, root: nn.Module) -> bool:
        module: Any = root
        for name in self.path:
            module = module._modules.get(name)
            if module is None:
                return False
        if self.training is not None and module.training is not self.training:
            return False
        own = module.__dict__
        for name, value in self.attributes:
            if name not in own or own[name] != value:
                return False
        if not self.path:
            return True
        kind = type(module)
        if kind is not self.type and kind.__dict__.get(_BASE) is not self.type:
            return False
        return not has_hooks(module)


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
        return gives_only(self.parameters, args, kwargs) and all(g.holds(root) for g in self.guards)


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
            for plan in self.__dict__[PLANS].plans:
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
    plans = self.__dict__[PLANS]
    if plans.remake:
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
            del part.__dict__[PLANS]


def guard(root: nn.Module, path: str, training: bool | None = None, settings: bool = True) -> Guard:
    """The guard that holds now.

    Args:
        root: the module whose forward is to be replaced.
        path: the name of a module in it.
        training: the mode that is taken for granted; None: none is.
        settings: whether the plain values among its attributes are.
    """
    module = root.get_submodule(path)
    plain = ()
    if settings:
        own = {k: v for k, v in vars(module).items() if k not in _MODULE_ATTRIBUTES and is_plain(v)}
        plain = tuple((name, copy.deepcopy(value)) for name, value in own.items())
    return Guard(tuple(path.split(".")) if path else (), type(module), training, plain)


_MODULE_ATTRIBUTES = {*vars(nn.Module()), PLANS}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a container of such, which code may have frozen."""
    if isinstance(value, dict):
        return all(is_plain(v) for item in value.items() for v in item)
    if isinstance(value, (tuple, list, set)):
        return all(is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))

"""The forward of a fused module, and when it may stand in for the module's own.

A fused module is a copy of the user's, of a subclass of its class, so that its methods, state_dict
and hooks are there. Its forward runs one of its plans, each traced in one setting of train and eval
modes, and only while its guards hold; otherwise it runs the original forward, on the same layers.
Plans know their modules by name, never by reference: copies share them, and what is unpickled makes
them anew.
"""

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

from convt_reduce._arguments import gives_only, gives_tensors
from convt_reduce._guards import BASE, Guards

_has_global_hook: Callable[[], Any] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", lambda: False
)
_numbers = itertools.count()
PLANS = "_convt_reduce_plans"  # in a fused module


@dataclass(frozen=True)
class Plan:
    """One rewritten forward: ``function(module, *parameters)``, made from ``source``."""

    parameters: tuple[str, ...]
    guards: Guards
    source: str
    function: Callable = field(compare=False)

    def fits(self, root: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether the plan may serve this call."""
        if not (gives_only(self.parameters, args, kwargs) and gives_tensors(args, kwargs)):
            return False
        return self.guards.hold(root)


def make_plan(graph: Graph, parameters: tuple[str, ...], guards: Guards) -> Plan:
    """Turns a rewritten graph into a plan; its code shows in tracebacks."""
    code = graph.python_code("self")
    name = f"<convt_reduce plan {next(_numbers)}>"
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(True), name)
    return Plan(parameters, guards, code.src, scope["forward"])


def merge(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """One plan for those that have the same code: what differs between their modes is free."""
    merged: list[Plan] = []
    for plan in plans:
        for index, other in enumerate(merged):
            if plan.source == other.source and plan.guards.loose() == other.guards.loose():
                merged[index] = replace(other, guards=other.guards.either(plan.guards))
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
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _has_global_hook() and not _is_traced(args, kwargs):
            # A state of the user's making may have come without them.
            for plan in self.__dict__[PLANS].plans if PLANS in self.__dict__ else ():
                if plan.fits(self, args, kwargs):
                    return plan.function(self, *args, **kwargs)
        return base.forward(self, *args, **kwargs)

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
        BASE: base,
    }
    return types.new_class(f"Fused{base.__name__}", (base,), {}, lambda scope: scope.update(body))


def fused_base(module: nn.Module) -> type | None:
    """The user's class of a fused module; None: it is not fused."""
    return type(module).__dict__.get(BASE)


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

"""Tracing a module's forward, and only what can be trusted of it.

torch.fx runs the forward once with stand-ins and records what happens to them. Whatever else the
forward does then is lost or frozen: an attribute it sets, a tensor it makes, a random number, a
gradient mode, an optional argument's None. Here each of these ends the trace with a sentence, and
what has hooks or a forward of its own is called, not traced. Traces run on throw-away copies that
share the model's tensors.
"""

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Tracer

from convt_reduce._match import is_layer
from convt_reduce._spelling import hooks_of


class Untraceable(Exception):
    """Why a forward cannot be traced: one sentence."""


def copy_sharing(model: nn.Module, each: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """A deep copy whose parameters, buffers and other tensors are the model's own.

    Args:
        model: any module.
        each: if given, makes the copy's tensor from each of the model's.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for tensor in own:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = tensor if each is None else each(tensor)
    return copy.deepcopy(model, memo)


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


def gives_only(names: tuple[str, ...], args: tuple, kwargs: dict) -> bool:
    """Whether a call gives exactly the required arguments."""
    return len(args) + len(kwargs) == len(names) and all(k in names[len(args) :] for k in kwargs)


def _modes() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
    )


def _state(model: nn.Module) -> dict[tuple[str, str], list]:
    """What a forward may change without fx noticing: attributes, and what containers hold."""
    state: dict[tuple[str, str], list] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = [value]
            if isinstance(value, Tensor):
                held.append(value._version)
            elif isinstance(value, dict):
                held += value.values()
            elif isinstance(value, (list, set)):
                held += value
            state[path, name] = held
    return state


def _same_number(a: Any, b: Any) -> bool:
    return type(a) is type(b) is int and a == b


def _changed(before: dict[tuple[str, str], list], after: dict[tuple[str, str], list]) -> Any:
    """The first (module, attribute) that is not what it was, or None."""
    for key in {**before, **after}:
        old, new = before.get(key, []), after.get(key, [])
        if len(old) != len(new) or any(
            a is not b and not _same_number(a, b) for a, b in zip(old, new, strict=True)
        ):
            return key
    return None


class ForwardTracer(Tracer):
    """Records one module's forward; see the file's head for what it refuses.

    Args:
        inline: the names of the submodules to trace through; None: all that can be.

    After `trace`: ``graph.nodes`` carry ``meta["callers"]``, the calls that they were made in, as
    (name, number) from the outermost; ``opaque`` names the modules that were called unseen though
    they may hold more than a layer of torch; ``hostable`` says of each call whether a forward of
    required arguments alone could stand for it.
    """

    proxy_buffer_attributes = True

    def __init__(self, inline: frozenset[str] | None = None) -> None:
        super().__init__()
        self.inline = inline
        self.callers: list[tuple[str, int]] = []
        self.opaque: list[str] = []
        self.hostable: dict[tuple[str, int], bool] = {}
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if super().is_leaf_module(m, module_qualified_name) or is_layer(m):
            return True
        if self.inline is not None:
            return module_qualified_name not in self.inline
        return is_opaque(m)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            own = type(m).__module__.startswith("torch.")
            if path not in self.opaque and not (own and next(m.children(), None) is None):
                self.opaque.append(path)
            return super().call_module(m, forward, args, kwargs)
        call = (path, len(self.hostable))
        try:
            self.hostable[call] = gives_only(required_parameters(m), args, kwargs)
        except Untraceable:
            self.hostable[call] = False
        self.callers.append(call)
        result = super().call_module(m, forward, args, kwargs)
        self.callers.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self.modes:
            raise Untraceable("it switches a gradient or autocast mode")
        node = super().create_node(*args, **kwargs)
        node.meta["callers"] = tuple(self.callers)
        return node

    def create_arg(self, a: Any) -> Any:
        if self.inline is not None and _loses_its_type(a):
            raise Untraceable(f"it builds a {type(a).__name__}, which would become a plain one")
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is b for b in self.root.buffers()) or a in self.tensor_attrs
            if not known:
                raise Untraceable("it makes a tensor that does not depend on its input")
        return super().create_arg(a)

    def create_args_for_root(
        self, root_fn: Callable, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable, list]:
        """Stand-ins for the required arguments; the optional ones keep their defaults."""
        names = required_parameters(self.root)
        keyword_only = {
            p.name
            for p in inspect.signature(root_fn).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }

        def forward(*values: Any) -> Any:
            given = dict(zip(names, values, strict=True))
            named = {k: given.pop(k) for k in list(given) if k in keyword_only}
            return root_fn(self.root, *given.values(), **named)

        return forward, [self.create_proxy("placeholder", name, (), {}) for name in names]


def _loses_its_type(value: Any) -> bool:
    """Whether fx would write a container down as a plain tuple, list or dict."""
    kept = (tuple, list, dict, torch.Size)
    if not isinstance(value, (tuple, list, dict)) or type(value) in kept:
        return False
    return not hasattr(value, "_fields") and not type(value).__module__.startswith("torch.fx")


def is_opaque(module: nn.Module) -> bool:
    """Whether calling the module may do more, or other, than its class's forward says."""
    return (
        hooks_of(module) is not None
        or "forward" in vars(module)
        or isinstance(module, (torch.jit.ScriptModule, GraphModule))
        or nn.utils.parametrize.is_parametrized(module)
    )


def trace(root: nn.Module, inline: frozenset[str] | None = None) -> tuple[Graph, ForwardTracer]:
    """Traces a throw-away module, with required arguments only.

    Raises:
        Untraceable: with the reason.
    """
    tracer = ForwardTracer(inline)
    before = _state(root)
    draws = (random.getstate(), torch.get_rng_state())
    try:
        graph = tracer.trace(root)
    except Untraceable:
        raise
    except Exception as error:  # a forward may raise anything when it meets a stand-in
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Untraceable(first.rstrip(".")) from error
    changed = _changed(before, _state(root))
    if changed is not None:
        path, name = changed
        raise Untraceable(f"it changes the attribute '{name}' of '{path or 'the model'}'")
    if random.getstate() != draws[0] or not torch.equal(torch.get_rng_state(), draws[1]):
        random.setstate(draws[0])
        torch.set_rng_state(draws[1])
        raise Untraceable("it draws random numbers that do not depend on its input")
    return graph, tracer

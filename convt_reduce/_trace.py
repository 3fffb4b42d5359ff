"""Tracing a module's forward, and only what can be trusted of it.

torch.fx runs the forward once with stand-ins and records what happens to them. Whatever else the
forward does then is lost or frozen: an attribute it sets, a tensor it makes, a random number, a
gradient mode, an optional argument's None. Here each of these ends the trace with a sentence, or is
written down for the plan's guards; and what has hooks or a forward of its own is called, not
traced. Traces run on throw-away copies that share the model's tensors.
"""

import copy
import dataclasses
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Proxy, Tracer

from convt_reduce._arguments import gives_only, required_parameters
from convt_reduce._effects import changed_globals, draws, first_change, redraw, state_of
from convt_reduce._frozen import is_torchs
from convt_reduce._match import is_layer
from convt_reduce._report import Untraceable
from convt_reduce._spelling import hooks_of
from convt_reduce._standin import InputStandIn
from convt_reduce._watch import Watch, watching

# Tracing patches nn.Module for a while; two at once would leave patches behind.
_LOCK = threading.RLock()


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


def _modes() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
    )


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
        self.thread = threading.get_ident()
        self.refused: list[str] = []
        self.watch = Watch(self.refuse)

    def refuse(self, why: str) -> Untraceable:
        """The exception to raise; it counts even where the forward catches it."""
        self.refused.append(why)
        return Untraceable(why)

    def proxy(self, node: torch.fx.Node) -> Proxy:
        return InputStandIn(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if super().is_leaf_module(m, module_qualified_name) or is_layer(m):
            return True
        if self.inline is not None:
            return module_qualified_name not in self.inline
        return is_opaque(m)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if threading.get_ident() != self.thread:  # fx's patches are everybody's
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if not isinstance(m, (GraphModule, torch.jit.ScriptModule)):
            for cls in type(m).__mro__:
                if "__call__" in vars(cls) and not is_torchs(cls):
                    # A plan that calls the module would do again what was traced of it.
                    raise self.refuse(f"the class of its part '{path}' has its own __call__")
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

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self.modes:
            raise self.refuse("it switches a gradient or autocast mode")
        node = super().create_node(*args, **kwargs)
        node.meta["callers"] = tuple(self.callers)
        return node

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), Proxy):
            return a.node
        if self.inline is not None and _loses_its_type(a):
            raise self.refuse(f"it builds a {type(a).__name__}, which would become a plain one")
        if _does_more(a):
            raise self.refuse(f"it builds a {type(a).__name__}, which does more than hold values")
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is b for b in self.root.buffers()) or a in self.tensor_attrs
            if not known:
                raise self.refuse("it makes a tensor that does not depend on its input")
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


def _does_more(value: Any) -> bool:
    """Whether building a dataclass or named tuple again from its fields could give another one."""
    cls = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return (
            hasattr(cls, "__post_init__")
            or not all(field.init for field in fields)
            or cls.__init__.__code__.co_filename != "<string>"  # written by hand
            or not set(getattr(value, "__dict__", ())) <= {field.name for field in fields}
        )
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        own = cls.__mro__[: cls.__mro__.index(next(c for c in cls.__mro__ if "_fields" in vars(c)))]
        return any("__new__" in vars(c) for c in own) or bool(getattr(value, "__dict__", None))
    return False


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
    with _LOCK:
        return _trace(root, ForwardTracer(inline))


def _trace(root: nn.Module, tracer: ForwardTracer) -> tuple[Graph, ForwardTracer]:
    before, drawn = state_of(root), draws()
    try:
        with watching(tracer.watch):
            graph = tracer.trace(root)
    except Exception as error:  # a forward may raise anything when it meets a stand-in
        if tracer.refused:
            raise Untraceable(tracer.refused[0]) from None
        if isinstance(error, Untraceable):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Untraceable(first.rstrip(".")) from error
    if tracer.refused:
        raise Untraceable(tracer.refused[0])
    changed = first_change(before, state_of(root))
    if changed is not None:
        path, name = changed
        raise Untraceable(f"it changes the attribute '{name}' of '{path or 'the model'}'")
    variable = changed_globals(tracer.watch.variables.values())
    if variable is not None:
        raise Untraceable(f"it changes the global variable '{variable}'")
    if draws() != drawn:
        redraw(drawn)
        raise Untraceable("it draws random numbers that do not depend on its input")
    return graph, tracer

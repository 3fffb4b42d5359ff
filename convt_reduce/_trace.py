"""Tracing a module's forward, and only what can be trusted of it.

torch.fx runs the forward once with stand-ins and records what happens to them. Whatever else the
forward does then is lost or frozen: an attribute it sets, a tensor it makes, a random number, a
gradient mode, an optional argument's None. Here each of these ends the trace with a sentence, and
what has hooks or a forward of its own is called, not traced. Traces run on throw-away copies that
share the model's tensors.
"""

import collections
import copy
import dis
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Proxy, Tracer
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode

from convt_reduce._match import is_layer
from convt_reduce._spelling import hooks_of

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
DEPTH = 6
SEQUENCES = (tuple, list, collections.deque)


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


_DICTS = (dict, collections.OrderedDict)


def gives_tensors(args: tuple, kwargs: dict) -> bool:
    """Whether a call gives tensors, or lists and dictionaries of tensors and numbers.

    Nothing else: a trace answers ``x is None`` with no, whatever will come.
    """
    return all(_is_input(value) for value in (*args, *kwargs.values()))


def _is_input(value: Any) -> bool:
    if isinstance(value, Tensor) or type(value) in (int, float):
        return True
    if type(value) in (tuple, list, torch.Size):
        return all(_is_input(v) for v in value)
    return type(value) in _DICTS and all(_is_input(v) for v in value.values())


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


class _Itself:
    """An object that equals itself alone, and is kept alive so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    __hash__ = None


def _content(value: Any, depth: int = 0) -> Any:
    """What compares equal as long as nothing in ``value`` is changed, however deep."""
    itself = _Itself(value)
    if issubclass(type(value), (Proxy, nn.Module, nn.parameter.UninitializedTensorMixin)):
        return itself
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
    if depth > DEPTH:
        return itself
    if isinstance(value, dict):
        return itself, [(_Itself(k), _content(v, depth + 1)) for k, v in value.items()]
    if isinstance(value, SEQUENCES):
        return itself, [_content(v, depth + 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return itself, len(value), [_Itself(v) for v in value]
    own = getattr(value, "__dict__", None)
    return (itself, _content(own, depth + 1)) if type(own) is dict else itself


def _state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What a forward may change without fx noticing: attributes, and what containers hold."""
    return {
        (path, name): _content(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }


def _changed(before: dict, after: dict) -> Any:
    """The first (module, attribute) that is not what it was, or None."""
    for key in {**before, **after}:
        if key not in before or key not in after or before[key] != after[key]:
            return key
    return None


def _draws() -> list:
    """The states of the generators that everybody shares, NumPy's only if it is loaded."""
    states = [random.getstate(), torch.get_rng_state().tolist()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tolist(), *rest))
    return states


def _redraw(states: list) -> None:
    random.setstate(states[0])
    torch.set_rng_state(torch.tensor(states[1], dtype=torch.uint8))
    if len(states) > 2:
        sys.modules["numpy"].random.set_state(states[2])


class _Shy:
    """A stand-in that answers no question about what it stands for.

    A plain Proxy says that it is no tensor, has every attribute and is of its own class, and the
    forward would be frozen with these answers.
    """

    @property
    def __class__(self) -> type:
        if self.tracer.watch.is_torchs(sys._getframe(1)):
            return type(self)
        raise self.tracer.refuse("it asks for the type of an input, or of what it computes from it")

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name) or name in ("grad", "grad_fn", "_base"):
            raise self.tracer.refuse(f"it asks an input for '{name}', which tensors may not have")
        return _ShyAttribute(self, name)


class _ShyProxy(_Shy, Proxy):
    pass


class _ShyAttribute(_Shy, Attribute):
    pass


# Python's questions that a stand-in cannot refuse to answer, or that no plan guards.
_QUESTIONS = frozenset({"type", "hasattr", "id", "vars", "dir", "globals", "locals"})
_MODES = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.is_autocast_cpu_enabled,
    torch.get_autocast_dtype,
    torch.get_default_dtype,
)
_LISTS = {
    function.__code__: name
    for name, function in (
        ("parameters or buffers", nn.Module._named_members),
        ("state_dict", nn.Module.state_dict),
    )
}


@functools.cache
def _questions(code: types.CodeType) -> str | None:
    """What a function asks that a trace would answer wrongly, from its bytecode."""
    asked = _QUESTIONS.intersection(code.co_names)
    previous = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in asked:
            return f"it uses {name}()"
        none = previous is not None and previous.opname == "LOAD_CONST" and previous.argval is None
        if instruction.opname == "IS_OP" and not none:
            return "it compares by 'is'"
        previous = instruction
    return None


def _is_ours(frame: Any) -> bool:
    """Whether a frame runs torch's code or the package's, not the user's."""
    name = frame.f_globals.get("__name__", "")
    ours = name.split(".")[0] in ("torch", "convt_reduce")
    return ours and not name.startswith("torch.nn.modules")


class _Watch(TorchFunctionMode):
    """Watches a forward under trace, for what leaves no trace: what it calls and reads."""

    def __init__(self, tracer: "ForwardTracer") -> None:
        super().__init__()
        self.tracer = tracer
        self.running: list[tuple[Any, Any]] = []  # calls of C functions: the caller, the function

    def is_torchs(self, frame: Any) -> bool:
        """Whether it is a C function of torch's that runs, called from a frame."""
        if not self.running or self.running[-1][0] is not frame:
            return False
        return (getattr(self.running[-1][1], "__module__", None) or "").startswith("torch")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if args and _is_tensor(args[0]) and name in _READS:
            raise self.tracer.refuse("it reads the values of a tensor that it holds")
        return func(*args, **(kwargs or {}))

    def called(self, frame: Any, event: str, argument: Any) -> None:
        """A profiling function."""
        if event == "call":
            code = frame.f_code
            if code in _LISTS:
                while frame is not None and (
                    frame.f_globals.get("__name__") == "torch.nn.modules.module"
                ):
                    frame = frame.f_back
                if frame is not None and not _is_ours(frame):
                    raise self.tracer.refuse(f"it looks through its {_LISTS[code]}")
            elif frame.f_globals.get("__name__", "").split(".")[0] not in _TRUSTED:
                why = _questions(code)
                if why is not None:
                    raise self.tracer.refuse(why)
        elif event == "c_call":
            self.running.append((frame, argument))
            if any(argument is mode for mode in _MODES) and not _is_ours(frame):
                raise self.tracer.refuse("it asks for a gradient or autocast mode")
        elif event in ("c_return", "c_exception") and self.running:
            self.running.pop()


_TRUSTED = {*sys.stdlib_module_names, "torch", "convt_reduce", "numpy"} - {"__main__"}
_READS = frozenset(
    {
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"),
        *("__contains__", "__get__"),
    }
)


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)


@contextmanager
def _watching(tracer: "ForwardTracer") -> Iterator[None]:
    watch, before = tracer.watch, sys.getprofile()
    with watch:
        sys.setprofile(watch.called)
        try:
            yield
        finally:
            sys.setprofile(before)


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
        self.refused: list[str] = []
        self.watch = _Watch(self)

    def refuse(self, why: str) -> Untraceable:
        """The exception to raise; it counts even where the forward catches it."""
        self.refused.append(why)
        return Untraceable(why)

    def proxy(self, node: torch.fx.Node) -> Proxy:
        return _ShyProxy(node, self)

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
        if issubclass(type(a), Proxy):
            return a.node
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
    draws = _draws()
    try:
        with _watching(tracer):
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
    changed = _changed(before, _state(root))
    if changed is not None:
        path, name = changed
        raise Untraceable(f"it changes the attribute '{name}' of '{path or 'the model'}'")
    if _draws() != draws:
        _redraw(draws)
        raise Untraceable("it draws random numbers that do not depend on its input")
    return graph, tracer

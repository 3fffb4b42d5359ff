"""Watches a forward under trace, for what leaves no trace in a graph.

Three eyes: a profiling function sees the calls, ``nn.Module.__getattribute__`` the attributes that
are read, and a torch function mode the tensors whose values are asked for. What may change until a
plan runs is written down, so that it can be compared then; what cannot be compared is refused.
"""

import functools
import gc
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convt_reduce._bytecode import source_of
from convt_reduce._effects import content
from convt_reduce._frozen import variables_of

_MODES = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.is_autocast_cpu_enabled,
    torch.get_autocast_dtype,
    torch.get_default_dtype,
)
# Methods of nn.Module that a forward may call: those that list parts, and those without an answer.
_LISTS = frozenset({"children", "named_children", "modules", "named_modules", "get_submodule"})
_PLAIN = frozenset({"__init__", "__getattr__", "__setattr__", "__delattr__", "_call_impl"})
_TENSORS = {
    **dict.fromkeys(("parameters", "named_parameters"), "parameters or buffers"),
    **dict.fromkeys(("buffers", "named_buffers", "_named_members"), "parameters or buffers"),
    "state_dict": "state_dict",
}
_MODULE = nn.Module.__module__
_TRUSTED = {*sys.stdlib_module_names, "torch", "convt_reduce", "numpy"} - {"__main__"}
# Torch's own, apart from tensors: what they answer may change, and what they do is no computation.
_GLOBAL = tuple(
    f"torch.{name}"
    for name in (
        *("accelerator", "backends", "compiler", "cpu", "cuda", "distributed", "_dynamo", "hub"),
        *("jit", "mps", "mtia", "multiprocessing", "onnx", "random", "version", "xpu"),
        # A trace would look into these, and lose what they do to gradients, or take x for a leaf.
        *("autograd.function", "func", "_functorch", "utils.checkpoint", "utils._pytree"),
        *("autograd.graph", "nn.attention"),
    )
)
_ANSWERS = ("is_", "are_", "has_", "get_", "device_count", "current_device")
# Where Python runs, the one says no and the other nothing: TorchScript compiles the source.
_CONSTANT = frozenset({torch.jit.is_scripting.__code__, torch.jit.annotate.__code__})
_TRACING = frozenset({"is_fx_tracing", "is_fx_symbolic_tracing"})
# Of Python itself: what they answer depends on the world, or what they do is seen there.
_WORLD = frozenset(
    {
        *("os", "posix", "_io", "time", "datetime", "platform", "socket", "threading", "_thread"),
        *("logging", "warnings", "_warnings"),
    }
)
_BUILTINS = (print, open, input)
_READS = frozenset(
    {
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"),
        *("__contains__", "__get__"),
    }
)


def _module(frame: Any) -> str:
    return frame.f_globals.get("__name__") or ""


def _is_ours(frame: Any) -> bool:
    """Whether a frame runs torch's code or the package's, not the user's."""
    name = _module(frame)
    ours = name.split(".")[0] in ("torch", "convt_reduce")
    return ours and not name.startswith("torch.nn.modules")


@functools.cache
def _who(name: str) -> str:
    """Whether code of a module of Python reads for itself, for its caller, or for the tracer."""
    if name.startswith(("torch.fx", "convt_reduce")) or name == _MODULE:
        return "tracer"  # what a forward calls of nn.Module is seen as a call
    if name.split(".")[0] == "torch" and not name.startswith("torch.nn.modules"):
        return "caller"
    return "itself"


def _is_users(frame: Any) -> bool:
    name = "" if frame is None else _module(frame)
    # A named tuple's methods are generated in a module of their own.
    return frame is not None and not name.startswith("namedtuple_") and not _is_trusted(name)


def _is_trusted(name: str) -> bool:
    return name.split(".")[0] in _TRUSTED


def _caller(frame: Any) -> Any:
    """Who called Python's own library: the first frame that is none of it."""
    while frame is not None and _module(frame).split(".")[0] in sys.stdlib_module_names:
        if _module(frame) == "__main__":
            break
        frame = frame.f_back
    return frame


class Watch(TorchFunctionMode):
    """What one forward under trace called and read.

    Attributes:
        reads: by the id of a module, the module and the names of attributes that were read of it.
        variables: the global variables that were read: who holds it, name, `content` before.
        answers: torch's functions without arguments that were asked, and what they said.
        asks_types: whether it may have asked for the type of a module.
    """

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self.refuse = refuse
        self.reads: dict[int, tuple[nn.Module, dict[str, None]]] = {}
        self.variables: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.answers: dict[Callable[[], Any], Any] = {}
        self.asks_types = False
        self.passing: Any = None  # a call that is none of the forward's, with all that it calls
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
        if args and issubclass(type(args[0]), Tensor) and name in _READS:
            raise self.refuse("it reads the values of a tensor that it holds")
        return func(*args, **(kwargs or {}))

    # ---- calls ----------------------------------------------------------------------------------

    def called(self, frame: Any, event: str, argument: Any) -> None:
        """A profiling function."""
        if self.passing is not None:
            if event == "return" and frame is self.passing:
                self.passing = None
                if frame.f_code.co_name != "<module>":
                    self.answers[frame.f_globals[frame.f_code.co_name]] = argument
        elif event == "call" and frame.f_code.co_name == "<module>":
            self.passing = frame  # an import
        elif event == "call":
            self._python(frame)
        elif event == "c_call":
            self.running.append((frame, argument))
            self._builtin(frame, argument)
        elif event in ("c_return", "c_exception") and self.running:
            self.running.pop()

    def _python(self, frame: Any) -> None:
        code, module = frame.f_code, _module(frame)
        if module == _MODULE:
            self._method(frame)
        elif _is_users(frame):
            self._users(frame)
        elif module == "torch" or module.startswith(_GLOBAL) or code.co_name in _TRACING:
            if _is_users(frame.f_back):
                self._ask(frame)
        elif module.split(".")[0] in _WORLD and _is_users(_caller(frame)):
            raise self.refuse(f"it calls {module}.{code.co_name}(), which is no computation")

    def _method(self, frame: Any) -> None:
        """A method of nn.Module, where the forward or a container calls it."""
        caller, name = frame.f_back, frame.f_code.co_name
        while caller is not None and _who(_module(caller)) == "caller":
            caller = caller.f_back
        if caller is None or _who(_module(caller)) == "tracer" or name in _PLAIN:
            return
        if name in _TENSORS:
            raise self.refuse(f"it looks through its {_TENSORS[name]}")
        if name not in _LISTS:
            raise self.refuse(f"it calls {name}() of a module")
        part = frame.f_locals["self"]
        for inner in (part,) if name in ("children", "named_children") else part.modules():
            self.read(inner, "_modules")

    def _users(self, frame: Any) -> None:
        """A function of the user's: what its code says, and the global variables that it reads."""
        source = source_of(frame.f_code)
        if source.refusal is not None:
            raise self.refuse(source.refusal)
        self.asks_types |= bool({"isinstance", "issubclass"} & source.names)
        for name in source.globals:
            if name in frame.f_globals:
                self._variable(frame.f_globals, name, source.names)

    def _variable(self, mapping: Any, name: str, names: frozenset[str]) -> None:
        key, value = (id(mapping), name), variables_of(mapping)[name]
        module = isinstance(value, types.ModuleType)
        if key in self.variables or (module and _is_trusted(value.__name__)):
            return
        if isinstance(value, types.FunctionType) and value.__globals__["__name__"].startswith(
            "torch.fx"
        ):
            value = getattr(value, "__wrapped__", value)  # fx puts its own in the place of some
        self.variables[key] = (mapping, name, content(value))
        if module or (isinstance(value, type) and not _is_trusted(value.__module__)):
            # Modules and classes as holders of settings: what has one of the code's names.
            for inner in names.intersection(vars(value)):
                if not isinstance(vars(value)[inner], (types.FunctionType, type)):
                    self._variable(value if not module else vars(value), inner, names)

    def _ask(self, frame: Any) -> None:
        """A function of torch's that is no computation: noted, to be asked again, or refused."""
        code = frame.f_code
        function = frame.f_globals.get(code.co_name)
        if code in _CONSTANT or code.co_name.startswith("<"):
            return
        if _module(frame) == "torch" and not code.co_name.startswith(_ANSWERS):
            return
        plain = getattr(function, "__code__", None) is code and not code.co_argcount
        plain = plain and not code.co_kwonlyargcount and not code.co_flags & 12  # * and **
        if not plain or not code.co_name.startswith(_ANSWERS):
            raise self.refuse(f"it calls {_module(frame)}.{code.co_name}()")
        self.passing = frame

    def _builtin(self, frame: Any, function: Any) -> None:
        if _is_ours(frame):
            return
        if any(function is mode for mode in _MODES):
            raise self.refuse("it asks for a gradient or autocast mode")
        if not _is_users(frame):
            return
        owner = getattr(function, "__self__", None)
        # Torch's functions of tensors have no owner, or one of the modules inside of it.
        writes = isinstance(owner, io.IOBase)
        if owner is torch._C or writes or any(function is f for f in _BUILTINS):
            raise self.refuse(f"it calls {function.__name__}(), which is no computation")
        name = owner.__name__ if isinstance(owner, types.ModuleType) else ""
        name = owner.__module__ if isinstance(owner, type) else name
        if name in _WORLD:
            raise self.refuse(f"it calls {name}.{function.__name__}(), which is no computation")

    # ---- reads ----------------------------------------------------------------------------------

    def read(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute of a module was read."""
        self.reads.setdefault(id(module), (module, {}))[1][name] = None

    def note_read(self, module: nn.Module, name: str, frame: Any) -> None:
        if name == "__dict__":
            if _is_users(frame):
                raise self.refuse("it looks through the attributes of a module")
            return
        while frame is not None and _who(_module(frame)) == "caller":
            frame = frame.f_back
        if frame is not None and _who(_module(frame)) == "itself":
            self.read(module, name)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Lets a watch see what happens inside, in this thread.

    No garbage is collected meanwhile: what its callbacks do would be taken for the forward's work.
    """
    before, collects, thread = sys.getprofile(), gc.isenabled(), threading.get_ident()

    def __getattribute__(self: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            watch.note_read(self, name, sys._getframe(1))
        return object.__getattribute__(self, name)

    with watch:
        nn.Module.__getattribute__ = __getattribute__
        gc.disable()
        sys.setprofile(watch.called)
        try:
            yield
        finally:
            sys.setprofile(before if callable(before) else None)
            if before is not None and not callable(before):
                before.enable()  # cProfile's, which only it can switch on again
            del nn.Module.__getattribute__
            if collects:
                gc.enable()

"""Stand-ins for a forward's inputs, and for what it computes from them.

They record what is done to them, as torch.fx's do, and refuse every question about what they stand
for: fx's own say that they are no tensors, have every attribute and a name of their own, and the
forward would be frozen with these answers. A refusal counts even where the forward catches it.
"""

import dis
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import Proxy
from torch.fx.proxy import Attribute

# Python's questions that fx answers or that need no method: the name of one, what it asks for.
# Others, for a number or an index, raise a TypeError, and a forward that catches it is refused.
_ASKED = {
    "__bool__": "whether an input, or what it computes from it, is true",
    "__len__": "the length of an input, or of what it computes from it",
    "__hash__": "an input, or what it computes from it, as a key",
    "__repr__": "an input, or what it computes from it, as a text",
    "__str__": "an input, or what it computes from it, as a text",
    "__format__": "an input, or what it computes from it, as a text",
    "__setattr__": "an attribute of an input, or of what it computes from it, to be set",
    "__delattr__": "an attribute of an input to be deleted",
}
_FX = ("torch.fx", "torch._C", "torch.overrides", "torch.utils._pytree", "convt_reduce")


def _is_fx(frame: Any) -> bool:
    return (frame.f_globals.get("__name__") or "").startswith(_FX)


def unpack(values: Any, count: int) -> list:
    """``values`` as a list, if it has ``count`` elements, as in ``a, b = values``.

    Raises:
        ValueError: it has not, as for the statement.
    """
    values = list(values)
    if len(values) != count:
        word = "not enough" if len(values) < count else "too many"
        raise ValueError(f"{word} values to unpack (expected {count}, got {len(values)})")
    return values


class StandIn:
    """What both kinds have in common; mixed in before fx's class."""

    tracer: Any

    @property
    def __class__(self) -> type:
        if self.tracer.watch.is_torchs(sys._getframe(1)):
            return type(self)
        raise self.tracer.refuse("it asks for the type of an input, or of what it computes from it")

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name) or name in ("grad", "grad_fn", "_base"):
            raise self.tracer.refuse(f"it asks an input for '{name}', which tensors may not have")
        return AttributeStandIn(self, name)

    def __iter__(self) -> Iterator:
        """Only for ``a, b = x``, which says how many there are."""
        frame = sys._getframe(1)
        for instruction in dis.get_instructions(frame.f_code):
            if instruction.offset == frame.f_lasti and instruction.opname == "UNPACK_SEQUENCE":
                count = instruction.argval
                parts = self.tracer.create_proxy("call_function", unpack, (self, count), {})
                return iter([parts[index] for index in range(count)])
        raise self.tracer.refuse("it loops over an input, or what it computes from it")


def _asked(name: str, what: str) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        if _is_fx(sys._getframe(1)):
            return getattr(super(StandIn, self), name)(*arguments)
        raise self.tracer.refuse(f"it asks for {what}")

    method.__name__ = name
    return method


for _name, _what in _ASKED.items():
    setattr(StandIn, _name, _asked(_name, _what))


class InputStandIn(StandIn, Proxy):
    pass


class AttributeStandIn(StandIn, Attribute):
    pass

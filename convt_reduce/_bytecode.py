"""What a function's bytecode says that no trace of it shows.

Some questions cannot be refused by whom they are about, and some answers come only in the cases
that a trace does not take; a function that asks them is not traced.
"""

import dis
import functools
import sys
import types
from typing import Any, NamedTuple

# Python's questions that a stand-in cannot refuse to answer.
_QUESTIONS = frozenset({"type", "hasattr", "id", "vars", "dir", "globals", "locals", "callable"})


class Source(NamedTuple):
    """What the bytecode of a function says."""

    refusal: str | None
    globals: tuple[str, ...]  # the names of global variables that it reads
    names: frozenset[str]  # all names, attributes included


def _catches(previous: Any, instruction: Any) -> bool:
    """Whether an instruction belongs to an except clause; a finally or with has others."""
    if instruction.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"):
        return True
    bare = "PUSH_EXC_INFO" if sys.version_info >= (3, 11) else "POP_TOP"
    if previous is None or previous.opname != bare or instruction.opname != "POP_TOP":
        return False
    return sys.version_info >= (3, 11) or previous.is_jump_target


@functools.cache
def source_of(code: types.CodeType) -> Source:
    refusal, read, previous = None, [], None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        none = previous is not None and previous.opname == "LOAD_CONST" and previous.argval is None
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.append(name)
            if name in _QUESTIONS:
                refusal = refusal or f"it uses {name}()"
        elif name == "__dict__":
            refusal = refusal or "it looks through a __dict__"
        elif instruction.opname == "IS_OP" and not none:
            refusal = refusal or "it compares by 'is'"
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            refusal = refusal or f"it sets the global variable '{name}'"
        elif instruction.opname.startswith("MATCH_"):
            refusal = refusal or "it uses a match statement"
        elif _catches(previous, instruction) or name == "suppress":
            # What a plan runs raises elsewhere, or not at all.
            refusal = refusal or "it catches exceptions"
        previous = instruction
    return Source(refusal, tuple(dict.fromkeys(read)), frozenset(code.co_names))

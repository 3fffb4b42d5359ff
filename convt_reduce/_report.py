"""What was fused, and why the rest was not: the answer of `fuse` and `explain`.

One entry for each call of a transposed convolution that the rewrite saw or knows of. An entry that
was left alone carries the first reason that was found, as one sentence.
"""

from dataclasses import dataclass

_VERDICTS = {True: "fused     ", False: "left alone"}


@dataclass(frozen=True)
class Entry:
    """One call of a transposed convolution.

    Attributes:
        where: the layer's qualified name, or the function and the module that calls it.
        fused: whether the call was replaced.
        detail: if fused, the steps from the convolution to the reduction; else the reason why not.
    """

    where: str
    fused: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """The entries, in the order of the calls, and what holds for the whole model."""

    entries: tuple[Entry, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fused(self) -> tuple[Entry, ...]:
        """The entries that were fused."""
        return tuple(entry for entry in self.entries if entry.fused)

    @property
    def left_alone(self) -> tuple[Entry, ...]:
        """The entries that were not."""
        return tuple(entry for entry in self.entries if not entry.fused)

    def __str__(self) -> str:
        if not self.entries and not self.notes:
            return "no transposed convolution was found"
        width = max([len(entry.where) for entry in self.entries], default=0)
        lines = [
            f"{entry.where:{width}}  {_VERDICTS[entry.fused]}  {entry.detail}"
            for entry in self.entries
        ]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


class Refusal(Exception):
    """A reason to leave a convolution alone: one sentence."""


class Untraceable(Exception):
    """Why a forward cannot be traced: one sentence."""

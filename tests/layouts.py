"""The makers of layouts: each gives a tensor with the values of another in different memory.

Strided, shifted, permuted, negated lazily; what lies between the elements is NaN, so that reading
it shows. The three expanded ones keep one value of theirs for many: other values, stride 0.
"""

import torch


def contiguous(t):
    return t.contiguous()


def channels_last(t):
    """Channels nearest in memory, for any number of spatial axes and an unbatched input too."""
    channel = 0 if t.dim() == 2 else 1
    return t.movedim(channel, -1).contiguous().movedim(-1, channel)


def shifted(elements):
    """Contiguous, but `elements` elements into its buffer: not aligned for wide loads."""

    def maker(t):
        buffer = torch.full((elements + t.numel() + 8,), float("nan"), dtype=t.dtype).to(t.device)
        view = buffer[elements : elements + t.numel()].view(t.shape)
        return view.copy_(t)

    maker.__name__ = f"shifted{elements}"
    return maker


def apart(elements):
    """Batch elements that are contiguous, with `elements` elements of NaN between them."""

    def maker(t):
        row = t[0].numel()
        buffer = torch.full((t.shape[0], row + elements), float("nan"), dtype=t.dtype).to(t.device)
        buffer[:, :row] = t.flatten(1)
        return torch.as_strided(buffer, t.shape, (row + elements, *t[0].contiguous().stride()))

    maker.__name__ = f"apart{elements}"
    return maker


def sliced(t):
    """The middle of a tensor that is wider on every axis and NaN outside."""
    big = torch.full([n + 3 for n in t.shape], float("nan"), dtype=t.dtype).to(t.device)
    view = big[tuple(slice(1, n + 1) for n in t.shape)]
    return view.copy_(t)


def every_second(t):
    """Every second element of the last axis; NaN between."""
    shape = (*t.shape[:-1], 2 * t.shape[-1])
    view = torch.full(shape, float("nan"), dtype=t.dtype).to(t.device)[..., ::2]
    return view.copy_(t)


def reversed_axes(t):
    """The axes in the opposite order in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def swapped_last(t):
    """The last two axes exchanged in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def negated(t):
    """A view with PyTorch's lazy negative bit set, as the imaginary part of a conjugate has."""
    return torch._neg_view(-t)


def expanded_batch(t):
    """The first sample (or channel) for all: stride 0. Other values than t's."""
    return t[:1].expand(t.shape)


def expanded_last(t):
    """The first column for all: stride 0. Other values than t's."""
    return t[..., :1].expand(t.shape)


def expanded_all(t):
    """One number for all: every stride 0. Other values than t's."""
    return t.flatten()[:1].view((1,) * t.dim()).expand(t.shape)


LAYOUTS = (
    contiguous,
    channels_last,
    shifted(1),
    sliced,
    every_second,
    reversed_axes,
    swapped_last,
    negated,
    expanded_batch,
    expanded_last,
    expanded_all,
)

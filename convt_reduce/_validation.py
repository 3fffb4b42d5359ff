"""The checks of csrc/validate.cpp for fake tensors: same order, same sentences, same shapes.

It stands beside the native one because sizes here may be symbols, which C++ cannot hold. Comparing
them goes through torch._check, so that a size that only a later run will know becomes a guard.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_SPATIAL = 3
MAX_EXTENT = 2**62

Ints = Sequence[int]  # or torch.SymInt


class Settings(NamedTuple):
    """The settings of a call, lists as they were given: one entry or one per spatial axis."""

    stride: Ints
    padding: Ints
    output_padding: Ints
    dilation: Ints

    def at(self, axis: int) -> "Settings":
        """The four numbers of one axis."""
        return Settings(*(v[0] if len(v) == 1 else v[axis] for v in self))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def output_size(size: int, kernel: int, settings: Settings) -> int:
    """Positions of the transposed convolution's output on one axis."""
    stride, padding, output_padding, dilation = settings
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def check_plain(op: str, name: str, tensor: Tensor | None) -> None:
    """Checks that a tensor argument is a tensor, and one of plain memory."""
    expect = Expect(op)
    expect(tensor is not None, lambda: f"{name} must be a tensor, got None")
    expect(
        tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested),
        lambda: f"{name} must be a dense, strided tensor, got {_kind(tensor)}",
    )


def check_fused_mean(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, groups: int
) -> list[int]:
    """Checks a call of fused_mean; returns the shape of its result."""
    expect = Expect(op)
    check_plain(op, "input", input)
    check_plain(op, "weight", weight)
    if bias is not None:
        check_plain(op, "bias", bias)
    expect.floating("input", input)
    kernel = weight.shape
    expect(
        3 <= len(kernel) <= 2 + MAX_SPATIAL,
        lambda: (
            "weight must have 3, 4 or 5 dimensions [C_in, C_out/groups, *kernel_size], got "
            f"shape {list_text(kernel)}"
        ),
    )
    spatial = len(kernel) - 2
    expect(
        input.dim() in (spatial + 1, spatial + 2),
        lambda: (
            f"input must have {spatial + 2} dimensions [N, C_in, *spatial] or {spatial + 1} "
            f"[C_in, *spatial] to go with a weight of {spatial + 2} dimensions, got shape "
            f"{list_text(input.shape)}"
        ),
    )
    expect.like("weight", weight, input)
    batch, channels, size = _split(input, spatial)
    expect.input_sizes(input, channels, size)
    for extent in kernel:
        expect(
            extent >= 1,
            lambda: f"weight must have at least 1 element, got shape {list_text(kernel)}",
        )
    expect(
        kernel[0] == channels,
        lambda: (
            f"weight must have input's {channels} channels in dimension 0, got shape "
            f"{list_text(kernel)}"
        ),
    )
    expect(groups >= 1, lambda: f"groups must be at least 1, got {groups}")
    expect(
        channels % groups == 0,
        lambda: f"groups must divide input's {channels} channels, got {groups}",
    )
    out_channels = kernel[1] * groups
    if bias is not None:
        expect(
            bias.dim() == 1,
            lambda: f"bias must have shape [{out_channels}], got shape {list_text(bias.shape)}",
        )
        expect(
            bias.shape[0] == out_channels,
            lambda: f"bias must have shape [{out_channels}], got shape {list_text(bias.shape)}",
        )
        expect.like("bias", bias, input)
    expect.settings(size, kernel[2:], settings)
    return [*batch, out_channels, *[1] * spatial]


def check_tap_sums(input: Tensor, kernel_size: Ints, settings: Settings) -> list[int]:
    """Checks a call of _tap_sums; returns the shape of its result."""
    expect = Expect("_tap_sums")
    check_plain("_tap_sums", "input", input)
    expect.floating("input", input)
    spatial = expect.entries_up_to_three("kernel_size", kernel_size)
    expect(
        input.dim() in (spatial + 1, spatial + 2),
        lambda: (
            f"input must have {spatial + 2} dimensions [N, C_in, *spatial] or {spatial + 1} "
            f"[C_in, *spatial] to go with a kernel_size of {_entries(spatial)}, got shape "
            f"{list_text(input.shape)}"
        ),
    )
    batch, channels, size = _split(input, spatial)
    expect.input_sizes(input, channels, size)
    expect.at_least("kernel_size", kernel_size, 1)
    expect.settings(size, kernel_size, settings)
    return [*batch, channels, *kernel_size]


def check_tap_spread(
    tap_grads: Tensor, size: Ints, dtype: torch.dtype, settings: Settings
) -> list[int]:
    """Checks a call of _tap_spread; returns the shape of its result."""
    expect = Expect("_tap_spread")
    check_plain("_tap_spread", "tap_grads", tap_grads)
    grads_dtype = tap_grads.dtype
    expect(
        grads_dtype in (torch.float32, torch.float64),
        lambda: f"tap_grads must be float32 or float64, got {name_of(grads_dtype)}",
    )
    allowed = [d for d in FLOATING if accumulate_dtype(d) == grads_dtype]
    names = "float64" if grads_dtype == torch.float64 else "float32, float16 or bfloat16"
    expect(
        dtype in allowed,
        lambda: f"dtype must be {names} for {name_of(grads_dtype)} tap_grads, got {name_of(dtype)}",
    )
    spatial = expect.entries_up_to_three("size", size)
    shape = tap_grads.shape
    expect(
        len(shape) in (spatial + 1, spatial + 2),
        lambda: (
            f"tap_grads must have {spatial + 2} dimensions [N, C, *kernel_size] or "
            f"{spatial + 1} [C, *kernel_size] to go with a size of {_entries(spatial)}, got shape "
            f"{list_text(shape)}"
        ),
    )
    batch, channels, kernel = _split(tap_grads, spatial)
    for extent in (channels, *kernel):
        expect(
            extent >= 1,
            lambda: (
                "tap_grads must have at least 1 channel and 1 tap on every axis, got shape "
                f"{list_text(shape)}"
            ),
        )
    expect.at_least("size", size, 1)
    expect.settings(size, kernel, settings)
    return [*batch, channels, *size]


class Expect:
    """Raises one sentence, with the operator's name in front, where a condition does not hold."""

    def __init__(self, op: str) -> None:
        self.op = op

    def __call__(self, condition, sentence) -> None:
        if condition is True:  # the usual case, and no need to bother torch._check
            return
        torch._check(condition, lambda: f"{self.op}: {sentence()}")

    def floating(self, name: str, tensor: Tensor) -> None:
        self(
            tensor.dtype in FLOATING,
            lambda: (
                f"{name} must be float32, float64, float16 or bfloat16, got {name_of(tensor.dtype)}"
            ),
        )

    def like(self, name: str, tensor: Tensor, first: Tensor, of: str = "input") -> None:
        self(
            tensor.dtype == first.dtype,
            lambda: (
                f"{name} must have {of}'s dtype {name_of(first.dtype)}, got {name_of(tensor.dtype)}"
            ),
        )
        self.same_device(name, tensor, first, of)

    def same_device(self, name: str, tensor: Tensor, first: Tensor, of: str) -> None:
        self(
            tensor.device == first.device,
            lambda: f"{name} must be on {of}'s device {first.device}, got {tensor.device}",
        )

    def input_sizes(self, input: Tensor, channels: int, size: Ints) -> None:
        for extent in (channels, *size):
            self(
                extent >= 1,
                lambda: (
                    "input must have at least 1 channel and 1 element on every spatial axis, "
                    f"got shape {list_text(input.shape)}"
                ),
            )

    def entries_up_to_three(self, name: str, values: Ints) -> int:
        self(
            1 <= len(values) <= MAX_SPATIAL,
            lambda: f"{name} must have 1, 2 or 3 entries, got {len(values)} entries",
        )
        return len(values)

    def at_least(self, name: str, values: Ints, minimum: int) -> None:
        for value in values:
            self(
                value >= minimum,
                lambda: f"{name} must be at least {minimum} on every axis, got {list_text(values)}",
            )

    def settings(self, size: Ints, kernel: Ints, settings: Settings) -> None:
        spatial = len(size)
        wanted = "1 entry" if spatial == 1 else f"1 or {spatial} entries"
        for name, values in settings._asdict().items():
            self(
                len(values) in (1, spatial),
                lambda name=name, values=values: (
                    f"{name} must have {wanted}, got {_entries(len(values))}"
                ),
            )
        for name, values in settings._asdict().items():
            self.at_least(name, values, 1 if name in ("stride", "dilation") else 0)
        for axis in range(spatial):
            stride, _, extra, dilation = settings.at(axis)
            self(
                extra < torch.sym_max(stride, dilation),
                lambda a=axis, s=stride, o=extra, d=dilation: (
                    "output_padding must be smaller than "
                    f"stride or dilation on every axis, got output_padding {o} with stride {s} and "
                    f"dilation {d} on spatial axis {a}"
                ),
            )
        for axis in range(spatial):
            here = settings.at(axis)
            output = output_size(size[axis], kernel[axis], here)
            extent = output + 2 * here.padding
            if isinstance(extent, int):  # a symbol's bound is left to the call that knows its value
                self(
                    extent < MAX_EXTENT,
                    lambda a=axis: (
                        "stride, dilation and output_padding must give an output size "
                        f"below 2**62, got a larger one on spatial axis {a}"
                    ),
                )
            self(
                output >= 1,
                lambda a=axis, m=output: (
                    "padding must leave an output of at least 1 on every axis, "
                    f"got output size {_bounded(m)} on spatial axis {a}"
                ),
            )


def _split(tensor: Tensor, spatial: int) -> tuple[list[int], int, list[int]]:
    """[N] or [], the channels, and the sizes of the last `spatial` axes."""
    shape = list(tensor.shape)
    return shape[: -spatial - 1], shape[-spatial - 1], shape[-spatial:]


def _bounded(value: int) -> int | str:
    return "below -2**63" if isinstance(value, int) and value < -(2**63) else value


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


# The dtypes that the native side can name; it is built for the oldest torch that it serves.
_NAMED = (
    *FLOATING,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.") if dtype in _NAMED else "an unsupported dtype"


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized or tensor.is_nested:
        return "a quantized one" if tensor.is_quantized else "a nested one"
    return f"layout {str(tensor.layout).removeprefix('torch.')}"


def list_text(values: Ints) -> str:
    return str(list(values))

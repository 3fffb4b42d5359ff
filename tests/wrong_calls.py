"""The table of wrong calls of fused_mean, each with the sentence it must raise.

A row is a call that is right but for what it names. The sentences are spelled out in full: their
wording is part of the contract.
"""

from dataclasses import dataclass, field

import torch

f32, f64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Wrong:
    """A call that is right but for what is given here. {device} stands for the input's device."""

    id: str
    sentence: str
    input: tuple = (2, 4, 5, 6)
    weight: tuple = (4, 3, 3, 3)
    bias: tuple | None = (3,)
    input_dtype: torch.dtype = f32
    weight_dtype: torch.dtype = f32
    bias_dtype: torch.dtype = f32
    elsewhere: str = ""  # the tensor that is on another device
    settings: dict = field(default_factory=dict)


def dtype_rows():
    floating = "must be float32, float64, float16 or bfloat16, got"
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        everything = {"input_dtype": dtype, "weight_dtype": dtype, "bias_dtype": dtype}
        yield Wrong(f"{name}", f"input {floating} {name}", **everything)
    yield Wrong("complex128-input", f"input {floating} complex128", input_dtype=torch.complex128)
    yield Wrong(
        "weight-float64", "weight must have input's dtype float32, got float64", weight_dtype=f64
    )
    yield Wrong(
        "weight-int64",
        "weight must have input's dtype float32, got int64",
        weight_dtype=torch.int64,
    )
    yield Wrong(
        "half-input",
        "weight must have input's dtype float16, got float32",
        input_dtype=torch.float16,
    )
    yield Wrong("bias-float64", "bias must have input's dtype float32, got float64", bias_dtype=f64)
    yield Wrong(
        "bias-bfloat16",
        "bias must have input's dtype float64, got bfloat16",
        input_dtype=f64,
        weight_dtype=f64,
        bias_dtype=torch.bfloat16,
    )


def dimension_rows():
    weight = "weight must have 3, 4 or 5 dimensions [C_in, C_out/groups, *kernel_size], got shape"
    yield Wrong("weight-2d", f"{weight} [4, 3]", weight=(4, 3))
    yield Wrong("weight-6d", f"{weight} [4, 3, 1, 1, 1, 1]", weight=(4, 3, 1, 1, 1, 1))
    yield Wrong("weight-0d", f"{weight} []", weight=())
    for axes, shape in (
        (1, (4,)),
        (1, (1, 2, 4, 5)),
        (2, (2, 4)),
        (2, (1, 2, 4, 5, 6)),
        (3, (4, 5)),
    ):
        yield Wrong(
            f"input-{len(shape)}d-of-{axes}",
            f"input must have {axes + 2} dimensions [N, C_in, *spatial] or {axes + 1} "
            f"[C_in, *spatial] to go with a weight of {axes + 2} dimensions, got shape "
            f"{list(shape)}",
            input=shape,
            weight=(4, 3, *(3,) * axes),
        )


def size_rows():
    empty = "input must have at least 1 channel and 1 element on every spatial axis, got shape"
    yield Wrong("no-rows", f"{empty} [2, 4, 0, 6]", input=(2, 4, 0, 6))
    yield Wrong("no-columns", f"{empty} [2, 4, 5, 0]", input=(2, 4, 5, 0))
    yield Wrong("no-channels", f"{empty} [2, 0, 5, 6]", input=(2, 0, 5, 6), weight=(0, 3, 3, 3))
    yield Wrong("no-channels-unbatched", f"{empty} [0, 5, 6]", input=(0, 5, 6))
    yield Wrong("no-rows-empty-batch", f"{empty} [0, 4, 0, 6]", input=(0, 4, 0, 6))
    empty = "weight must have at least 1 element, got shape"
    yield Wrong("no-outputs", f"{empty} [4, 0, 3, 3]", weight=(4, 0, 3, 3), bias=(0,))
    yield Wrong("no-taps", f"{empty} [4, 3, 3, 0]", weight=(4, 3, 3, 0))
    yield Wrong("weight-without-channels", f"{empty} [0, 3, 3, 3]", weight=(0, 3, 3, 3))
    channels = "weight must have input's 4 channels in dimension 0, got shape"
    yield Wrong("channels", f"{channels} [5, 3, 3, 3]", weight=(5, 3, 3, 3))
    yield Wrong("channels-swapped", f"{channels} [3, 4, 3, 3]", weight=(3, 4, 3, 3))
    yield Wrong(
        "channels-unbatched", f"{channels} [5, 3, 3, 3]", input=(4, 5, 6), weight=(5, 3, 3, 3)
    )
    for groups in (0, -1):
        yield Wrong(
            f"groups-{groups}",
            f"groups must be at least 1, got {groups}",
            settings={"groups": groups},
        )
    for groups in (3, 8):
        yield Wrong(
            f"groups-{groups}",
            f"groups must divide input's 4 channels, got {groups}",
            settings={"groups": groups},
        )
    yield Wrong("bias-long", "bias must have shape [3], got shape [4]", bias=(4,))
    yield Wrong("bias-2d", "bias must have shape [3], got shape [1, 3]", bias=(1, 3))
    yield Wrong("bias-0d", "bias must have shape [3], got shape []", bias=())
    yield Wrong(
        "bias-of-one-group", "bias must have shape [6], got shape [3]", settings={"groups": 2}
    )
    yield Wrong(
        "bias-2d-of-groups",
        "bias must have shape [6], got shape [1, 6]",
        bias=(1, 6),
        settings={"groups": 2},
    )


def list_rows():
    names = ("stride", "padding", "output_padding", "dilation")
    for name in names:
        for values, count in (([1, 1, 1], "3 entries"), ([], "0 entries")):
            yield Wrong(
                f"{name}-{len(values)}-entries",
                f"{name} must have 1 or 2 entries, got {count}",
                settings={name: values},
            )
        lowest = 1 if name in ("stride", "dilation") else 0
        for values in ([lowest - 1], [2, lowest - 1], [lowest - 1, 2], [-3, 2]):
            yield Wrong(
                f"{name}-{'-'.join(map(str, values))}",
                f"{name} must be at least {lowest} on every axis, got {values}",
                settings={name: values},
            )
    yield Wrong(
        "stride-2-entries-1d",
        "stride must have 1 entry, got 2 entries",
        input=(2, 4, 5),
        weight=(4, 3, 3),
        settings={"stride": [1, 1]},
    )
    yield Wrong(
        "padding-2-entries-3d",
        "padding must have 1 or 3 entries, got 2 entries",
        input=(2, 4, 5, 6, 7),
        weight=(4, 3, 3, 3, 3),
        settings={"padding": [1, 1]},
    )


def output_rows():
    def extra(o, s, d, axis):
        return (
            "output_padding must be smaller than stride or dilation on every axis, got "
            f"output_padding {o} with stride {s} and dilation {d} on spatial axis {axis}"
        )

    yield Wrong("output-padding-plain", extra(1, 1, 1, 0), settings={"output_padding": [1]})
    yield Wrong(
        "output-padding-axis-0",
        extra(1, 1, 1, 0),
        settings={"output_padding": [1, 0], "stride": [1, 2]},
    )
    yield Wrong(
        "output-padding-axis-1",
        extra(3, 2, 3, 1),
        settings={"output_padding": [2, 3], "stride": [3, 2], "dilation": [1, 3]},
    )
    yield Wrong(
        "output-padding-1d",
        extra(2, 2, 1, 0),
        input=(2, 4, 5),
        weight=(4, 3, 3),
        settings={"output_padding": [2], "stride": [2]},
    )

    def no_output(size, axis):
        return (
            "padding must leave an output of at least 1 on every axis, got output size "
            f"{size} on spatial axis {axis}"
        )

    small = {"input": (1, 4, 2, 2), "weight": (4, 3, 2, 2)}
    yield Wrong("output-0", no_output(0, 0), **small, settings={"stride": [2], "padding": [2]})
    yield Wrong(
        "output-negative", no_output(-2, 0), **small, settings={"stride": [2], "padding": [3]}
    )
    yield Wrong(
        "output-0-depthwise",
        no_output(0, 0),
        input=(1, 8, 14, 14),
        weight=(8, 1, 3, 3),
        bias=(8,),
        settings={"padding": [8, 0], "groups": 8},
    )
    yield Wrong("output-axis-1", no_output(-2, 1), settings={"padding": [1, 5]})
    yield Wrong(
        "output-0-empty-batch", no_output(-1, 0), input=(0, 4, 5, 6), settings={"padding": [4]}
    )
    yield Wrong("padding-huge", no_output(7 - 2**63, 0), settings={"padding": [2**62]})
    too_large = (
        "stride, dilation and output_padding must give an output size below 2**62, got a larger "
        "one on spatial axis "
    )
    # 5 rows and 6 columns: (n-1) * stride reaches 2**62, and in the last row wraps around to 0.
    for id, settings, axis in (
        ("stride-huge", {"stride": [2**60]}, 0),
        ("stride-huge-axis-1", {"stride": [1, 2**60]}, 1),
        ("dilation-huge", {"dilation": [2**61]}, 0),
        ("dilation-largest", {"dilation": [2**63 - 1]}, 0),
        (
            "output-padding-huge",
            {"stride": [1, 2**62 // 5], "output_padding": [0, 2**62 // 5 - 1]},
            1,
        ),
        ("stride-wraps", {"stride": [2**62]}, 0),
    ):
        yield Wrong(id, f"{too_large}{axis}", settings=settings)


def order_rows():
    """Where two things are wrong, the one that is checked first is named."""
    yield Wrong(
        "dtype-before-dimensions",
        "input must be float32, float64, float16 or bfloat16, got int64",
        input_dtype=torch.int64,
        weight=(4, 3),
    )
    yield Wrong(
        "shape-before-dtype-of-bias",
        "bias must have shape [3], got shape [4]",
        bias=(4,),
        bias_dtype=f64,
    )
    yield Wrong(
        "lengths-before-values",
        "dilation must have 1 or 2 entries, got 3 entries",
        settings={"stride": [0], "dilation": [1, 1, 1]},
    )


def device_rows():
    for name in ("weight", "bias"):
        sentence = f"{name} must be on input's device {{device}}, got {{other}}"
        yield Wrong(f"{name}-elsewhere", sentence, elsewhere=name)


ROWS = (
    *dtype_rows(),
    *dimension_rows(),
    *size_rows(),
    *list_rows(),
    *output_rows(),
    *order_rows(),
    *device_rows(),
)

"""The table of cases, and the tensors that go with them.

A case is one setting of every parameter; the table is chosen as an adversary would choose it, and
each group says what it is after. Layouts in memory are another matter, and another file.
"""

import zlib
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def as_lists(*values):
    return [[v] if isinstance(v, int) else list(v) for v in values]


@dataclass(frozen=True)
class Case:
    id: str
    batch: int | None  # None is an unbatched input
    c_in: int
    size: tuple[int, ...]
    c_out: int
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    output_padding: int | tuple[int, ...] = 0
    groups: int = 1
    dilation: int | tuple[int, ...] = 1
    bias: bool = True
    multiplier: float = 0.5

    @property
    def axes(self):
        return len(self.size)

    @property
    def settings(self):
        """What follows the tensors in a call."""
        return (
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
            self.multiplier,
        )

    @property
    def tap_settings(self):
        """What follows the sizes in a call of _tap_sums and _tap_spread."""
        return self.stride, self.padding, self.output_padding, self.dilation

    @property
    def op_settings(self):
        """`settings` as torch.ops wants them: lists, of one entry where the case has an int."""
        s, p, op, groups, dilation, multiplier = self.settings
        return (*as_lists(s, p, op), groups, *as_lists(dilation), multiplier)

    @property
    def op_tap_settings(self):
        return as_lists(*self.tap_settings)

    @property
    def input_shape(self):
        return (*(() if self.batch is None else (self.batch,)), self.c_in, *self.size)

    @property
    def weight_shape(self):
        return (self.c_in, self.c_out // self.groups, *self.kernel)

    @property
    def output_shape(self):
        batch = () if self.batch is None else (self.batch,)
        return (*batch, self.c_out, *(1 for _ in self.size))

    @property
    def terms(self):
        """How many products one output element adds up, for the tolerance."""
        count = self.c_in // self.groups
        for n, k in zip(self.size, self.kernel, strict=True):
            count *= n * k
        return count

    def generator(self):
        return torch.Generator().manual_seed(zlib.crc32(self.id.encode()))

    def tensors(self, dtype=torch.float64, device="cpu"):
        """input, weight and bias (or None): the same values on every device.

        Every sample and channel has its own offset: an answer that ignores the input, or takes
        the wrong sample or channel, is then far off.
        """
        g = self.generator()
        x = torch.randn(self.input_shape, generator=g, dtype=torch.float64)
        planes = x.shape[: x.dim() - self.axes]
        x += torch.randn(planes, generator=g, dtype=torch.float64)[(...,) + (None,) * self.axes]
        w = torch.randn(self.weight_shape, generator=g, dtype=torch.float64)
        b = torch.randn(self.c_out, generator=g, dtype=torch.float64) if self.bias else None
        return tuple(None if t is None else t.to(dtype).to(device) for t in (x, w, b))


def _one_axis():
    yield Case("1d-one-element", 1, 1, (1,), 1, (1,), multiplier=1.0)
    yield Case("1d-small", 2, 4, (9,), 6, (3,), 2, 1, 1)
    yield Case("1d-unbatched", None, 3, (10,), 5, (4,), 3, 2, 1)
    yield Case("1d-groups", 2, 6, (11,), 9, (3,), 2, 1, 1, groups=3)
    yield Case("1d-kernel-longer-than-input", 2, 3, (3,), 2, (7,), 2, 4)
    yield Case("1d-output-padding-by-dilation", 2, 2, (7,), 3, (3,), 1, 1, 1, dilation=2)
    yield Case("1d-dilation-over-stride", 2, 2, (11,), 3, (4,), 2, 2, 2, dilation=3)
    yield Case("1d-stride-over-kernel", 2, 2, (8,), 3, (2,), 5, 0, 4)
    yield Case("1d-many-bands", 1, 2, (40,), 3, (16,), 1, 15)
    # Around vector, warp and block lengths. 2-D rows of these lengths follow below.
    for n in (2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1025, 4099):
        yield Case(f"1d-n{n}", 2, 3, (n,), 2, (3,), 2, 1, 1)


def _rules_of_each_axis():
    """Settings that change which inputs count; unequal on the two axes wherever they can be."""
    yield Case("2d-one-element", 1, 1, (1, 1), 1, (1, 1), multiplier=1.0)
    yield Case("2d-defaults", 2, 3, (4, 5), 4, (3, 2))
    yield Case("2d-all-unequal", 3, 4, (7, 10), 6, (3, 4), (2, 3), (1, 2), (1, 2), 2, (1, 2))
    yield Case("2d-unbatched", None, 4, (5, 6), 3, (3, 3), 2, 1, 1)
    yield Case("2d-no-bias", 2, 4, (5, 6), 6, (3, 3), 2, 1, 1, 2, bias=False, multiplier=-1.5)
    yield Case("2d-one-entry-lists", 2, 3, (5, 8), 2, (2, 3), (2,), (1,), (1,), 1, (2,))
    # Rows that every tap crops: they are read, or not, and must not count.
    yield Case("2d-cropped-rows", 2, 3, (9, 11), 4, (3, 3), 2, 5, 1)
    yield Case("2d-cropped-to-one-output", 2, 3, (4, 3), 2, (2, 1), 1, (2, 1), 0)
    # Taps whose box is empty: with one input and these paddings only the middle tap lands inside.
    yield Case("2d-taps-that-miss", 2, 3, (1, 1), 2, (5, 7), 1, (2, 3))
    yield Case("2d-taps-that-miss-one-axis", 2, 2, (1, 6), 3, (5, 3), 1, (2, 0))
    yield Case("2d-kernel-longer-than-input", 2, 3, (2, 3), 4, (7, 5), 2, (3, 1), 1)
    yield Case("2d-output-padding-by-stride", 2, 3, (5, 4), 2, (2, 3), 4, 1, 3)
    yield Case("2d-output-padding-by-dilation", 2, 3, (5, 4), 2, (3, 2), 2, 1, 2, dilation=3)
    yield Case("2d-output-padding-one-axis", 2, 3, (5, 4), 2, (3, 3), (1, 2), 1, (0, 1))
    yield Case("2d-dilation-over-stride", 2, 3, (8, 9), 2, (3, 4), 2, (2, 4), 0, dilation=(3, 5))
    yield Case("2d-stride-over-kernel", 2, 3, (6, 5), 2, (1, 2), (4, 3), 0, (3, 2))
    yield Case("2d-axes-apart", 2, 3, (9, 13), 2, (1, 5), (3, 1), (0, 4), (2, 0), 1, (1, 2))
    yield Case("2d-many-cells-k7", 2, 2, (13, 11), 3, (7, 7), 1, 3)
    yield Case("2d-many-cells-k7-d2", 2, 2, (13, 16), 3, (7, 7), 1, 3, 0, dilation=2)
    yield Case("2d-many-cells-k7-s2", 2, 2, (17, 15), 3, (7, 6), 2, (5, 6), 1)
    yield Case("2d-every-input-its-own-cell", 1, 2, (6, 7), 2, (9, 11), 1, (6, 8))
    yield Case("2d-multiplier-zero", 2, 3, (5, 4), 2, (3, 3), 2, 1, 1, multiplier=0.0)
    yield Case("2d-multiplier-large", 2, 3, (5, 4), 2, (3, 3), 2, 1, 1, multiplier=300.0)


def _channels_and_groups():
    """Several channels per group on both sides tell an exchanged order of groups and channels."""
    yield Case("2d-groups-2", 3, 4, (5, 6), 6, (3, 2), 2, 1, 1, groups=2)
    yield Case("2d-groups-3", 2, 9, (4, 7), 6, (2, 3), 2, 1, 0, groups=3)
    yield Case("2d-depthwise", 2, 5, (6, 5), 5, (3, 3), 2, 1, 1, groups=5)
    yield Case("2d-depthwise-two-each", 2, 5, (6, 5), 10, (3, 3), 2, 1, 1, groups=5)
    yield Case("2d-many-in", 2, 1030, (3, 3), 3, (2, 3), 2, 1, 1)
    yield Case("2d-many-out", 2, 5, (4, 3), 1030, (3, 2), 2, 1, 1)
    for c_in, c_out in ((31, 129), (33, 127), (128, 32), (130, 70)):
        yield Case(f"2d-c{c_in}-c{c_out}", 2, c_in, (5, 4), c_out, (3, 3), 2, 1, 1)
    yield Case("2d-groups-of-many", 2, 96, (4, 5), 160, (3, 3), 2, 1, 1, groups=4)
    yield Case("2d-batch-67", 67, 3, (3, 5), 4, (3, 3), 2, 1, 1)


def _rows_and_planes():
    """Few large planes, many small ones, and rows around vector and block lengths."""
    # 127, 128, 129 stand for 255..257 too: all are one below, at and above a multiple of 32.
    for width in (7, 14, 31, 32, 33, 127, 128, 129, 224):
        yield Case(f"2d-w{width}", 2, 3, (9, width), 4, (3, 3), 2, 1, 1)
    yield Case("2d-tall", 2, 3, (129, 2), 4, (3, 3), 2, 1, 1)
    yield Case("2d-tiny-planes", 3, 257, (2, 2), 4, (3, 3), 2, 1, 1)
    yield Case("2d-one-large-plane", 1, 1, (257, 259), 2, (3, 3), 2, 1, 1)
    yield Case("2d-one-row", 2, 4, (1, 300), 3, (1, 3), 2, (0, 1), (0, 1))
    yield Case("2d-benchmark-small", 4, 16, (32, 32), 24, (3, 3), 2, 1, 1)
    yield Case("2d-benchmark-plane", 1, 4, (128, 128), 8, (3, 3), 2, 1, 1)


def _three_axes():
    yield Case("3d-one-element", 1, 1, (1, 1, 1), 1, (1, 1, 1), multiplier=1.0)
    yield Case("3d-small", 2, 4, (4, 5, 6), 6, (3, 3, 3), 2, 1, 1, groups=2)
    yield Case("3d-unbatched", None, 2, (3, 5, 4), 3, (2, 3, 1), 2, (0, 1, 0), 1)
    yield Case(
        "3d-all-unequal",
        2,
        4,
        (4, 6, 5),
        6,
        (3, 2, 4),
        (2, 1, 3),
        (1, 0, 3),
        (1, 0, 2),
        2,
        (1, 3, 2),
    )
    yield Case("3d-many-cells", 1, 2, (8, 7, 9), 2, (5, 4, 5), 1, (2, 3, 4))
    yield Case("3d-cropped", 2, 2, (7, 6, 8), 2, (2, 3, 1), 2, (4, 3, 5), 1)
    yield Case("3d-kernel-longer-than-input", 1, 3, (2, 1, 3), 2, (4, 5, 6), 1, (2, 2, 3))
    for width in (31, 33, 129):
        yield Case(f"3d-w{width}", 2, 2, (3, 4, width), 3, (3, 3, 3), 2, 1, 1)


CASES = (
    *_one_axis(),
    *_rules_of_each_axis(),
    *_channels_and_groups(),
    *_rows_and_planes(),
    *_three_axes(),
)
BY_ID = {case.id: case for case in CASES}


def some(*ids):
    return [BY_ID[id] for id in ids]


# One for each number of axes and each code path that a layout or a gradient could take: few cells,
# many cells, groups, unbatched, one element. The other cases differ from these in numbers only.
VARIED = some(
    "1d-small",
    "1d-one-element",
    "1d-unbatched",
    "1d-many-bands",
    "2d-all-unequal",
    "2d-no-bias",
    "2d-unbatched",
    "2d-cropped-rows",
    "2d-taps-that-miss-one-axis",
    "2d-many-cells-k7-d2",
    "2d-depthwise-two-each",
    "2d-groups-of-many",
    "2d-w33",
    "3d-all-unequal",
    "3d-small",
    "3d-unbatched",
)

"""The cases, by group. Ids read group/what-varies; `select` picks by group or by part of an id.

A group says in one sentence what it shows: the table and docs/performance.md print it. Peers that
are not at hand (those that need a compiler) are named all the same, and reported as absent.
"""

import math
from collections.abc import Iterable, Iterator

from convt_reduce._bench._case import LAYOUTS, Case

GROUPS = {
    "headline": "x [16, 64, 128, 128], k3 s2 p1 op1, against every peer",
    "shapes": "inputs of 256 MiB and more: widths, ranks, few large planes, many small ones",
    "layouts": "channels_last by number of channels; contiguous inputs off a boundary",
    "widths": "256 MiB by width: 1 to 40, and every residue mod 8 near 128 and 224",
    "planes": "256 MiB by size of plane, from one element on",
    "strided": "inputs of neither layout, against copying them",
    "channels": "many channels on small images, where combining costs as much as reading",
    "sizes": "time against bytes",
    "training": "forward and backward together",
    "spread": "grad_x from tap gradients, against a fill of its size",
    "small": "one small input, eager calls on the wall clock",
    "host": "what the host spends on a call, by mode",
    "cpu": "the headline's shape with N=2 on the processor, by threads",
}

_HEADLINE = (16, 64, 128, 128)
_NATIVE = ("one block per item", "CUB segmented sum")
_REFERENCES = ("reference", "reference, TF32 off")
_COMPILED = (
    "reference compiled",
    "reference compiled, TF32 off",
    "reference max-autotune",
    "reference max-autotune, TF32 off",
)
_ALGEBRA = ("algebra", "algebra compiled")
_MEMORY = ("sum", "copy", "fill")
_FLOATS = ("float32", "bfloat16")
_LARGE = 256 * 2**20


def all_cases() -> list[Case]:
    """Every case, in the order of GROUPS."""
    makers = (
        _headline(),
        _shapes(),
        _layouts(),
        _widths(),
        _planes(),
        _strided(),
        _channels(),
        _sizes(),
        _training(),
        _spread(),
        _small(),
        _host(),
        _cpu(),
    )
    return [case for maker in makers for case in maker]


def select(
    cases: Iterable[Case], *, full: bool, devices: set[str], threads: int, words: list[str]
) -> list[Case]:
    """The cases that are asked for, and that a processor of so many threads can do.

    words: a group's name, or part of an id; any one suffices.
    """
    return [
        case
        for case in cases
        if case.device in devices
        and (case.threads or 0) <= threads
        and (full or case.quick or words)
        and (not words or any(word == case.group or word in case.id for word in words))
    ]


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _headline() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16", "float16"):
        peers = ("ours", *_REFERENCES, *_ALGEBRA, *_MEMORY)
        if dtype == "float32":
            peers = ("ours", *_REFERENCES, *_COMPILED, *_ALGEBRA, *_NATIVE, *_MEMORY)
        yield Case(
            f"headline/{dtype}",
            "headline",
            _HEADLINE,
            dtype=dtype,
            protocols=("graph", "single", "eager"),
            peers=peers,
            targets=() if dtype == "float16" else (f"headline {dtype}",),
        )
    for dtype in _FLOATS:
        yield Case(
            f"headline/{dtype}/channels_last",
            "headline",
            _HEADLINE,
            dtype=dtype,
            layout="channels_last",
            protocols=("graph", "single"),
            peers=("ours", *_REFERENCES, "algebra", *_MEMORY),
        )
    # The short set's headline: what needs no compiler and takes seconds.
    yield Case(
        "headline/float32/short",
        "headline",
        _HEADLINE,
        protocols=("graph", "single"),
        peers=("ours", *_REFERENCES, "algebra", *_MEMORY),
        targets=("headline float32",),
        quick=True,
    )


def _shapes() -> Iterator[Case]:
    def large(name: str, shape: tuple[int, ...], **settings) -> Iterator[Case]:
        """The shape in float32, and in the halves with a batch grown to the same bytes."""
        quick = settings.pop("quick", False)
        for dtype in ("float32", "bfloat16", "float16"):
            grown = (shape[0] * 4 // _itemsize(dtype), *shape[1:])
            yield Case(
                f"shapes/{name}/{dtype}",
                "shapes",
                grown,
                dtype=dtype,
                targets=("large inputs",),
                quick=quick and dtype != "float16",
                **settings,
            )

    yield from large("1 GiB", (256, 64, 128, 128), quick=True)
    for width in (7, 14, 31, 127, 129, 224):
        batch = math.ceil(_LARGE / (4 * 64 * width * width))
        yield from large(f"W{width}", (batch, 64, width, width), quick=width in (7, 127))
    yield from large("3-D", (16, 64, 32, 64, 64))
    yield from large("1-D", (64, 64, 16384))
    yield from large("1-D one plane", (1, 1, 2**26), c_out=1)
    yield from large("1-D one plane of 1 GiB", (1, 1, 2**28), c_out=1)
    yield from large("1-D of 10**7", (7, 1, 10**7), c_out=1)
    yield from large("few large planes", (2, 2, 4096, 4096), c_out=4)
    yield from large(
        "4x4 cells", (64, 64, 128, 128), kernel=7, stride=1, padding=3, output_padding=0
    )
    yield from large(
        "k7 p3 d2", (64, 64, 128, 128), kernel=7, stride=1, padding=3, output_padding=0, dilation=2
    )
    for dtype in _FLOATS:
        shape = (16 * 4 // _itemsize(dtype), 64, 32, 64, 64)
        yield Case(
            f"shapes/3-D channels_last/{dtype}",
            "shapes",
            shape,
            dtype=dtype,
            layout="channels_last",
            targets=("large inputs",),
        )
        yield Case(
            f"shapes/channels_last 256 MiB/{dtype}",
            "shapes",
            (64 * 4 // _itemsize(dtype), 64, 128, 128),
            dtype=dtype,
            layout="channels_last",
            targets=("large inputs",),
            quick=dtype == "float32",
        )


def _layouts() -> Iterator[Case]:
    for dtype in _FLOATS:
        for channels in (3, 8, 64, 100, 1024):
            batch = math.ceil(_LARGE / (_itemsize(dtype) * channels * 56 * 56))
            yield Case(
                f"layouts/channels_last C{channels}/{dtype}",
                "layouts",
                (batch, channels, 56, 56),
                c_out=16,
                dtype=dtype,
                layout="channels_last",
                targets=("large inputs",),
            )
        for width in (127, 128):
            batch = math.ceil(_LARGE / (_itemsize(dtype) * 64 * width * width))
            yield Case(
                f"layouts/misaligned W{width}/{dtype}",
                "layouts",
                (batch, 64, width, width),
                dtype=dtype,
                layout="misaligned",
                targets=("large inputs",),
            )


def _widths() -> Iterator[Case]:
    for dtype in _FLOATS:
        for width in (*range(1, 41), *range(124, 132), *range(220, 228)):
            # Planes of 256 KiB in float32 whatever the width, so that only the width varies.
            height = math.ceil(65536 / width)
            yield Case(
                f"widths/{dtype}/W{width}",
                "widths",
                (16 * 4 // _itemsize(dtype), 64, height, width),
                dtype=dtype,
                targets=("large inputs",),
            )


def _planes() -> Iterator[Case]:
    for dtype in _FLOATS:
        for side in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64):
            batch = math.ceil(_LARGE / (_itemsize(dtype) * 1024 * side * side))
            yield Case(
                f"planes/{dtype}/{side}x{side}",
                "planes",
                (batch, 1024, side, side),
                c_out=8,  # a result far smaller than x, whatever the batch
                dtype=dtype,
                targets=("large inputs",),
            )


def _strided() -> Iterator[Case]:
    for layout in LAYOUTS[3:]:
        for width in (127, 128):
            yield Case(
                f"strided/{layout}/W{width}",
                "strided",
                (64, 64, 128, width),
                layout=layout,
                peers=("ours", "sum", "copy"),
                targets=("strided",),
            )


def _channels() -> Iterator[Case]:
    for dtype in _FLOATS:
        for side in (7, 14):
            for kernel, output_padding in ((3, 1), (4, 0)):
                yield Case(
                    f"channels/{side}x{side} k{kernel}/{dtype}",
                    "channels",
                    (256, 512, side, side),
                    c_out=512,
                    kernel=kernel,
                    output_padding=output_padding,
                    dtype=dtype,
                    peers=("ours", "algebra", "sum", "matmul"),
                    targets=("many channels",),
                )


def _sizes() -> Iterator[Case]:
    for dtype in _FLOATS:
        for side in (8, 16, 32, 64):
            yield Case(f"sizes/{dtype}/N1 {side}x{side}", "sizes", (1, 64, side, side), dtype=dtype)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)[: 9 if dtype == "float32" else 10]:
            yield Case(
                f"sizes/{dtype}/N{batch} 128x128", "sizes", (batch, 64, 128, 128), dtype=dtype
            )


def _training() -> Iterator[Case]:
    for dtype in _FLOATS:
        yield Case(
            f"training/{dtype}",
            "training",
            _HEADLINE,
            dtype=dtype,
            kind="training",
            protocols=("graph", "single", "eager", "memory"),
            peers=("ours", *_REFERENCES, "algebra"),
            targets=("training time", "training memory") if dtype == "float32" else (),
            quick=dtype == "float32",
        )


def _spread() -> Iterator[Case]:
    def spread(
        name: str, shape: tuple[int, ...], quick: bool = False, **settings
    ) -> Iterator[Case]:
        for dtype in _FLOATS:
            yield Case(
                f"spread/{name}/{dtype}",
                "spread",
                (shape[0] * 4 // _itemsize(dtype), *shape[1:]),
                dtype=dtype,
                kind="spread",
                peers=("ours, spread", "fill"),
                targets=("grad_x",),
                quick=quick,
                **settings,
            )

    yield from spread("64 MiB", _HEADLINE, quick=True)
    for width in (7, 14, 31, 127, 129, 224):
        batch = math.ceil(_LARGE / (4 * 64 * width * width))
        yield from spread(f"W{width}", (batch, 64, width, width))
    yield from spread("3-D", (16, 64, 32, 64, 64))
    yield from spread("1-D one plane", (1, 1, 2**26))
    yield from spread("few large planes", (2, 2, 4096, 4096))
    yield from spread(
        "4x4 cells", (64, 64, 128, 128), kernel=7, stride=1, padding=3, output_padding=0
    )


def _small() -> Iterator[Case]:
    yield Case(
        "small/8x8",
        "small",
        (1, 64, 8, 8),
        protocols=("eager", "graph"),
        peers=("ours", *_REFERENCES, "reference compiled", *_ALGEBRA, *_NATIVE, "sum"),
        targets=("small input",),
    )


def _host() -> Iterator[Case]:
    for mode in ("inference_mode", "no_grad", "grad"):
        yield Case(
            f"host/{mode}",
            "host",
            (1, 64, 8, 8),
            mode=mode,
            protocols=("eager",),
            peers=("ours", "ours, the packet", "ours, the function", "sum", "reference"),
            targets=("host time",) if mode == "inference_mode" else (),
            quick=mode == "inference_mode",
        )


def _cpu() -> Iterator[Case]:
    for dtype in _FLOATS:
        for layout in ("contiguous", "channels_last"):
            more = (4, 8) if layout == "contiguous" else ()
            for threads in (1, 2, *more, 0):
                yield Case(
                    f"cpu/{dtype}/{layout}/threads {threads or 'all'}",
                    "cpu",
                    (2, *_HEADLINE[1:]),
                    dtype=dtype,
                    layout=layout,
                    device="cpu",
                    threads=threads,
                    protocols=("cpu",),
                    # The reference takes seconds: where the targets are, and no more.
                    peers=("ours", *(["reference"] if threads == 2 else []), "algebra", "sum"),
                    targets=("CPU", "CPU, sum") if threads == 2 else (),
                    quick=(dtype, layout, threads) == ("float32", "contiguous", 2),
                )

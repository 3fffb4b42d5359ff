"""The plots of docs/performance.md, as SVG, from a record. The same record gives the same bytes.

Colours mean the same everywhere: one per dtype, grey for what is not ours. A hollow mark is x.sum.
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from convt_reduce._bench._table import duration
from convt_reduce._bench._targets import floor_s, median, quotient

COLOURS = {"float32": "#1b6ca8", "bfloat16": "#d1495b", "float16": "#7a9e3a"}
GREY = "#8a8a8a"
SETTINGS = {
    "svg.hashsalt": "convt_reduce",  # else ids are drawn at random
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
}


def write(record: dict, folder: Path) -> list[Path]:
    """Draws what the record has figures for; returns the files."""
    written = []
    with matplotlib.rc_context(SETTINGS):
        for name, draw in DRAWINGS.items():
            if any(case["group"] == name for case in record["cases"]):
                path = folder / f"performance-{name}.svg"
                # Neither date nor version: they would change bytes that show nothing.
                draw(record).savefig(path, format="svg", metadata={"Date": None, "Creator": None})
                written.append(path)
    return written


def sizes(record: dict) -> Figure:
    """Time against bytes, both logarithmic, with the floor as a line."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    every = [case for case in record["cases"] if case["group"] == "sizes"]
    for dtype in ("float32", "bfloat16"):
        for peer, style in (("ours", "o-"), ("sum", "o--")):
            points = sorted(
                (case["bytes"], at * 1e6, case["cold"])
                for case in every
                if case["dtype"] == dtype and (at := median(case, peer, "graph")) is not None
            )
            if not points:
                continue
            colour = COLOURS[dtype]
            axes.plot(
                [nbytes for nbytes, _, _ in points],
                [time for _, time, _ in points],
                style,
                color=colour,
                alpha=1 if peer == "ours" else 0.55,
                linewidth=1.4,
                markersize=4,
                markerfacecolor=colour if peer == "ours" else "white",
                label=f"{'ours' if peer == 'ours' else 'x.sum over space'}, {dtype}",
            )
    if record["read"] and every:
        ends = [min(case["bytes"] for case in every), max(case["bytes"] for case in every)]
        floor = [nbytes / record["read"]["bytes_per_s"] * 1e6 for nbytes in ends]
        axes.plot(ends, floor, color=GREY, linewidth=1.4, label="floor: bytes / read rate")
    times = [at * 1e6 for case in every if (at := median(case, "ours", "graph")) is not None]
    if times:
        axes.set_ylim(bottom=min(times) / 4)  # below that the floor shows nothing
    warm = [case["bytes"] for case in every if not case["cold"]]
    if warm:
        axes.axvspan(min(warm) / 1.5, max(warm) * 1.2, color=GREY, alpha=0.1, linewidth=0)
        axes.text(min(warm) / 1.4, 0.97, "in cache", color=GREY, va="top",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size(nbytes)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:g}"))
    axes.set_xlabel("bytes of x")
    axes.set_ylabel("microseconds per call, in a graph")
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(0.02, 0.93))
    return figure


def shapes(record: dict) -> Figure:
    """A line per shape with a dot per dtype: the share of the floor."""
    every = [case for case in record["cases"] if case["group"] in ("shapes", "layouts")]
    names = list(dict.fromkeys(name_of(case) for case in every))
    figure = Figure(figsize=(7, 0.9 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    for dtype, colour in COLOURS.items():
        for peer, face in (("ours", colour), ("sum", "white")):
            points = [
                (found, names.index(name_of(case)))
                for case in every
                if case["dtype"] == dtype and (found := share(case, record, peer)) is not None
            ]
            if points:
                axes.plot(
                    [found for found, _ in points],
                    [place for _, place in points],
                    "o",
                    color=colour,
                    markerfacecolor=face,
                    markersize=5 if peer == "ours" else 4,
                    alpha=1 if peer == "ours" else 0.6,
                    zorder=3 if peer == "ours" else 2,
                    label=f"{'ours' if peer == 'ours' else 'x.sum'}, {dtype}",
                )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="y", color="#e6e6e6", linewidth=0.6)
    share_axis(axes.set_xlim, axes.axvline)
    axes.set_xlabel("share of the floor: bytes / read rate / time")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def widths(record: dict) -> Figure:
    """The share of the floor against the width, in three stretches, and against square planes."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True, width_ratios=(4, 1.4, 1.4, 2.4))
    stretches = ((1, 40), (124, 131), (220, 227))
    for axes, (low, high) in zip(panels, stretches, strict=False):
        of_group(axes, record, "widths", lambda case: case["shape"][-1], (low, high))
        axes.set_xlabel(f"width {low} to {high}")
        if high - low < 10:
            axes.set_xticks([low, high])
    of_group(panels[3], record, "planes", lambda case: case["shape"][-1], (1, 64))
    panels[3].set_xscale("log", base=2)
    panels[3].xaxis.set_major_formatter(FuncFormatter(lambda side, _: f"{side:g}"))
    panels[3].set_xlabel("side of a square plane")
    panels[0].set_ylabel("share of the floor")
    for axes in panels:
        share_axis(axes.set_ylim, axes.axhline)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def of_group(axes: Axes, record: dict, group: str, place, stretch: tuple[int, int]) -> None:
    """ours and x.sum of one group against a number of the case, within a stretch of it."""
    for dtype in ("float32", "bfloat16"):
        for peer, style in (("ours", "o-"), ("sum", "-")):
            points = sorted(
                (place(case), found)
                for case in record["cases"]
                if case["group"] == group
                and case["dtype"] == dtype
                and stretch[0] <= place(case) <= stretch[1]
                and (found := share(case, record, peer)) is not None
            )
            axes.plot(
                [at for at, _ in points],
                [found for _, found in points],
                style,
                color=COLOURS[dtype],
                linewidth=1 if peer == "ours" else 0.8,
                markersize=2.6,
                alpha=1 if peer == "ours" else 0.4,
                label=f"{'ours' if peer == 'ours' else 'x.sum'}, {dtype}",
            )


def training(record: dict) -> Figure:
    """A bar per peer, the time of forward and backward together, logarithmic."""
    every = [case for case in record["cases"] if case["group"] == "training"]
    bars = [
        (row["peer"], case["dtype"], row["timings"]["graph"]["median_s"] * 1e6)
        for case in every
        for row in case["results"]
        if "graph" in row.get("timings", {})
    ]
    figure = Figure(figsize=(7, 0.9 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (peer, dtype, time) in enumerate(bars):
        ours = peer == "ours"
        axes.barh(place, time, height=0.7, color=COLOURS[dtype], alpha=1 if ours else 0.4)
        axes.annotate(duration(time / 1e6), (time, place), xytext=(4, 0),
                      textcoords="offset points", va="center")  # fmt: skip
    floors = [floor for case in every if (floor := floor_s(case, record_rate(record)))]
    axes.set_yticks(range(len(bars)), [f"{peer}, {dtype}" for peer, dtype, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:g}"))
    if bars:
        # A bar on a logarithmic axis has no zero to begin at: it begins at reading x once.
        least = min([time for _, _, time in bars] + [floor * 1e6 for floor in floors])
        axes.set_xlim(least * 0.9, max(time for _, _, time in bars) * 2)
    axes.set_xlabel("microseconds of forward and backward, in a graph")
    return figure


DRAWINGS = {"sizes": sizes, "shapes": shapes, "widths": widths, "training": training}


# ---- figures of a case --------------------------------------------------------------------------


def record_rate(record: dict) -> float | None:
    return record["read"]["bytes_per_s"] if record["read"] else None


def share(case: dict, record: dict, peer: str) -> float | None:
    """How much of the read rate a peer reaches."""
    return quotient(floor_s(case, record_rate(record)), median(case, peer, "graph"))


def name_of(case: dict) -> str:
    """The id without group and dtype."""
    return "/".join(part for part in case["id"].split("/")[1:] if part != case["dtype"])


def share_axis(limit, line) -> None:
    """From nothing to a little above the floor, with the target as a line."""
    limit(0, 1.1)
    line(0.9, color=GREY, linewidth=0.9, linestyle=":")
    line(1.0, color=GREY, linewidth=0.9)


def size(nbytes: float) -> str:
    """Bytes as a power of two with its unit."""
    for unit, of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= of:
            return f"{nbytes / of:g} {unit}"
    return f"{nbytes:g}"

"""`make report`: writes the figures of a record into docs/performance.md, and its plots beside it.

    python benchmarks/report.py RECORD.json [--page docs/performance.md] [--no-plots]

The page is written by hand but for the parts between `<!-- generated: NAME -->` and
`<!-- end -->`, which this file owns. The same record gives the same bytes. No figure is computed
here but quotients of what the record holds. Plots need matplotlib (the dependency group bench).
"""

import argparse
import json
import re
import sys
from pathlib import Path

from convt_reduce._bench._run import SCHEMA
from convt_reduce._bench._table import duration, spread_of
from convt_reduce._bench._targets import TARGETS, floor_s, median, quotient

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLOTS = ("sizes", "shapes", "widths", "training")


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/report.py", description=__doc__)
    parser.add_argument("record", type=Path, help="what make bench wrote")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--no-plots", action="store_true", help="leave the plots as they are")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text())
    reason = why_unfit(record)
    if reason:
        print(f"{options.record}: {reason}", file=sys.stderr)
        return 2
    if not options.no_plots:
        import plots  # before anything is written: it may find matplotlib missing

        plots.write(record, options.page.parent)
    options.page.write_text(rewritten(options.page.read_text(), record))
    return 0


def why_unfit(record: dict) -> str | None:
    """Why figures of a record should not be published, or None."""
    if record.get("schema") != SCHEMA:
        return f"must be a record of schema {SCHEMA}, got {record.get('schema')!r}"
    if record["notes"].get("smoke"):
        return "must hold figures, got a smoke run, whose times mean nothing"
    return None


def rewritten(page: str, record: dict) -> str:
    """The page with every generated part made anew. Raises KeyError for a part nobody writes."""

    def part(match: re.Match) -> str:
        return f"{match[1]}\n{PARTS[match['name']](record).strip()}\n\n{match[3]}"

    return PART.sub(part, page)


# ---- the parts ----------------------------------------------------------------------------------


def machine(record: dict) -> str:
    """Where and when, and the rate that floors are made of."""
    machine, versions = record["machine"], record["versions"]
    gpu, read = machine["gpu"], record["read"]
    rows = []
    if gpu:
        rows += [
            ("GPU", f"{gpu['name']}, {gpu['multiprocessors']} multiprocessors, "
             f"{gpu['memory_bytes'] / 2**30:.0f} GiB, driver {gpu['driver'] or 'unknown'}"),
        ]  # fmt: skip
    rows += [
        ("CPU", f"{machine['cpu']}, {machine['cpu_threads']} threads"),
        ("torch", f"{versions['torch']}, Python {versions['python']}"),
        (
            "convt_reduce",
            f"{versions['convt_reduce']}, commit {(versions['commit'] or 'unknown')[:12]}, built "
            f"with nvcc {versions['build']['cuda'] or '-'} beside torch "
            f"{versions['build']['torch']}",
        ),
        ("date", f"{record['date'][:10]}, {record['seconds']:.0f} s"),
    ]
    if read:
        less = " (less than 4 GiB, for want of memory)" if read["scaled_down"] else ""
        rate = f"{read['bytes_per_s'] / 1e12:.3f} TB/s over {read['bytes'] / 2**30:g} GiB{less}"
        rows.append(("read rate", rate))
    for peer, seconds in (record["notes"].get("build_s") or {}).items():
        if seconds is not None:
            rows.append((f"build of {peer}", f"{seconds:.0f} s"))
    return table(("", ""), rows)


def targets(record: dict) -> str:
    """Per target, how many cases meet it, and the case that is furthest off."""
    rows = []
    for name, target in TARGETS.items():
        found = [
            (verdict, case["id"])
            for case in record["cases"]
            for verdict in case["verdicts"]
            if verdict["target"] == name and verdict["ratio"] is not None
        ]
        if not found:
            rows.append((name, target.text, target.wanted, "not measured", "", ""))
            continue
        pick = min if target.at_least else max
        worst, where = pick(found, key=lambda pair: pair[0]["ratio"])
        met = sum(verdict["met"] for verdict, _ in found)
        rows.append(
            (name, target.text, target.wanted, f"{met} of {len(found)}", f"{worst['ratio']:.3g}",
             where)
        )  # fmt: skip
    return table(("target", "ratio", "wanted", "cases that meet it", "worst", "where"), rows)


def headline(record: dict) -> str:
    """Every peer at the headline's shape, by every way of timing."""
    parts = []
    for case in cases(record, "headline"):
        if case["id"].endswith("/short") and case_of(record, "headline/float32"):
            continue
        rows = [peer_row(case, row, rate(record)) for row in case["results"]]
        layout = "" if case["layout"] == "contiguous" else f", {case['layout']}"
        parts.append(f"**{case['dtype']}{layout}**, x of {case['bytes'] / 2**20:g} MiB\n")
        parts.append(table(("peer", *ORDER, "graph / floor", "largest error"), rows) + "\n")
    return "\n".join(parts) or NOT_MEASURED


def shapes(record: dict) -> str:
    """ours and x.sum as shares of the floor, for the groups of shapes and layouts."""
    rows = []
    for group in ("shapes", "layouts", "planes"):
        for case in cases(record, group):
            ours, total = (median(case, peer, "graph") for peer in ("ours", "sum"))
            floor = floor_s(case, rate(record))
            rows.append(
                (case["id"], f"{case['shape']}", time_of(ours), share(floor, ours),
                 share(floor, total))
            )  # fmt: skip
    return table(("case", "x", "time", "share", "x.sum's share"), rows) if rows else NOT_MEASURED


def widths(record: dict) -> str:
    """The sweep's extremes; the plot shows the rest."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        found = [
            (floor_s(case, rate(record)) / ours, case["id"].split("/")[-1])
            for case in cases(record, "widths")
            if case["dtype"] == dtype and (ours := median(case, "ours", "graph")) and rate(record)
        ]
        if found:
            least, most = min(found), max(found)
            rows.append(
                (dtype, f"{len(found)}", f"{least[0]:.2f} at {least[1]}",
                 f"{most[0]:.2f} at {most[1]}")
            )  # fmt: skip
    return (
        table(("dtype", "widths", "least share", "greatest share"), rows) if rows else NOT_MEASURED
    )


def side_by_side(*groups: str):
    """A part that lists every peer of some groups."""

    def part(record: dict) -> str:
        found = [(case, row) for group in groups for case in cases(record, group)
                 for row in case["results"]]  # fmt: skip
        ways = [way for way in ORDER if any(way in row.get("timings", {}) for _, row in found)]
        memory = any(row.get("peak_bytes") is not None for _, row in found)
        rows = []
        for case, row in found:
            cells = [case["id"], row["peer"], *(cell(row, way) for way in ways)]
            if memory:
                peak = row.get("peak_bytes")
                cells.append("" if peak is None else f"{peak / 2**20:.1f} MiB")
            rows.append(tuple(cells))
        heads = ("case", "peer", *ways, *(["peak extra memory"] if memory else []))
        return table(heads, rows) if rows else NOT_MEASURED

    return part


def plot(name: str, alt: str):
    """A part that shows a plot, if the record has what it needs."""

    def part(record: dict) -> str:
        return f"![{alt}](performance-{name}.svg)" if cases(record, name) else NOT_MEASURED

    return part


NOT_MEASURED = "Not measured in this record."
ORDER = ("graph", "single", "eager", "host", "cpu")
PARTS = {
    "machine": machine,
    "targets": targets,
    "headline": headline,
    "sizes-plot": plot("sizes", "Time against the bytes of x, with the floor as a line"),
    "shapes-plot": plot("shapes", "The share of the floor per shape, for each dtype"),
    "shapes": shapes,
    "widths-plot": plot("widths", "The share of the floor against the width"),
    "widths": widths,
    "training-plot": plot("training", "Forward and backward: ours against the reference"),
    "training": side_by_side("training"),
    "spread": side_by_side("spread"),
    "strided": side_by_side("strided"),
    "channels": side_by_side("channels"),
    "small": side_by_side("small", "host"),
    "cpu": side_by_side("cpu"),
}


# ---- cells --------------------------------------------------------------------------------------


def cases(record: dict, group: str) -> list[dict]:
    return [case for case in record["cases"] if case["group"] == group]


def case_of(record: dict, id: str) -> dict | None:
    return next((case for case in record["cases"] if case["id"] == id), None)


def rate(record: dict) -> float | None:
    """Bytes per second of the run's own 4 GiB sum."""
    return (record["read"] or {}).get("bytes_per_s")


def time_of(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def share(floor: float | None, seconds: float | None) -> str:
    found = quotient(floor, seconds)
    return "" if found is None else f"{found:.2f}"


def cell(row: dict, way: str) -> str:
    """A median with its spread, or why there is none."""
    if row["status"] != "timed":
        return row["status"]
    timing = row["timings"].get(way)
    return "" if timing is None else f"{duration(timing['median_s'])} ± {spread_of(timing):.0%}"


def peer_row(case: dict, row: dict, read_rate: float | None) -> tuple[str, ...]:
    if row["status"] != "timed":
        return (row["peer"], f"{row['status']}: {row['why']}", *[""] * (len(ORDER) + 1))
    graph = row["timings"].get("graph", {}).get("median_s")
    floors = quotient(graph, floor_s(case, read_rate))
    return (
        row["peer"],
        *(cell(row, way) for way in ORDER),
        "" if floors is None else f"{floors:.2f}",
        f"{row['check']['max_share']:.0e}",
    )


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of markdown, without the columns in which no row has anything."""
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells[i].replace("|", "\\|") for i in kept) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(kept), *map(line, rows)])


if __name__ == "__main__":
    sys.exit(main())

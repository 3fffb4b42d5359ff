"""The record as a plain table: a section per group, a line per peer and way of timing."""

from collections.abc import Iterator

from convt_reduce._bench._cases import GROUPS
from convt_reduce._bench._targets import floor_s, quotient

_ROW = "{:46} {:32} {:7} {:>10} {:>7} {:>7} {:>8}  {}"


def duration(seconds: float) -> str:
    """A time as people read it, to about three digits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def spread_of(timing: dict) -> float:
    """Half the distance of the quartiles, as a share of the median."""
    return (timing["q3_s"] - timing["q1_s"]) / 2 / timing["median_s"]


def verdict_text(verdict: dict) -> str:
    """A target and what came of it, in a few words."""
    if verdict["ratio"] is None:
        return f"{verdict['of']} {verdict['wanted']}: not measured"
    met = "met" if verdict["met"] else "NOT MET"
    return f"{verdict['of']} = {verdict['ratio']:.3g}, wanted {verdict['wanted']}: {met}"


def lines(record: dict) -> Iterator[str]:
    """The whole report, line by line."""
    yield from _head(record)
    rate = (record["read"] or {}).get("bytes_per_s")
    for group, text in GROUPS.items():
        cases = [case for case in record["cases"] if case["group"] == group]
        if not cases:
            continue
        yield ""
        yield f"{group}: {text}"
        yield _ROW.format(
            "case", "peer", "timing", "median", "+-", "floors", "error", "target"
        ).rstrip()
        for case in cases:
            yield from _case(case, rate)
    yield ""
    yield from _tail(record)


def _head(record: dict) -> Iterator[str]:
    machine, versions = record["machine"], record["versions"]
    gpu = machine["gpu"]
    if gpu:
        yield f"{gpu['name']}, driver {gpu['driver'] or 'unknown'}; {machine['cpu']}"
    else:
        yield f"{machine['cpu']}"
    yield (
        f"convt_reduce {versions['convt_reduce']}, torch {versions['torch']}, "
        f"Python {versions['python']}, {machine['cpu_threads']} CPU threads"
    )
    read = record["read"]
    if read:
        scaled = ", less than 4 GiB for want of memory" if read["scaled_down"] else ""
        yield (
            f"floor: a case's bytes at {read['bytes_per_s'] / 1e12:.3f} TB/s, the rate at which "
            f"x.sum() reads {read['bytes'] / 2**30:g} GiB{scaled}"
        )
    elif record["read_error"]:
        yield f"no floors, since the read rate could not be measured: {record['read_error']}"
    yield "graph: cold inputs in a CUDA graph; single: one call after 256 MiB were written;"
    yield "eager, host: calls in a row on the wall clock, and the host's part of it"


def _case(case: dict, rate: float | None) -> Iterator[str]:
    name = case["id"] + ("" if case.get("cold", True) else " (warm)")
    if case["error"]:
        yield f"{name:46} {case['error']}"
    floor = floor_s(case, rate)
    verdicts = [verdict_text(verdict) for verdict in case["verdicts"]]
    for row in case["results"]:
        if row["status"] != "timed":
            yield f"{name:46} {row['peer']:32} {row['status']}: {row['why']}"
            continue
        for protocol, timing in row["timings"].items():
            reads_x = case["kind"] == "forward" and protocol in ("graph", "single")
            floors = quotient(timing["median_s"], floor) if reads_x else None
            # The first line of a case carries what its targets say; it is ours.
            target = "; ".join(verdicts)
            verdicts = []
            yield _ROW.format(
                name,
                row["peer"],
                protocol,
                duration(timing["median_s"]),
                f"{spread_of(timing):.1%}",
                "" if floors is None else f"{floors:.2f}",
                f"{row['check']['max_share']:.0e}",
                target,
            ).rstrip()
        if row.get("peak_bytes") is not None:
            peak = f"{row['peak_bytes'] / 2**20:.1f} MiB"
            yield f"{name:46} {row['peer']:32} memory  {peak:>10}"


def _tail(record: dict) -> Iterator[str]:
    verdicts = [(case["id"], verdict) for case in record["cases"] for verdict in case["verdicts"]]
    met = sum(verdict["met"] is True for _, verdict in verdicts)
    unmet = [(id, verdict) for id, verdict in verdicts if verdict["met"] is False]
    unknown = len(verdicts) - met - len(unmet)
    yield f"targets: {met} met, {len(unmet)} not met, {unknown} not measured"
    for id, verdict in unmet:
        yield f"  {id}: {verdict_text(verdict)}"
    troubles = [
        (case["id"], row)
        for case in record["cases"]
        for row in case["results"]
        if row["status"] in ("wrong", "failed")
    ]
    if troubles:
        yield f"peers that were wrong or failed: {len(troubles)}"
    for id, row in troubles:
        yield f"  {id}, {row['peer']}: {row['status']}: {row['why']}"
    if not record["complete"]:
        yield "the run was interrupted: this is what there was"
    yield f"{record['seconds']:.0f} s"

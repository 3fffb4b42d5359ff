"""The targets, and whether a record meets them: plain arithmetic on what was measured.

Each target is a ratio of two times of one case, taken side by side in one run, or of two sizes.
The floor of a case is its bytes divided by the rate at which the same run reads 4 GiB.
"""

from collections.abc import Callable
from dataclasses import dataclass

Ratio = Callable[[dict, float | None], float | None]


@dataclass(frozen=True)
class Target:
    """``ratio(record, read rate)`` must be at most ``bound``, or at least if ``at_least``.

    A ratio is None where one of its two figures was not measured.
    """

    text: str  # what the ratio is of
    bound: float
    ratio: Ratio
    at_least: bool = False

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


def median(record: dict, peer: str, protocol: str) -> float | None:
    """Seconds per call of one peer by one protocol, or None if it was not timed."""
    for row in record["results"]:
        if row["peer"] == peer and protocol in row.get("timings", {}):
            return row["timings"][protocol]["median_s"]
    return None


def floor_s(record: dict, read_rate: float | None) -> float | None:
    """The seconds that the case's bytes alone take. read_rate: bytes per second."""
    return record["bytes"] / read_rate if read_rate else None


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _to_floor(record: dict, read_rate: float | None) -> float | None:
    return quotient(median(record, "ours", "graph"), floor_s(record, read_rate))


def _share_of_read_rate(record: dict, read_rate: float | None) -> float | None:
    return quotient(floor_s(record, read_rate), median(record, "ours", "graph"))


def _to_peer(peer: str, protocol: str, ours: str = "ours") -> Ratio:
    def ratio(record: dict, read_rate: float | None) -> float | None:
        return quotient(median(record, ours, protocol), median(record, peer, protocol))

    return ratio


def _from_peer(peer: str, protocol: str) -> Ratio:
    def ratio(record: dict, read_rate: float | None) -> float | None:
        return quotient(median(record, peer, protocol), median(record, "ours", protocol))

    return ratio


def _to_fastest(record: dict, read_rate: float | None) -> float | None:
    """Against the fastest other that computes the whole mean."""
    others = [
        row["timings"]["eager"]["median_s"]
        for row in record["results"]
        if row["computes"] == "mean"
        and not row["peer"].startswith("ours")
        and "eager" in row.get("timings", {})
    ]
    return quotient(median(record, "ours", "eager"), min(others, default=None))


def _to_floor_and_matmul(record: dict, read_rate: float | None) -> float | None:
    floor, matmul = floor_s(record, read_rate), median(record, "matmul", "graph")
    if floor is None or matmul is None:
        return None
    return quotient(median(record, "ours", "graph"), floor + matmul)


def _memory_to_grad_x(record: dict, read_rate: float | None) -> float | None:
    for row in record["results"]:
        if row["peer"] == "ours" and row.get("peak_bytes") is not None:
            return row["peak_bytes"] / record["bytes"]
    return None


TARGETS: dict[str, Target] = {
    "headline float32": Target("time / floor", 1.20, _to_floor),
    "headline bfloat16": Target("time / floor", 1.45, _to_floor),
    "large inputs": Target("floor / time", 0.90, _share_of_read_rate, at_least=True),
    "strided": Target("time / a contiguous copy", 1.0, _to_peer("copy", "graph")),
    "many channels": Target("time / (floor + matmul)", 1.5, _to_floor_and_matmul),
    "grad_x": Target("time / a fill", 1.20, _to_peer("fill", "graph", ours="ours, spread")),
    "training time": Target(
        "reference / time", 50.0, _from_peer("reference", "graph"), at_least=True
    ),
    "training memory": Target("peak extra / grad_x", 1.05, _memory_to_grad_x),
    "small input": Target("time / fastest other", 1.0, _to_fastest),
    "host time": Target("host time / x.sum's", 1.7, _to_peer("sum", "host")),
    "CPU": Target("reference / time", 20.0, _from_peer("reference", "cpu"), at_least=True),
    "CPU, sum": Target("time / x.sum", 1.3, _to_peer("sum", "cpu")),
}


def verdicts(record: dict, read_rate: float | None) -> list[dict]:
    """What the case's targets say: the ratio, what was wanted, and whether it is met.

    ratio and met are None where the figures are missing: a target that was not measured is not met,
    and not failed either.
    """
    found = []
    for name in record["targets"]:
        target = TARGETS[name]
        ratio = target.ratio(record, read_rate)
        found.append(
            {
                "target": name,
                "of": target.text,
                "wanted": target.wanted,
                "ratio": ratio,
                "met": None if ratio is None else target.met(ratio),
            }
        )
    return found

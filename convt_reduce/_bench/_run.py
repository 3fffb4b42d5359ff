"""Runs cases and writes the record. One peer that fails never stops the others.

Every peer is called once and checked against float64 before it is timed; a wrong one is not timed.
What happened to a peer is its `status`: timed, wrong, failed, unsupported (it does not do such a
case) or absent (it is not at hand). The record is plain data for JSON, and holds what a table or a
plot needs: they compute nothing but quotients.
"""

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from convt_reduce._bench import _machine, _timing
from convt_reduce._bench._case import Case
from convt_reduce._bench._oracle import ROUNDINGS
from convt_reduce._bench._peers import Peer
from convt_reduce._bench._subject import Subject, check_record
from convt_reduce._bench._targets import verdicts
from convt_reduce._bench._timing import Cpu, Cuda, Timing

SCHEMA = 1  # of the record; raised when a reader of older records would go wrong
READ_BYTES = 4 * 2**30
# The oracle and the convolution, both in float64, may differ by this share of the largest value.
DEFINITION_SHARE = 1e-9

Clocks = Mapping[str, tuple[Cuda | Cpu, torch.device]]
Progress = Callable[[int, int, str], None]


class DeviceLost(Exception):
    """The GPU no longer answers: whatever comes after would fail with the same error."""


def clocks_at_hand(device: str | None) -> Clocks:
    """The clocks of the devices to run on: one, or all there are."""
    clocks: dict[str, tuple[Cuda | Cpu, torch.device]] = {}
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        clocks["cuda"] = Cuda(gpu), gpu
    if device != "cuda":
        clocks["cpu"] = Cpu(), torch.device("cpu")
    return clocks


def run(
    cases: Sequence[Case],
    peers: Mapping[str, Peer],
    clocks: Clocks,
    progress: Progress = lambda done, total, text: None,
    last: Callable[[Case], bool] = lambda case: False,
    repository: Path | None = None,
) -> dict:
    """Runs every case and returns the record. Interrupted, it returns what there is.

    last: the cases to run after all others; the record keeps the order of ``cases``.
    repository: the source tree that the run belongs to, for its commit.
    """
    started = time.perf_counter()
    record: dict = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine.machine("cuda" in clocks),
        "versions": _machine.versions(repository),
        "protocol": protocol(),
        "notes": {},
        "read": None,
        "read_error": None,
        "cases": [],
        "complete": False,
    }
    order = sorted(range(len(cases)), key=lambda index: last(cases[index]))  # stable
    found: dict[int, dict] = {}
    lost: str | None = None
    try:
        if any(case.device == "cuda" for case in cases):
            progress(0, len(cases), "the read rate")
            try:
                record["read"] = read_rate(*clocks["cuda"])
            except Exception as error:  # then there are no floors, but times all the same
                record["read_error"] = _sentence(error)
        for done, index in enumerate(order):
            case = cases[index]
            progress(done, len(cases), case.id)
            if lost and case.device == "cuda":
                found[index] = _without_results(case, f"not run: {lost}")
                continue
            try:
                found[index] = measure(case, peers, *clocks[case.device])
            except DeviceLost as error:
                lost = f"the GPU stopped answering during {case.id}: {error}"
                found[index] = _without_results(case, lost)
        record["complete"] = True
    except KeyboardInterrupt:
        pass
    progress(len(cases), len(cases), "done")
    rate = (record["read"] or {}).get("bytes_per_s")
    for index in sorted(found):
        case_record = found[index]
        case_record["verdicts"] = verdicts(case_record, rate)
        record["cases"].append(case_record)
    record["seconds"] = time.perf_counter() - started
    return record


def protocol() -> dict:
    """The constants of the protocol, as the record holds them."""
    return {
        "times": "seconds per call: median, quartiles and least of the repeats",
        "min_repeats": _timing.MIN_REPEATS,
        "max_repeats": _timing.MAX_REPEATS,
        "seconds_per_timing": _timing.SECONDS_PER_TIMING,
        "caches_between_uses_of_an_input": _timing.CACHES_BETWEEN,
        "max_copies": _timing.MAX_COPIES,
        "min_calls_per_graph": _timing.MIN_CALLS,
        "flush_bytes": _timing.FLUSH_BYTES,
        "eager_calls": _timing.EAGER_CALLS,
        "cpu_rotation_bytes": _timing.CPU_ROTATION_BYTES,
        "tf32_as_shipped": {
            "cudnn": torch.backends.cudnn.allow_tf32,
            "matmul": torch.backends.cuda.matmul.allow_tf32,
        },
        "roundings_allowed": {
            name: {dtype: of(getattr(torch, dtype)) for dtype in ("float32", "bfloat16", "float16")}
            for name, of in ROUNDINGS.items()
        },
    }


def read_rate(clock: Cuda, device: torch.device) -> dict:
    """The rate at which a sum reads 4 GiB of float32, or less where the GPU has less memory."""
    nbytes = READ_BYTES
    while nbytes > clock.free_bytes() // 3:
        nbytes //= 2
    big = torch.randn(nbytes // 4, device=device)
    with torch.inference_mode():
        timing = clock.graph([big.sum])
    return {
        "bytes": nbytes,
        "scaled_down": nbytes < READ_BYTES,
        "timing": dataclasses.asdict(timing),
        "bytes_per_s": nbytes / timing.median_s,
    }


def measure(case: Case, peers: Mapping[str, Peer], clock: Cuda | Cpu, device: torch.device) -> dict:
    """One case's record. Raises DeviceLost if the GPU no longer answers."""
    record = _without_results(case, None)
    try:
        subject = Subject(case, clock, device)
    except Exception as error:  # most likely memory
        _still_there(clock)
        return record | {"error": _sentence(error)}
    try:
        gap = subject.definition_gap()
    except Exception as error:  # a convolution that a library does not do in float64
        _still_there(clock)
        record["oracle_unchecked"], gap = _sentence(error), None
    record |= {"copies": subject.copies, "cold": subject.cold, "oracle_gap": gap}
    if gap is not None and not gap <= DEFINITION_SHARE:
        why = f"the oracle differs from the convolution by {gap:.3g} of its largest value"
        return record | {"error": why}
    all_threads = torch.get_num_threads()
    if case.threads is not None:
        torch.set_num_threads(case.threads or all_threads)
    try:
        record["threads"] = torch.get_num_threads()
        for name in case.peers:
            record["results"].append(_measure_peer(subject, name, peers.get(name), clock))
        return record
    finally:
        torch.set_num_threads(all_threads)


def _without_results(case: Case, error: str | None) -> dict:
    return case.describe() | {"results": [], "error": error, "verdicts": []}


def _measure_peer(subject: Subject, name: str, peer: Peer | None, clock: Cuda | Cpu) -> dict:
    case = subject.case
    if peer is None:
        why = "not at hand: it is among the repository's benchmarks/"
        return {"peer": name, "computes": None, "status": "absent", "why": why}
    row: dict = {"peer": name, "computes": peer.computes}
    refusal = peer.refuses(case)
    if refusal:
        return row | {"status": "unsupported", "why": f"does only {refusal}"}
    try:
        with peer.settings(), subject.mode():
            started = time.perf_counter()
            function = peer.make(case, subject.device)
            first = subject.call(peer, function, 0)
            result = first()
            clock.synchronize()
            row["setup_s"] = time.perf_counter() - started  # compiling included
            check = subject.check(peer, result)
            del result
            row["check"] = check_record(check)
            if not check.right:
                return row | {"status": "wrong", "why": check.sentence}
            row["timings"] = {}
            for name_of_protocol in case.protocols:
                _take(name_of_protocol, subject, peer, function, clock, row)
            return row | {"status": "timed"}
    except Exception as error:  # whatever a peer raises is its result
        row |= {"status": "failed", "why": _sentence(error)}
    _still_there(clock)
    return row


def _take(name: str, subject: Subject, peer: Peer, function, clock, row: dict) -> None:
    """Takes one protocol's timing into the row."""

    def put(key: str, timing: Timing) -> None:
        row["timings"][key] = dataclasses.asdict(timing)

    first = subject.call(peer, function, 0)
    if name == "graph":
        keep = subject.keep or peer.computes in ("copy", "fill")
        put("graph", clock.graph(subject.calls(peer, function), keep=keep))
    elif name == "single":
        put("single", clock.single(first))
    elif name == "eager":
        wall, host = clock.eager(first)
        put("eager", wall)
        put("host", host)
    elif name == "cpu":
        put("cpu", clock.cpu(subject.calls(peer, function)))
    elif name == "memory":
        row["peak_bytes"] = clock.peak_bytes(first)
    else:
        raise ValueError(f"protocol must be graph, single, eager, cpu or memory, got {name!r}")


def _still_there(clock: Cuda | Cpu) -> None:
    try:
        clock.synchronize()
    except Exception as error:
        raise DeviceLost(_sentence(error)) from error


def _sentence(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return text if len(text) <= 300 else text[:297] + "..."


def without_nan(value):
    """A record with NaN and infinity, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

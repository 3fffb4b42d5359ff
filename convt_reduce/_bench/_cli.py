"""The command line of the benchmark, which the repository's benchmarks/ shares.

The table goes to stdout, progress to stderr, the record to the file that --json names. The exit
status says whether ours was right in every case, and complete; missing a target is no failure.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from convt_reduce._bench import _table
from convt_reduce._bench._case import Case, shrunk
from convt_reduce._bench._cases import GROUPS, all_cases, select
from convt_reduce._bench._peers import PEERS, Peer
from convt_reduce._bench._run import clocks_at_hand, run, without_nan

_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, on a parser or subparser."""
    parser.add_argument("--full", action="store_true", help="every case; minutes instead of one")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"only the group of that name ({', '.join(GROUPS)}), or the ids that hold the text; "
        "may be given more than once",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all there are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    parser.add_argument("--list", action="store_true", help="print the ids and stop")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="shrink every case: shows that all of it runs; its times mean nothing",
    )


def main(
    options: argparse.Namespace,
    more_peers: Mapping[str, Peer] | None = None,
    last: Callable[[Case], bool] = lambda case: False,
    repository: Path | None = None,
    notes: Callable[[], Mapping[str, object]] = dict,
) -> int:
    """Runs what the options ask for. The other arguments are those of `_run.run`, and the peers
    that are not part of the package. Returns the exit status."""
    clocks = clocks_at_hand(options.device)
    if options.device and options.device not in clocks:
        print(f"--device {options.device}: torch sees no such device", file=sys.stderr)
        return 2
    cases = select(
        all_cases(),
        full=options.full,
        devices=set(clocks),
        threads=torch.get_num_threads(),
        words=options.filter,
    )
    if not cases:
        print(
            f"--filter must match a case of {' and '.join(clocks)}, got "
            f"{', '.join(map(repr, options.filter))}; --list --full shows them all",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    if options.smoke:
        cases = [shrunk(case) for case in cases]
    if options.json and not options.json.absolute().parent.is_dir():
        print(f"--json must be in a folder that exists, got {options.json}", file=sys.stderr)
        return 2
    # Whoever ends a run early still gets the record of what was measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if "cuda" not in clocks and options.device is None:
        print("no GPU: torch.cuda.is_available() is False, so the processor alone", file=sys.stderr)
    peers = {**PEERS, **(more_peers or {})}
    record = run(cases, peers, clocks, progress_on_stderr, last, repository)
    record["notes"] = {**notes(), "smoke": options.smoke}
    if options.json:
        options.json.write_text(json.dumps(without_nan(record), indent=1) + "\n")
    for line in _table.lines(record):
        print(line)
    return 0 if record["complete"] and ours_is_right(record) else 1


def ours_is_right(record: dict) -> bool:
    """Whether every case ran and no form of ours was wrong or failed."""
    return all(
        not case["error"]
        and all(
            row["status"] == "timed" for row in case["results"] if row["peer"].startswith("ours")
        )
        for case in record["cases"]
    )


def progress_on_stderr(done: int, total: int, text: str) -> None:
    """A bar that redraws itself on a terminal, and a line per tenth anywhere else."""
    if sys.stderr.isatty():
        filled = _BAR * done // max(1, total)
        bar = "#" * filled + "." * (_BAR - filled)
        end = "\n" if done == total else ""
        print(f"\r[{bar}] {done}/{total} {text:60.60}", end=end, file=sys.stderr, flush=True)
    elif done == total or done % max(1, total // 10) == 0:
        print(f"{done}/{total} {text}", file=sys.stderr, flush=True)

"""The command: draws cases until the time or the number is used up, and counts.

Case i of a seed is always the same, so a failure is repeated by its seed and number alone. The
cases run in a process of their own: if one of them ends it, the parent names that case, counts it
as a failure and goes on behind it.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent
ODD_SHARE = 0.1  # of the malformed cases


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description="Random calls, right and wrong, against PyTorch."
    )
    parser.add_argument("--seconds", type=float, help="how long to run")
    parser.add_argument("--cases", type=int, help="how many cases to run, of each kind")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", choices=("valid", "malformed", "both"), default="both")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the file that progress is noted in
    options = parser.parse_args(arguments)
    if options.seconds is None and options.cases is None:
        options.seconds = 60
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    if options.worker:
        return work(options)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**9)
    print(f"seed {options.seed}", flush=True)
    started, failures = time.time(), 0
    totals = collections.Counter()
    for kind in ("valid", "malformed") if options.kind == "both" else (options.kind,):
        share = options.seconds and options.seconds / (2 if options.kind == "both" else 1)
        counts, failed = _supervise(options, kind, share)
        totals.update(counts)
        failures += failed
    for name, count in sorted(totals.items()):
        print(f"{count:9} {name}")
    print(f"{failures} failures, seed {options.seed}, {time.time() - started:.0f} s")
    return 1 if failures else 0


def _supervise(options, kind, seconds):
    """Runs workers over the cases of one kind, a new one after each that died."""
    counts, failures, first = collections.Counter(), 0, options.first
    last = None if options.cases is None else options.first + options.cases
    until = None if seconds is None else time.time() + seconds
    while (last is None or first < last) and (until is None or time.time() < until):
        progress = Path(f"fuzz-{os.getpid()}-{kind}.json").absolute()
        command = [sys.executable, str(FOLDER), "--worker", str(progress), "--kind", kind]
        command += ["--seed", str(options.seed), "--first", str(first), "--device", options.device]
        command += ["--threads", str(options.threads)]
        command += ["--no-compile"] if options.no_compile else []
        command += [] if last is None else ["--cases", str(last - first)]
        command += [] if until is None else ["--seconds", str(max(1.0, until - time.time()))]
        code = subprocess.run(command, check=False).returncode
        done = _Note.read(progress)
        progress.unlink(missing_ok=True)
        counts.update(done.get("counts", {}))
        failures += done.get("failures", 0)
        if code in (0, 1) and done.get("finished"):
            break
        case = max(first, done["case"])
        print(
            f"{kind} case {case} ended the process with {code}: --seed {options.seed} "
            f"--kind {kind} --first {case} --cases 1",
            flush=True,
        )
        failures, first = failures + 1, case + 1
    return counts, failures


# ---- in the worker ------------------------------------------------------------------------------


def work(options) -> int:
    import faulthandler

    import torch

    faulthandler.enable()
    warnings.simplefilter("ignore")  # of kinds of tensors that PyTorch calls prototypes
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    run = valid if options.kind == "valid" else malformed
    counts, failures = collections.Counter(), 0
    until = float("inf") if options.seconds is None else time.time() + options.seconds
    last = float("inf") if options.cases is None else options.first + options.cases
    case = options.first
    note = _Note(options.worker)
    while case < last and time.time() < until:
        note.case(case)  # a file, since it outlives the process
        try:
            counts[run(options, case)] += 1
        except Exception as error:
            failures += 1
            _report(options, case, error)
        case += 1
        if case % 256 == 0:
            note.save(counts, failures)
    note.save(counts, failures, finished=True)
    return 1 if failures else 0


class _Note:
    """What the parent learns of a worker: the case it is at on a first line, then its counts."""

    WIDTH = 20

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def case(self, case: int) -> None:
        os.pwrite(self.file, f"{case:<{self.WIDTH}}".encode(), 0)

    def save(self, counts, failures, finished=False) -> None:
        text = json.dumps({"counts": counts, "failures": failures, "finished": finished})
        os.pwrite(self.file, text.encode(), self.WIDTH)
        os.ftruncate(self.file, self.WIDTH + len(text))

    @classmethod
    def read(cls, path: Path) -> dict:
        text = path.read_text() if path.exists() else ""
        counted = json.loads(text[cls.WIDTH :] or "{}")
        return {"case": int(text[: cls.WIDTH].strip() or -1), **counted}


def _draw(options, case: int):
    """The case's own generator."""
    return random.Random(f"{options.seed}/{options.kind}/{case}")


def valid(options, case: int) -> str:
    from fuzz import check, problem

    compiled = not options.no_compile and case % problem.COMPILE_EVERY == problem.COMPILE_EVERY - 1
    drawn = problem.draw(_draw(options, case), compiled)
    check.check(drawn, options.device)
    return f"valid, {drawn.direction}"


def malformed(options, case: int) -> str:
    from fuzz import kinds
    from fuzz import malformed as wrong

    rng = _draw(options, case)
    if rng.random() < ODD_SHARE:
        odd = kinds.draw(rng)
        refused = kinds.check(odd, options.device)
        return f"malformed, odd arguments, {'refused' if refused else 'accepted'}"
    refused = wrong.check(wrong.draw(rng), options.device)
    return f"malformed, {'refused' if refused else 'right after all'}"


def _report(options, case: int, error: Exception) -> None:
    from fuzz import check, problem
    from fuzz import shrink as shrinking

    print(f"\n{options.kind} case {case} of seed {options.seed}: {type(error).__name__}: {error}")
    if not isinstance(error, AssertionError):
        traceback.print_exception(error)
    if options.kind == "valid":
        drawn = problem.draw(_draw(options, case))

        def failure(candidate):
            try:
                check.check(candidate, options.device)
            except Exception as found:
                return f"{type(found).__name__}: {found}" if type(found) is type(error) else None
            return None

        if failure(drawn) is not None:
            small, message = shrinking.shrink(drawn, failure, limit=500)
            print(shrinking.reproducer(small, message, options.device))
    print(
        f"again: python tests/fuzz --seed {options.seed} --kind {options.kind} --first {case} "
        f"--cases 1 --device {options.device}",
        flush=True,
    )

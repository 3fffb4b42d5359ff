"""What holds our kernels back: Nsight Compute's counters for one call of each case.

    python benchmarks/counters.py                       # the cases of the target for large inputs
    python benchmarks/counters.py --filter headline W7  # a group's name, or part of an id

Prints a table in Markdown, a row for each kernel of a call. Needs a GPU, `ncu` (of a CUDA toolkit)
and the right to read counters. The profiler runs kernels one by one, each several times, with empty
caches and at the GPU's base clock: its times are longer than those of `make bench`, and show which
kernel they go to; the shares say what each is limited by. About half a second per kernel.
"""

import argparse
import csv
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from convt_reduce._bench import _cases
from convt_reduce._bench._case import Case, inputs

METRICS = {
    "time, us": "gpu__time_duration.sum",
    "memory busy": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue slots busy": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps resident": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "bytes per instruction of a warp": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
}


def main() -> int:
    """Runs the profiler on this file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/counters.py", description=__doc__)
    parser.add_argument("--filter", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--ncu", default=find_ncu(), help="Nsight Compute's command line")
    parser.add_argument(
        "--calls", action="store_true", help=argparse.SUPPRESS
    )  # under the profiler
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("counters.py: needs a CUDA GPU, found none", file=sys.stderr)
        return 2
    cases = chosen(options.filter)
    if options.calls:
        call_each(cases)
        return 0
    if options.ncu is None:
        print("counters.py: --ncu must name Nsight Compute's ncu, found none", file=sys.stderr)
        return 2
    command = [options.ncu, "--csv", "--page", "raw", "--nvtx", "--kernel-name-base", "mangled"]
    command += ["--kernel-name", "regex:convt_reduce"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--calls"]
    command += ["--filter", *options.filter] if options.filter else []
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
        return 1
    print(table(list(csv.DictReader(lines))[1:], {case.id: case for case in cases}))  # [0]: units
    return 0


def find_ncu() -> str | None:
    """ncu on PATH, or of the newest toolkit in the usual folders."""
    places = itertools.chain(
        Path("/usr/local").glob("cuda*/bin/ncu"), Path("/opt/nvidia/nsight-compute").glob("*/ncu")
    )
    return shutil.which("ncu") or next(iter(sorted(map(str, places), reverse=True)), None)


def chosen(words: list[str]) -> list[Case]:
    """The forward calls on the GPU that the words name, or those of the target for large inputs."""
    cases = _cases.select(_cases.all_cases(), full=True, devices={"cuda"}, threads=0, words=words)
    return [
        case
        for case in cases
        if case.kind == "forward"
        and (words or "large inputs" in case.targets)
        and (words or case.group != "widths")
    ]


def call_each(cases: list[Case]) -> None:
    """One call of each case in a range with its id, its inputs made outside."""
    operator = torch.ops.convt_reduce.fused_mean.default
    with torch.inference_mode():
        for case in cases:
            (tensors,) = inputs(case, torch.device("cuda"), 1)
            stride, padding, output_padding, dilation = case.tap_settings
            torch.cuda.synchronize()
            with torch.cuda.nvtx.range(case.id):
                operator(*tensors, stride, padding, output_padding, case.groups, dilation)
                torch.cuda.synchronize()
            del tensors


def table(rows: list[dict[str, str]], cases: dict[str, Case]) -> str:
    """The profiler's rows in Markdown."""
    shown = ["case", "kernel", *METRICS]
    lines = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    for row in rows:
        ranges = ":".join(value for title, value in row.items() if "Push/Pop" in title).split(":")
        case_id = next(part for part in ranges if part in cases)
        lines.append(
            "| "
            + " | ".join([case_id, kernel(row["Kernel Name"]), *figures(row, cases[case_id])])
            + " |"
        )
    return "\n".join(lines)


def kernel(name: str) -> str:
    """`void convt_reduce::cuda::f<..>(..)` -> `f`."""
    return "`" + re.sub(r"[<(].*", "", name.removeprefix("void ")).rsplit("::", 1)[-1] + "`"


def figures(row: dict[str, str], case: Case) -> list[str]:
    found = []
    for title, metric in METRICS.items():
        value = float(row[metric].replace(",", ""))
        if title == "time, us":
            found.append(f"{value / 1e3:.1f}")
        elif metric == "smsp__inst_executed.sum":
            found.append(f"{case.bytes / value:.1f}")
        elif metric.startswith("launch__"):
            found.append(f"{value:.0f}")
        else:
            found.append(f"{value:.0f} %")
    return found


if __name__ == "__main__":
    sys.exit(main())

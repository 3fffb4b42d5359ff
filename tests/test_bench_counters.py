"""benchmarks/counters.py: which cases it takes, and the profiler's rows as a table."""

import importlib
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("counters")


def test_without_words_the_large_inputs(counters):
    """The widths, which are many and alike, only when asked for."""
    ids = {case.id for case in counters.chosen([])}
    assert "shapes/W7/float32" in ids
    assert not any(name.startswith(("widths", "headline", "spread")) for name in ids)
    assert {case.group for case in counters.chosen(["widths"])} == {"widths"}
    assert [case.id for case in counters.chosen(["headline/float32/short"])] == [
        "headline/float32/short"
    ]


def test_a_row_for_each_kernel(counters):
    (case,) = counters.chosen(["shapes/W7/float32"])
    row = {
        RANGES: '539  "<default domain>:shapes/W7/float32:none:none:none:none:none:none" ',
        "Kernel Name": "void unnamed>::stats_small_kernel<2, 2, float>(SmallArguments, float *)",
        "gpu__time_duration.sum": "70,712",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": "84.61",
        "smsp__issue_active.avg.pct_of_peak_sustained_active": "65.2",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "41",
        "smsp__inst_executed.sum": f"{case.bytes // 8:,}",
        "launch__registers_per_thread": "59",
        "launch__grid_size": "2,419",
        "launch__block_size": "224",
    }
    lines = counters.table([row], {case.id: case}).splitlines()
    assert len(lines) == 3
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        *("shapes/W7/float32", "`stats_small_kernel`", "70.7", "85 %", "65 %", "41 %", "8.0"),
        *("59", "2419", "224"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "counters.py"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr.strip() == "counters.py: needs a CUDA GPU, found none"

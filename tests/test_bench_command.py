"""The benchmark's command line: what it runs, prints and writes; wrong options."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from benching import CASES
from conftest import ROOT, why_no_gpu

from convt_reduce._bench import _cli

COMMAND = [sys.executable, "-m", "convt_reduce", "bench"]
# Which cases there are depends on the processor's threads.
TWO_THREADS = {**os.environ, "OMP_NUM_THREADS": "2"}


def bench(*arguments, cwd, command=COMMAND):
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=TWO_THREADS,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command(empty_folder):
    result = bench(
        "--device", "cpu", "--smoke", "--filter", "bfloat16/contiguous", "--json", "found.json",
        cwd=empty_folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((empty_folder / "found.json").read_text())
    assert [case["threads"] for case in record["cases"]][:2] == [1, 2]
    assert record["machine"]["gpu"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert record["notes"]["smoke"] is True
    assert record["protocol"]["flush_bytes"] == 256 * 2**20
    for case in record["cases"]:
        for row in case["results"]:
            timing = row["timings"]["cpu"]
            assert timing["min_s"] <= timing["q1_s"] <= timing["median_s"] <= timing["q3_s"]
    assert "cpu/bfloat16/contiguous/threads 2" in result.stdout
    assert "0/3" in result.stderr
    assert "3/3 done" in result.stderr


def test_a_run_that_is_ended_leaves_its_record(empty_folder):
    process = subprocess.Popen(
        [*COMMAND, "--device", "cpu", "--full", "--json", "found.json"],
        cwd=empty_folder,
        env=TWO_THREADS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline().startswith("0/12 ")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 1
    record = json.loads((empty_folder / "found.json").read_text())
    assert not record["complete"]
    assert len(record["cases"]) < 12


def test_wrong_options(empty_folder):
    result = bench("--filter", "no such case", cwd=empty_folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--filter must match a case" in result.stderr
    result = bench("--json", "nowhere/found.json", cwd=empty_folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--json must be in a folder that exists" in result.stderr
    if why_no_gpu() == "torch sees no GPU":
        result = bench("--device", "cuda", cwd=empty_folder)
        assert result.returncode == 2
        assert "torch sees no such device" in result.stderr


def test_the_list(empty_folder):
    result = bench("--list", "--full", "--device", "cpu", cwd=empty_folder)
    assert result.stdout.split("\n")[:-1] == [
        case.id for case in CASES if case.device == "cpu" and case.threads in (0, 1, 2)
    ]


def test_the_package_imports_none_of_it():
    code = "import sys, convt_reduce; sys.exit('convt_reduce._bench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_bar(monkeypatch):
    for terminal, wanted in (
        (True, "\r[###############...............] 1/2 a case"),
        (False, "1/2"),
    ):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        with contextlib.redirect_stderr(stream):
            _cli.progress_on_stderr(1, 2, "a case")
        assert stream.getvalue().startswith(wanted)


def test_the_whole_suite_without_a_gpu(empty_folder):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and the suite would compile for it")
    result = bench(
        "--smoke", "--json", "found.json", "--filter", "cpu/float32", cwd=empty_folder,
        command=[sys.executable, ROOT / "benchmarks" / "full.py"],
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((empty_folder / "found.json").read_text())
    assert len(record["cases"]) == 6
    assert "the processor alone" in result.stderr

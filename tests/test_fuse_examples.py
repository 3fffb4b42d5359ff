"""The examples: each is fused where its text says so, and gives what the model gives."""

import importlib
import subprocess
import sys

import pytest
from conftest import ROOT
from fusing import Captured, assert_same, fused

EXAMPLES = ROOT / "examples"
# name -> (fused, left alone)
FUSES = {
    "two_means": (1, 0),
    "logsumexp_score": (1, 0),
    "volume": (1, 0),
    "auxiliary_head": (1, 2),
    "audio_score": (1, 1),
}


@pytest.mark.parametrize("name", FUSES)
def test_an_example(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    model, x = importlib.import_module(name).build(small=True)
    model, x = model.double(), x.double()
    other, report = fused(model)
    assert (len(report.fused), len(report.left_alone)) == FUSES[name]
    record = assert_same(model, other, x, tolerance=1e-9)
    assert record.fused == FUSES[name][0]
    record = assert_same(model, Captured(model), x, tolerance=1e-9)
    assert record.fused == FUSES[name][0]


def test_the_runner(empty_folder):
    command = [sys.executable, EXAMPLES / "run_all.py", "--small", "--no-compile"]
    command += ["--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("== ") == len(FUSES)
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows] == ["example", *FUSES]
    assert {len(row) for row in rows} == {6}
    assert "all results agree" in result.stdout

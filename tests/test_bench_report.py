"""docs/performance.md from a record: the generated parts, the plots, and the same bytes each time.

The records are made here, with numbers that are easy to follow; none of them was measured.
"""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from convt_reduce._bench import _run
from convt_reduce._bench._cases import all_cases
from convt_reduce._bench._targets import verdicts

RATE = 4e12
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "performance.md"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("report")


def a_timing(seconds):
    return {"median_s": seconds, "q1_s": seconds * 0.98, "q3_s": seconds * 1.02,
            "min_s": seconds * 0.97, "repeats": 20, "calls": 16}  # fmt: skip


def a_case(case):
    """ours at 1.25 floors and everyone else at 5; the last peer of many failed."""
    record = case.describe() | {"error": None, "cold": case.bytes > 2**20, "results": []}
    for peer in case.peers:
        seconds = case.bytes / RATE * (1.25 if peer.startswith("ours") else 5)
        ways = [way for way in case.protocols if way != "memory"]
        ways += ["host"] if "eager" in ways else []
        row = {
            "peer": peer,
            "computes": "sum" if peer == "sum" else "mean",
            "status": "timed",
            "check": {"max_share": 1e-7},
            "timings": {way: a_timing(seconds) for way in ways},
        }
        if "memory" in case.protocols:
            row["peak_bytes"] = case.bytes
        record["results"].append(row)
    if len(case.peers) > 8:
        record["results"][-1] = {
            "peer": case.peers[-1], "computes": "fill", "status": "failed", "why": "Error: a|b",
        }  # fmt: skip
    return record | {"verdicts": verdicts(record, RATE)}


@pytest.fixture
def record():
    gpu = {"name": "A GPU", "multiprocessors": 2, "memory_bytes": 2**34, "driver": None}
    return {
        "schema": _run.SCHEMA,
        "date": "2001-02-03T04:05:06+00:00",
        "machine": {"cpu": "A CPU", "cpu_threads": 2, "gpu": gpu},
        "versions": {
            "convt_reduce": "0",
            "torch": "0",
            "python": "0",
            "commit": None,
            "build": {"torch": "0", "cuda": None},
        },
        "notes": {"smoke": False, "build_s": {"one block per item": 34.2, "other": None}},
        "read_error": None,
        "read": {"bytes": 2**30, "scaled_down": True, "bytes_per_s": RATE},
        "cases": [a_case(case) for case in all_cases()],
        "complete": True,
        "seconds": 300.0,
    }


def parts_of(page):
    found = re.findall(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return {name: text.strip() for name, text in found}


def test_the_page_has_every_part_once(report):
    names = re.findall(r"<!-- generated: ([\w-]+) -->", PAGE.read_text())
    assert sorted(names) == sorted(report.PARTS)
    assert PAGE.read_text().count("<!-- end -->") == len(names)


def test_the_parts(report, record):
    before = PAGE.read_text()
    page = report.rewritten(before, record)
    parts = parts_of(page)
    assert "1.000" not in parts["machine"]
    assert "| read rate | 4.000 TB/s over 1 GiB (less than 4 GiB, for want of memory) |" in page
    assert "| build of one block per item | 34 s |" in page
    assert "build of other" not in page
    targets = parts["targets"].splitlines()
    cases = record["cases"]
    large = [case for case in cases if "large inputs" in case["targets"]]
    assert (
        f"| large inputs | floor / time | >= 0.9 | 0 of {len(large)} | 0.8 | " in parts["targets"]
    )
    headline = "| headline float32 | time / floor | <= 1.2 | 0 of 2 | 1.25 | headline/float32 |"
    assert headline in targets
    assert "| strided | time / a contiguous copy | <= 1 | 8 of 8 | 0.25 |" in parts["targets"]
    assert "| ours | 21.0 us ± 2% |" in parts["headline"]
    assert "| fill | failed: Error: a\\|b |" in parts["headline"]
    assert parts["headline"].count("**float32**") == 1  # the short one is not shown beside it
    w7 = next(case for case in cases if case["id"] == "shapes/W7/float32")
    assert f"| shapes/W7/float32 | {w7['shape']} | " in parts["shapes"]
    assert "us | 0.80 | 0.20 |" in parts["shapes"]
    assert "| float32 | 56 | 0.80 at W" in parts["widths"]
    assert "64.0 MiB |" in parts["training"]
    assert "![Time against" in parts["sizes-plot"]
    # What is written by hand stays.
    hand = re.compile(r"<!-- generated.*?<!-- end -->", re.DOTALL)
    assert hand.sub("", page) == hand.sub("", before)
    assert report.rewritten(page, record) == page


def test_a_record_of_some_groups(report, record):
    record["cases"] = [case for case in record["cases"] if case["group"] == "cpu"]
    record["read"] = record["machine"]["gpu"] = None
    parts = parts_of(report.rewritten(PAGE.read_text(), record))
    assert (
        parts["headline"]
        == parts["sizes-plot"]
        == parts["strided"]
        == "Not measured in this record."
    )
    assert "read rate" not in parts["machine"]
    assert "| CPU | reference / time | >= 20 | 0 of 4 | 4 |" in parts["targets"]
    assert "| grad_x | time / a fill | <= 1.2 | not measured |" in parts["targets"]


def run_report(folder, record, *options):
    (folder / "record.json").write_text(json.dumps(record))
    shutil.copy(PAGE, folder / "page.md")
    command = [sys.executable, BENCHMARKS / "report.py", "record.json", "--page", "page.md"]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)


def test_two_reports_are_the_same_bytes(tmp_path, record):
    pages = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result = run_report(tmp_path / name, record, "--no-plots")
        assert result.returncode == 0, result.stderr
        pages.append((tmp_path / name / "page.md").read_bytes())
        assert not list((tmp_path / name).glob("*.svg"))
    assert pages[0] == pages[1] != PAGE.read_bytes()


def test_unfit_records_are_refused(tmp_path, record):
    for change, sentence in (
        ({"schema": 0}, "must be a record of schema"),
        ({"notes": {"smoke": True}}, "got a smoke run"),
    ):
        result = run_report(tmp_path, record | change, "--no-plots")
        assert result.returncode == 2
        assert sentence in result.stderr
        assert (tmp_path / "page.md").read_bytes() == PAGE.read_bytes()


def test_the_plots(tmp_path, record):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install --group bench")
    drawn = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result = run_report(tmp_path / name, record)
        assert result.returncode == 0, result.stderr
        drawn.append({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.svg")})
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {
        f"performance-{name}.svg" for name in ("sizes", "shapes", "widths", "training")
    }
    page = (tmp_path / "one" / "page.md").read_text()
    assert set(re.findall(r"\((performance-\w+\.svg)\)", page)) == set(drawn[0])
    shapes = drawn[0]["performance-shapes.svg"].decode()
    for text in ("W127", "few large planes", "channels_last C1024", "ours, bfloat16"):
        assert f">{text}<" in shapes
    sizes = drawn[0]["performance-sizes.svg"].decode()
    assert ">floor: bytes / read rate<" in sizes


def test_a_plot_of_what_is_missing(tmp_path, record):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install --group bench")
    record["cases"] = [a_case(case) for case in all_cases() if case.group in ("sizes", "training")]
    for case in record["cases"]:
        for row in case["results"]:
            if row["peer"] == "ours":
                row.pop("timings")
                row |= {"status": "failed", "why": "Error: none"}
    result = run_report(tmp_path, record)
    assert result.returncode == 0, result.stderr
    assert {p.name for p in tmp_path.glob("*.svg")} == {
        "performance-sizes.svg", "performance-training.svg",
    }  # fmt: skip


def test_the_record_of_this_file_has_the_fields_of_a_true_one(record):
    """Lest the report be tested on a record that no run would write."""
    true = _run.run([], {}, {})
    assert set(true) == set(record) | {"protocol"}
    assert set(record["versions"]) <= set(true["versions"])
    assert set(record["machine"]) <= set(true["machine"])
    fields = {field.name for field in dataclasses.fields(all_cases()[0])}
    assert fields <= set(record["cases"][0])

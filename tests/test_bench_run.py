"""The benchmark's run from end to end, and its peers that need a compiler."""

import dataclasses
import importlib
import json

import pytest
import torch
from benching import BY_ID, CASES, CPU, PLAIN_PEERS, OnCpu, make_haste
from conftest import ROOT

from convt_reduce._bench import _cli, _oracle, _run, _table, _timing
from convt_reduce._bench._case import shrunk
from convt_reduce._bench._peers import PEERS, Peer


@pytest.fixture
def clocks(monkeypatch):
    make_haste(monkeypatch)
    return {"cuda": (OnCpu(), CPU), "cpu": (_timing.Cpu(), CPU)}


# ---- the run ------------------------------------------------------------------------------------


def failing(case, device):
    raise RuntimeError("no such luck\nand more")


FEW = ["headline/float32/short", "training/float32", "spread/64 MiB/float32", "small/8x8"]


def test_every_kind_of_case_runs(clocks, monkeypatch):
    monkeypatch.setattr(_run, "READ_BYTES", 2**22)
    ids = [*FEW, "host/grad", "host/no_grad", "channels/7x7 k3/float32", "strided/transposed/W127",
           "cpu/bfloat16/channels_last/threads 2", "sizes/float32/N1 8x8"]  # fmt: skip
    cases = [shrunk(BY_ID[id]) for id in ids]
    seen = []
    record = _run.run(cases, PLAIN_PEERS, clocks, lambda *step: seen.append(step))
    assert [case["id"] for case in record["cases"]] == ids
    assert seen[-1] == (len(ids), len(ids), "done")
    assert record["complete"]
    assert record["read"]["scaled_down"]
    assert record["read"]["bytes"] == 2**20
    assert _cli.ours_is_right(record)
    for case in record["cases"]:
        assert case["error"] is None
        for row in case["results"]:
            if row["peer"] in PLAIN_PEERS:
                assert row["status"] == "timed", row
                assert set(row["timings"]) - {"host"} == set(case["protocols"]) - {"memory"}
                assert all(t["median_s"] > 0 for t in row["timings"].values())
                assert ("peak_bytes" in row) == ("memory" in case["protocols"])
            else:
                assert row["status"] == "absent"
    text = json.dumps(_run.without_nan(record), allow_nan=False)
    assert json.loads(text)["schema"] == _run.SCHEMA
    table = "\n".join(_table.lines(json.loads(text)))
    for id in ids:
        assert id in table
    assert "less than 4 GiB" in table


def test_a_peer_that_fails_or_is_wrong_stops_nothing(clocks):
    peers = {
        "ours": PEERS["ours"],
        "reference": Peer("reference", failing),
        "algebra": Peer("algebra", lambda case, device: lambda x, w, b: x.new_zeros(1)),
        "sum": Peer("sum", lambda case, device: lambda x, w, b: x.sum((2, 3)) + 1, computes="sum"),
        "copy": dataclasses.replace(PEERS["copy"], refuses=lambda case: "this or that"),
    }
    case = shrunk(BY_ID["headline/float32/short"])
    record = _run.measure(case, peers, *clocks["cuda"])
    found = {row["peer"]: (row["status"], row.get("why", "")) for row in record["results"]}
    assert found["ours"] == ("timed", "")
    assert found["reference"] == ("failed", "RuntimeError: no such luck")
    assert found["algebra"][0] == "wrong"
    assert found["sum"][0] == "wrong"
    assert found["sum"][1].startswith("largest error 1")
    assert found["copy"] == ("unsupported", "does only this or that")
    assert found["fill"][0] == "absent"


def test_an_oracle_that_is_off_is_believed_by_nobody(clocks, monkeypatch):
    case = shrunk(BY_ID["host/no_grad"])
    assert _run.measure(case, PLAIN_PEERS, *clocks["cuda"])["oracle_gap"] < 1e-12
    right = _oracle.runs
    monkeypatch.setattr(_oracle, "runs", lambda size, case: [(0, size)] * len(right(size, case)))
    record = _run.measure(case, PLAIN_PEERS, *clocks["cuda"])
    assert record["error"].startswith("the oracle differs from the convolution by ")
    assert record["results"] == []
    assert not _cli.ours_is_right({"cases": [record]})


def test_a_convolution_that_cannot_be_had_in_float64_stops_nothing(clocks, monkeypatch):
    def definition(case, inputs):
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(_oracle, "definition", definition)
    record = _run.measure(shrunk(BY_ID["host/no_grad"]), PLAIN_PEERS, *clocks["cuda"])
    assert record["oracle_unchecked"] == "RuntimeError: CUDNN_STATUS_NOT_SUPPORTED"
    assert _cli.ours_is_right({"cases": [record]})


def test_ours_being_wrong_is_a_failure(clocks):
    peers = {"ours": Peer("ours", lambda case, device: lambda x, w, b: x.new_zeros(1))}
    record = {"cases": [_run.measure(shrunk(BY_ID["host/no_grad"]), peers, *clocks["cuda"])]}
    assert not _cli.ours_is_right(record)


def test_a_lost_gpu_ends_its_cases_and_no_others(clocks, monkeypatch):
    clock = clocks["cuda"][0]
    monkeypatch.setattr(_run, "read_rate", lambda clock, device: {"bytes_per_s": 1e12})

    def lose(case, device):
        def synchronize():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        clock.synchronize = synchronize
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cases = [shrunk(BY_ID[id]) for id in (*FEW[:2], "cpu/float32/contiguous/threads 1")]
    peers = {**PEERS, "reference": Peer("reference", lose)}
    peers = {name: peers[name] for name in ("ours", "reference", "sum")}
    first, second, third = _run.run(cases, peers, clocks)["cases"]
    assert "stopped answering during headline" in first["error"]
    assert second["error"].startswith("not run: ")
    assert third["error"] is None  # where the reference fails, too, but the processor goes on


def test_without_a_read_rate_there_are_times_and_no_floors(clocks, monkeypatch):
    def read_rate(clock, device):
        raise MemoryError("none left")

    monkeypatch.setattr(_run, "read_rate", read_rate)
    case = dataclasses.replace(shrunk(BY_ID["shapes/W7/float32"]), targets=("large inputs",))
    record = _run.run([case], PLAIN_PEERS, clocks)
    (verdict,) = record["cases"][0]["verdicts"]
    assert verdict["ratio"] is verdict["met"] is None
    assert record["complete"]
    assert "MemoryError: none left" in "\n".join(_table.lines(record))


def test_an_interrupted_run_keeps_what_it_has(clocks, monkeypatch):
    monkeypatch.setattr(_run, "read_rate", lambda clock, device: {"bytes_per_s": 1e12})

    def progress(done, total, text):
        if done == 1 and text != "done":
            raise KeyboardInterrupt

    cases = [shrunk(BY_ID[id]) for id in ("host/grad", "host/no_grad")]
    record = _run.run(cases, {"ours": PEERS["ours"]}, clocks, progress)
    assert not record["complete"]
    assert [case["id"] for case in record["cases"]] == ["host/grad"]


def test_last_cases_run_last_and_are_listed_in_their_place(clocks):
    cases = [shrunk(BY_ID[f"cpu/float32/contiguous/threads {n}"]) for n in (1, 2, "all")]
    seen = []
    record = _run.run(
        cases,
        {"ours": PEERS["ours"]},
        clocks,
        lambda done, total, text: seen.append(text),
        last=lambda case: case.threads == 1,
    )
    ids = [case.id for case in cases]
    assert seen[:3] == [*ids[1:], ids[0]]
    assert [case["id"] for case in record["cases"]] == ids


def test_settings_are_put_back(clocks):
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        with PEERS["reference, TF32 off"].settings():
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
    case = dataclasses.replace(shrunk(BY_ID["cpu/float32/contiguous/threads 1"]), peers=("ours",))
    assert _run.measure(case, PEERS, *clocks["cpu"])["threads"] == 1
    assert torch.get_num_threads() == threads


# ---- the peers that need a compiler -------------------------------------------------------------


@pytest.fixture
def native(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("native_peers")


def test_native_peers_are_those_that_cases_name(native):
    named = {name for case in CASES for name in case.peers}
    assert named - set(PEERS) == set(native.FUNCTIONS)
    for function, declaration in native.FUNCTIONS.values():
        source = (ROOT / "benchmarks" / f"{function}.cu").read_text()
        assert " ".join(declaration.rstrip(";").split()) in " ".join(source.split())


def test_native_peers_refuse_what_they_cannot_do(native):
    whole, planes = native.one_block_refuses, native.segmented_refuses
    assert whole(BY_ID["headline/float32"]) is planes(BY_ID["headline/float32"]) is None
    for id in ("headline/bfloat16", "headline/float32/channels_last"):
        assert whole(BY_ID[id]) == planes(BY_ID[id]) == "contiguous float32"
    assert whole(BY_ID["shapes/4x4 cells/float32"]) == "2-D k3 s2 p1 op1 without groups"
    assert whole(BY_ID["shapes/3-D/float32"]) == "2-D k3 s2 p1 op1 without groups"
    assert planes(BY_ID["shapes/3-D/float32"]) is None
    assert planes(BY_ID["cpu/float32/contiguous/threads 1"]) == "CUDA"


class NoBuild:
    """A build that goes wrong in a stated way."""

    def __init__(self, said):
        self.said, self.returncode = said, 1

    def communicate(self, timeout=None):
        return self.said, None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("a.cu(3): error: no such name\n1 error\nRuntimeError: Error building\n", "no such name"),
        ("Traceback\nOSError: CUDA_HOME environment variable is not set\n", "CUDA_HOME"),
        ("", "no output"),
    ],
)
def test_a_build_that_fails_is_its_peers_result(native, clocks, said, why):
    builds = native.Builds.__new__(native.Builds)
    builds._processes, builds._said = {name: NoBuild(said) for name in native.FUNCTIONS}, {}
    peers = native.peers(builds)
    record = _run.measure(shrunk(BY_ID["small/8x8"]), peers, *clocks["cuda"])
    rows = {row["peer"]: row for row in record["results"]}
    for name in native.FUNCTIONS:
        assert rows[name]["status"] == "failed"
        assert f"the build of {name!r} failed: " in rows[name]["why"]
        assert why in rows[name]["why"]
    assert builds.seconds() == dict.fromkeys(native.FUNCTIONS)


# ---- with a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_case_on_the_gpu(monkeypatch):
    make_haste(monkeypatch)
    monkeypatch.setattr(_run, "READ_BYTES", 2**24)
    cases = [shrunk(case) for case in CASES if case.device == "cuda"]
    record = _run.run(cases, PLAIN_PEERS, _run.clocks_at_hand("cuda"))
    assert record["complete"]
    assert _cli.ours_is_right(record)
    troubles = [
        (case["id"], row["peer"], row["why"])
        for case in record["cases"]
        for row in case["results"]
        if row["status"] in ("wrong", "failed")
    ]
    assert not troubles

"""The benchmark: its arithmetic, its peers, and its run from end to end.

The GPU's clock is stood in for by one that takes wall time on the processor, so that every case of
the suite, shrunk, goes through everything but the few calls to torch.cuda.
"""

import contextlib
import dataclasses
import io
import json
import math
import subprocess
import sys
import time

import pytest
import reference
import torch
from conftest import why_no_gpu

from convt_reduce._bench import _cli, _oracle, _run, _table, _targets, _timing
from convt_reduce._bench._case import LAYOUTS, Case, bands, inputs, runs, shrunk
from convt_reduce._bench._cases import GROUPS, all_cases, select
from convt_reduce._bench._peers import PEERS, Peer
from convt_reduce._bench._subject import Subject

CPU = torch.device("cpu")
CASES = all_cases()
BY_ID = {case.id: case for case in CASES}
NATIVE = {"one block per item", "CUB segmented sum"}


class OnCpu(_timing.Cuda):
    """The GPU's clock without a GPU: the same samples, taken on the wall clock."""

    def __init__(self):
        self.device, self.l2_bytes, self._flush = CPU, 2**16, None

    def free_bytes(self):
        return 3 * 2**20

    def synchronize(self):
        pass

    def graph(self, calls, keep=False):
        results = [call() for call in calls]
        del results
        return _timing.summary([self._between_events(call) for call in calls], 1)

    def peak_bytes(self, call):
        call()
        return 1000

    def _between_events(self, call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start + 1e-9


@pytest.fixture
def hasty(monkeypatch):
    """As few repeats as there can be."""
    for name, value in {
        "MIN_REPEATS": 2,
        "MAX_REPEATS": 2,
        "MAX_COPIES": 3,
        "EAGER_CALLS": 2,
        "FLUSH_BYTES": 2**10,
        "SECONDS_PER_TIMING": 0.0,
    }.items():
        monkeypatch.setattr(_timing, name, value)


@pytest.fixture
def clocks(hasty):
    return {"cuda": (OnCpu(), CPU), "cpu": (_timing.Cpu(), CPU)}


def settings(case):
    return (case.stride, case.padding, case.output_padding, case.groups, case.dilation)


# ---- the table of cases -------------------------------------------------------------------------


def test_ids_differ_and_targets_exist():
    assert len(BY_ID) == len(CASES)
    assert {case.group for case in CASES} == set(GROUPS)
    assert {name for case in CASES for name in case.targets} == set(_targets.TARGETS)
    assert {name for case in CASES for name in case.peers} == set(PEERS) | NATIVE
    assert {case.layout for case in CASES} == set(LAYOUTS)


def test_large_inputs_are_large_and_small_enough_for_a_graph():
    for case in CASES:
        if "large inputs" in case.targets:
            assert case.bytes >= 256 * 2**20, case.id
        assert case.bytes <= 1.2 * 2**30, case.id


def test_selection():
    def ids(full, devices, words):
        return {case.id for case in select(CASES, full=full, devices=devices, words=words)}

    both = {"cpu", "cuda"}
    assert ids(True, both, []) == set(BY_ID)
    assert ids(False, both, []) == {case.id for case in CASES if case.quick}
    # Words reach past the short set, and a group's name is not looked for in other ids.
    assert ids(False, both, ["widths"]) == {case.id for case in CASES if case.group == "widths"}
    assert ids(False, {"cpu"}, ["bfloat16/contiguous"]) == {
        f"cpu/bfloat16/contiguous/threads {n}" for n in (1, 2, "all")
    }
    assert ids(True, {"cpu"}, ["widths"]) == set()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 4, 5, 6), (2, 3, 8)])
def test_layouts_are_what_their_names_say(layout, shape):
    if layout == "transposed" and len(shape) == 3:
        shape = (2, 3, 8, 4)
    case = Case("a", "b", shape, layout=layout)
    first, second = inputs(case, CPU, 2)
    x = first.x
    assert x.shape == shape
    assert not torch.equal(x, second.x)
    assert first.weight is second.weight
    assert torch.equal(x, inputs(case, CPU, 1)[0].x)
    dense = layout in ("contiguous", "misaligned")
    assert x.is_contiguous() == dense
    assert (x.movedim(1, -1).is_contiguous()) == (layout == "channels_last")
    assert x.storage_offset() == (layout == "misaligned")


def test_bands_are_those_of_the_reference():
    case = Case("a", "b", (1, 1, 9), kernel=4, stride=3, padding=5, output_padding=2, dilation=2)
    for size in range(5, 12):
        theirs = reference.runs(size, 4, 3, 5, 2, 2)
        assert [run for run in runs(size, case) if run != (0, 0)] == [
            run for run in theirs if run[0] < run[1]
        ]
        for position in range(size):
            covering = [tap for tap, (lo, hi) in enumerate(theirs) if lo <= position < hi]
            mine = [taps for begin, end, taps in bands(size, case) if begin <= position < end]
            assert mine == ([covering] if covering else [])


# ---- who is right -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id", ["headline/float32", "shapes/k7 p3 d2/float32", "spread/3-D/float32"]
)
def test_the_oracle_is_the_suites_own(id):
    case = shrunk(BY_ID[id])
    assert case.bytes < 2**20
    (one,) = inputs(case, CPU, 1)
    s, p, op, g, d = settings(case)
    if case.kind == "spread":
        theirs = reference.tap_spread(one.x, case.shape[2:], s, p, op, d)
        torch.testing.assert_close(_oracle.spread(case, one.x).value, theirs)
        return
    theirs = reference.torch_chain(*one, s, p, op, g, d, case.multiplier)
    mine = _oracle.mean(case, one)
    torch.testing.assert_close(mine.value, theirs.flatten(1))
    assert _oracle.definition(case, one) < 1e-12
    grad = torch.randn(case.shape[0], case.c_out)
    theirs = reference.gradients(
        reference.torch_chain, grad.view(*grad.shape, *(1,) * case.axes), *one, s, p, op, g, d,
        case.multiplier,
    )  # fmt: skip
    for part, expected in zip(_oracle.gradients(case, one, grad), theirs, strict=True):
        torch.testing.assert_close(part.value, expected)


def test_a_wrong_element_is_seen():
    value = torch.tensor([1.0, 2.0, 1e-3], dtype=torch.float64)
    expected = _oracle.Expected(value, value, 4)
    assert _oracle.check(value.float(), expected, "float32", torch.float32).right
    for index, wrong in ((0, 1.001), (2, 1.001e-3), (1, math.nan), (1, math.inf)):
        result = value.float()
        result[index] = wrong
        verdict = _oracle.check(result, expected, "float32", torch.float32)
        assert not verdict.right
        assert not verdict.max_error < abs(wrong - value[index]) * 0.99
    # What TF32 gives away is allowed to whoever says so, and no more.
    near = (value * 1.001).float()
    assert _oracle.check(near, expected, "tf32", torch.float32).right
    assert not _oracle.check((value * 1.01).float(), expected, "tf32", torch.float32).right
    assert not _oracle.check(value[:2].float(), expected, "tf32", torch.float32).right


def runnable(case):
    return [name for name in case.peers if name in PEERS and not PEERS[name].compiled]


@pytest.mark.parametrize("id", BY_ID)
def test_every_peer_agrees_with_the_oracle(id, hasty):
    case = dataclasses.replace(shrunk(BY_ID[id]), protocols=("graph",))
    subject = Subject(case, OnCpu(), CPU)
    done = 0
    for name in runnable(case):
        peer = PEERS[name]
        if peer.refuses(case):
            continue
        with peer.settings(), subject.mode():
            result = subject.call(peer, peer.make(case, CPU), 0)()
            check = subject.check(peer, result)
        assert check.right, f"{name}: {check.sentence}"
        done += 1
    assert done >= 2, "nothing was compared"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference compiled", "algebra compiled"])
def test_a_compiled_peer(name, hasty):
    case = dataclasses.replace(shrunk(BY_ID["headline/float32"]), protocols=("graph",))
    subject = Subject(case, OnCpu(), CPU)
    with PEERS[name].settings(), subject.mode():
        function = PEERS[name].make(case, CPU)
        for copy in range(2):
            result = subject.call(PEERS[name], function, copy)()
        assert torch.equal(result, subject.call(PEERS[name], function, 1)())
        check = subject.check(PEERS[name], subject.call(PEERS[name], function, 0)())
    assert check.right, check.sentence


# ---- time ---------------------------------------------------------------------------------------


def test_summary():
    timing = _timing.summary([4.0, 2.0, 8.0, 6.0, 10.0], 2)
    assert timing == _timing.Timing(3.0, 2.0, 4.0, 1.0, 5, 2)
    assert _timing.summary([3.0], 1) == _timing.Timing(3.0, 3.0, 3.0, 3.0, 1, 1)


def test_repeats_are_bounded(monkeypatch):
    monkeypatch.setattr(_timing, "SECONDS_PER_TIMING", 0.0)
    assert len(_timing.repeated(lambda: 1.0)) == _timing.MIN_REPEATS
    monkeypatch.setattr(_timing, "SECONDS_PER_TIMING", 60.0)
    assert len(_timing.repeated(lambda: 1.0)) == _timing.MAX_REPEATS


@pytest.mark.parametrize("nbytes", [1, 2**14, 2**20, 2**26, 2**28, 2**30])
def test_a_rotation_is_cold_unless_it_would_take_too_many(nbytes):
    clock = OnCpu()
    clock.l2_bytes = 60 * 2**20
    copies = clock.copies(nbytes)
    assert 2 <= copies <= _timing.MAX_COPIES
    assert clock.is_cold(nbytes, copies) == (copies < _timing.MAX_COPIES)
    assert clock.is_cold(nbytes, copies) == ((copies - 1) * nbytes >= 240 * 2**20)
    assert copies * nbytes <= 2**31


# ---- floors and targets -------------------------------------------------------------------------


def a_record(case, timings, read_rate, **row):
    """A case's record with these medians: {peer: {protocol: seconds}}."""
    record = case.describe() | {"error": None, "cold": True}
    record["results"] = [
        {
            "peer": peer,
            "computes": "sum" if peer == "sum" else "mean",
            "status": "timed",
            "check": {"max_share": 1e-7},
            "timings": {
                name: {"median_s": s, "q1_s": s * 0.99, "q3_s": s * 1.01} for name, s in of.items()
            },
        }
        | row
        for peer, of in timings.items()
    ]
    record["verdicts"] = _targets.verdicts(record, read_rate)
    return record


def verdict(case_id, timings, read_rate=4e12, **row):
    return a_record(BY_ID[case_id], timings, read_rate, **row)["verdicts"]


def test_headline_target():
    floor = 16 * 64 * 128 * 128 * 4 / 4e12
    for factor, met in ((1.19, True), (1.21, False)):
        (it,) = verdict("headline/float32", {"ours": {"graph": factor * floor}})
        assert it["ratio"] == pytest.approx(factor)
        assert (it["met"], it["wanted"]) == (met, "<= 1.2")
    (it,) = verdict("headline/bfloat16", {"ours": {"graph": 1.44 * floor / 2}})
    assert it["met"]


def test_read_rate_target():
    case = BY_ID["shapes/1 GiB/float32"]
    floor = case.bytes / 4e12
    for share, met in ((0.91, True), (0.89, False)):
        (it,) = verdict(case.id, {"ours": {"graph": floor / share}})
        assert it["ratio"] == pytest.approx(share)
        assert it["met"] is met


@pytest.mark.parametrize(
    ("id", "timings", "ratios"),
    [
        ("strided/transposed/W127", {"ours": {"graph": 3}, "copy": {"graph": 4}}, [0.75]),
        ("spread/W7/float32", {"ours, spread": {"graph": 3}, "fill": {"graph": 2}}, [1.5]),
        ("small/8x8", {"ours": {"eager": 3}, "a": {"eager": 4}, "b": {"eager": 6}}, [0.75]),
        ("small/8x8", {"ours": {"eager": 3}, "sum": {"eager": 1}, "b": {"eager": 6}}, [0.5]),
        ("host/inference_mode", {"ours": {"host": 3}, "sum": {"host": 2}}, [1.5]),
        (
            "cpu/float32/contiguous/threads 2",
            {"ours": {"cpu": 2}, "sum": {"cpu": 1}, "reference": {"cpu": 50}},
            [25, 2],
        ),
    ],
)
def test_targets_against_peers(id, timings, ratios):
    assert [it["ratio"] for it in verdict(id, timings)] == ratios


def test_many_channels_target():
    case = BY_ID["channels/7x7 k3/float32"]
    floor = case.bytes / 4e12
    timings = {"ours": {"graph": 6 * floor}, "matmul": {"graph": 2 * floor}}
    (it,) = verdict(case.id, timings)
    assert it["ratio"] == pytest.approx(2)
    assert not it["met"]


def test_training_targets():
    timings = {"ours": {"graph": 1e-4}, "reference": {"graph": 6e-3}}
    peak = int(1.04 * BY_ID["training/float32"].bytes)
    time_, memory = verdict("training/float32", timings, peak_bytes=peak)
    assert (time_["ratio"], time_["met"]) == (pytest.approx(60), True)
    assert (memory["ratio"], memory["met"]) == (pytest.approx(1.04), True)


def test_what_was_not_measured_is_neither_met_nor_missed():
    for case in CASES:
        for it in a_record(case, {"sum": {"graph": 1.0}}, None)["verdicts"]:
            assert it["ratio"] is None
            assert it["met"] is None


# ---- the run ------------------------------------------------------------------------------------


def failing(case, device):
    raise RuntimeError("no such luck\nand more")


FEW = ["headline/float32/short", "training/float32", "spread/64 MiB/float32", "small/8x8"]


def test_every_kind_of_case_runs(clocks, monkeypatch):
    monkeypatch.setattr(_run, "READ_BYTES", 2**22)
    ids = [*FEW, "host/grad", "host/no_grad", "channels/7x7 k3/float32", "strided/transposed/W127",
           "cpu/bfloat16/channels_last/threads 2", "sizes/float32/N1 8x8"]  # fmt: skip
    cases = [shrunk(BY_ID[id]) for id in ids]
    peers = {name: peer for name, peer in PEERS.items() if not peer.compiled}
    seen = []
    record = _run.run(cases, peers, clocks, lambda *step: seen.append(step))
    assert [case["id"] for case in record["cases"]] == ids
    assert seen[-1] == (len(ids), len(ids), "done")
    assert record["complete"]
    assert record["read"]["scaled_down"]
    assert record["read"]["bytes"] == 2**20
    assert _cli.ours_is_right(record)
    for case in record["cases"]:
        assert case["error"] is None
        for row in case["results"]:
            if row["peer"] in peers:
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


# ---- the command line ---------------------------------------------------------------------------


def bench(*arguments, cwd):
    command = [sys.executable, "-m", "convt_reduce", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


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
    assert result.stdout.split("\n")[:-1] == [c.id for c in CASES if c.device == "cpu"]


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


# ---- with a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_case_on_the_gpu(monkeypatch):
    monkeypatch.setattr(_timing, "MAX_COPIES", 3)
    monkeypatch.setattr(_run, "READ_BYTES", 2**24)
    cases = [shrunk(case) for case in CASES if case.device == "cuda"]
    peers = {name: peer for name, peer in PEERS.items() if not peer.compiled}
    record = _run.run(cases, peers, _run.clocks_at_hand("cuda"))
    assert record["complete"]
    assert _cli.ours_is_right(record)
    troubles = [
        (case["id"], row["peer"], row["why"])
        for case in record["cases"]
        for row in case["results"]
        if row["status"] in ("wrong", "failed")
    ]
    assert not troubles

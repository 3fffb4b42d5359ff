"""The benchmark's parts: its cases, who is right, how time is summed up, floors and targets."""

import dataclasses
import math

import pytest
import reference
import torch
from benching import BY_ID, CASES, CPU, PLAIN_PEERS, OnCpu, make_haste

from convt_reduce._bench import _oracle, _targets, _timing
from convt_reduce._bench._case import LAYOUTS, Case, bands, inputs, runs, shrunk
from convt_reduce._bench._cases import GROUPS, select
from convt_reduce._bench._peers import PEERS
from convt_reduce._bench._subject import Subject


@pytest.fixture
def hasty(monkeypatch):
    make_haste(monkeypatch)


def settings(case):
    return (case.stride, case.padding, case.output_padding, case.groups, case.dilation)


# ---- the table of cases -------------------------------------------------------------------------


def test_ids_differ_and_targets_exist():
    assert len(BY_ID) == len(CASES)
    assert {case.group for case in CASES} == set(GROUPS)
    assert {name for case in CASES for name in case.targets} == set(_targets.TARGETS)
    assert {name for case in CASES for name in case.peers} - set(PEERS) == {
        "one block per item",
        "CUB segmented sum",
    }
    assert {case.layout for case in CASES} == set(LAYOUTS)


def test_large_inputs_are_large_and_small_enough_for_a_graph():
    for case in CASES:
        if "large inputs" in case.targets:
            assert case.bytes >= 256 * 2**20, case.id
        assert case.bytes <= 1.2 * 2**30, case.id


def test_selection():
    def ids(full, devices, words, threads=8):
        found = select(CASES, full=full, devices=devices, threads=threads, words=words)
        return {case.id for case in found}

    both = {"cpu", "cuda"}
    assert ids(True, both, []) == set(BY_ID)
    assert ids(False, both, []) == {case.id for case in CASES if case.quick}
    # Words reach past the short set, and a group's name is not looked for in other ids.
    assert ids(False, both, ["widths"]) == {case.id for case in CASES if case.group == "widths"}
    assert ids(False, {"cpu"}, ["bfloat16/contiguous"]) == {
        f"cpu/bfloat16/contiguous/threads {n}" for n in (1, 2, 4, 8, "all")
    }
    # More threads than there are would only get in each other's way.
    assert ids(False, {"cpu"}, ["bfloat16/contiguous"], threads=2) == {
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


@pytest.mark.parametrize("id", BY_ID)
def test_every_peer_agrees_with_the_oracle(id, hasty):
    case = dataclasses.replace(shrunk(BY_ID[id]), protocols=("graph",))
    subject = Subject(case, OnCpu(), CPU)
    done = 0
    for name in case.peers:
        peer = PLAIN_PEERS.get(name)
        if peer is None or peer.refuses(case):
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

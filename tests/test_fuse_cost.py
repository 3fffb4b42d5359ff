"""The cost rule: its verdicts where both ways were measured to be far apart, and its script."""

import importlib.util

import pytest
from conftest import ROOT

from convt_reduce import _cost

# batch, size, kernel -> whether the operator was several times as fast on the CPU, or as slow.
VERDICTS = {
    (16, (64, 64), (3, 3)): True,
    (1, (32, 32), (31, 31)): True,
    (4, (16, 16), (3, 3)): True,
    (256, (4, 4), (3, 3)): True,
    (1, (1, 1), (4, 4)): False,
    (16, (4, 4), (4, 4)): False,
    (1, (16, 16), (4, 4)): False,
    (1024, (1, 1), (1, 1)): False,
    (256, (2, 2), (3, 3)): False,
    (1, (1, 1), (31, 31)): False,
}


@pytest.mark.parametrize("work", VERDICTS)
def test_verdicts_on_the_cpu(work):
    assert _cost.pays(*work, "cpu") == VERDICTS[work]


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_everything_is_fused_elsewhere(device):
    assert all(_cost.pays(*work, device) for work in VERDICTS)


def test_the_script_weighs_verdicts_by_what_they_cost():
    path = ROOT / "tools" / "cost_rule.py"
    spec = importlib.util.spec_from_file_location("cost_rule", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = _cost.PRICES["cpu"]
    small, large = (1, 8, 8, 2, 3, 2, 1), (16, 8, 8, 64, 3, 2, 1)
    # The operator takes four times as long on the small one, and a quarter on the large one.
    measured = [(small, (1.0, 4.0)), (large, (4.0, 1.0))]
    assert script.loss(measured, _cost.Prices(0, 0)) == pytest.approx(2)
    assert script.loss(measured, _cost.Prices(700, 10)) == pytest.approx(1)
    assert script.loss(measured, _cost.Prices(10**9, 0)) == pytest.approx(2)
    assert _cost.PRICES["cpu"] == before
    forward, trained = script.measure(small, "cpu")
    assert all(seconds > 0 for seconds in (*forward, *trained))

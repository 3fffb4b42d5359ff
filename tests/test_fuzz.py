"""A short budget of the fuzzer, and that it can find what it looks for.

The seeds are fixed: a failure here is a failure everywhere, and `python tests/fuzz` looks further.
"""

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import check, cli, compare, kinds, malformed, problem, shrink

ops = torch.ops.convt_reduce
CASES = 300


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("part", range(4))
def test_right_calls(part, device):
    for case in range(part * CASES, (part + 1) * CASES):
        drawn = problem.draw(random.Random(f"ci/{case}"))
        try:
            check.check(drawn, device)
        except Exception as error:
            raise AssertionError(f"case {case}, {drawn}: {error}") from error


@pytest.mark.parametrize("part", range(2))
def test_wrong_calls(part, device):
    refused = 0
    for case in range(part * CASES, (part + 1) * CASES):
        drawn = malformed.draw(random.Random(f"ci/{case}"))
        try:
            refused += malformed.check(drawn, device)
        except Exception as error:
            raise AssertionError(f"case {case}, {drawn}: {error}") from error
    assert CASES // 2 < refused < CASES  # some come out right after all, and are computed


KINDS = [
    *itertools.product(kinds.SHAPES, kinds.TENSORS),
    *itertools.product(kinds.SETTINGS, kinds.OBJECTS),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", kinds.PATHS)
def test_odd_arguments(path, device):
    """Every kind in every place, by position and by name."""
    for (argument, kind), keyword in itertools.product(KINDS, (False, True)):
        kinds.check(kinds.Odd(argument, kind, path, keyword), device)


# ---- it finds what it looks for -----------------------------------------------------------------


def off_by_one_in(setting):
    """fused_mean with one setting a little wrong where it matters."""
    right = ops.fused_mean.default

    def wrong(x, w, b, stride, padding, output_padding, groups, dilation, multiplier):
        if setting == "padding" and padding[0] == 2:
            padding = [1, *padding[1:]]
        if setting == "bias" and b is not None and x.dtype == torch.float64:
            b = b.roll(1)
        steps = x.untyped_storage().nbytes() == 2 * x.numel() * x.element_size()
        if setting == "layout" and x.stride(-1) == 2 and steps:
            x = x.as_strided(x.shape, x.stride(), 1)  # what lies between the elements
        y = right(x, w, b, stride, padding, output_padding, groups, dilation, multiplier)
        if setting == "last bits":
            y = y * (1 + 100 * torch.finfo(y.dtype).eps)
        return y

    return wrong


@pytest.mark.parametrize("fault", ["padding", "bias", "layout", "last bits"])
def test_a_fault_is_found_and_made_small(fault, monkeypatch):
    class Ops:
        def __getattr__(self, name):
            return getattr(ops, name)

        fused_mean = staticmethod(off_by_one_in(fault))

    monkeypatch.setattr(check, "ops", Ops())

    def failure(candidate):
        try:
            check.value(candidate, "cpu")
        except compare.Mismatch as error:
            return str(error)
        return None

    for case in range(3000):
        drawn = problem.draw(random.Random(f"fault/{case}")).replace(direction="value")
        drawn = drawn.replace(seed=drawn.seed // 4 * 4 + 3)  # the way that calls ops.fused_mean
        if drawn.values != "special" and failure(drawn) is not None:
            break
    else:
        pytest.fail(f"no case shows the fault in {fault}")
    small, message = shrink.shrink(drawn, failure)
    assert failure(small) == message
    assert small.is_right()
    assert small.axes == 1
    assert all(failure(s) is None for s in shrink.smaller(small) if s.is_right())
    if fault == "padding":
        assert small.padding == (2,)


def test_the_reproducer_is_a_program():
    """It runs as it is printed, and prints both results."""
    drawn = problem.draw(random.Random("reproducer")).replace(
        direction="value", values="integers", layouts=("every_second", "sliced", "contiguous")
    )
    small = drawn.replace(batch=2, dtype="float32", bias=True)
    text = shrink.reproducer(small, "what was\nwrong")
    assert text.startswith("# what was\n# wrong\n")
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    _, ours, chain, difference = run.stdout.split("tensor")
    assert "[" in ours
    assert "[" in chain
    assert float(difference.strip("()\n ").partition(",")[0]) < 1e-3


def test_a_case_depends_on_its_seed_and_number_alone():
    draws = [problem.draw(random.Random(f"{seed}/valid/7")) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    options = cli.parse(["--cases", "1", "--seed", "3", "--kind", "valid"])
    assert cli._draw(options, 5).random() == random.Random("3/valid/5").random()


def test_command(empty_folder):
    """The door itself, with its worker; nothing is left behind."""
    command = [sys.executable, str(Path(cli.__file__).parent), "--cases", "8", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("seed 1\n")
    assert "0 failures" in run.stdout
    assert not list(empty_folder.iterdir())


def test_a_worker_that_dies_is_a_failure(empty_folder, monkeypatch, capfd):
    """The case is named, and those behind it are run."""
    script = empty_folder / "fuzz"
    script.mkdir()
    (script / "__main__.py").write_text(
        f"import os, sys\nsys.path[0] = {str(Path(cli.__file__).parent.parent)!r}\n"
        "from fuzz import cli\n"
        "def deadly(options, case):\n"
        "    os.abort() if case == 2 else None\n"
        "    return 'valid'\n"
        "cli.valid = deadly\n"
        "sys.exit(cli.main())\n"
    )
    monkeypatch.setattr(cli, "FOLDER", script)
    assert cli.main(["--cases", "5", "--seed", "1", "--kind", "valid"]) == 1
    said = capfd.readouterr().out
    assert "valid case 2 ended the process with" in said
    assert "1 failures" in said

"""Every wrong call raises one sentence, the same one whatever the tensors are and the mode is.

Each row of the table in wrong_calls.py runs on CPU, CUDA, meta and fake tensors, plainly, under
inference_mode and with gradients wanted: a check that only one of these paths reaches would let the
others compute nonsense.
"""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_calls import ROWS, Wrong

import convt_reduce

ops = torch.ops.convt_reduce
PLACES = ["cpu", "meta", "fake", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ["plain", "inference_mode", "requires_grad"]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
each_place = pytest.mark.parametrize("place", PLACES)
each_mode = pytest.mark.parametrize("mode", MODES)


@contextlib.contextmanager
def arguments(row, place, mode):
    """Makes the tensors of a row, holds the mode, and gives (input, weight, bias), sentence."""
    device = {"fake": "cpu", "cuda": "cuda:0"}.get(place, place)
    other = "cpu" if device != "cpu" else "meta"

    def tensor(name, shape, dtype):
        if shape is None:
            return None
        t = torch.zeros(shape, dtype=dtype, device=other if row.elsewhere == name else device)
        wanted = mode == "requires_grad" and (dtype.is_floating_point or dtype.is_complex)
        return t.requires_grad_(wanted)

    with contextlib.ExitStack() as stack:
        if place == "fake":
            stack.enter_context(FakeTensorMode())
        tensors = (
            tensor("input", row.input, row.input_dtype),
            tensor("weight", row.weight, row.weight_dtype),
            tensor("bias", row.bias, row.bias_dtype),
        )
        if mode == "inference_mode":
            stack.enter_context(torch.inference_mode())
        yield tensors, row.sentence.format(device=device, other=other)


@each_mode
@each_place
@each_row
def test_fused_mean(row, place, mode):
    with arguments(row, place, mode) as (tensors, sentence), pytest.raises(RuntimeError) as caught:
        ops.fused_mean(*tensors, **row.settings)
    assert str(caught.value) == f"fused_mean: {sentence}"


@each_row
def test_python_function(row):
    with (
        arguments(row, "cpu", "plain") as (tensors, sentence),
        pytest.raises(RuntimeError) as caught,
    ):
        convt_reduce.fused_mean(*tensors, **row.settings)
    assert str(caught.value) == f"fused_mean: {sentence}"


@each_place
@each_row
def test_pair(row, place):
    with (
        arguments(row, place, "plain") as (tensors, sentence),
        pytest.raises(RuntimeError) as caught,
    ):
        ops._fused_mean_with_sums(*tensors, **row.settings)
    assert str(caught.value).endswith(f"fused_mean: {sentence}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elsewhere", ["weight", "bias"])
def test_two_gpus(elsewhere, mode):
    """On fake tensors, which need none; on real ones it is test_devices.py's business."""
    if torch.cuda.device_count() == 1:
        pytest.skip("beside a real GPU, fake tensors ask for a real second one")
    with FakeTensorMode(), torch.inference_mode(mode == "inference_mode"):
        named = {
            name: torch.zeros(shape, device="cuda:1" if name == elsewhere else "cuda:0")
            for name, shape in (("input", (2, 4, 5, 6)), ("weight", (4, 3, 3, 3)), ("bias", (3,)))
        }
        for t in named.values():
            t.requires_grad_(mode == "requires_grad")
        with pytest.raises(RuntimeError) as caught:
            ops.fused_mean(**named)
    sentence = f"{elsewhere} must be on input's device cuda:0, got cuda:1"
    assert str(caught.value) == f"fused_mean: {sentence}"


@pytest.mark.parametrize("place", PLACES)
def test_the_calls_of_the_table_are_right_but_for_the_fault(place):
    """Without this, a table of calls that all fail for another reason would pass."""
    with arguments(Wrong("nothing", ""), place, "plain") as (tensors, _):
        assert ops.fused_mean(*tensors).shape == (2, 3, 1, 1)
        assert ops.fused_mean(*tensors[:2], None, groups=2).shape == (2, 6, 1, 1)


def test_padding_beyond_any_number(device):
    """2 * padding leaves 64 bits here; the answer is still no output, not a wrapped size."""
    for t in (torch.zeros(2, 4, 5, 6, device=device), torch.zeros(2, 4, 5, 6, device="meta")):
        w = torch.zeros(4, 3, 3, 3, device=t.device)
        with pytest.raises(RuntimeError, match="fused_mean: padding must leave an output of at"):
            ops.fused_mean(t, w, padding=[2**63 - 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [("padding", "same"), ("stride", 1.5), ("groups", "two"), ("multiplier", "x")],
)
def test_python_types(name, value, device):
    x, w = torch.zeros(2, 4, 5, 6, device=device), torch.zeros(4, 3, 3, 3, device=device)
    with pytest.raises((RuntimeError, TypeError), match=name):
        convt_reduce.fused_mean(x, w, **{name: value})


def test_a_wrong_call_leaves_nothing_behind(device):
    """The next right call is not affected, nor the next error."""
    x, w = torch.randn(2, 4, 5, 6, device=device), torch.randn(4, 3, 3, 3, device=device)
    before = ops.fused_mean(x, w)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="stride must be at least 1"):
            ops.fused_mean(x, w, stride=[0])
        assert torch.equal(ops.fused_mean(x, w), before)

"""Wrong calls of the two private tap operators: the operator, the argument and the value are named.

Their wording is not part of the contract, but that they refuse on every path alike is: they are
what a backward under torch.compile reaches.
"""

import contextlib

import pytest
import torch
from test_errors import PLACES
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.convt_reduce
f32, f16 = torch.float32, torch.float16

SUMS = [
    ({"input": torch.int64}, "input", "int64"),
    ({"kernel_size": []}, "kernel_size", "0 entries"),
    ({"kernel_size": [3, 3, 3, 3]}, "kernel_size", "4 entries"),
    ({"kernel_size": [0, 3]}, "kernel_size", "[0, 3]"),
    ({"kernel_size": [3, -1]}, "kernel_size", "[3, -1]"),
    ({"shape": (2, 4)}, "input", "[2, 4]"),
    ({"shape": (1, 1, 2, 4, 5)}, "input", "[1, 1, 2, 4, 5]"),
    ({"shape": (2, 4, 0, 6)}, "input", "[2, 4, 0, 6]"),
    ({"shape": (2, 0, 5, 6)}, "input", "[2, 0, 5, 6]"),
    ({"stride": [1, 1, 1]}, "stride", "3 entries"),
    ({"stride": [0]}, "stride", "[0]"),
    ({"padding": [1, -1]}, "padding", "[1, -1]"),
    ({"padding": [9]}, "padding", "-"),
    ({"output_padding": [1]}, "output_padding", "1"),
    ({"dilation": [0, 1]}, "dilation", "[0, 1]"),
    ({"dilation": [2**62]}, "dilation", "2**62"),
]
SPREAD = [
    ({"tap_grads": f16}, "tap_grads", "float16"),
    ({"tap_grads": torch.int64}, "tap_grads", "int64"),
    ({"dtype": torch.float64}, "dtype", "float64"),
    ({"dtype": torch.int32}, "dtype", "int32"),
    ({"tap_grads": torch.float64}, "dtype", "float32"),
    ({"size": []}, "size", "0 entries"),
    ({"size": [5, 6, 7, 8]}, "size", "4 entries"),
    ({"size": [0, 6]}, "size", "[0, 6]"),
    ({"shape": (3, 3)}, "tap_grads", "[3, 3]"),
    ({"shape": (2, 4, 0, 3)}, "tap_grads", "[2, 4, 0, 3]"),
    ({"stride": [1, 1, 1]}, "stride", "3 entries"),
    ({"stride": [1, 0]}, "stride", "[1, 0]"),
    ({"padding": [-1]}, "padding", "[-1]"),
    ({"padding": [9]}, "padding", "-"),
    ({"output_padding": [1]}, "output_padding", "1"),
    ({"dilation": [0]}, "dilation", "[0]"),
]
each_place = pytest.mark.parametrize("place", PLACES)


def call_sums(change, device):
    change = dict(change)
    dtype, shape = change.pop("input", f32), change.pop("shape", (2, 4, 5, 6))
    kernel_size = change.pop("kernel_size", [3, 3])
    x = torch.zeros(shape, dtype=dtype, device=device)
    return ops._tap_sums(x, kernel_size, **change)


def call_spread(change, device):
    change = dict(change)
    grads_dtype, shape = change.pop("tap_grads", f32), change.pop("shape", (2, 4, 3, 3))
    size, dtype = change.pop("size", [5, 6]), change.pop("dtype", f32)
    g = torch.zeros(shape, dtype=grads_dtype, device=device)
    return ops._tap_spread(g, size, dtype, **change)


@contextlib.contextmanager
def holding(place):
    with FakeTensorMode() if place == "fake" else contextlib.nullcontext():
        yield "cpu" if place == "fake" else place


def sentence_of(call, change, place):
    with holding(place) as device, pytest.raises(RuntimeError) as caught:
        call(change, device)
    return str(caught.value)


@each_place
@pytest.mark.parametrize(("change", "argument", "came"), SUMS, ids=str)
def test_tap_sums(change, argument, came, place):
    text = sentence_of(call_sums, change, place)
    assert text.startswith("_tap_sums: ")
    assert argument in text
    assert came in text
    assert text == sentence_of(call_sums, change, "cpu")
    assert "\n" not in text


@each_place
@pytest.mark.parametrize(("change", "argument", "came"), SPREAD, ids=str)
def test_tap_spread(change, argument, came, place):
    text = sentence_of(call_spread, change, place)
    assert text.startswith("_tap_spread: ")
    assert argument in text
    assert came in text
    assert text == sentence_of(call_spread, change, "cpu")
    assert "\n" not in text


@each_place
def test_the_calls_are_right_but_for_the_fault(place):
    with holding(place) as device:
        sums, spread = call_sums({}, device), call_spread({}, device)
    assert sums.shape == (2, 4, 3, 3)
    assert spread.shape == (2, 4, 5, 6)

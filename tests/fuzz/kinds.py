"""Arguments that are no plain tensors, lists and numbers: what each kind must come to.

"fine": the call works. "house": one sentence of ours. "torch": PyTorch's own parser or layer below
refuses it before we are asked; its error names the argument or the kind, and is one of the Python
kinds that a program can catch. Whatever it is, the process lives and the next right call is right.
"""

import contextlib
import random
import re
import warnings
from dataclasses import dataclass

import numpy as np
import torch

import convt_reduce

ops = torch.ops.convt_reduce
SHAPES = {"input": (2, 4, 5, 6), "weight": (4, 3, 3, 3), "bias": (3,)}
CAUGHT = (RuntimeError, TypeError, ValueError)  # NotImplementedError is a RuntimeError
PATHS = ("eager", "inference_mode", "requires_grad", "python")


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Index:
    def __index__(self):
        return 2


def _freed(t, bytes_left=0):
    t = t.clone()
    t.untyped_storage().resize_(bytes_left)
    return t


def _read_only(t):
    array = t.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


# name -> (maker from a plain tensor, what the call comes to)
TENSORS = {
    "sparse_coo": (lambda t: t.to_sparse(), "house"),
    "sparse_csr": (lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(), "house"),
    "sparse_bsr": (lambda t: torch.ones(4, 4).to_sparse_bsr((2, 2)), "house"),
    "mkldnn": (lambda t: t.to_mkldnn(), "house"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "house"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "house"),
    "jagged": (
        lambda t: torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged
        ),
        "torch",
    ),
    "meta": (lambda t: t.to("meta"), "house"),
    "complex": (lambda t: t.to(torch.complex64), "house"),
    "conjugate": (lambda t: t.to(torch.complex64).conj(), "house"),
    "conjugate_imag": (lambda t: torch.complex(t, t).conj().imag, "fine"),
    "negative": (lambda t: torch._neg_view(t), "fine"),
    "zero_tensor": (lambda t: torch._efficientzerotensor(t.shape, device=t.device), "fine"),
    "parameter": (lambda t: torch.nn.Parameter(t), "fine"),
    "subclass": (lambda t: t.as_subclass(Plain), "fine"),
    "read_only": (_read_only, "fine"),
    "bits": (lambda t: t.to(torch.uint8).view(torch.bits8), "house"),
    "float8": (lambda t: t.to(torch.float8_e5m2), "house"),
    "masked": (lambda t: torch.masked.masked_tensor(t, t > 0), "torch"),
    "freed": (_freed, "house"),
    "shrunk": (lambda t: _freed(t, 4 * t.numel() - 4), "house"),
    "uninitialised": (lambda t: torch.nn.UninitializedParameter(), "torch"),
    "none": (lambda t: None, "house"),  # but for a bias
    "array": (lambda t: t.numpy(), "torch"),
    "list": (lambda t: t.tolist(), "torch"),
    "number": (lambda t: 1.0, "torch"),
    "text": (lambda t: "input", "torch"),
}

# Objects for lists and numbers; what PyTorch's parser makes of each is its own affair.
OBJECTS = {
    "none": lambda: None,
    "text": lambda: "same",
    "bytes": lambda: b"x",
    "float": lambda: 1.5,
    "nan": lambda: float("nan"),
    "complex": lambda: 1 + 2j,
    "bool": lambda: True,
    "large": lambda: 2**63,
    "larger": lambda: -(2**100),
    "list_of_float": lambda: [1.5],
    "list_of_text": lambda: ["a"],
    "list_of_none": lambda: [None],
    "nested_list": lambda: [[1]],
    "list_of_large": lambda: [2**63],
    "tuple": lambda: (1, 1),
    "tensor": lambda: torch.tensor(2),
    "float_tensor": lambda: torch.tensor(2.0, requires_grad=True),
    "vector": lambda: torch.tensor([1, 1]),
    "meta_tensor": lambda: torch.tensor(2, device="meta"),
    "numpy_int": lambda: np.int64(1),
    "numpy_float": lambda: np.float32(1),
    "array": lambda: np.array([1, 1]),
    "index": lambda: Index(),
    "dict": dict,
    "set": lambda: {1},
    "range": lambda: range(1, 3),
    "iterator": lambda: iter([1]),
    "object": object,
    "size": lambda: torch.Size([1, 1]),
    "type": lambda: int,
    "dtype": lambda: torch.float32,
}
SETTINGS = ("stride", "padding", "output_padding", "dilation", "groups", "multiplier")


@dataclass(frozen=True)
class Odd:
    argument: str
    kind: str
    path: str
    keyword: bool  # whether the argument is given by its name

    def __str__(self):
        return f"{self.argument} = {self.kind} on {self.path}, keyword={self.keyword}"


def draw(rng: random.Random) -> Odd:
    if rng.random() < 0.5:
        argument, kind = rng.choice(list(SHAPES)), rng.choice(list(TENSORS))
    else:
        argument, kind = rng.choice(SETTINGS), rng.choice(list(OBJECTS))
    return Odd(argument, kind, rng.choice(PATHS), rng.random() < 0.5)


def check(odd: Odd, device: str = "cpu") -> bool:
    """Runs the call; raises where it is not as promised. True: it was refused."""
    generator = torch.Generator().manual_seed(1)
    given = {n: torch.randn(s, generator=generator).to(device) for n, s in SHAPES.items()}
    expectation = "torch"
    if odd.argument in SHAPES:
        maker, expectation = TENSORS[odd.kind]
        plain = given[odd.argument]
        if expectation == "fine" and odd.kind == "read_only" and device != "cpu":
            expectation = "house"  # memory of numpy's, beside tensors on a GPU
        given[odd.argument] = maker(plain if expectation == "fine" else plain.cpu())
        if odd.argument == "bias" and odd.kind == "none":
            expectation = "fine"
    else:
        given[odd.argument] = OBJECTS[odd.kind]()
        given["bias"] = None  # whose right shape depends on the groups
        if odd.argument == "multiplier" and odd.path == "python" and "tensor" in odd.kind:
            expectation = "house"
    try:
        y = _run(odd, given)
    except Exception as error:
        _judge(odd, expectation, error)
        refused = True
    else:
        # Objects that PyTorch's parser takes for a number are its affair; ours are not.
        if expectation == "house" or (expectation == "torch" and odd.argument in SHAPES):
            raise AssertionError(f"{odd}: accepted, with a result of shape {list(y.shape)}")
        refused = False
    x, w = torch.ones(1, 1, 2, device=device), torch.ones(1, 1, 1, device=device)
    if ops.fused_mean(x, w).item() != 1:
        raise AssertionError(f"{odd}: the next call was wrong")
    return refused


def _run(odd, given):
    function = convt_reduce.fused_mean if odd.path == "python" else ops.fused_mean
    if odd.path == "requires_grad":
        for name, t in given.items():
            if name != odd.argument and isinstance(t, torch.Tensor):
                t.requires_grad_()
    with contextlib.ExitStack() as stack:
        if odd.path == "inference_mode":
            stack.enter_context(torch.inference_mode())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if odd.keyword:
            return function(**given)
        positional = [given.pop(name) for name in SHAPES]
        return function(*positional, **given)


HOUSE = re.compile(r"fused_mean: (\w+) must [^\n]+, got [^\n]+")


def _judge(odd, expectation, error):
    text = str(error)
    if expectation == "fine":
        raise AssertionError(f"{odd}: refused with {error!r}") from error
    if not isinstance(error, CAUGHT):
        raise AssertionError(f"{odd}: raised {error!r}") from error
    match = HOUSE.fullmatch(text)
    # A weight or bias elsewhere than an odd input is at fault as much as the input.
    if expectation == "house" and (
        type(error) is not RuntimeError
        or match is None
        or (match[1] != odd.argument and odd.argument != "input")
    ):
        raise AssertionError(f"{odd}: {type(error).__name__} {text!r}") from error
    if expectation == "torch" and odd.argument not in SHAPES and odd.argument not in text:
        raise AssertionError(f"{odd}: the argument is not named in {text!r}") from error

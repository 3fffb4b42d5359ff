"""Wrong calls, and what must be said about them on every path alike.

A right call is drawn and up to three of its arguments are spoilt; `contract` says which are wrong.
A call with faults must raise one sentence that begins with one of them; a call that came out right
after all must give the same shape everywhere. Either way all paths must agree to the letter.
"""

import contextlib
import dataclasses
import math
import random
import re

import reference
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import convt_reduce
from fuzz.compare import demand, plain
from fuzz.contract import FLOATING, LISTS, Call, Spec, faults, shape_of
from fuzz.problem import draw as draw_right

ops = torch.ops.convt_reduce
OTHER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
)
NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 100, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1),
    *(-2, -(2**31), -(2**62), -(2**63)),
)
PATHS = (
    "eager",
    "inference_mode",
    "requires_grad",
    "meta",
    "fake",
    "python",
    "pair",
    "vmap",
    "jvp",
)


# ---- drawing ------------------------------------------------------------------------------------


def draw(rng: random.Random) -> Call:
    while True:
        right = draw_right(rng)
        if right.work < 3e4:
            break
    x, w, b = right.shapes
    dtype = rng.choice(FLOATING)
    tensors = {"input": Spec(x, dtype), "weight": Spec(w, dtype)}
    if right.bias:
        tensors["bias"] = Spec(b, dtype)
    settings = {name: list(getattr(right, name)) for name in LISTS}
    settings["groups"] = right.groups
    settings["multiplier"] = rng.choice((1.0, 0.5, math.nan, math.inf, -0.0, 1e308))
    call = Call(tensors, settings)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        call = rng.choice(_SPOILS)(call, rng)
    return call


def _with_tensor(call, name, **changes):
    return Call(
        {**call.tensors, name: dataclasses.replace(call.tensors[name], **changes)}, call.settings
    )


def _spoil_size(call, rng):
    name = rng.choice(list(call.tensors))
    shape = list(call.tensors[name].shape)
    if not shape:
        return call
    shape[rng.randrange(len(shape))] = rng.choice((0, 0, 1, 2, 3, 5, 8))
    return _with_tensor(call, name, shape=tuple(shape))


def _spoil_dimensions(call, rng):
    name = rng.choice(list(call.tensors))
    shape = list(call.tensors[name].shape)
    if shape and rng.random() < 0.5:
        del shape[rng.randrange(len(shape))]
    else:
        shape.insert(rng.randint(0, len(shape)), rng.choice((1, 1, 2)))
    return _with_tensor(call, name, shape=tuple(shape))


def _spoil_dtype(call, rng):
    dtype = rng.choice(FLOATING + OTHER_DTYPES)
    if rng.random() < 0.3:  # all alike, so that only the kind can be at fault
        for name in call.tensors:
            call = _with_tensor(call, name, dtype=dtype)
        return call
    return _with_tensor(call, rng.choice(list(call.tensors)), dtype=dtype)


def _spoil_device(call, rng):
    return _with_tensor(call, rng.choice([n for n in call.tensors if n != "input"]), elsewhere=True)


def _spoil_number(call, rng):
    name = rng.choice((*LISTS, "groups"))
    if name == "groups":
        return Call(call.tensors, {**call.settings, name: rng.choice(NUMBERS)})
    values = list(call.settings[name])
    if values:
        values[rng.randrange(len(values))] = rng.choice(NUMBERS)
    return Call(call.tensors, {**call.settings, name: values})


def _spoil_length(call, rng):
    name = rng.choice(LISTS)
    values = [rng.randint(0, 3) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 50)))]
    return Call(call.tensors, {**call.settings, name: values})


_SPOILS = (
    _spoil_size,
    _spoil_dimensions,
    _spoil_dtype,
    _spoil_device,
    _spoil_number,
    _spoil_number,
    _spoil_length,
)


# ---- running ------------------------------------------------------------------------------------


def make(call: Call, device: str, generator=None):
    other = "cpu" if device == "meta" else "meta"
    tensors = {}
    for name, t in call.tensors.items():
        values = torch.empty(t.shape, device=other if t.elsewhere else device, dtype=t.dtype)
        if values.is_floating_point() and not t.elsewhere and generator is not None:
            values = torch.randn(t.shape, generator=generator).to(t.dtype).to(device)
        tensors[name] = values
    return tensors


def outcome(call: Call, path: str, device: str = "cpu"):
    """The result, or the exception that was raised, of the call on one path."""
    generator = None if path in ("meta", "fake") else torch.Generator().manual_seed(3)
    place = "meta" if path == "meta" else device
    with contextlib.ExitStack() as stack:
        if path == "fake":
            stack.enter_context(FakeTensorMode())
        tensors = make(call, place, generator)
        if path == "inference_mode":
            stack.enter_context(torch.inference_mode())
        try:
            return _run(call, path, tensors)
        except Exception as error:
            return error


def _run(call, path, tensors):
    if path == "python":
        return convt_reduce.fused_mean(**tensors, **call.settings)
    if path == "pair":
        return ops._fused_mean_with_sums(**tensors, **call.settings)[0]
    if path == "requires_grad":
        for t in tensors.values():
            t.requires_grad_(t.is_floating_point() or t.is_complex())
    if path == "vmap":
        stacked = {name: t.expand(2, *t.shape) for name, t in tensors.items()}
        return torch.vmap(lambda ts: ops.fused_mean(**ts, **call.settings))(stacked)[0]
    x = tensors["input"]
    if path == "jvp" and x.is_floating_point() and x.dtype in FLOATING:
        rest = {name: t for name, t in tensors.items() if name != "input"}

        def function(t):
            return ops.fused_mean(t, **rest, **call.settings)

        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[0]
    y = ops.fused_mean(**tensors, **call.settings)
    if path == "requires_grad":
        torch.autograd.grad(y.sum(), list(tensors.values()))
    return y


SENTENCE = re.compile(
    r"fused_mean: (\w+)(?:, dilation and output_padding)? must [^\n]+, got [^\n]+"
)


def check(call: Call, device: str = "cpu") -> bool:
    """Runs the call on every path; raises where it is not as promised. True: it was wrong."""
    wrong = faults(call)
    first = None
    for path in PATHS:
        result = outcome(call, path, device)
        if not wrong:
            if isinstance(result, Exception):
                raise AssertionError(f"{path}: a right call raised {result!r}") from result
            # What vmap returns is an element of a stack, which may be strided.
            strided = path != "vmap" and not result.is_contiguous()
            if tuple(result.shape) != shape_of(call) or strided:
                raise AssertionError(f"{path}: {list(result.shape)}, not {shape_of(call)}")
            if path == "eager":
                _demand_value(call, result, device)
            continue
        if type(result) is not RuntimeError:
            raise AssertionError(f"{path}: {sorted(wrong)} wrong, and no RuntimeError: {result!r}")
        text = str(result)
        if path == "meta":  # where the two devices have changed places
            name = str(torch.empty(0, device=device).device)
            text = re.sub("device meta, got cpu$", f"device {name}, got meta", text)
        match = SENTENCE.fullmatch(text)
        if match is None or match[1] not in wrong:
            raise AssertionError(f"{path}: {sorted(wrong)} wrong, but it says {text!r}")
        first = first or text
        if text != first:
            raise AssertionError(f"{path} says {text!r}, {PATHS[0]} {first!r}")
    return bool(wrong)


def _demand_value(call, result, device):
    """Numbers as large as the spoilt ones still have a closed form, in float64."""
    settings = [
        call.settings[name]
        for name in ("stride", "padding", "output_padding", "groups", "dilation")
    ]
    multiplier = call.settings["multiplier"]
    if not math.isfinite(multiplier) or multiplier > 1e3:
        return
    tensors = [plain(t) for t in make(call, device, torch.Generator().manual_seed(3)).values()]
    tensors += [None] * (3 - len(tensors))
    expected = reference.closed_form(*tensors, *settings, multiplier)
    magnitude = reference.magnitude_of(*tensors, *settings, multiplier)
    terms = call.tensors["input"].shape[-1] * math.prod(call.tensors["weight"].shape)
    terms *= max(1, math.prod(call.tensors["input"].shape))
    demand(result, expected, magnitude, terms, result.dtype, "value")

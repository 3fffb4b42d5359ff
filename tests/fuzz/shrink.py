"""Makes a failing problem small, field by field, and prints it as a program to paste."""

import math
from collections.abc import Callable, Iterator

from fuzz.problem import Problem, tensors

SIMPLE = {
    "bias": False,
    "multiplier": 1.0,
    "dtype": "float64",
    "values": "integers",
    "layouts": ("contiguous",) * 3,
    "wanted": (True, False, False),
    "batch": 1,
    "seed": 0,
}
MINIMA = {
    **dict.fromkeys(("groups", "group_in", "group_out", "size", "kernel", "stride", "dilation"), 1),
    **dict.fromkeys(("padding", "output_padding", "batch"), 0),
}


def smaller(problem: Problem) -> Iterator[Problem]:
    """Problems that are one step simpler, the boldest steps first."""
    per_axis = ("size", "kernel", "stride", "padding", "output_padding", "dilation")
    if problem.axes > 1:
        for axis in range(problem.axes):
            yield problem.replace(
                **{
                    n: getattr(problem, n)[:axis] + getattr(problem, n)[axis + 1 :]
                    for n in per_axis
                }
            )
    for name, value in SIMPLE.items():
        if getattr(problem, name) != value:
            yield problem.replace(**{name: value})
    for i, layout in enumerate(problem.layouts):
        if layout != "contiguous":
            layouts = [*problem.layouts]
            layouts[i] = "contiguous"
            yield problem.replace(layouts=tuple(layouts))
    for name, least in MINIMA.items():
        value = getattr(problem, name)
        if isinstance(value, tuple):
            for axis, number in enumerate(value):
                for less in _less(number, least):
                    yield problem.replace(**{name: (*value[:axis], less, *value[axis + 1 :])})
        elif value is not None:
            for less in _less(value, least):
                yield problem.replace(**{name: less})


def _less(value: int, least: int) -> Iterator[int]:
    if value > least:
        yield from sorted({least, (value + least) // 2, value - 1})


def shrink(problem: Problem, failure: Callable[[Problem], str | None], limit: int = 2000):
    """The smallest problem found that still fails, and how it fails.

    Args:
        failure: what is wrong with a problem, or None. It must be the same kind of fault that is
            looked for, or the search drifts to another one.
        limit: the most problems that are tried.
    """
    message, tried = failure(problem), 0
    progress = True
    while progress and tried < limit:
        progress = False
        for candidate in smaller(problem):
            if not candidate.is_right():
                continue
            tried += 1
            found = failure(candidate)
            if found is not None:
                problem, message, progress = candidate, found, True
                break
            if tried >= limit:
                break
    return problem, message


# ---- printing -----------------------------------------------------------------------------------


def reproducer(problem: Problem, message: str, device: str = "cpu") -> str:
    """A program that needs torch and convt_reduce alone, for the value of the call.

    Other directions, whose checks are longer, are named by the last line, to be run in tests/.
    """
    lines = [f"# {line}" for line in message.splitlines()]
    lines += ["import math, torch, convt_reduce", "nan, inf = math.nan, math.inf"]
    names = ("x", "w", "b")
    for name, tensor in zip(names, tensors(problem, "cpu"), strict=True):
        lines.append(f"{name} = None" if tensor is None else _written(name, tensor, device))
    settings = ", ".join(map(str, problem.settings))
    conv = ", ".join(map(str, problem.settings[:5]))
    dims = tuple(range(-problem.axes, 0))
    wide = "*(t if t is None else t.double() for t in (x, w, b))"
    lines += [
        f"y = torch.ops.convt_reduce.fused_mean(x, w, b, {settings})",
        f"chain = torch.nn.functional.conv_transpose{problem.axes}d({wide}, {conv})",
        f"expected = (chain * {problem.multiplier}).mean({dims}, keepdim=True)",
        "print(y.flatten(), expected.flatten(), (y.double() - expected).abs().max(), sep='\\n')",
        "# in tests/: python -c 'from fuzz.check import check; from fuzz.problem import Problem; "
        f'check({str(problem).replace(chr(39), chr(34))}, "{device}")\'',
    ]
    return "\n".join(lines)


def _written(name, tensor, device) -> str:
    shape, stride, offset = list(tensor.shape), tensor.stride(), tensor.storage_offset()
    dtype = tensor.dtype
    if tensor.numel() <= 64:
        values = f"torch.tensor({tensor.flatten().tolist()}, dtype={dtype})"
    else:
        values = f"torch.randn({tensor.numel()}).to({dtype})  # stands for the values that failed\n"
        values += f"{name} = {name}"
    place = f".view({shape})"
    if tensor.numel() and not (tensor.is_contiguous() and offset == 0):
        length = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        buffer = f"torch.full(({length},), nan, dtype={dtype}, device={device!r})"
        laid = f"{buffer}.as_strided({shape}, {stride}, {offset})"
        if 0 in stride and math.prod(shape) > 1:  # elements that share memory hold one value
            return f"{name} = {values}{place}\n{name} = {laid}.fill_({name}.flatten()[0])"
        return f"{name} = {values}{place}\n{name} = {laid}.copy_({name})"
    return f"{name} = {values}{place}.to({device!r})"

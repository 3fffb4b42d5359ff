"""Questions that a forward asks: a trace would answer them once for all, so it refuses or guards.

What is compared is the result itself, its dtype and whether it carries a gradient, with the
original on one side.
"""

import collections
import contextlib

import pytest
import torch
from fusing import Up, fused, pooled, same, sample
from torch import nn

# ---- questions about the inputs ------------------------------------------------------------------


def by_type(m, x):
    return pooled(m, x * 2 - 1 if isinstance(x, torch.Tensor) else x)


def by_attribute(m, x):
    return pooled(m, x.tensors if hasattr(x, "tensors") else x)


def by_exact_type(m, x):
    return pooled(m, x * 2 if type(x) is torch.Tensor else x)


def by_dtype(m, x):
    return pooled(m, x.float() if x.dtype is torch.float64 else x)


def by_trial(m, x):
    try:
        x = x.tensors
    except Exception:
        x = x * 2
    return pooled(m, x)


def by_bare_trial(m, x):
    try:
        a, b, c = x
        return pooled(m, a + b + c)
    except:  # noqa: E722
        return pooled(m, x)


def by_suppression(m, x):
    with contextlib.suppress(TypeError):
        x = x * range(x.dim())[3]
    return pooled(m, x)


def by_truth(m, x):
    return pooled(m, x) * (2 if x.sum() > 0 else 3)


def by_length(m, x):
    return pooled(m, x) * len(x)


def by_key(m, x):
    return pooled(m, x) * {4: 3.0}.get(x.dim(), 1.0)


def by_set(m, x):
    return pooled(m, x) * (3 if x.dim() in {3, 4} else 2)


def by_dtype_table(m, x):
    return pooled(m, x) * {torch.float32: 3}.get(x.dtype, 2)


def by_format(m, x):
    return pooled(m, x) * getattr(m, f"factor_{x.dim()}", 1.0)


def by_text(m, x):
    return pooled(m, x) * len(str(x.shape))


def by_percent(m, x):
    return pooled(m, x) * len("%s" % x.dim())  # noqa: UP031


def by_call(m, x):
    return pooled(m, x) * (3 if callable(x) else 2)


def by_match(m, x):
    match x:
        case [a, _]:
            return pooled(m, a)
    return pooled(m, x)


def by_loop(m, x):
    return sum(pooled(m, image[None]) for image in x)


def by_note(m, x):
    x.note = 3
    return pooled(m, x)


def by_attributes(m, x):
    return pooled(m, x) * len(m.__dict__)


def by_attribute_of_that_name(m, x):
    return pooled(m, x) * len(getattr(m, "_".join(["_", "dict", "_"])))


def by_attributes_of_an_input(m, x):
    return pooled(m, x) * len(x.__dict__)


def by_buffers(m, x):
    return pooled(m, x) * (1 + sum(1 for _ in m.buffers()))


def by_switching(m, x):
    m.up.eval()
    return pooled(m, x)


def by_gradient_mode(m, x):
    return pooled(m, x) if torch.is_grad_enabled() else pooled(m, x).sigmoid()


def by_autocast(m, x):
    return pooled(m, x) if torch.is_autocast_enabled("cpu") else pooled(m, x).sigmoid()


def by_parameters(m, x):
    return pooled(m, x.to(next(m.parameters()).dtype))


def by_keys(m, x):
    return pooled(m, x) * len(m.state_dict())


def by_value(m, x):
    return pooled(m, x) * m.held.item()


def by_number(m, x):
    return pooled(m, x) * float(m.held)


def by_size(m, x):
    return pooled(m, x) * m.held.dim() if m.held.dtype.is_complex else pooled(m, x)


QUESTIONS = {
    by_type: "it asks for the type of an input",
    by_attribute: "it uses hasattr()",
    by_exact_type: "it uses type()",
    by_dtype: "it compares by 'is'",
    by_trial: "it catches exceptions",
    by_bare_trial: "it catches exceptions",
    by_suppression: "it catches exceptions",
    by_truth: "it asks for whether an input, or what it computes from it, is true",
    by_length: "it asks for the length of an input",
    by_key: "as a key",
    by_set: "as a key",
    by_dtype_table: "as a key",
    by_format: "as a text",
    by_text: "as a text",
    by_percent: "as a text",
    by_call: "it uses callable()",
    by_match: "it uses a match statement",
    by_loop: "it loops over an input",
    by_note: "it asks for an attribute of an input, or of what it computes from it, to be set",
    by_attributes: "it looks through a __dict__",
    by_attribute_of_that_name: "it looks through the attributes of a module",
    by_attributes_of_an_input: "it looks through a __dict__",
    by_buffers: "it looks through its parameters or buffers",
    by_switching: "it calls eval() of a module",
    by_gradient_mode: "it asks for a gradient or autocast mode",
    by_autocast: "it asks for a gradient or autocast mode",
    by_parameters: "it looks through its parameters or buffers",
    by_keys: "it looks through its state_dict",
    by_value: "it reads the values of a tensor that it holds",
    by_number: "it reads the values of a tensor that it holds",
    by_size: "it reads the values of a tensor that it holds",
}


@pytest.mark.parametrize("body", QUESTIONS)
def test_questions_that_a_trace_would_answer_wrongly(body):
    def init(m):
        m.held = torch.tensor(2.0)
        m.factor_4 = 5.0

    model = Up(body, init)
    other, report = fused(model)
    assert QUESTIONS[body] in report.entries[0].detail
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert same(model, other, sample()).fused == 0


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3)

    def forward(self, x, mask):
        x = x["image"] if mask is None else x * mask
        return self.up(x).mean((2, 3))


def test_an_argument_that_is_none_or_no_tensor():
    model = Masked()
    other = fused(model)[0]
    x = sample()
    assert same(model, other, x, torch.rand(9, 9)).fused == 1
    assert same(model, other, x, 2.0).fused == 1
    assert same(model, other, {"image": x}, None).fused == 0


@pytest.mark.parametrize(
    "container", [lambda x: [x, x], lambda x: (x, x), lambda x: collections.OrderedDict({-1: x})]
)
def test_lists_of_tensors_are_fused(container):
    model = Up(lambda m, x: pooled(m, x[-1]))
    assert same(model, fused(model)[0], container(sample())).fused == 1


def test_a_list_with_none_in_it():
    model = Up(lambda m, x: pooled(m, x[0] if x[1] is None else x[0] * x[1]))
    other = fused(model)[0]
    assert same(model, other, [sample(), sample()]).fused == 1
    assert same(model, other, [sample(), None]).fused == 0


@pytest.mark.parametrize("count", [2, 3])
def test_unpacking_counts(count):
    """``a, b = x`` of something else raises as before, and of a shape is fused."""

    def parts(m, x):
        a, b = x
        return pooled(m, torch.stack([a, b]))

    def sizes(m, x):
        n, c, h, w = x.shape
        return pooled(m, x.reshape(n, c, h, w)) / (n * c)

    model = Up(parts)
    other = fused(model)[0]
    x = sample(count)
    if count == 2:
        assert same(model, other, x).fused == 1
    for module in (model, other) if count != 2 else ():
        with pytest.raises(ValueError, match="too many values to unpack"):
            module(x)
    model = Up(sizes)
    assert same(model, fused(model)[0], x).fused == 1


def test_a_finally_and_a_with_are_no_handlers():
    class Nothing:
        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            return False

    def body(m, x):
        try:
            with m.nothing:
                return pooled(m, x)
        finally:
            m.nothing.__enter__()

    model = Up(body, lambda m: setattr(m, "nothing", Nothing()))
    assert same(model, fused(model)[0], sample()).fused == 1

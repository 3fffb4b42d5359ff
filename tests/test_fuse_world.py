"""Questions about the world around: torch's answers are asked for again, others are refused."""

import contextlib
import math
import os
import sys
import time

import pytest
import torch
from fusing import Up, fused, pooled, same, sample


def in_script(m, x):
    return pooled(m, x) * (2 if torch.jit.is_scripting() else 3)


def annotated(m, x):
    return pooled(m, torch.jit.annotate(torch.Tensor, x))


@pytest.mark.parametrize("body", [in_script, annotated])
def test_scripting_is_never_under_way(body):
    model = Up(body)
    assert same(model, fused(model)[0], sample()).fused == 1


def in_trace(m, x):
    return pooled(m, x) * (2 if torch.jit.is_tracing() else 3)


def in_compiler(m, x):
    return pooled(m, x) * (2 if torch.compiler.is_compiling() else 3)


def in_export(m, x):
    return pooled(m, x) * (2 if torch.onnx.is_in_onnx_export() else 3)


def in_deterministic_mode(m, x):
    return pooled(m, x) * (2 if torch.are_deterministic_algorithms_enabled() else 3)


@contextlib.contextmanager
def onnx_export():
    _flags = pytest.importorskip("torch.onnx._internal.exporter._flags")
    _flags._is_onnx_exporting = True
    yield
    _flags._is_onnx_exporting = False


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("body", "around"), [(in_export, onnx_export), (in_deterministic_mode, deterministic)]
)
def test_an_answer_of_torch_is_asked_for_again(body, around):
    model = Up(body)
    other = fused(model)[0]
    assert same(model, other, sample()).fused == 1
    with around():
        assert same(model, other, sample()).fused == 0
    assert same(model, other, sample()).fused == 1


def test_tracing_and_compiling_are_asked_for_again():
    x = sample()
    model, other = Up(in_trace), fused(Up(in_trace))[0]
    other.load_state_dict(model.state_dict())
    traced = [torch.jit.trace(module, x) for module in (model, other)]
    torch.testing.assert_close(traced[1](x), traced[0](x))
    assert not torch.allclose(traced[1](x), other(x))

    model, other = Up(in_compiler), fused(Up(in_compiler))[0]
    other.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    compiled = [torch.compile(module, backend="eager") for module in (model, other)]
    torch.testing.assert_close(compiled[1](x), compiled[0](x))
    assert not torch.allclose(compiled[1](x), other(x))


WORLD = {
    "threads": (lambda m, x: pooled(m, x) * torch.get_num_threads(), "it calls get_num_threads()"),
    "seed": (lambda m, x: pooled(m, x) * torch.initial_seed(), "it calls torch.random."),
    "cudnn": (lambda m, x: pooled(m, x) * torch.backends.cudnn.enabled, "it calls torch.backends"),
    "environment": (lambda m, x: pooled(m, x) * len(os.environ.get("HOME", "")), "it calls os."),
    "clock": (lambda m, x: pooled(m, x) * (time.time() > 0), "it calls time.time()"),
    "writing": (
        lambda m, x: (sys.stdout.write(""), pooled(m, x))[1],
        "it calls write(), which is no computation",
    ),
    "printing": (lambda m, x: (print(end=""), pooled(m, x))[1], "it calls print()"),
}


@pytest.mark.parametrize("name", WORLD)
def test_what_depends_on_the_world(name):
    body, why = WORLD[name]
    model = Up(body)
    other, report = fused(model)
    assert why in report.entries[0].detail
    assert same(model, other, sample()).fused == 0


def test_mathematics_is_no_question():
    model = Up(lambda m, x: pooled(m, x) * math.sqrt(2) * max(m.factors))
    model.factors = [1.0, 3.0]
    assert same(model, fused(model)[0], sample()).fused == 1


def in_fx(m, x):
    return pooled(m, x) * (2 if torch.fx._symbolic_trace.is_fx_tracing() else 3)


def test_fx_tracing_is_over_when_the_model_runs():
    model = Up(in_fx)
    assert same(model, fused(model)[0], sample()).fused == 0


class Straight(torch.autograd.Function):
    """Its gradient is not that of what it does."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_autograd_function_of_the_users():
    model = Up(lambda m, x: Straight.apply(pooled(m, x)))
    other, report = fused(model)
    assert not report.fused  # for one reason or another, by torch's version
    gradients = []
    for module in (model, other):
        (gradient,) = torch.autograd.grad(module(torch.ones(1, 4, 5, 5)).sum(), module.up.weight)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


def test_a_tree_of_inputs():
    def body(m, x):
        return pooled(m, torch.utils._pytree.tree_map(lambda t: t * 2, x)[0])

    model = Up(body)
    assert same(model, fused(model)[0], [sample()]).fused == 0

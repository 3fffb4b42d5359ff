"""What the tests of fusing share: small models around one convolution, and how to compare them.

A test that only compared values would pass if nothing were fused, so the operators that run are
recorded: the convolution must be gone, or must still be there.
"""

import copy

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from convt_reduce.compiler import fuse_graph
from convt_reduce.rewrite import fuse

LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = {1: (9,), 2: (4, 5), 3: (3, 2, 4)}


class Chain(nn.Module):
    """A transposed convolution, and a function of the module and its result."""

    def __init__(self, body, axes=2, **parts):
        super().__init__()
        self.conv = LAYERS[axes](2, 3, 3, stride=2, padding=1, output_padding=1)
        self.scale = nn.Parameter(torch.rand(3, *[1] * axes) + 0.5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(1, 3, *[1] * axes))
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body
        for part in self.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.body(self, self.conv(x))


def input_of(axes=2, batched=True, dtype=torch.float64):
    return torch.randn(*([4] if batched else []), 2, *SIZES[axes], dtype=dtype)


class Record(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))

    @property
    def convolutions(self):
        return sum(name == "aten::convolution" for name in self.names)

    @property
    def fused(self):
        ours = ("convt_reduce::fused_mean", "convt_reduce::_fused_mean_with_sums")
        return sum(name in ours for name in self.names)


def run(module, *inputs):
    """The result and what ran for it."""
    if isinstance(module, Captured):  # torch.compile steps back where it sees a dispatch mode
        return module(*inputs), module.record
    with Record() as record:
        result = module(*inputs)
    return result, record


def gradients(result, module, inputs):
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    # No two elements weigh the same.
    weights = [torch.linspace(1, 2, t.numel(), device=t.device).view(t.shape) for t in tensors]
    total = sum((t.double() * w).sum() for t, w in zip(tensors, weights, strict=True))
    leaves = [*inputs, *module.parameters()]
    return torch.autograd.grad(total, leaves, allow_unused=True)


def assert_same(model, other, *inputs, tolerance=1e-10, with_gradients=True):
    """The results of two modules, and the gradients of their inputs and parameters."""
    results = []
    for module in (model, other):
        given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        torch.manual_seed(5)
        result, record = run(module, *given)
        # A captured model has no parameters of its own.
        owner = module if isinstance(module, nn.Module) else model
        grads = gradients(result, owner, given) if with_gradients else ()
        results.append((pytree.tree_leaves(result), grads, record))
    (want, want_grads, _), (have, have_grads, record) = results
    for a, b in zip(want, have, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
    for a, b in zip(want_grads, have_grads, strict=True):
        if a is None:
            assert b is None or not b.any()
        else:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
    return record


class Captured:
    """The model after torch.compile's capture and our rewrite, run as it is, with no compiler."""

    def __init__(self, model, dynamic=None, cost_rule=False):
        self.reports = []

        def rewrite(graph_module, inputs):
            self.reports.append(fuse_graph(graph_module, cost_rule=cost_rule))

            def recorded(*arguments):
                with Record() as self.record:
                    return graph_module(*arguments)

            return recorded

        torch._dynamo.reset()
        self.call = torch.compile(model, backend=rewrite, dynamic=dynamic, fullgraph=True)

    def __call__(self, *inputs):
        return self.call(*inputs)


def fused(model):
    """The fused copy whatever it costs, and the report."""
    return fuse(model, return_report=True, cost_rule=False)


class Head(nn.Module):
    """One of everything that a model may hold besides; it can be pickled."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(2, 2, 3, padding=1)
        self.unused = nn.Parameter(torch.randn(3))
        self.up = nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.BatchNorm2d(3))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))
        self.register_buffer("offset", torch.randn(3, 1, 1))
        self.last = nn.Linear(3, 4)
        self.note = "mine"

    def forward(self, x, twice: bool = False):
        y = self.drop(self.up(self.before(x).relu()) * self.scale + self.offset)
        y = self.last(y.mean((2, 3)))
        return y * 2 if twice else y

    def describe(self):
        return f"{self.note} {self.training}"


def head(train=False):
    model = Head().double().train(train)
    model.up[1].running_mean.normal_()
    return model


def is_fused(model, x):
    return run(model, x)[1].fused


class Up(nn.Module):
    """A transposed convolution, parts by ``init`` and a forward by ``body``."""

    def __init__(self, body, init=None, channels=(4, 6)):
        super().__init__()
        self.up = nn.ConvTranspose2d(*channels, 3, stride=2, padding=1)
        self.body = body
        if init is not None:
            init(self)

    def forward(self, x):
        return self.body(self, x)


def sample(batch=2, channels=4):
    return torch.randn(batch, channels, 9, 9)


def same(model, other, *inputs, tolerance=1e-5):
    """Compares two modules, dtype and requires_grad too; returns what the second one ran."""
    want = model(*inputs)
    have, record = run(other, *inputs)
    assert (have.dtype, have.requires_grad) == (want.dtype, want.requires_grad)
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    return record


def changed(model, change):
    """The model and its fused copy, both changed afterwards."""
    other, report = fused(model)
    assert report.fused, report
    reference = copy.deepcopy(model)
    change(reference)
    change(other)
    return reference, other


def pooled(m, x):
    return m.up(x).mean((2, 3))


def seeded(make):
    """What ``make`` builds, the same each time."""
    torch.manual_seed(0)
    return make()

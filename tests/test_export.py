"""Graphs that leave the process that made them: torch.export, AOTInductor, torch.jit.trace."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

from convt_reduce.nn import ConvTransposeMean2d

# Distinct from each other and from every channel count: equal first sizes become one symbol.
SIZES = [
    (7, 11, 13),
    (2, 5, 6),
    (3, 9, 8),
    (5, 12, 4),
    (4, 33, 17),
    (8, 6, 6),
    (2, 31, 64),
    (16, 4, 5),
    (9, 3, 21),
    (6, 17, 3),
]


class Net(nn.Module):
    """A layer of ours between two of PyTorch's.

    The first mixes channels by nn.Linear: Inductor pins the sizes of an nn.Conv2d that it trains.
    """

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.head = ConvTransposeMean2d(
            4, 10, 3, 2, 1, 1, groups=2, bias=bias, dilation=(1, 2), multiplier=0.5
        )
        self.last = nn.Linear(10, 5)

    def forward(self, x):
        mixed = self.first(x.movedim(1, -1)).relu().movedim(-1, 1)
        return self.last(self.head(mixed).flatten(1))


each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def net(bias=True, device="cpu"):
    return Net(bias).double().to(device)


def images(sizes, device="cpu"):
    batch, height, width = sizes
    return torch.randn(batch, 3, height, width, dtype=torch.float64, device=device)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def python(script, *arguments, cwd=None):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


# ---- torch.export -------------------------------------------------------------------------------


def exported(model, dynamic=True, device="cpu"):
    dimensions = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    return torch.export.export(
        model.eval(),
        (images(SIZES[0], device),),
        dynamic_shapes={"x": dimensions} if dynamic else None,
    )


def operators_in(program):
    return [n.target for n in program.graph.nodes if "convt_reduce" in str(n.target)]


@each_bias
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_export(bias, dynamic, device):
    model = net(bias, device)
    program = exported(model, dynamic, device)
    assert operators_in(program) == [torch.ops.convt_reduce.fused_mean.default]
    lowered = program.run_decompositions()
    assert operators_in(lowered) == [torch.ops.convt_reduce.fused_mean.default]
    for p in (program, lowered):
        for sizes in SIZES if dynamic else SIZES[:1]:
            x = images(sizes, device)
            assert_close(p.module()(x), model(x))
    if not dynamic:
        with pytest.raises(Exception, match=r"Guard failed|Expected input"):
            program.module()(images(SIZES[1], device))


@pytest.mark.parametrize("sizes", [(1, 5, 6), (2, 1, 9), (1, 1, 1)], ids=str)
def test_export_holds_for_sizes_of_one(sizes, device):
    model = net(True, device)
    x = images(sizes, device)
    assert_close(exported(model, True, device).module()(x), model(x))


def test_exported_graph_trains(device):
    """Exported for training, the graph records gradients for the parameters."""
    model = net(True, device)
    module = exported(model, True, device).module()
    x = images(SIZES[1], device)
    for m in (model, module):
        m.zero_grad()
        m(x).square().sum().backward()
    for (name, a), (_, b) in zip(
        sorted(model.named_parameters()), sorted(module.named_parameters()), strict=True
    ):
        assert a.grad.count_nonzero(), name
        assert_close(b.grad, a.grad)


LOAD = """
import sys, torch
program, tensors, package = sys.argv[1:]
if package != "none":
    __import__(package)
x, y = torch.load(tensors)
found = torch.export.load(program).module()(x)
torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
"""


@each_bias
def test_saved_and_loaded_in_a_new_process(bias, device, empty_folder):
    model = net(bias, device)
    torch.export.save(exported(model, True, device), "model.pt2")
    x = images(SIZES[3], device)
    torch.save((x, model(x).detach()), "tensors.pt")
    loaded = python(LOAD, "model.pt2", "tensors.pt", "convt_reduce")
    assert loaded.returncode == 0, loaded.stderr


def test_loading_without_the_import_says_what_is_missing(empty_folder):
    torch.export.save(exported(net()), "model.pt2")
    torch.save((images(SIZES[3]), None), "tensors.pt")
    unaware = python(LOAD, "model.pt2", "tensors.pt", "none")
    assert unaware.returncode != 0
    assert "torch.ops.convt_reduce.fused_mean" in unaware.stderr


# ---- AOTInductor --------------------------------------------------------------------------------

# Compiling runs in a process of its own, since what it may do is crash; see works.
COMPILE = """
import sys, torch
import torch._inductor.codecache  # torch 2.10 uses it without importing it
program, package = sys.argv[1:]
if program == "plain":
    model = torch.nn.Linear(3, 2).to(torch.float64).to(package.split("-")[0])
    program = torch.export.export(model, (torch.ones_like(model.weight),))
else:
    import convt_reduce
    program = torch.export.load(program)
with torch.no_grad():
    print(torch._inductor.aoti_compile_and_package(program, package_path=package))
"""

RUN_PACKAGE = """
import sys, torch
import torch._inductor.codecache
package, tensors = sys.argv[1:]
if tensors != "plain":
    import convt_reduce
model = torch._inductor.aoti_load_package(package)
if tensors == "plain":
    model(torch.ones(2, 3, dtype=torch.float64, device=package.split("-")[0]))
    sys.exit()
for x, y in torch.load(tensors):
    torch.testing.assert_close(model(x), y, rtol=1e-10, atol=1e-10)
"""


@functools.cache
def works(device, folder):
    """Whether AOTInductor compiles and runs a linear layer: it has been seen to crash at either."""
    package = f"{device}-plain.pt2"
    return (
        python(COMPILE, "plain", package, cwd=folder).returncode == 0
        and python(RUN_PACKAGE, package, "plain", cwd=folder).returncode == 0
    )


@pytest.mark.slow
@each_bias
def test_aot_inductor_package(bias, device, empty_folder):
    """Compiled to a shared library in one process, run in another."""
    model = net(bias, device)
    torch.export.save(exported(model, True, device), "program.pt2")
    compiled = python(COMPILE, "program.pt2", str(empty_folder / "model.pt2"))
    if compiled.returncode < 0 and not works(device, str(empty_folder)):
        pytest.skip("AOTInductor of this torch cannot compile a linear layer here")
    assert compiled.returncode == 0, compiled.stderr
    with torch.no_grad():
        pairs = [(x := images(sizes, device), model(x)) for sizes in SIZES]
    torch.save(pairs, "tensors.pt")
    result = python(RUN_PACKAGE, compiled.stdout.split()[-1], "tensors.pt")
    if result.returncode < 0 and not works(device, str(empty_folder)):
        pytest.skip("AOTInductor of this torch cannot run a linear layer here")
    assert result.returncode == 0, result.stderr


# ---- torch.jit.trace ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@each_bias
def test_traced(bias, device, empty_folder):
    model = net(bias, device).eval()
    traced = torch.jit.trace(model, images(SIZES[0], device))
    assert "convt_reduce::fused_mean" in str(traced.inlined_graph)
    traced.save("model.pt")
    loaded = torch.jit.load("model.pt")
    for sizes in SIZES:
        x = images(sizes, device)
        for module in (traced, loaded):
            assert_close(module(x), model(x))
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        for p, m in ((a, model), (b, loaded)):
            (p.grad,) = torch.autograd.grad(m(x).square().sum(), p)
        assert_close(b.grad, a.grad)

"""A fused forward goes on reading attributes and containers, and calling parts, as the model."""

import threading

import pytest
from fusing import Chain, assert_same, fused, head, input_of, run
from torch import nn

from convt_reduce.rewrite import fuse


def test_attributes_that_change_later():
    """A number that the forward reads is a constant of the plan: another one, another answer."""
    model = Chain(lambda m, y: (y * m.factor).mean(m.dims))
    model.factor, model.dims = 0.5, [2, 3]
    model = model.double()
    other = fused(model)[0]
    for name, value, fuses in (("factor", 0.25, 0), ("factor", 0.5, 1), ("dims", [1, 2], 0)):
        setattr(model, name, value)
        setattr(other, name, value)
        assert assert_same(model, other, input_of()).fused == fuses
    other.dims[:] = [2, 3]
    model.dims[:] = [2, 3]
    assert assert_same(model, other, input_of()).fused == 1


def test_a_pool_that_changes_later():
    model = Chain(lambda m, y: m.pool(y), pool=nn.AdaptiveAvgPool2d(1)).double()
    other = fused(model)[0]
    model.pool.output_size = other.pool.output_size = (2, 1)
    assert assert_same(model, other, input_of()).fused == 0


def test_a_forward_that_reads_the_mode_of_a_part():
    model = Chain(lambda m, y: y.mean((2, 3)) * (2 if m.norm.training else 3), norm=nn.ReLU())
    other = fused(model.double())[0]
    for training in (True, False, True):  # each has its plan
        for module in (model, other):
            module.norm.train(training)
        assert assert_same(model, other, input_of()).fused == 1


def test_containers_keep_their_type():
    class Dict(dict):
        pass

    for build, fuses in ((dict, 1), (Dict, 0)):
        model = Chain(lambda m, y, build=build: build(score=y.mean((2, 3)))).double()
        other, report = fused(model)
        result, record = run(other, input_of())
        assert type(result) is build
        assert record.fused == fuses
    assert "it builds a Dict, which would become a plain one" in report.entries[0].detail


def test_a_model_that_cannot_be_copied():
    model = head()
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"model must be such that copy\.deepcopy works, got"):
        fuse(model)


def test_a_part_that_is_called_with_optional_arguments():
    """Its own forward could not stand for such calls, so that of the module around it does."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, 3)

        def forward(self, x, factor=1.0, dims=None):
            return (self.conv(x) * factor).mean(dims or (2, 3))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x, factor=3.0) + self.block(x, 0.5, (-1, -2)) + self.block(x)

    model = Model().double()
    other = fused(model)[0]
    record = assert_same(model, other, input_of())
    assert (record.fused, record.convolutions) == (3, 0)
    names = [n for n, m in other.named_modules() if type(m).__name__.startswith("Fused")]
    assert names == ["", "block"]


def test_a_part_with_a_hook_is_fused_inside():
    """It is called, hooks and all; its own forward is the fused one."""
    model = nn.Sequential(Chain(lambda m, y: y.mean((2, 3))), nn.ReLU()).double()
    model[0].register_forward_hook(lambda module, args, y: y + 1)
    other, report = fused(model)
    assert [entry.where for entry in report.fused] == ["0.conv"]
    assert assert_same(model, other, input_of()).fused == 1

"""Whether a result's bits depend on what they must not depend on."""

import torch

ops = torch.ops.convt_reduce


def assert_same_bits(y, case, x, w, b):
    """Again, from the operator that autograd calls, and from a batch element alone."""
    assert torch.equal(ops.fused_mean(x, w, b, *case.op_settings), y)
    assert torch.equal(ops._fused_mean_with_sums(x, w, b, *case.op_settings)[0], y)
    if case.batch <= 128:
        for n in {0, case.batch - 1}:
            assert torch.equal(ops.fused_mean(x[n : n + 1], w, b, *case.op_settings), y[n : n + 1])

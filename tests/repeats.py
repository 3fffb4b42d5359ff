"""Whether a result's bits depend on what they must not depend on."""

import reference
import torch

ops = torch.ops.convt_reduce


def assert_same_bits(y, case, x, w, b):
    """Again, from the operator that autograd calls, and from a batch element alone."""
    assert torch.equal(ops.fused_mean(x, w, b, *case.op_settings), y)
    assert torch.equal(ops._fused_mean_with_sums(x, w, b, *case.op_settings)[0], y)
    if case.batch <= 128:
        for n in {0, case.batch - 1}:
            assert torch.equal(ops.fused_mean(x[n : n + 1], w, b, *case.op_settings), y[n : n + 1])


def assert_spoilt_elements_alone(case, x, w, b, values):
    """Values that are not finite, {(batch element, place in it): value}, do what the chain says.

    All other batch elements keep their bits.
    """
    y = ops.fused_mean(x, w, b, *case.op_settings)
    spoilt = x.clone().flatten(1)
    for at, value in values.items():
        spoilt[at] = value
    spoilt = spoilt.view(x.shape)
    found = ops.fused_mean(spoilt, w, b, *case.op_settings)
    touched = sorted({n for n, _ in values})
    expected = reference.torch_chain(spoilt[touched], w, b, *case.settings)
    reference.assert_not_finite_alike(found[touched], expected)
    found[touched] = y[touched]
    assert torch.equal(found, y)

"""Expected values, and the one comparison: the tolerance of tests/reference.py, element by element.

fused_mean is linear in each tensor, and so is every derivative of it. Run on absolute values, the
same computation therefore gives the magnitude that the tolerance scales with.
"""

import reference
import torch

from fuzz.problem import Problem

LARGEST_CONVOLUTION = 3e7  # multiplications; beyond, the closed form stands for PyTorch's chain


class Mismatch(AssertionError):
    """A result that is not within the tolerance."""


def plain(tensor):
    """The same values on the CPU in float64, in memory of their own."""
    return None if tensor is None else tensor.detach().cpu().double().clone()


def oracle(problem: Problem):
    """The definition, or the closed form where that is no judge.

    PyTorch's convolution refuses an empty batch and takes long for large ones. Its gradients add
    one element after another, in float64: numbers of one sign then err in one direction, by more
    than what a float64 result is allowed.
    """
    one_sign = problem.dtype == "float64" and problem.values in ("constant", "ramp")
    if problem.batch == 0 or problem.work > LARGEST_CONVOLUTION or one_sign:
        return reference.closed_form
    return reference.torch_chain


def magnitude_of(problem: Problem, copies):
    """The bound's scale, from the finite values: no other reaches a result that is finite."""
    copies = [None if t is None else t.nan_to_num(0, 0, 0) for t in copies]
    settings = (
        *problem.settings[:5],
        abs(problem.multiplier) if problem.multiplier == problem.multiplier else 1.0,
    )
    return reference.closed_form(*reference.absolute(*copies), *settings)


def absolute_settings(problem: Problem):
    return (*problem.settings[:5], abs(problem.settings[5]))


def demand(actual, expected, magnitude, terms, dtype, what):
    """Raises Mismatch unless every element is right; NaN and inf must be exact.

    A result beyond the dtype's largest number must be infinite, as one rounding makes it.
    """
    if actual.dtype != dtype or actual.shape != expected.shape:
        raise Mismatch(
            f"{what}: {actual.dtype} {list(actual.shape)}, not {dtype} {list(expected.shape)}"
        )
    actual, expected = plain(actual), plain(expected)
    bound = reference.error_bound(expected, plain(magnitude), dtype, terms)
    error = (actual - expected).abs()
    right = torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True) | (error <= bound)
    overflow = expected.isfinite() & (expected.abs() + bound >= torch.finfo(dtype).max)
    right |= overflow & actual.isinf() & (actual.sign() == expected.sign())
    if right.all():
        return
    at = tuple((~right).nonzero()[0].tolist())
    raise Mismatch(
        f"{what}: {int((~right).sum())} of {right.numel()} elements are wrong, the first at {at}: "
        f"{actual[at].item()!r}, expected {expected[at].item()!r} +- {bound[at].item():.3g}"
    )


def demand_same_bits(a, b, what):
    if not torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)):
        raise Mismatch(f"{what}: two runs gave different bits")

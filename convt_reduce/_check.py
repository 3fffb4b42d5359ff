"""The self-check of `fuse`: the model and its fused copy, side by side in float64."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Far above what another order of additions changes in float64, far below what a wrong border does.
RELATIVE = 1e-8


def to_double(value: Any) -> Any:
    """A copy of a tensor in float64, if it is real; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    wide = value.detach().clone()
    wide = wide.double() if wide.is_floating_point() else wide
    return nn.Parameter(wide, value.requires_grad) if isinstance(value, nn.Parameter) else wide


def check_results(model: nn.Module, fused: nn.Module, example_inputs: Any) -> None:
    """Runs both on the inputs, in float64 and from the same random state.

    Raises:
        RuntimeError: their results differ, and the message says where and by how much; or the model
            does not run in float64.
    """
    inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    results = []
    for module in (model, fused):
        given = pytree.tree_map(to_double, copy.deepcopy(tuple(inputs)))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            try:
                result = module(*given)
            except Exception as error:
                if module is fused:
                    raise
                raise RuntimeError(
                    "check: the model must run in float64 to be checked, got "
                    f"{type(error).__name__}: {error}"
                ) from error
            results.append(pytree.tree_flatten(result))
    (expected, form), (found, found_form) = results
    if form != found_form:
        raise RuntimeError(f"check: the fused model must return {form}, got {found_form}")
    for index, (want, have) in enumerate(zip(expected, found, strict=True)):
        if isinstance(want, Tensor):
            _compare(f"result {index}", want, have)
        elif type(want) in (bool, int, float, str) and want != have:
            raise RuntimeError(f"check: result {index} must be {want!r}, got {have!r}")


def _compare(what: str, want: Tensor, have: Tensor) -> None:
    if want.shape != have.shape or want.dtype != have.dtype:
        raise RuntimeError(
            f"check: {what} must be {list(want.shape)} of {want.dtype}, "
            f"got {list(have.shape)} of {have.dtype}"
        )
    if want.numel() == 0:
        return
    size = want.abs().nan_to_num(0, 0, 0).max().item()
    if torch.allclose(have, want, rtol=RELATIVE, atol=RELATIVE * size, equal_nan=True):
        return
    difference = (have - want).abs().max().item()
    raise RuntimeError(
        f"check: {what} must agree with the model's to {RELATIVE} of its largest element "
        f"{size:.3g}, got a difference of {difference:.3g}"
    )

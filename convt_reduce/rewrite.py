"""`fuse` and `explain`: the door to rewriting a model.

A fused model is a copy that shares the model's tensors. Where the sites are and what becomes of
them is decided in `_search`, and under which conditions a fused forward runs in `_fused`; a forward
is never wrong, at worst it is the original one.
"""

import warnings
from typing import Any, Literal, overload

from torch import nn

from convt_reduce import _fused
from convt_reduce._check import check_results, to_double
from convt_reduce._fused import Plan, Plans, merge
from convt_reduce._report import Entry, Report
from convt_reduce._search import Search, merge_entries
from convt_reduce._trace import copy_sharing

__all__ = ["Entry", "Report", "explain", "fuse"]


@overload
def fuse(
    model: nn.Module,
    *,
    return_report: Literal[False] = False,
    example_inputs: Any = None,
    check: bool = False,
    cost_rule: bool = True,
) -> nn.Module: ...
@overload
def fuse(
    model: nn.Module,
    *,
    return_report: Literal[True],
    example_inputs: Any = None,
    check: bool = False,
    cost_rule: bool = True,
) -> tuple[nn.Module, Report]: ...
def fuse(
    model: nn.Module,
    *,
    return_report: bool = False,
    example_inputs: Any = None,
    check: bool = False,
    cost_rule: bool = True,
) -> nn.Module | tuple[nn.Module, Report]:
    """A copy of the model in which convolutions that only get averaged are not carried out.

    Args:
        model: any module; it stays as it is.
        return_report: also return what was fused and why the rest was not.
        example_inputs: for ``check``, the arguments of one call: a tensor, or a tuple of them.
            Small ones will do.
        check: run the model and the copy on them in float64, and raise if they differ.
        cost_rule: at each call, leave the convolution in where fusing would not pay.

    Returns:
        The copy. Its parameters and buffers are the model's own, its state_dict has the same keys
        in the same order, and where a forward changed, the module's class is a subclass of what it
        was. It can be trained, moved, copied, pickled and compiled. With ``return_report``, the
        copy and a `Report`.

    Raises:
        TypeError: ``model`` is no module, is compiled already, or cannot be deep-copied.
        ValueError: ``check`` without ``example_inputs``.
        RuntimeError: the check failed.
    """
    _check_model(model)
    if check and example_inputs is None:
        raise ValueError("example_inputs must be given where check=True, got None")
    fused, report = _fuse(model, cost_rule)
    if check:
        reference, rewritten = (copy_sharing(model, to_double) for _ in range(2))
        check_results(reference, _fuse(rewritten, False)[0], example_inputs)
    if report.notes and not report.fused:
        warnings.warn(f"fuse changed nothing: {report.notes[0]}", stacklevel=2)
    return (fused, report) if return_report else fused


def explain(model: nn.Module) -> Report:
    """What `fuse` would do to the model, and why not more: ``print(explain(model))``.

    Raises:
        TypeError: ``model`` is no module, is compiled already, or cannot be deep-copied.
    """
    _check_model(model)
    return _fuse(model, True)[1]


def plans_for(module: nn.Module, cost_rule: bool) -> tuple[Plan, ...]:
    """The plans of a module that was fused and has been unpickled without them."""
    copy = copy_sharing(module)
    _fused.uninstall(copy)
    found = [Search(copy, mode, cost_rule).plans.get("") for mode in _distinct_modes(copy)]
    return merge([plan for plan in found if plan is not None])


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        raise TypeError("model must not be compiled yet, got the result of torch.compile")


def _fuse(model: nn.Module, cost_rule: bool) -> tuple[nn.Module, Report]:
    try:
        copy = copy_sharing(model)
    except Exception as error:
        raise TypeError(f"model must be such that copy.deepcopy works, got {error}") from error
    for held in ("named_parameters", "named_buffers"):
        own, copied = (dict(getattr(m, held)(remove_duplicate=False)) for m in (model, copy))
        if own.keys() != copied.keys() or any(own[name] is not copied[name] for name in own):
            raise TypeError(
                "model must be such that copy.deepcopy keeps its parameters and buffers, got a "
                f"copy with others: {type(model).__name__}, or a part of it, copies itself"
            )
    _fused.uninstall(copy)
    searches = [Search(copy, mode, cost_rule) for mode in _distinct_modes(copy)]
    plans: dict[str, list[Plan]] = {}
    for search in searches:
        for host, plan in search.plans.items():
            plans.setdefault(host, []).append(plan)
    for host, found in plans.items():
        _fused.install(copy.get_submodule(host), Plans(cost_rule, merge(found)))
    return copy, Report(merge_entries(searches), tuple(searches[0].notes))


def _distinct_modes(model: nn.Module) -> list[bool | None]:
    """The modes as they are (None), and all in train and all in eval mode where that differs."""
    now = {module.training for module in model.modules()}
    return [None, *(mode for mode in (True, False) if now != {mode})]

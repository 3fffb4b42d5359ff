"""Gradients, backward and forward, of every order.

They rest on one fact: backward needs the tap sums, never the input. A call that wants a gradient
goes through `_fused_mean_with_sums`, which returns them; one that wants none goes straight to the
backend's `fused_mean`, which never writes them. `_tap_sums` and `_tap_spread` are each other's
adjoint, hence each other's backward, and what stands between them is matrix products.

torch.autograd.Function is used, and not torch.library.register_autograd, because only the former
has forward mode and works under torch.func's transforms.
"""

import contextlib
import math

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from convt_reduce import _sharding
from convt_reduce._validation import Settings, accumulate_dtype, output_size

_library = torch.library.Library("convt_reduce", "IMPL")
_ops = torch.ops.convt_reduce


@contextlib.contextmanager
def _one_level_down():
    """Inside a Function's forward: without this level's autograd, but with the other levels'.

    A Function's forward runs with both gradient modes off. Under nested transforms (torch.func.grad
    of grad, jvp of grad) the next level still has derivatives of its own to take.
    """
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


class _Problem:
    """What a call's derivative formulas need besides tensors."""

    def __init__(self, input, weight, settings: Settings, groups: int, multiplier: float) -> None:
        self.settings = settings
        self.groups = groups
        self.multiplier = multiplier
        self.dtype = input.dtype
        self.weight_shape = weight.shape
        c_in, self.group_out, *self.kernel_size = weight.shape
        self.group_in = c_in // groups
        self.taps = math.prod(self.kernel_size)
        self.size = input.shape[-len(self.kernel_size) :]
        self.batch_shape = input.shape[: -len(self.kernel_size) - 1]  # [N], or [] if unbatched
        outputs = (
            output_size(n, k, settings.at(axis))
            for axis, (n, k) in enumerate(zip(self.size, self.kernel_size, strict=True))
        )
        self.scale = multiplier / math.prod(outputs)

    # The three views in which every formula is a matrix product per group.

    def result_view(self, y: Tensor) -> Tensor:
        """[N, C_out, 1..] -> [N, groups, C_out/groups], in the accumulate dtype."""
        return y.to(accumulate_dtype(self.dtype)).reshape(-1, self.groups, self.group_out)

    def weight_view(self, weight: Tensor) -> Tensor:
        """[C_in, C_out/groups, *k] -> [groups, C_in/groups, C_out/groups, taps]."""
        wide = weight.to(accumulate_dtype(self.dtype))
        return wide.reshape(self.groups, self.group_in, self.group_out, self.taps)

    def sums_view(self, sums: Tensor) -> Tensor:
        """[N, C_in, *k] -> [N, groups, C_in/groups, taps]."""
        return sums.reshape(-1, self.groups, self.group_in, self.taps)

    def tap_sums(self, input: Tensor) -> Tensor:
        return _ops._tap_sums.default(input, self.kernel_size, *self.settings)

    def spread(self, tap_grads: Tensor) -> Tensor:
        return _ops._tap_spread.default(tap_grads, self.size, self.dtype, *self.settings)


class _FusedMean(_SingleLevelFunction):
    """(input, weight, bias, settings..) -> (y, tap sums)."""

    @staticmethod
    def forward(input, weight, bias, *settings):
        with _one_level_down():
            return _ops._fused_mean_with_sums.default(input, weight, bias, *settings)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        input, weight, _, stride, padding, output_padding, groups, dilation, multiplier = inputs
        settings = Settings(stride, padding, output_padding, dilation)
        ctx.set_materialize_grads(False)
        ctx.problem = _Problem(input, weight, settings, groups, multiplier)
        # The weight serves input's gradient alone and the tap sums the weight's, so that what
        # belongs to something frozen is not kept. Forward mode needs both, while the call lasts.
        needs_input, needs_weight, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(weight if needs_input else None, output[1] if needs_weight else None)
        ctx.save_for_forward(weight, output[1])

    @staticmethod
    def backward(ctx, grad, grad_sums):
        weight, sums = ctx.saved_tensors
        problem: _Problem = ctx.problem
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        grad_taps = grad_sums
        if grad is not None:
            g = problem.result_view(grad)
            if needs_input:
                w = problem.weight_view(weight)
                taps = torch.einsum("ngo,gcot->ngct", g * problem.scale, w)
                taps = taps.reshape(*problem.batch_shape, -1, *problem.kernel_size)
                grad_taps = taps if grad_sums is None else taps + grad_sums
            if needs_weight:
                s = problem.sums_view(sums)
                grad_weight = torch.einsum("ngo,ngct->gcot", g * problem.scale, s)
                grad_weight = grad_weight.reshape(problem.weight_shape).to(problem.dtype)
            if needs_bias:
                grad_bias = (g.sum(0).reshape(-1) * problem.multiplier).to(problem.dtype)
        if needs_input and grad_taps is not None:
            grad_input = problem.spread(grad_taps)
        return grad_input, grad_weight, grad_bias, *[None] * 6

    @staticmethod
    def jvp(ctx, input_tangent, weight_tangent, bias_tangent, *_):
        weight, sums = ctx.saved_tensors
        problem: _Problem = ctx.problem
        y = torch.zeros((), dtype=accumulate_dtype(problem.dtype), device=sums.device)
        sums_tangent = None
        if input_tangent is not None:
            sums_tangent = problem.tap_sums(input_tangent)
            w = problem.weight_view(weight)
            y = y + torch.einsum("ngct,gcot->ngo", problem.sums_view(sums_tangent), w)
        if weight_tangent is not None:
            w = problem.weight_view(weight_tangent)
            y = y + torch.einsum("ngct,gcot->ngo", problem.sums_view(sums), w)
        y = y * problem.scale
        if bias_tangent is not None:
            b = bias_tangent.to(y.dtype).reshape(problem.groups, problem.group_out)
            y = y + problem.multiplier * b
        ones = [1] * len(problem.kernel_size)
        c_out = problem.groups * problem.group_out
        y = y.expand(math.prod(problem.batch_shape), problem.groups, problem.group_out)
        y = y.reshape(*problem.batch_shape, c_out, *ones).to(problem.dtype)
        return y, torch.zeros_like(sums) if sums_tangent is None else sums_tangent


class _TapSums(_SingleLevelFunction):
    """(input, kernel_size, settings..) -> tap sums; linear in the input."""

    @staticmethod
    def forward(input, kernel_size, *settings):
        with _one_level_down():
            return _ops._tap_sums.default(input, kernel_size, *settings)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        input, ctx.kernel_size, *ctx.settings = inputs
        ctx.size = input.shape[-len(ctx.kernel_size) :]
        ctx.dtype = input.dtype

    @staticmethod
    def backward(ctx, grad):
        grad_input = _ops._tap_spread.default(grad, ctx.size, ctx.dtype, *ctx.settings)
        return grad_input, *[None] * 5

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _ops._tap_sums.default(tangent, ctx.kernel_size, *ctx.settings)


class _TapSpread(_SingleLevelFunction):
    """(tap gradients, size, dtype, settings..) -> input's gradient; linear in the first."""

    @staticmethod
    def forward(tap_grads, size, dtype, *settings):
        with _one_level_down():
            return _ops._tap_spread.default(tap_grads, size, dtype, *settings)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tap_grads, ctx.size, ctx.dtype, *ctx.settings = inputs
        ctx.kernel_size = tap_grads.shape[-len(ctx.size) :]

    @staticmethod
    def backward(ctx, grad):
        grad_taps = _ops._tap_sums.default(grad, ctx.kernel_size, *ctx.settings)
        return grad_taps, *[None] * 6

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _ops._tap_spread.default(tangent, ctx.size, ctx.dtype, *ctx.settings)


# ---- the Autograd kernels -----------------------------------------------------------------------

# The dispatcher leaves out trailing arguments that equal their defaults.
_FUSED_MEAN_DEFAULTS = ([1], [0], [0], 1, [1], 1.0)
_TAP_DEFAULTS = ([1], [0], [0], [1])


def _wanted(*tensors: Tensor | None) -> bool:
    """Whether a derivative may be asked of this call."""
    _sharding.ensure_registered()  # this layer is the first of ours that sees a DTensor
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    # A tensor's tangent shows only once it is unpacked, and levels are rare: inside one, always.
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _apply(function, *arguments):
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _below(op, keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _fused_mean(keyset, input, weight, bias=None, *rest):
    if _wanted(input, weight, bias):
        defaults = _FUSED_MEAN_DEFAULTS[len(rest) :]
        return _apply(_FusedMean, input, weight, bias, *rest, *defaults)[0]
    return _below(_ops.fused_mean.default, keyset, input, weight, bias, *rest)


def _fused_mean_with_sums(keyset, input, weight, bias=None, *rest):
    if _wanted(input, weight, bias):
        defaults = _FUSED_MEAN_DEFAULTS[len(rest) :]
        return _apply(_FusedMean, input, weight, bias, *rest, *defaults)
    return _below(_ops._fused_mean_with_sums.default, keyset, input, weight, bias, *rest)


def _tap_sums(keyset, input, kernel_size, *rest):
    if _wanted(input):
        return _apply(_TapSums, input, kernel_size, *rest, *_TAP_DEFAULTS[len(rest) :])
    return _below(_ops._tap_sums.default, keyset, input, kernel_size, *rest)


def _tap_spread(keyset, tap_grads, size, dtype, *rest):
    if _wanted(tap_grads):
        return _apply(_TapSpread, tap_grads, size, dtype, *rest, *_TAP_DEFAULTS[len(rest) :])
    return _below(_ops._tap_spread.default, keyset, tap_grads, size, dtype, *rest)


for _name, _kernel in {
    "fused_mean": _fused_mean,
    "_fused_mean_with_sums": _fused_mean_with_sums,
    "_tap_sums": _tap_sums,
    "_tap_spread": _tap_spread,
}.items():
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)

"""Gradients, backward and forward, of every order.

They rest on one fact: backward needs the tap sums, never the input. A call that wants a gradient
goes through `_fused_mean_with_sums`, which returns them; one that wants none goes straight to the
backend's `fused_mean`, which never writes them. `_tap_sums` and `_tap_spread` are each other's
adjoint, hence each other's backward, and what stands between them is matrix products, or, for small
ones, `_combine_backward`.

torch.autograd.Function is used, and not torch.library.register_autograd, because only the former
has forward mode and works under torch.func's transforms.
"""

import contextlib
import functools

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from convt_reduce import _sharding
from convt_reduce._products import Call, product
from convt_reduce._validation import Settings

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


def _without_autocast(backward):
    """The products below are in the accumulate dtype; autocast would round their operands."""

    @functools.wraps(backward)
    def wrapped(*arguments):
        with torch._C._DisableAutocast():
            return backward(*arguments)

    return wrapped


def _with_outer_levels(jvp):
    """Switches forward mode on: a Function's jvp has it off, for outer levels (jvp of jvp) too."""

    @functools.wraps(jvp)
    def with_forward_mode(*arguments):
        with forward_ad._set_fwd_grad_enabled(True), torch._C._DisableAutocast():
            return jvp(*arguments)

    return with_forward_mode


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
        ctx.call = Call(input, weight, settings, groups, multiplier)
        # The weight serves input's gradient alone and the tap sums the weight's, so that what
        # belongs to something frozen is not kept. Forward mode needs both, while the call lasts.
        needs_input, needs_weight, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(weight if needs_input else None, output[1] if needs_weight else None)
        ctx.save_for_forward(weight, output[1])

    @staticmethod
    @_without_autocast
    def backward(ctx, grad, grad_sums):
        weight, sums = ctx.saved_tensors
        call: Call = ctx.call
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        grad_taps = grad_sums
        native = grad is not None and call.native_gradients(
            grad,
            weight if needs_input else None,
            sums if needs_weight else None,
            needs_bias,
        )
        if native:
            grad_taps, grad_weight, grad_bias = (
                g if needed else None
                for g, needed in zip(native, (needs_input, needs_weight, needs_bias), strict=True)
            )
            if needs_input and grad_sums is not None:
                grad_taps = grad_taps + grad_sums
        elif grad is not None:
            g = call.result_matrix(grad)
            if needs_input:
                w = call.weight_matrix(weight)
                taps = call.sums_from_matrix(product(g * call.scale, w.transpose(1, 2)))
                grad_taps = taps if grad_sums is None else taps + grad_sums
            if needs_weight:
                s = call.sums_matrix(sums)
                by_tap = product(s.transpose(1, 2), g * call.scale)
                grad_weight = call.weight_from_matrix(by_tap)
            if needs_bias:
                grad_bias = (g.sum(1).reshape(-1) * call.multiplier).to(call.dtype)
        if needs_input and grad_taps is not None:
            grad_input = call.spread(grad_taps)
        return grad_input, grad_weight, grad_bias, *[None] * 6

    @staticmethod
    @_with_outer_levels
    def jvp(ctx, input_tangent, weight_tangent, bias_tangent, *_):
        # With forward mode on, this level's own tangents must be taken off what was saved.
        weight, sums = (forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors)
        call: Call = ctx.call
        terms = []  # of the mean
        sums_tangent = None
        if input_tangent is not None:
            sums_tangent = call.tap_sums(input_tangent)
            matrix = call.sums_matrix(sums_tangent)
            terms.append(product(matrix, call.weight_matrix(weight)) * call.scale)
        if weight_tangent is not None:
            matrix = call.sums_matrix(sums)
            terms.append(product(matrix, call.weight_matrix(weight_tangent)) * call.scale)
        if bias_tangent is not None:
            b = bias_tangent.to(sums.dtype).reshape(call.groups, 1, call.group_out)
            b = b.expand(call.groups, call.batch, call.group_out)
            terms.append(b * call.multiplier)
        y = call.result_from_matrix(sum(terms[1:], terms[0]))
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
    @_with_outer_levels
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
    @_with_outer_levels
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


def _combine_backward(keyset, grad, weight, tap_sums, *rest):
    tensors = [tensor for tensor in (grad, weight, tap_sums) if tensor is not None]
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if forward_ad._current_level >= 0:  # of any thread, so it says little
        wanted |= any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    if wanted:
        # _FusedMean.backward takes matrix products where derivatives of derivatives are wanted.
        raise RuntimeError(
            "_combine_backward: grad, weight and tap_sums must need no derivative, "
            "got one that may be asked for it"
        )
    return _below(_ops._combine_backward.default, keyset, grad, weight, tap_sums, *rest)


for _name, _kernel in {
    "fused_mean": _fused_mean,
    "_fused_mean_with_sums": _fused_mean_with_sums,
    "_tap_sums": _tap_sums,
    "_tap_spread": _tap_spread,
    "_combine_backward": _combine_backward,
}.items():
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)

"""What the operators need besides their kernels: fake kernels and gradients.

The gradients rest on one fact: backward needs the tap sums, never the input. So a call that wants
gradients goes through `_fused_mean_with_sums`, which returns them, and a call that wants none goes
straight to the backend's `fused_mean`, which never writes them. `_tap_sums` and `_tap_spread` are
each other's adjoint, hence each other's backward, and higher derivatives follow.
"""

import math

import torch
from torch import Tensor

from convt_reduce import _validation
from convt_reduce._validation import Settings, accumulate_dtype

_library = torch.library.Library("convt_reduce", "IMPL")
_ops = torch.ops.convt_reduce


# ---- fake kernels: shapes and checks, for meta and fake tensors ---------------------------------


@torch.library.register_fake("convt_reduce::fused_mean")
def _(
    input,
    weight,
    bias=None,
    stride=(1,),
    padding=(0,),
    output_padding=(0,),
    groups=1,
    dilation=(1,),
    multiplier=1.0,
):
    settings = Settings(stride, padding, output_padding, dilation)
    shape = _validation.check_fused_mean("fused_mean", input, weight, bias, settings, groups)
    return input.new_empty(shape)


@torch.library.register_fake("convt_reduce::_fused_mean_with_sums")
def _(
    input,
    weight,
    bias=None,
    stride=(1,),
    padding=(0,),
    output_padding=(0,),
    groups=1,
    dilation=(1,),
    multiplier=1.0,
):
    settings = Settings(stride, padding, output_padding, dilation)
    shape = _validation.check_fused_mean("fused_mean", input, weight, bias, settings, groups)
    sums = [*input.shape[: input.dim() - weight.dim() + 1], *weight.shape[:1], *weight.shape[2:]]
    return input.new_empty(shape), input.new_empty(sums, dtype=accumulate_dtype(input.dtype))


@torch.library.register_fake("convt_reduce::_tap_sums")
def _(input, kernel_size, stride=(1,), padding=(0,), output_padding=(0,), dilation=(1,)):
    settings = Settings(stride, padding, output_padding, dilation)
    shape = _validation.check_tap_sums(input, kernel_size, settings)
    return input.new_empty(shape, dtype=accumulate_dtype(input.dtype))


@torch.library.register_fake("convt_reduce::_tap_spread")
def _(tap_grads, size, dtype, stride=(1,), padding=(0,), output_padding=(0,), dilation=(1,)):
    settings = Settings(stride, padding, output_padding, dilation)
    shape = _validation.check_tap_spread(tap_grads, size, dtype, settings)
    return tap_grads.new_empty(shape, dtype=dtype)


# ---- gradients ----------------------------------------------------------------------------------


def _fused_mean_autograd(keyset, input, weight, bias=None, *rest, **kwargs) -> Tensor:
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _ops._fused_mean_with_sums.default(input, weight, bias, *rest, **kwargs)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.fused_mean.default.redispatch(
            keyset & torch._C._after_autograd_keyset, input, weight, bias, *rest, **kwargs
        )


_library.impl("fused_mean", _fused_mean_autograd, "Autograd", with_keyset=True)


def _save_for_fused_mean(ctx, inputs, output) -> None:
    input, weight, bias, stride, padding, output_padding, groups, dilation, multiplier = inputs
    spatial = weight.dim() - 2
    ctx.set_materialize_grads(False)
    # The weight serves input's gradient alone, and the tap sums the weight's: what is frozen costs
    # nothing. The bias is kept for its dtype only.
    ctx.needs = [t is not None and t.requires_grad for t in (input, weight, bias)]
    ctx.save_for_backward(weight if ctx.needs[0] else None, output[1] if ctx.needs[1] else None)
    ctx.size = input.shape[-spatial:]
    ctx.dtype = input.dtype
    ctx.weight_shape = weight.shape
    ctx.settings = Settings(stride, padding, output_padding, dilation)
    ctx.groups = groups
    ctx.multiplier = multiplier


def _fused_mean_backward(ctx, grad, grad_sums):
    weight, tap_sums = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs
    c_in, group_out, *kernel = ctx.weight_shape
    spatial = len(kernel)
    outputs = [
        _validation.output_size(n, k, ctx.settings.at(axis))
        for axis, (n, k) in enumerate(zip(ctx.size, kernel, strict=True))
    ]
    scale = ctx.multiplier / math.prod(outputs)
    grad_input = grad_weight = grad_bias = None
    grad_taps = grad_sums
    if grad is not None:
        # [N, groups, C_out/groups]; reshape copes with the strides of an expanded gradient.
        g = grad.to(accumulate_dtype(ctx.dtype)).reshape(-1, ctx.groups, group_out)
        if needs_input:
            w = weight.to(g.dtype).reshape(ctx.groups, -1, group_out, math.prod(kernel))
            taps = torch.einsum("ngo,gcot->ngct", g * scale, w)
            batch = grad.shape[: grad.dim() - spatial - 1]
            taps = taps.reshape(*batch, c_in, *kernel)
            grad_taps = taps if grad_sums is None else taps + grad_sums
        if needs_weight:
            sums = tap_sums.reshape(-1, ctx.groups, c_in // ctx.groups, math.prod(kernel))
            grad_weight = torch.einsum("ngo,ngct->gcot", g * scale, sums)
            grad_weight = grad_weight.reshape(ctx.weight_shape).to(ctx.dtype)
        if needs_bias:
            grad_bias = (g.sum(0).reshape(-1) * ctx.multiplier).to(ctx.dtype)
    if needs_input and grad_taps is not None:
        grad_input = _ops._tap_spread.default(grad_taps, ctx.size, ctx.dtype, *ctx.settings)
    return grad_input, grad_weight, grad_bias, None, None, None, None, None, None


torch.library.register_autograd(
    "convt_reduce::_fused_mean_with_sums", _fused_mean_backward, setup_context=_save_for_fused_mean
)


def _save_for_tap_sums(ctx, inputs, output) -> None:
    input, kernel_size, *settings = inputs
    ctx.size = input.shape[-len(kernel_size) :]
    ctx.dtype = input.dtype
    ctx.settings = settings


def _tap_sums_backward(ctx, grad):
    grad_input = _ops._tap_spread.default(grad, ctx.size, ctx.dtype, *ctx.settings)
    return grad_input, None, None, None, None, None


torch.library.register_autograd(
    "convt_reduce::_tap_sums", _tap_sums_backward, setup_context=_save_for_tap_sums
)


def _save_for_tap_spread(ctx, inputs, output) -> None:
    tap_grads, size, _, *settings = inputs
    ctx.kernel_size = tap_grads.shape[-len(size) :]
    ctx.settings = settings


def _tap_spread_backward(ctx, grad):
    grad_taps = _ops._tap_sums.default(grad, ctx.kernel_size, *ctx.settings)
    return grad_taps, None, None, None, None, None, None


torch.library.register_autograd(
    "convt_reduce::_tap_spread", _tap_spread_backward, setup_context=_save_for_tap_spread
)

"""Fake kernels: shapes and checks for meta and fake tensors, whose sizes may be symbols."""

import torch

from convt_reduce import _validation, _validation_backward
from convt_reduce._validation import Settings, accumulate_dtype


def _result_shape(
    input,
    weight,
    bias,
    stride=(1,),
    padding=(0,),
    output_padding=(0,),
    groups=1,
    dilation=(1,),
    multiplier=1.0,
):
    settings = Settings(stride, padding, output_padding, dilation)
    # Both operators speak as fused_mean: that is what the user called.
    return _validation.check_fused_mean("fused_mean", input, weight, bias, settings, groups)


@torch.library.register_fake("convt_reduce::fused_mean")
def _(input, weight, bias=None, *settings, **named_settings):
    shape = _result_shape(input, weight, bias, *settings, **named_settings)
    return input.new_empty(shape)  # after the check that there is an input at all


@torch.library.register_fake("convt_reduce::_fused_mean_with_sums")
def _(input, weight, bias=None, *settings, **named_settings):
    shape = _result_shape(input, weight, bias, *settings, **named_settings)
    kernel_size = weight.shape[2:]
    sums = [*shape[: -len(kernel_size) - 1], weight.shape[0], *kernel_size]
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


@torch.library.register_fake("convt_reduce::_combine_backward")
def _(grad, weight, tap_sums, kernel_size, groups, scale, multiplier, bias, channels_last):
    tap_shape, weight_shape = _validation_backward.check_combine_backward(
        grad, weight, tap_sums, kernel_size, groups
    )
    tap_grads = grad.new_empty(tap_shape, dtype=accumulate_dtype(grad.dtype))
    grad_weight = grad.new_empty(weight_shape)
    if channels_last and tap_sums is not None:
        c_in, c_out, *kernel = weight_shape
        grad_weight = grad.new_empty([c_in, *kernel, c_out]).movedim(-1, 1)
    channels = grad.shape[-len(kernel_size) - 1]
    return tap_grads, grad_weight, grad.new_empty([channels if bias else 0])

"""torch.vmap over any of the tensors, as one call.

A batch of inputs is a longer batch. A batch of weights on one input is more output channels. With
both, each batch element is a group of its own; a batch of biases counts as one of weights. No case
loops, and the input is copied only in the last case, if its batch is not next to its channels.
"""

import torch
from torch import Tensor

from convt_reduce import _validation

_ops = torch.ops.convt_reduce


def _front(tensor: Tensor | None, dim: int | None) -> Tensor | None:
    return tensor if tensor is None or dim is None else tensor.movedim(dim, 0)


def _with_sums(info, in_dims, input, weight, bias, settings, op):
    """Returns op's results with their batch dimensions in front, and which of them are batched."""
    batch = info.batch_size
    input_dim, weight_dim, bias_dim = in_dims[:3]
    input, weight, bias = (
        _front(t, d) for t, d in zip((input, weight, bias), in_dims[:3], strict=True)
    )
    stride, padding, output_padding, groups, dilation, multiplier = settings
    # Of one batch element, before anything below is arranged by its sizes.
    one = [
        t if d is None else t.select(0, 0) if batch > 0 else t.new_empty(t.shape[1:])
        for t, d in zip((input, weight, bias), in_dims[:3], strict=True)
    ]
    lists = _validation.Settings(stride, padding, output_padding, dilation)
    _validation.check_fused_mean("fused_mean", *one, lists, groups)
    if bias_dim is not None and weight_dim is None:
        weight, weight_dim = weight.unsqueeze(0).expand(batch, *weight.shape), 0

    def call(x, w, b, g):
        return op(x, w, b, stride, padding, output_padding, g, dilation, multiplier)

    if batch == 0:
        return [r.new_empty((0, *r.shape)) for r in call(*one, groups)], [True, True]
    if weight_dim is None:
        # N and the batch are one dimension; an unbatched input gets its N from the batch.
        spatial = weight.dim() - 2
        lead = input.shape[: -spatial - 1]
        results = call(input.flatten(0, len(lead) - 1), weight, bias, groups)
        return [r.unflatten(0, lead) for r in results], [True, True]

    _, c_in, group_out, *kernel = weight.shape
    per_group = [groups, batch, group_out]
    if bias is not None:
        # [batch, groups, group_out] or [groups, group_out], into the order of the channels below.
        bias = bias.reshape(-1, groups, group_out)
    if input_dim is None:
        # Channels in the order (group, batch, channel of the group).
        weight = weight.movedim(0, 1).reshape(c_in, batch * group_out, *kernel)
        if bias is not None:
            bias = bias.movedim(0, 1).expand(per_group).reshape(-1)
        y, *sums = call(input, weight, bias, groups)
        channel = y.dim() - len(kernel) - 1
        y = y.unflatten(channel, per_group).movedim(channel + 1, 0)
        y = y.flatten(channel + 1, channel + 2)
        return [y, *sums], [True, False]
    # Channels in the order (batch, group, channel of the group): each batch element has its own
    # groups.
    weight = weight.reshape(batch * c_in, group_out, *kernel)
    if bias is not None:
        bias = bias.expand(batch, groups, group_out).reshape(-1)
    channel = input.dim() - len(kernel) - 2
    results = call(
        input.movedim(0, channel).flatten(channel, channel + 1), weight, bias, batch * groups
    )
    return [r.unflatten(channel, (batch, -1)).movedim(channel, 0) for r in results], [True, True]


_DEFAULTS = ([1], [0], [0], 1, [1], 1.0)


@torch.library.register_vmap("convt_reduce::fused_mean")
def _(info, in_dims, input, weight, bias=None, *settings):
    def op(*arguments):
        return [_ops.fused_mean.default(*arguments)]

    settings = (*settings, *_DEFAULTS[len(settings) :])
    in_dims = (*in_dims, None)  # of a bias that was left out
    (y,), _ = _with_sums(info, in_dims, input, weight, bias, settings, op)
    return y, 0


@torch.library.register_vmap("convt_reduce::_fused_mean_with_sums")
def _(info, in_dims, input, weight, bias=None, *settings):
    settings = (*settings, *_DEFAULTS[len(settings) :])
    in_dims = (*in_dims, None)
    results, batched = _with_sums(
        info, in_dims, input, weight, bias, settings, _ops._fused_mean_with_sums.default
    )
    return tuple(results), tuple(0 if b else None for b in batched)


def _fold_batch(op, info, in_dims, tensor, sizes, *settings):
    tensor = tensor.movedim(in_dims[0], 0)
    lead = tensor.shape[: -len(sizes) - 1]
    return op(tensor.flatten(0, len(lead) - 1), sizes, *settings).unflatten(0, lead), 0


@torch.library.register_vmap("convt_reduce::_tap_sums")
def _(info, in_dims, input, kernel_size, *settings):
    return _fold_batch(_ops._tap_sums.default, info, in_dims, input, kernel_size, *settings)


@torch.library.register_vmap("convt_reduce::_tap_spread")
def _(info, in_dims, tap_grads, size, *settings):
    return _fold_batch(_ops._tap_spread.default, info, in_dims, tap_grads, size, *settings)

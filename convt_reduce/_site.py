"""What a fused forward calls: the operator where it fits the input, PyTorch's own call where not.

A model that was only traced has shown neither its ranks nor its sizes, so these functions decide
per call. Either answer is right for the nodes behind them, because those were left in place: steps
and reductions do the same to a tensor that is averaged already as to one that is not. Layers are
read when they are called, so that whatever computes their weight does so once, as before.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convt_reduce import _cost
from convt_reduce._match import DTYPES

_CONVOLUTIONS = {n: getattr(functional, f"conv_transpose{n}d") for n in (1, 2, 3)}
POOLS = {n: getattr(functional, f"avg_pool{n}d") for n in (1, 2, 3)}


def per_axis(value: Any, spatial: int) -> Sequence[int]:
    values = [value] if isinstance(value, (int, torch.SymInt)) else list(value)
    return values * spatial if len(values) == 1 else values


def output_shape(input: Tensor, channels: int, kernel_size: Sequence[int], settings: tuple) -> list:
    """The convolution's output shape; settings: stride, padding, output_padding, dilation."""
    spatial = len(kernel_size)
    lists = [per_axis(value, spatial) for value in settings]
    sizes = [
        (n - 1) * stride - 2 * padding + dilation * (k - 1) + output_padding + 1
        for n, k, stride, padding, output_padding, dilation in zip(
            input.shape[-spatial:], kernel_size, *lists, strict=True
        )
    ]
    return [*input.shape[: -spatial - 1], channels, *sizes]


_PLAIN = (Tensor, nn.Parameter)
_DEFAULTS = (
    Tensor.__torch_function__.__func__,
    torch._C._disabled_torch_function_impl,
)


def _has_its_own_functions(kind: type) -> bool:
    """Whether a subclass of Tensor decides itself what torch's functions do to it."""
    function = kind.__torch_function__
    return getattr(function, "__func__", function) not in _DEFAULTS


def may_leave_nothing(kernel_size: Sequence[int], settings: tuple) -> bool:
    """Whether a small input could have no output at all."""
    spatial = len(kernel_size)
    padding, dilation = per_axis(settings[1], spatial), per_axis(settings[3], spatial)
    axes = zip(kernel_size, padding, dilation, strict=True)
    return any(2 * p > d * (k - 1) for k, p, d in axes)


def _fits(
    input: Any,
    kernel_size: Sequence[int],
    settings: tuple,
    rank: int | None,
    window: Sequence[int] | None,
    dtype: torch.dtype | None,
    cost_rule: bool,
) -> bool:
    """Whether the operator takes this input, and whether what the match assumed of it holds."""
    spatial = len(kernel_size)
    if not isinstance(input, Tensor) or input.dtype not in DTYPES or input.is_nested:
        return False
    if type(input) not in _PLAIN and _has_its_own_functions(type(input)):
        return False  # it may do something else for a convolution
    if input.device.type not in ("cpu", "cuda", "meta") or input.layout is not torch.strided:
        return False
    if dtype is not None and not (
        input.dtype is dtype and not torch.is_autocast_enabled(input.device.type)
    ):
        return False
    if input.dim() != rank and (rank is not None or input.dim() - spatial not in (1, 2)):
        return False
    if window is not None or may_leave_nothing(kernel_size, settings):
        output = output_shape(input, 0, kernel_size, settings)[-spatial:]
        if window is not None and output != list(window):
            return False
        if not all(size > 0 for size in output):
            return False  # PyTorch returns an empty tensor here and there; the operator refuses
    if not cost_rule:
        return True
    batch = input.shape[0] if input.dim() == spatial + 2 else 1
    return _cost.pays(batch, input.shape[-spatial:], kernel_size, input.device.type)


def _layer_settings(layer: nn.Module, input: Tensor, output_size: Any) -> tuple:
    output_padding = layer.output_padding
    if output_size is not None:
        output_padding = layer._output_padding(
            input,
            output_size,
            layer.stride,
            layer.padding,
            layer.kernel_size,
            len(layer.kernel_size),
            layer.dilation,
        )
    return layer.stride, layer.padding, output_padding, layer.dilation


def layer_mean(
    layer: nn.Module,
    input: Tensor,
    output_size: Any = None,
    *,
    rank: int | None = None,
    window: Sequence[int] | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
    cost_rule: bool = True,
) -> Tensor:
    """``layer(input, output_size) * multiplier``, averaged over space if that can be done.

    Args:
        layer: an nn.ConvTransposeNd.
        input: ``[N, C_in, *spatial]`` or ``[C_in, *spatial]``.
        output_size: the layer's own second argument.
        rank: if given, average only for an input of so many dimensions.
        window: if given, average only if the convolution's output has these spatial sizes.
        multiplier: a number.
        dtype: if given, average only if that is the dtype that the convolution returns.
        cost_rule: average only if that pays.

    Returns:
        ``[N, C_out, 1, ..., 1]`` where it was averaged, else ``[N, C_out, *output]``.
    """
    settings = _layer_settings(layer, input, output_size)
    # The weight itself may be computed, and is read once alone.
    same = dtype is None or all(tensor.dtype is dtype for tensor in layer.parameters())
    conditions = (rank, window, dtype, cost_rule)
    if same and _fits(input, layer.kernel_size, settings, *conditions):
        stride, padding, output_padding, dilation = settings
        return torch.ops.convt_reduce.fused_mean.default(
            input,
            layer.weight,
            layer.bias,
            stride,
            padding,
            output_padding,
            layer.groups,
            dilation,
            multiplier,
        )
    y = layer(input) if output_size is None else layer(input, output_size)
    return y if multiplier == 1 else y * multiplier


def layer_shape(layer: nn.Module, input: Tensor, output_size: Any = None) -> torch.Size:
    """The shape that ``layer(input, output_size)`` has."""
    settings = _layer_settings(layer, input, output_size)
    return torch.Size(output_shape(input, layer.out_channels, layer.kernel_size, settings))


def function_mean(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    rank: int | None = None,
    window: Sequence[int] | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
    cost_rule: bool = True,
) -> Tensor:
    """The same for ``F.conv_transposeNd``, N being ``spatial``."""
    settings = (stride, padding, output_padding, dilation)
    fits = weight.dim() == spatial + 2 and weight.dtype in DTYPES and dtype in (None, weight.dtype)
    conditions = (rank, window, dtype, cost_rule)
    if fits and _fits(input, weight.shape[2:], settings, *conditions):
        return torch.ops.convt_reduce.fused_mean.default(
            input,
            weight,
            bias,
            per_axis(stride, spatial),
            per_axis(padding, spatial),
            per_axis(output_padding, spatial),
            groups,
            per_axis(dilation, spatial),
            multiplier,
        )
    convolution = _CONVOLUTIONS[spatial]
    y = convolution(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return y if multiplier == 1 else y * multiplier


def function_shape(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Size:
    """The shape that ``F.conv_transposeNd`` returns, N being ``spatial``."""
    settings = (stride, padding, output_padding, dilation)
    return torch.Size(output_shape(input, weight.shape[1] * groups, weight.shape[2:], settings))


def _all_one(y: Tensor, dims: Sequence[int]) -> bool:
    rank = y.dim()
    return all(-rank <= dim < rank and y.shape[dim] == 1 for dim in dims)


def function_positions(axes: Sequence[int], spatial: int, *arguments: Any) -> int:
    """How many positions that output has along some of its spatial axes, counted from 0."""
    shape = function_shape(spatial, *arguments)
    return math.prod([shape[len(shape) - spatial + axis] for axis in axes])


def positions(y: Tensor, shape: Sequence[int], axes: Sequence[int]) -> int:
    """How many elements along ``axes``, which are negative, each element of ``y`` stands for.

    ``y`` is what `layer_mean` returned, and ``shape`` what the convolution would have. If nothing
    was averaged that is 1.
    """
    if not _all_one(y, axes):
        return 1
    return math.prod([shape[axis] for axis in axes])


def times(y: Tensor, count: int) -> Tensor:
    """``y * count``, for what `positions` counted."""
    return y if isinstance(count, int) and count == 1 else y * count


def shape_of(y: Tensor, shape: Sequence[int], spatial: int) -> torch.Size:
    """The shape that ``y`` would have if nothing had been averaged.

    ``shape`` is what the convolution would have; a step may have added channels or images since.
    """
    return torch.Size([*y.shape[:-spatial], *shape[-spatial:]])


def pool_all(y: Tensor, spatial: int) -> Tensor:
    """``F.avg_poolNd`` with one window of the size that ``y`` has."""
    return POOLS[spatial](y, y.shape[-spatial:])


def pool(y: Tensor, shape: Sequence[int], window: Sequence[int], settings: Sequence) -> Tensor:
    """``F.avg_poolNd(y, window, *settings)``, where ``y`` may be averaged already.

    That it is shows in its sizes, unless the convolution's output, of ``shape``, has them anyway.
    """
    spatial = len(window)
    if _all_one(y, range(-spatial, 0)) and list(shape[-spatial:]) == list(window):
        return POOLS[spatial](y, 1)
    return POOLS[spatial](y, window, *settings)

"""The public function. Its work is done by the operator of the same name."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter


def fused_mean(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    multiplier: float = 1.0,
) -> Tensor:
    r"""The mean over space of a transposed convolution times a number, without the convolution.

    Equal to ``(F.conv_transposeNd(input, weight, bias, stride, padding, output_padding, groups,
    dilation) * multiplier).mean(spatial_dims, keepdim=True)`` for N = 1, 2 or 3, computed from sums
    over the input, which is read once:

    .. math::
        y_{n,o} = \text{multiplier} \Bigl( \frac{1}{M} \sum_{c} \sum_{t} w_{c,o,t} S_{n,c,t}
        + b_o \Bigr)

    where :math:`S_{n,c,t}` sums the inputs that tap :math:`t` sends inside the output and
    :math:`M` counts the output's positions. ``docs/math.md`` derives it.

    Args:
        input: ``[N, C_in, *spatial]`` or, unbatched, ``[C_in, *spatial]``, with 1 to 3 spatial
            axes; float32, float64, float16 or bfloat16; any strides. Contiguous and channels_last
            inputs are read in place.
        weight: ``[C_in, C_out / groups, *kernel_size]``, of input's dtype and on its device.
        bias: ``[C_out]``, of input's dtype and on its device, or None.
        stride, padding, output_padding, dilation: one int, or one per spatial axis, as in
            ``torch.nn.functional.conv_transpose2d``.
        groups: number of groups that C_in and C_out are split into.
        multiplier: a Python number; the mean is multiplied by it. A tensor is refused: as a number
            it would lose its gradient, and reading it from a GPU would wait for that.

    Returns:
        ``[N, C_out, 1, ..., 1]`` (unbatched: ``[C_out, 1, ..., 1]``), contiguous, of input's dtype.
        Sums and products are held in float32 (float64 for float64) and rounded once; the same
        inputs give the same bits on every call. Differentiable in input, weight and bias.

    Raises:
        RuntimeError: an argument is not as described, or the output would have no position; the
            message names the argument, what was expected and what came. For an argument of a wrong
            Python type the message is that of PyTorch's own parser, which names it too.
    """
    if isinstance(multiplier, Tensor):
        raise RuntimeError(
            "fused_mean: multiplier must be a Python number, got a tensor; "
            "multiply the result by it"
        )
    arguments = (
        input,
        weight,
        bias,
        _as_list(stride),
        _as_list(padding),
        _as_list(output_padding),
        groups,
        _as_list(dilation),
        multiplier,
    )
    operator = torch.ops.convt_reduce.fused_mean.default
    if (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()  # the dispatcher goes past it
        or _wants_derivatives(input, weight, bias)
    ):
        return operator(*arguments)
    # Past the Autograd kernel, which is Python and costs a third of a small call.
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _wants_derivatives(*tensors: Tensor | None) -> bool:
    """Whether anything that takes derivatives may have to see this call."""
    if forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None:
        return True
    enabled = torch.is_grad_enabled()
    return any(
        tensor is not None
        and (type(tensor) not in (Tensor, Parameter) or (enabled and tensor.requires_grad))
        for tensor in tensors
    )


def _as_list(value: int | Sequence[int]) -> Sequence[int]:
    return [value] if isinstance(value, (int, torch.SymInt)) else value

"""The matrix products that derivatives are made of: three views of a call's tensors, per group."""

import functools
import math

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter

from convt_reduce._validation import Settings, accumulate_dtype, output_size

_ops = torch.ops.convt_reduce


def product(a: Tensor, b: Tensor) -> Tensor:
    """[groups, m, k] x [groups, k, n] -> [groups, m, n].

    bmm and not einsum, which batched gradients (torch.autograd.grad with is_grads_batched) cannot
    take. cuBLAS does not promise repeatable bits without an environment variable that has to be set
    before the process starts; where the program asks for them, the operator itself, on an input of
    one position with a kernel of one tap, is a matrix product that does.
    """
    groups, m, k = a.shape
    if k == 0 or not (a.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return torch.bmm(a, b)
    n = b.shape[2]
    x = a.transpose(0, 1).reshape(m, groups * k, 1)
    y = _ops.fused_mean.default(x, b.reshape(groups * k, n, 1), None, [1], [0], [0], groups)
    return y.reshape(m, groups, n).transpose(0, 1)


# Up to so many multiplications per product, one kernel for all of backward's products takes less
# time than a matrix product, which costs some 20 microseconds however small it is on a GPU. Beyond
# so many images or output channels of a group, the sums over them would be long for the few threads
# that share one, and lose digits.
_MOST_MULTIPLICATIONS = {"cuda": 2**25, "cpu": 2**15}
_MOST_TERMS = 1024


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether nothing is to be known of a tensor's use but its numbers: no subclass, no level."""
    return tensor is None or (
        type(tensor) in (Tensor, Parameter) and not _functorch.is_functorch_wrapped_tensor(tensor)
    )


class Call:
    """What a call's derivative formulas need besides tensors.

    Most calls of a model in training mode never get here again, or by the native way, so nothing is
    worked out before it is asked for.
    """

    def __init__(self, input, weight, settings: Settings, groups: int, multiplier: float) -> None:
        self.settings = settings
        self.groups = groups
        self.multiplier = multiplier
        self.dtype = input.dtype
        self.input_shape = input.shape
        self.weight_shape = weight.shape
        self.c_in, self.group_out, *self.kernel_size = weight.shape
        # Sizes of 1 can make a weight this and contiguous at once; its strides then tell which.
        self.weight_is_channels_last = weight.stride(1) == 1 and weight.stride(-1) == self.group_out

    @functools.cached_property
    def group_in(self) -> int:
        return self.c_in // self.groups

    @functools.cached_property
    def taps(self) -> int:
        return math.prod(self.kernel_size)

    @functools.cached_property
    def size(self) -> torch.Size:
        return self.input_shape[-len(self.kernel_size) :]

    @functools.cached_property
    def batch_shape(self) -> torch.Size:
        """[N], or [] if unbatched."""
        return self.input_shape[: -len(self.kernel_size) - 1]

    @functools.cached_property
    def batch(self) -> int:
        return math.prod(self.batch_shape)

    @functools.cached_property
    def scale(self) -> float:
        outputs = (
            output_size(n, k, self.settings.at(axis))
            for axis, (n, k) in enumerate(zip(self.size, self.kernel_size, strict=True))
        )
        return self.multiplier / math.prod(outputs)

    def native_gradients(
        self, grad: Tensor, weight: Tensor | None, sums: Tensor | None, needs_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of the tap sums, the weight and the bias, by the operator made for them.

        What is not wanted (no weight, no sums, no bias) comes back without elements. None where
        this is not the way: large products, deterministic mode on a GPU, and wherever derivatives
        of these derivatives may be wanted.
        """
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return None
        # A graph that is being traced may be differentiated later.
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            return None
        # In this mode an element's gradient has the bits that it has alone, whatever the batch.
        if grad.is_cuda and torch.are_deterministic_algorithms_enabled():
            return None
        if not (_is_plain(grad) and _is_plain(weight) and _is_plain(sums)):
            return None
        most = _MOST_MULTIPLICATIONS.get(grad.device.type)
        if most is None:
            return None
        if self.batch * self.weight_shape.numel() > most:
            return None
        if max(self.batch, self.group_out) > _MOST_TERMS:
            return None
        return _ops._combine_backward.default(
            grad,
            weight,
            sums if sums is None else sums.contiguous(),
            self.kernel_size,
            self.groups,
            self.scale,
            self.multiplier,
            needs_bias,
            self.weight_is_channels_last,
        )

    # The three matrices per group of which every formula is a product.

    def result_matrix(self, y: Tensor) -> Tensor:
        """[N, C_out, 1..] -> [groups, N, C_out/groups], in the accumulate dtype."""
        wide = y.to(accumulate_dtype(self.dtype))
        return wide.reshape(self.batch, self.groups, self.group_out).transpose(0, 1)

    def sums_matrix(self, sums: Tensor) -> Tensor:
        """[N, C_in, *k] -> [groups, N, C_in/groups * taps]."""
        return sums.reshape(self.batch, self.groups, self.group_in * self.taps).transpose(0, 1)

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """[C_in, C_out/groups, *k] -> [groups, C_in/groups * taps, C_out/groups]."""
        wide = weight.to(accumulate_dtype(self.dtype))
        by_tap = wide.reshape(self.groups, self.group_in, self.group_out, self.taps)
        return by_tap.transpose(2, 3).reshape(self.groups, -1, self.group_out)

    def sums_from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of sums_matrix."""
        sums = matrix.transpose(0, 1)
        return sums.reshape(*self.batch_shape, self.c_in, *self.kernel_size)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of weight_matrix, with the strides of a contiguous or channels_last weight.

        DistributedDataParallel compares them to the letter, strides of dimensions of size 1 too.
        """
        if self.weight_is_channels_last:  # as the matrix is
            by_tap = matrix.reshape(self.c_in, *self.kernel_size, self.group_out)
            return by_tap.movedim(-1, 1).to(self.dtype)
        by_tap = matrix.reshape(self.groups, self.group_in, self.taps, self.group_out)
        weight = by_tap.transpose(2, 3).reshape(self.weight_shape).to(self.dtype)
        # What this is so far is a channels_last view, of which autograd would make .grad a copy.
        return weight.clone(memory_format=torch.contiguous_format)

    def result_from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of result_matrix."""
        y = matrix.transpose(0, 1)
        ones = [1] * len(self.kernel_size)
        c_out = self.groups * self.group_out
        return y.reshape(*self.batch_shape, c_out, *ones).to(self.dtype)

    def tap_sums(self, input: Tensor) -> Tensor:
        return _ops._tap_sums.default(input, self.kernel_size, *self.settings)

    def spread(self, tap_grads: Tensor) -> Tensor:
        return _ops._tap_spread.default(tap_grads, self.size, self.dtype, *self.settings)

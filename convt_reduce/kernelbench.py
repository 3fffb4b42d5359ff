"""KernelBench level 2, problem 44: the reference and its replacement, with one set of weights.

The problem (https://github.com/ScalingIntelligence/KernelBench): a transposed convolution, times a
number, averaged over space, and averaged once more, which changes nothing. Both modules have the
same constructor, draw the same parameters in the same order and share their state_dict keys.
"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """The reference: what PyTorch does, step by step.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding: of the
            ``nn.ConvTranspose2d``.
        multiplier: a Python number between the convolution and the averages.

    Input ``[N, in_channels, H, W]``, result ``[N, out_channels, 1, 1]``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int],
        padding: int | tuple[int, int],
        output_padding: int | tuple[int, int],
        multiplier: float,
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding
        )
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        """Runs the convolution and averages its output."""
        scaled = self.conv_transpose(x) * self.multiplier
        averaged = scaled.mean(dim=(2, 3), keepdim=True)
        return averaged.mean(dim=(2, 3), keepdim=True)


class ModelNew(Model):
    """The replacement: the same module with one call of ``fused_mean`` for its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Sums the input and combines the sums with the weights."""
        conv = self.conv_transpose
        return torch.ops.convt_reduce.fused_mean(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.output_padding,
            conv.groups,
            conv.dilation,
            self.multiplier,
        )


def get_init_inputs() -> list:
    """The constructor arguments that the problem is scored with."""
    return [64, 128, 3, 2, 1, 1, 0.5]


def get_inputs() -> list[Tensor]:
    """The input that the problem is scored with: uniform in [0, 1), ``[16, 64, 128, 128]``."""
    return [torch.rand(16, 64, 128, 128)]

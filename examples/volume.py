"""Volumes: a learnable scale, batch normalisation and dropout stand between, all of them in eval
mode. In train mode the statistics come from the convolution's output, so it is carried out."""

import torch
from torch import Tensor, nn


class Volume(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(c_in, c_out, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(c_out, 1, 1, 1) + 0.5)
        self.norm = nn.BatchNorm3d(c_out)
        self.drop = nn.Dropout3d(0.2)
        self.pool = nn.AdaptiveAvgPool3d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.drop(self.norm(self.up(x) * self.scale))).flatten(1)


def build(small: bool = False) -> tuple[nn.Module, Tensor]:
    """The model in eval mode, and an input for it."""
    if small:
        return Volume(4, 6).eval(), torch.randn(2, 4, 12, 12, 12)
    return Volume(16, 32).eval(), torch.randn(8, 16, 32, 48, 48)

"""The plainest case: a transposed convolution, a number, and the mean over space taken twice."""

import torch
from torch import Tensor, nn


class TwoMeans(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(c_in, c_out, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 0.5
        y = torch.mean(y, dim=[2, 3], keepdim=True)
        return torch.mean(y, dim=[2, 3], keepdim=True)


def build(small: bool = False) -> tuple[nn.Module, Tensor]:
    """The model, and an input for it."""
    if small:
        return TwoMeans(8, 8), torch.randn(2, 8, 24, 24)
    return TwoMeans(64, 128), torch.randn(16, 64, 128, 128)

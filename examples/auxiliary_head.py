"""An encoder and decoder with an auxiliary head: the decoder's convolutions are needed and stay,
the head's own upsampling is only averaged and is fused."""

import torch
from torch import Tensor, nn


class AuxiliaryHead(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width, classes, 2, 2),
        )
        self.auxiliary = nn.Sequential(
            nn.ConvTranspose2d(2 * width, 4 * width, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(image)
        return self.decoder(features), self.auxiliary(features)


def build(small: bool = False) -> tuple[nn.Module, Tensor]:
    """The model in eval mode, and an input for it."""
    if small:
        return AuxiliaryHead(4, 3).eval(), torch.randn(2, 3, 48, 48)
    return AuxiliaryHead(32, 19).eval(), torch.randn(8, 3, 256, 256)

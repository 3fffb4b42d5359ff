"""One axis: an upsampler for audio whose last layer's waveform features are pooled to a score.

The layers before it are followed by a non-linear step, so only the last one is fused.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class AudioScore(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.ConvTranspose1d(width, width // 2, 8, stride=4, padding=2)
        self.second = nn.ConvTranspose1d(width // 2, width, 16, stride=8, padding=4)
        self.score = nn.Linear(width, 1)

    def forward(self, frames: Tensor) -> Tensor:
        y = functional.leaky_relu(self.first(frames), 0.1)
        return self.score(self.second(y).flatten(2).mean(-1))


def build(small: bool = False) -> tuple[nn.Module, Tensor]:
    """The model, and an input for it."""
    if small:
        return AudioScore(8), torch.randn(2, 8, 300)
    return AudioScore(128), torch.randn(16, 128, 4000)

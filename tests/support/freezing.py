"""The backend that freezes weights, and models whose weights it freezes."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.values import rnd

NAME = "inductor-freezing"


class Layers(nn.Module):
    """Two layers; ``weight`` is the first one's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(rnd(33, 21, seed=seed))
        self.bias = nn.Parameter(rnd(33, seed=seed + 1))
        self.last = nn.Parameter(rnd(5, 33, seed=seed + 2) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.weight, self.bias).tanh()
        return nn.functional.linear(hidden, self.last)

    def inputs(self) -> torch.Tensor:
        return rnd(4, 21, seed=9)


class Convolutions(nn.Module):
    """Two of them with batch norms, odd channels, and a pooled linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 13, 3, padding=1, bias=False),
            nn.BatchNorm2d(13),
            nn.ReLU(),
            nn.Conv2d(13, 7, 3, stride=2),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(7, 5),
        )
        for number, tensor in enumerate([*self.parameters(), *self.buffers()]):
            if tensor.is_floating_point():
                tensor.data.copy_(rnd(*tensor.shape, seed=seed + number).abs() / 2 + 0.1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def inputs(self) -> torch.Tensor:
        return rnd(2, 3, 11, 9, seed=9)

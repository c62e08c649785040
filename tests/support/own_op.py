"""An op that only a process which imports this has: no child process does."""

from __future__ import annotations

import torch


@torch.library.custom_op("fuseboard_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)

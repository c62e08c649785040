"""Something to explain. Try::

fuseboard explain examples/explain_me.py:attention
fuseboard explain examples/explain_me.py:broken
fuseboard explain examples/explain_me.py:training
fuseboard explain examples/explain_me.py:attention --json | jq '.graphs[].regions'
"""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


def attention():
    """Return what is to be called: inference of one block."""
    model = Block().eval().requires_grad_(False)
    return model, (torch.randn(2, 64, 128),)


def broken():
    """Return a function that Dynamo can't capture as one graph."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        print("Dynamo can't trace this print, so the graph ends here")
        if x.sum() > 0:  # a tensor's value decides: the graph ends here as well
            x = x / x.sum()
        return torch.softmax(x, dim=-1)

    return step, (torch.randn(8, 199),)


def training():
    """Do the work here instead: what it compiles with fuseboard is explained."""
    model = torch.compile(Block(), backend="fuseboard")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 64, 128)).square().mean().backward()
        optimizer.step()

"""Models that the tests package, and that a fresh process makes again to compare with."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import nn

Pair = namedtuple("Pair", "first second")


def seeded(make):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return make()


class Network(nn.Module):
    """Arguments by position and by name; a dict of results."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x, mask=None, scale=2.0, *, flag=True):
        y = self.norm(self.linear(x)).relu() * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {"y": y, "flag": flag, "parts": (y.mean(-1), [y.sum()]), "none": None}


class Tied(nn.Module):
    """Two names for one weight, and a transposed one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.head = nn.Linear(16, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(16, 16).t())

    def forward(self, ids):
        return self.head(self.embedding(ids) @ self.turned)


class Counter(nn.Module):
    """A buffer that each call writes to, as a cache of keys and values is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, place):
        self.cache.index_copy_(0, place, x)
        self.calls += 1
        return Pair(self.cache.sum(0), self.calls * 2)


class Swap(nn.Module):
    """Two buffers that change places."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(3))
        self.register_buffer("b", torch.randn(3))

    def forward(self, x):
        a = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(a)
        return x * self.a - self.b


def write_to_input(x, y):
    """Writes to an argument, and returns it."""
    x.add_(y)
    return x, y * 2


def views(x):
    """Results that share memory with the argument."""
    return x, x[1:], x.t(), x * 2


def normalised():
    """Running statistics, in training mode."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()


def images():
    return torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)


#: name → (model, calls): each call is (args, kwargs); the first is that which is packaged.
CASES = {
    "network": (
        lambda: Network().eval(),
        [
            ((torch.randn(5, 16),), {"mask": torch.rand(5, 8) > 0.5}),
            ((torch.randn(5, 16), torch.rand(5, 8) > 0.5), {"flag": True}),
            ((), {"mask": torch.rand(5, 8) > 0.5, "x": torch.randn(16, 5).t()}),
        ],
    ),
    "tied": (lambda: Tied().eval(), [((torch.arange(6) % 7,), {}), ((torch.arange(1, 7),), {})]),
    "counter": (
        lambda: Counter(),
        [((torch.randn(1, 3), torch.tensor([i])), {}) for i in (1, 0, 3)],
    ),
    "swap": (lambda: Swap(), [((torch.randn(3),), {}) for _ in range(3)]),
    "write_to_input": (
        lambda: write_to_input,
        [((torch.randn(4, 3), torch.randn(4, 3)), {}) for _ in range(2)],
    ),
    "views": (lambda: views, [((torch.randn(4, 3),), {}) for _ in range(2)]),
    "normalised": (normalised, [((images(),), {}) for _ in range(3)]),
}

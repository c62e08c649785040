"""Models to train, small: each takes a batch and gives a loss. Weights from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, ...]

CLASSES = 7


@dataclass(frozen=True)
class Task:
    """A model and its data.

    :ivar batch: step → inputs, floating ones in float32.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()


class _Loss(nn.Module):
    """Cross entropy of a transformers model's logits."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model = model
        self.argument = argument

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(**{self.argument: inputs}).logits, labels)


def bert() -> nn.Module:
    """Two layers, dropout in attention and elsewhere, a classifier on the pooled token."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=CLASSES,
    )
    return _Loss(BertForSequenceClassification(config), "input_ids")


def resnet18(activation: str = "relu") -> nn.Module:
    """ResNet-18 at an eighth of its width: every op and every batch norm of it."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32, 64],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        hidden_act=activation,
        num_labels=CLASSES,
    )
    return _Loss(ResNetForImageClassification(config), "pixel_values")


class LSTM(nn.Module):
    """Two stacked LSTMs of cells, unrolled over time in one graph."""

    def __init__(self, width: int = 24, words: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, :-1])
        for cell in self.cells:
            state = (x.new_zeros(len(x), x.shape[-1]), x.new_zeros(len(x), x.shape[-1]))
            steps = []
            for t in range(x.shape[1]):
                state = cell(x[:, t], state)
                steps.append(state[0])
            x = self.drop(torch.stack(steps, 1))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


class BuiltInLSTM(nn.Module):
    """``nn.LSTM`` of two layers, then a layer norm; see ``torch._dynamo.config.allow_rnn``."""

    def __init__(self, width: int = 24, words: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(ids[:, :-1]))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class NanoGPT(nn.Module):
    """Four layers, four heads, 128 wide, blocks of 64; the head shares the embedding's weight."""

    def __init__(self, layers: int = 4, heads: int = 4, width: int = 128, words: int = 65) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(_Layer(width, heads, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        known, wanted = ids[:, :-1], ids[:, 1:]
        x = self.embed(known) + self.place(torch.arange(known.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def _drawn(*parts: Callable[[torch.Generator], torch.Tensor]) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 + step)
        return tuple(part(generator) for part in parts)

    return batch


def _ints(high: int, *shape: int) -> Callable[[torch.Generator], Any]:
    return lambda generator: torch.randint(high, shape, generator=generator)


def _normal(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda generator: torch.randn(shape, generator=generator)


_images = _drawn(_normal(16, 3, 32, 32), _ints(CLASSES, 16))


def _smooth_resnet18() -> nn.Module:
    return resnet18("silu")


TASKS = {
    task.name: task
    for task in (
        Task("bert", bert, _drawn(_ints(97, 5, 13), _ints(CLASSES, 5))),
        Task("resnet18", resnet18, _images),
        Task("resnet18-silu", _smooth_resnet18, _images),
        Task("lstm", LSTM, _drawn(_ints(31, 4, 8))),
        Task("nn.LSTM", BuiltInLSTM, _drawn(_ints(31, 4, 8))),
        Task("nanogpt", NanoGPT, _drawn(_ints(65, 3, 65))),
    )
}

"""The models of the GPU check in plain torch: BERT, a decode step of GPT-2, a layer of Llama."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """What a model is made of.

    :ivar cache: tokens that a decode step finds in its cache.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    batch: int
    length: int
    words: int = 0
    cache: int = 0


SIZES = {
    "bert-base": Sizes(12, 768, 12, 3072, batch=8, length=128, words=30522),
    "gpt2-decode": Sizes(12, 768, 12, 3072, batch=1, length=1, words=50257, cache=512),
    "llama-block": Sizes(1, 4096, 32, 11008, batch=1, length=2048),
}
TINY = {
    "bert-base": Sizes(2, 16, 2, 32, batch=1, length=4, words=50),
    "gpt2-decode": Sizes(2, 16, 2, 32, batch=1, length=1, words=50, cache=4),
    "llama-block": Sizes(1, 16, 2, 24, batch=1, length=4),
}


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, bias: bool = True) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=bias)
        self.out = nn.Linear(sizes.width, sizes.width, bias=bias)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values: (batch, heads, length, size)."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def join(self, x: Tensor) -> Tensor:
        batch, _, length, _ = x.shape
        return self.out(x.transpose(1, 2).reshape(batch, length, -1))


class BertLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.first, self.second = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.up, self.down = (
            nn.Linear(sizes.width, sizes.hidden),
            nn.Linear(sizes.hidden, sizes.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention.split(x)
        x = self.first(x + self.attention.join(F.scaled_dot_product_attention(q, k, v)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.places = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.norm = nn.LayerNorm(sizes.width)
        self.layers = nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.places)
        for layer in self.layers:
            x = layer(x)
        return x


class GptLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.first, self.second = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.up, self.down = (
            nn.Linear(sizes.width, sizes.hidden),
            nn.Linear(sizes.hidden, sizes.width),
        )

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = self.attention.split(self.first(x))
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        x = x + self.attention.join(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class GptStep(nn.Module):
    """The next token's logits, from the last token and the keys and values before it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(GptLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Tensor, cache: Tensor) -> Tensor:
        x = self.words(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, cache[number, 0], cache[number, 1])
        return self.norm(x) @ self.words.weight.t()


class LlamaLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes, bias=False)
        self.first, self.second = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        size = sizes.width // sizes.heads
        angles = torch.arange(sizes.length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention.split(self.first(x))
        q, k = (t * self.cos + _turned(t) * self.sin for t in (q, k))
        x = x + self.attention.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden = self.second(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def make(name: str, tiny: bool, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in bfloat16 and what to call it with."""
    sizes = (TINY if tiny else SIZES)[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16
    shape = (sizes.batch, sizes.length)
    if name == "llama-block":
        model: nn.Module = LlamaLayer(sizes)
        inputs = (torch.randn(*shape, sizes.width, dtype=dtype),)
    elif name == "bert-base":
        model, inputs = Bert(sizes), (torch.randint(0, sizes.words, shape),)
    else:
        model = GptStep(sizes)
        size = sizes.width // sizes.heads
        cache = torch.randn(sizes.layers, 2, sizes.batch, sizes.heads, sizes.cache, size)
        inputs = (torch.randint(0, sizes.words, shape), cache.to(dtype))
    return model.to(device, dtype), tuple(x.to(device) for x in inputs)

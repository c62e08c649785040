"""For tests of attention: whether it was found, and how exact what stands in its place is."""

from __future__ import annotations

from typing import Any

import torch

from fuseboard.fuse import attention
from fuseboard.report.data import ledger


def rewrite_however_small(monkeypatch: Any) -> None:
    """Attention of few scores is rewritten too; what other tests found isn't counted."""
    for least in ("LEAST_SCORES", "LEAST_SCORES_WITH_GRADIENT", "LEAST_KEYS_WITH_GRADIENT"):
        monkeypatch.setattr(attention, least, 0)
    ledger.clear()


def found() -> int:
    """How many attentions were written as one op."""
    fusions = [one for graph in ledger.graphs() for one in graph.fusions]
    return sum(one.plugin == "attention" and one.applied for one in fusions)


def error(got: torch.Tensor, precise: torch.Tensor) -> float:
    """The root of the mean square of what it is off."""
    return float((got.detach().double() - precise.detach()).square().mean().sqrt())


def no_further(got: torch.Tensor, eager: torch.Tensor, precise: torch.Tensor) -> None:
    """From float64 than twice as far as eager is."""
    assert error(got, precise) <= 2 * error(eager, precise)


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in values])

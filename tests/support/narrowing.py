"""What tests of ``tolerance`` share: a plugin that narrows wherever it runs, metrics, reports."""

from __future__ import annotations

from typing import Any

import torch

import fuseboard
from fuseboard.fuse import narrow
from fuseboard.report.data import CandidateReport, GraphReport
from tests.support.eager_loses import MEASURE

NAME = "narrowing"


@fuseboard.hookimpl
def fuseboard_narrow(graph: Any) -> Any:
    """The board's own rewrites, however slow they are here, under another format's name."""
    offered = narrow.fuseboard_narrow(graph)
    return offered and [fuseboard.Narrowing("bf16", offered[0].changes, offered[0].fusions)]


def agreement(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The share of rows whose largest element is another one."""
    return float((result.argmax(-1) != reference.argmax(-1)).double().mean())


def failing(result: torch.Tensor) -> float:
    raise ArithmeticError(f"of {tuple(result.shape)}")


def negative(reference: torch.Tensor) -> float:
    return -1.0


def compiled(target: Any, *backends: str, **options: Any) -> Any:
    """What comes last among candidates is the fastest: what is narrower, if it is right."""
    options = {"backends": [*backends, "eager"], "margin": 0.0, **options}
    options.setdefault("stages", {"measure": MEASURE})
    return torch.compile(target, backend="fuseboard", options=options)


def report() -> GraphReport:
    return fuseboard.last_report().graphs[0]


def rows() -> dict[str, CandidateReport]:
    return {one.name: one for one in report().candidates}

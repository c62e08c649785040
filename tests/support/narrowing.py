"""A plugin that narrows to bfloat16 wherever it runs, and metrics, for tests of ``tolerance``."""

from __future__ import annotations

from typing import Any

import torch

import fuseboard
from fuseboard.fuse import narrow

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

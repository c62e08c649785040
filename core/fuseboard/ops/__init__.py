"""Facts about single ops, for all stages: cost, effects, draws, views; and the board's own ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuseboard.ops import linear_cross_entropy as linear_cross_entropy  # graphs call its ops
from fuseboard.ops.attention import attention
from fuseboard.ops.attention_formula import formula

#: Ops that the board's passes write → what each stands for, in torch's ops: a decomposition.
#: Not ``linear_cross_entropy``, which is there to hold less than what it stands for.
OWN_OPS: Mapping[Any, Callable[..., Any]] = {attention: formula}

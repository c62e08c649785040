"""The numbers of the protocol: how long to warm up, how many rounds, when to stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Input sets per model. More than one, so that no arm lives off values that it saw the call before.
POOL_SIZE = 4


@dataclass(frozen=True)
class Protocol:
    """How one worker measures.

    :ivar warmup_calls: at least so many calls before anything counts.
    :ivar warmup_window: the last so many calls must agree ...
    :ivar warmup_spread: ... within this share of their median.
    :ivar warmup_s: give up waiting for them to agree after so long; the record then says unsteady.
    :ivar rounds: at least so many rounds, if ``budget_s`` allows.
    :ivar max_rounds: never more.
    :ivar fill_s: go on past ``rounds`` until so long went by: small models afford more.
    :ivar budget_s: stop after so long even short of ``rounds``, but not before ``min_rounds``.
    :ivar burst_s: calls shorter than this are timed several at a time. One call of a small model
        right after another arm's finds caches full of the other's packed weights.
    :ivar max_burst: never more calls in a burst.
    :ivar timeout_s: a worker that takes longer has failed.
    :ivar seed: of the order within rounds. Weights and inputs have fixed seeds of their own.
    """

    warmup_calls: int = 5
    warmup_window: int = 5
    warmup_spread: float = 0.03
    warmup_s: float = 15.0
    rounds: int = 30
    max_rounds: int = 100
    min_rounds: int = 5
    fill_s: float = 8.0
    budget_s: float = 90.0
    burst_s: float = 0.01
    max_burst: int = 1000
    timeout_s: float = 1200.0
    seed: int = 0

    def is_steady(self, calls_s: Sequence[float]) -> bool:
        """Whether there were calls enough and the last of them agree."""
        if len(calls_s) < max(self.warmup_calls, self.warmup_window):
            return False
        last = sorted(calls_s[-self.warmup_window :])
        return last[-1] - last[0] <= self.warmup_spread * last[len(last) // 2]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FULL = Protocol()
#: For a look, not for a claim: a third of the rounds.
QUICK = Protocol(warmup_s=3.0, rounds=10, max_rounds=30, fill_s=1.0, budget_s=15.0, timeout_s=600.0)

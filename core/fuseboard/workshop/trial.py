"""Which of two programs answers the user's calls faster: the calls themselves tell.

Both answer them in turn, so that what the machine does meanwhile hits both. Nothing is computed
for timing's sake.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from fuseboard.forks import fork_safe_lock

Run = Callable[..., Any]

#: Calls of each after which the test may end, and after which it does.
LOOKS = (4, 8, 16, 32)
#: Standard errors of the difference of medians, in logarithms, by which one wins before the end.
SURE = 3.0
#: Calls of each whose times don't count: they fill caches.
WARM = 1
#: Which of the two answers, so that a drift hits both alike.
_ORDER = (0, 1, 1, 0)


class Trial:
    """Lets two programs answer calls in turn until one has won.

    :param runs: two programs that answer the same calls.
    :param margin: the share of the second one's time by which the first has to win; the second has
        won a comparison before.
    :param decided: is told the position of the winner, once, in the call that decides.
    """

    def __init__(self, runs: Sequence[Run], margin: float, decided: Callable[[int], None]) -> None:
        self._runs = tuple(runs)
        self._margin = margin
        self._decided = decided
        self._turns = itertools.count()
        self._times: tuple[list[float], list[float]] = ([], [])
        self._lock = fork_safe_lock()
        self._is_over = False

    @property
    def latencies_us(self) -> tuple[float, float]:
        """The medians so far; NaN where nothing was timed."""
        first, second = (1e6 * median(one[WARM:] or [math.nan]) for one in self._times)
        return first, second

    @property
    def calls(self) -> int:
        """How many were timed."""
        return sum(max(len(one) - WARM, 0) for one in self._times)

    def call(self, *args: Any) -> Any:
        """Answer a call by the one whose turn it is."""
        which = _ORDER[next(self._turns) % len(_ORDER)]
        start = time.perf_counter()
        results = self._runs[which](*args)
        self._note(which, time.perf_counter() - start)
        return results

    def _note(self, which: int, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self._times[which].append(seconds)
            winner = self._winner()
            self._is_over = winner is not None
        if winner is not None:
            self._decided(winner)

    def _winner(self) -> int | None:
        first, second = (one[WARM:] for one in self._times)
        count = min(len(first), len(second))
        if count not in LOOKS or len(first) != len(second):
            return None
        behind = math.log(median(second) / median(first)) - math.log1p(self._margin)
        error = math.hypot(_error(first), _error(second))
        if abs(behind) < SURE * error and count < LOOKS[-1]:
            return None
        return 0 if behind > 0 else 1


def _error(times: Sequence[float]) -> float:
    """The standard error of the logarithm of a median, from the quartiles."""
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return 0.93 * (high - low) / middle / math.sqrt(len(times))

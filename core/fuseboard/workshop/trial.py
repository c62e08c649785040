"""Which of two programs answers the user's calls faster: the calls themselves tell.

Both answer them in turn, so that what the machine does meanwhile hits both. Nothing is computed
for timing's sake.

Calls of other sizes take another time. So they take turns among calls of the same sizes, and the
two calls of a turn make a pair: the ratio of their times is comparable to that of any other pair.
Where sizes hardly come again there are few pairs, or none; then what won before has won.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from fuseboard.forks import fork_safe_lock

Run = Callable[..., Any]

#: Pairs of calls after which the test may end, and after which it does.
LOOKS = (4, 8, 16, 32)
#: Standard errors of the median ratio, in logarithms, by which one wins before the end.
SURE = 3.0
#: Pairs of the same sizes whose times don't count: they fill caches.
WARM = 1
#: Calls after which the test ends, however few pairs there are; those passed by included.
MOST_CALLS = 256
#: Which of the two answers, so that a drift hits both alike.
_ORDER = (0, 1, 1, 0)
#: What no call takes less than: clocks are coarse on some systems.
_LEAST_S = 1e-9


class _Times:
    """What calls of the same sizes took.

    :param first_turn: where in the order of turns they begin.
    """

    def __init__(self, first_turn: int) -> None:
        self.turn = first_turn
        self.of: tuple[list[float], list[float]] = ([], [])


class Trial:
    """Lets two programs answer calls in turn until one has won.

    :param runs: two programs that answer the same calls.
    :param margin: the share of the second one's time by which the first has to win; the second has
        won a comparison before.
    :param decided: is told the position of the winner, once, in the call that decides.
    :param sizes_of: a function of a call's arguments, equal for the same sizes; None where all
        calls are of the same.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        margin: float,
        decided: Callable[[int], None],
        sizes_of: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        self._runs = tuple(runs)
        self._margin = margin
        self._decided = decided
        self._sizes_of = sizes_of
        self._times: dict[Any, _Times] = {}
        self._calls = 0
        #: Times of both, in calls of the same sizes.
        self._pairs: list[tuple[float, float]] = []
        self._cold_pairs: list[tuple[float, float]] = []
        self._lock = fork_safe_lock()
        self._is_over = False

    @property
    def latencies_us(self) -> tuple[float, float]:
        """The medians so far; NaN where nothing was timed."""
        first, second = zip(*self._counted(), strict=True) if self._counted() else ((), ())
        return 1e6 * median(first or [math.nan]), 1e6 * median(second or [math.nan])

    @property
    def is_undecided(self) -> bool:
        """Whether there are too few pairs, so that what won before has won."""
        return len(self._counted()) < LOOKS[0]

    @property
    def calls(self) -> int:
        """How many were compared."""
        return 2 * len(self._counted())

    def call(self, *args: Any) -> Any:
        """Answer a call by the one whose turn it is."""
        sizes = None if self._sizes_of is None else self._sizes_of(args)
        with self._lock:
            if sizes not in self._times:
                # Each begins with every other size, as the second one may find caches filled.
                self._times[sizes] = _Times(2 * (len(self._times) % 2))
            times = self._times[sizes]
            which = _ORDER[times.turn % len(_ORDER)]
            times.turn += 1
        start = time.perf_counter()
        results = self._runs[which](*args)
        self._note(times, which, max(time.perf_counter() - start, _LEAST_S))
        return results

    def pass_by(self) -> None:
        """A call was answered by neither of the two in its turn, as one of unfit sizes."""
        with self._lock:
            if self._is_over:
                return
            self._calls += 1
            winner = self._winner()
            self._is_over = winner is not None
        if winner is not None:
            self._decided(winner)

    def _note(self, times: _Times, which: int, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            mine, others = times.of[which], times.of[1 - which]
            mine.append(seconds)
            self._calls += 1
            if len(mine) <= len(others):
                number = len(mine)
                pair = times.of[0][number - 1], times.of[1][number - 1]
                (self._pairs if number > WARM else self._cold_pairs).append(pair)
            winner = self._winner()
            self._is_over = winner is not None
        if winner is not None:
            self._decided(winner)

    def _counted(self) -> list[tuple[float, float]]:
        """The pairs that decide."""
        is_late = self._calls >= MOST_CALLS and len(self._pairs) < LOOKS[0]
        return [*self._cold_pairs, *self._pairs] if is_late else self._pairs

    def _winner(self) -> int | None:
        pairs, is_end = self._counted(), self._calls >= MOST_CALLS
        if is_end and self.is_undecided:
            return 1
        if not is_end and len(pairs) not in LOOKS:
            return None
        ratios = [math.log(second / first) for first, second in pairs]
        behind = median(ratios) - math.log1p(self._margin)
        if abs(behind) < SURE * _error(ratios) and len(pairs) < LOOKS[-1] and not is_end:
            return None
        return 0 if behind > 0 else 1


def _error(values: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return 0.93 * (high - low) / math.sqrt(len(values))

"""The largest part of a graph that can be narrowed within a budget of error.

Where a graph that was narrowed as a whole is beyond its budget, some places may cause most of the
error: an input with outliers, a last layer. They are looked for on the inputs of the call that is
compiled. Each place's own error comes from one run of all of them on exact values, which says in
what order to try them, and how many first; what they do together is measured, by the judge that
candidates are judged by, so that what is found has been run as it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import GraphModule

from fuseboard.errors import error_text
from fuseboard.ops.estimate import estimates_us
from fuseboard.profile.judge.accuracy import Metric, NotMeasured, float64_run
from fuseboard.profile.judge.reference import run_eager
from fuseboard.profile.judge.sensitivity import own_errors
from fuseboard.torch_api.internals import real_tensors

#: So many versions of a graph are run at most, that with all places narrowed among them.
JUDGINGS = 8
#: The share of the budget that a part may use up: a little less than a candidate's, whose backend
#: may round otherwise than these runs.
SHARE_OF_PART = 0.7
#: The same of a part with the rest in another format, whose error other inputs change more: tokens
#: of SmolLM2 had errors of 0.0098 and 0.02, with its last layer in int8.
SHARE_WITH_REST = 0.4

#: The names of the nodes that one rewrite narrows.
Place = tuple[str, ...]


class Judge:
    """Errors of versions of a graph, on the inputs of one call.

    :param graph: as captured.
    :param inputs: real ones, which aren't written to.
    :raises NotMeasured: it can't be run beside a call.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[object], metric: Metric) -> None:
        self.inputs = inputs
        self._metric = metric
        self._reference = float64_run(graph, inputs)

    def error(self, version: GraphModule) -> float:
        """
        :raises NotMeasured: it isn't known.
        """
        with real_tensors():
            try:
                results = run_eager(version, self.inputs)
            except Exception as error:  # an op may raise anything
                raise NotMeasured(error_text(error)) from error
            return self._metric.error(results, self._reference)


@dataclass(frozen=True)
class Part:
    """What was found.

    :ivar places: that are narrowed; none where no part is within the budget.
    :ivar error: of that.
    :ivar judged: how many versions were run.
    """

    places: tuple[Place, ...]
    error: float | None = None
    judged: int = 0


def largest_part(
    places: Sequence[Place],
    error_of: Callable[[Collection[Place]], float],
    limit: float,
    first: int | None = None,
) -> Part:
    """Add halves to what is narrowed, and halves of those that are too much, largest first.

    :param places: in the order in which they are worth it; all together are beyond the limit.
    :param error_of: runs the graph with some of them narrowed.
    :param first: how many of them are tried first; None: half of them.
    """
    kept: list[Place] = []
    error, judged = None, 1
    beyond = [frozenset(places)]
    left = deque(_halves(places) if first is None else [places[:first], places[first:]])
    while left:
        piece = left.popleft()
        together = frozenset([*kept, *piece])
        if not any(known <= together for known in beyond):
            if judged == JUDGINGS:
                break
            judged += 1
            found = error_of(together)
            if found <= limit:
                kept.extend(piece)
                error = found
                continue
            beyond.append(together)
        left.extend(_halves(piece))
    return Part(tuple(kept), error, judged)


def expected_within(
    places: Sequence[Place], errors: Mapping[Place, float], whole: float, limit: float
) -> int | None:
    """How many of the first places should be within a limit, by their own errors.

    Roundings are independent of each other, so that it is squares of errors that add up. How much
    is left of them in the results is known of all places together.

    :param whole: the error of all of them, beyond the limit.
    :returns: at least one, and not all; None where the errors don't tell.
    """
    squares = list(accumulate(errors.get(place, 0.0) ** 2 for place in places))
    if not 0 < squares[-1] < math.inf or not whole < math.inf:
        return None
    allowed = squares[-1] * (limit / whole) ** 2
    return min(max(bisect_right(squares, allowed), 1), len(places) - 1)


def _halves(places: Sequence[Place]) -> list[Sequence[Place]]:
    middle = len(places) // 2
    return [places[:middle], places[middle:]] if middle else []


def by_worth(
    graph: GraphModule, narrowed: GraphModule, places: Sequence[Place], inputs: Sequence[object]
) -> tuple[list[Place], Mapping[Place, float]]:
    """Places in the order of the time that they take for the square of the error that they cause.

    :param graph: exact.
    :param narrowed: the same with all places narrowed.
    :returns: them, and their own errors, as far as these are known.
    """
    try:
        with real_tensors():
            errors = own_errors(graph, narrowed, places, inputs)
    except NotMeasured:
        errors = {}  # as they come in the graph
    nodes = {node.name: node for node in graph.graph.nodes}
    times = estimates_us(nodes.values())
    cost = {
        place: errors.get(place, 0.0) ** 2 / (sum(times[nodes[name]] for name in place) or 1.0)
        for place in places
    }
    return sorted(places, key=cost.__getitem__), errors

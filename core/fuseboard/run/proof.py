"""Results held against float64, and regions against their contracts, in calls after the judged one.

Which of these a call goes through; what follows a failure is the runner's, whose calls these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch.fx import GraphModule

from fuseboard.contracts import Boxed
from fuseboard.profile.judge.accuracy import Budget, NotMeasured, float64_run

#: So many calls of the user's are held against float64, besides the one that was judged.
FURTHER_CALLS = 3


def held_to(budget: Budget, call: Boxed, graph: GraphModule, exceeded: Callable[..., Any]) -> Boxed:
    """A call whose results are held against a float64 run of the graph as captured.

    :param exceeded: is given what is wrong, and the inputs, and returns the results instead.
    """

    def run(args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        results = call(args)
        try:
            error = budget.metric.error(results, float64_run(graph, inputs))
            problem = budget.excess(error)
        except NotMeasured as why:
            problem = f"its error isn't known: {why}"
        return exceeded(problem, inputs) if problem else results

    return run


def at_first(calls: int, held: Boxed, then: Callable[[], Boxed]) -> Boxed:
    """So many calls go to one function, and those after that to what another one gives."""
    numbers = count(1)

    def run(args: list[Any]) -> Sequence[Any]:
        return (held if next(numbers) <= calls else then())(args)

    return run


def each(number: int, checked: Boxed, plain: Boxed) -> Boxed:
    """Every so many calls the checked function, else the plain one."""
    calls = count(1)

    def run(args: list[Any]) -> Sequence[Any]:
        return (plain if next(calls) % number else checked)(args)

    return run

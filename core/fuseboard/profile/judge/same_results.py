"""Whether eager's results of two graphs are the same, roundings aside.

One graph's own results take the place of a float64 run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.profile.judge.interpret import Disturbed
from fuseboard.profile.judge.reference import Reference, run_eager, run_undisturbed
from fuseboard.profile.judge.rules import Rule
from fuseboard.profile.judge.spread import Spread, spread_of, widened
from fuseboard.profile.judge.values import judge

#: Units in the last place of a result's largest element that eager is taken to be off; an engine
#: may be off ten times as far. Runs with disturbed roundings tell more, where that isn't enough.
_ROUNDINGS, _DISTURBED_RUNS = 2.0, 3


class Disturbances:
    """How far results are apart if the ops that make them round otherwise.

    :param run: makes them again, by name, with roundings disturbed by a ``seed``; or an exception.
    :param results: as they are, by name.
    """

    def __init__(self, run: Callable[..., Any], results: dict[str, Any]) -> None:
        self._run = run
        self._results = results
        self._runs: list[dict[str, Any]] = []

    def spreads(self, name: str) -> Iterator[Spread]:
        """The spread of one result, over more and more runs; nothing if there can be none."""
        if not isinstance(self._results[name], torch.Tensor):
            return
        precise = _precise(self._results[name])
        found = Spread()
        for number in range(_DISTURBED_RUNS):
            if number == len(self._runs):
                results = self._run(seed=number)
                self._runs.append({} if isinstance(results, BaseException) else results)
            value = self._runs[number].get(name)
            if not isinstance(value, torch.Tensor):
                return
            found = found.joined(spread_of(value.detach(), precise, relative=True))
            yield found


def difference_of_dynamo_graph(
    captured: GraphModule, inputs: Sequence[Any], results: Sequence[Any], rules: Sequence[Rule]
) -> str:
    """How results of Dynamo's graph differ from the captured graph's by more than roundings.

    Dynamo's graph is eager, so the captured graph's own error is no measure for it. Capture takes
    ops apart, and the parts may round less, or otherwise, than the kernel that users have:
    ``interpolate`` becomes ops that compute coordinates.

    :param captured: as AOTAutograd captured it. In a rewritten graph such coordinates are
        constants, which show none of the roundings that made them.
    :param rules: outputs that are ``unjudged`` are left out.
    :returns: the first difference; "" where there is none.
    """

    def disturbed(seed: int) -> dict[str, Any]:
        values = run_undisturbed(captured, inputs, Disturbed(set(), seed))
        return {str(number): value for number, value in enumerate(values)}

    own = {str(number): value for number, value in enumerate(run_eager(captured, inputs))}
    disturbances = Disturbances(disturbed, own)
    for (name, value), result, rule in zip(own.items(), results, rules, strict=True):
        if rule == "unjudged":
            continue
        if isinstance(result, torch.Tensor):
            result = result.detach()
        if problem := difference(value, result, disturbances.spreads(name)):
            return f"output {name} {problem}"
    return ""


def _precise(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return widened(value) if value.is_floating_point() or value.is_complex() else value


def difference(got: Any, want: Any, disturbed: Iterator[Spread], exact: bool = False) -> str:
    """How a result differs from Dynamo's by more than roundings; "" if it doesn't.

    It is Dynamo's that is judged, as any engine's would be, by what AOTAutograd captured.

    :param exact: nothing is rounded in Dynamo's graph on the way to it.
    """
    if (got is None) != (want is None):
        return f"is {'a tensor' if got is None else 'nothing'} in eager only"
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return "" if type(got) is type(want) and got == want else f"is {got}, eager's {want}"
    if got.requires_grad != want.requires_grad:
        return f"has requires_grad={got.requires_grad}, eager's {want.requires_grad}"
    own, eagers = got.detach(), want.detach()
    if own.dtype == eagers.dtype and torch.equal(own, eagers):
        return ""
    reference = _reference(own)
    if exact:
        reference, disturbed = replace(reference, rules=("exact",)), iter(())
    verdict = judge(reference, [eagers])
    while not verdict.ok and verdict.by_value and (spread := next(disturbed, None)):
        verdict = judge(replace(reference, disturbed=partial(tuple, [spread])), [eagers])
    if verdict.ok or not verdict.by_value:
        return (
            verdict.problem and f"isn't Dynamo's: that {verdict.problem.removeprefix('output 0 ')}"
        )
    return _first_difference(own, eagers)


def _reference(own: torch.Tensor) -> Reference:
    """What Dynamo's result is held against: a few roundings of the largest element are allowed."""
    precise = _precise(own)
    spread = spread_of(own, precise)
    floating = own.is_floating_point() or own.is_complex()
    if floating and own.numel():
        largest = float(own.abs().nan_to_num(0.0, 0.0, 0.0).max())
        spread = replace(spread, worst=_ROUNDINGS * torch.finfo(own.dtype).eps * largest)
    rule: Rule = "close" if floating else "mismatches"
    return Reference(eager=(own,), precise=(precise,), rules=(rule,), spreads=(spread,))


def _first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    other = (got != want) & ~((got != got) & (want != want))
    place = other.nonzero()[0].tolist()
    return (
        f"is {got[tuple(place)].item()} at {place}, Dynamo's graph gives "
        f"{want[tuple(place)].item()} ({int(other.sum())} of {other.numel()} elements differ)"
    )

"""How far results are from float64, by the metric of the settings.

For programs that the setting ``tolerance`` allows an error: all others are judged by what eager's
own error allows (:mod:`fuseboard.profile.judge.values`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.board.overrides import Override
from fuseboard.errors import containable, error_text
from fuseboard.profile.judge.reference import Reference, make_reference
from fuseboard.profile.judge.replays import replayable
from fuseboard.profile.judge.rewrites import why_no_room
from fuseboard.profile.judge.spread import aim, chunks, widened
from fuseboard.torch_api.internals import real_tensors

#: The share of a budget that may be used up on the inputs that a choice is made on. Others have
#: other errors, and the first one beyond the budget ends a program for good.
SHARE_AT_CHOICE = 0.75
#: What eager and the float64 run hold, in terms of what eager does.
_RUNS = 3


class NotMeasured(Exception):
    """An error isn't known; the text says why."""


def float64_run(graph: GraphModule, inputs: Sequence[Any]) -> Reference:
    """What a graph computes on inputs, which aren't written to.

    :param graph: as captured.
    :raises NotMeasured: it can't be run beside a call, or float64 has no kernel for it.
    """
    if why := replayable(graph) or why_no_room("a float64 run", [graph], runs=_RUNS):
        raise NotMeasured(why)
    try:
        with real_tensors():
            return make_reference(graph, inputs)
    except Exception as error:  # an op may raise anything, in float64 alone or in eager too
        raise NotMeasured(error_text(error)) from error


@dataclass(frozen=True)
class Metric:
    """Measures errors of results, each relative to the size of what it should be.

    :ivar name: ``norm``, ``max`` or ``cosine``, or the path of the user's function.
    """

    name: str
    function: Override | None = None

    @classmethod
    def of(cls, session: Session) -> Metric:
        return cls(session.settings.tolerance_metric, session.metric)

    def error(self, results: Sequence[Any], reference: Reference) -> float:
        """The largest error of results: of integers that floats reach, the share that is wrong.

        :raises NotMeasured: float64 has no value for one of them, or the user's function failed.
        """
        found = 0.0
        pairs = zip(results, reference.eager, reference.precise, reference.rules, strict=True)
        for number, (got, eager, precise, rule) in enumerate(pairs):
            if eager is None:
                continue
            if rule == "unjudged":
                why = next((n for n in reference.notes if n.startswith(f"output {number} ")), "")
                raise NotMeasured(why or f"output {number} has no value in float64")
            if _form(got) != _form(eager):
                raise NotMeasured(f"output {number} is {_form(got)}, expected {_form(eager)}")
            if rule == "exact":
                found = max(found, math.inf if self.distance(got, eager) else 0.0)
            else:
                want = aim(eager, precise) if rule == "close" and _is_tensor(eager) else precise
                found = max(found, self.distance(got, want))
        return found

    def distance(self, got: Any, want: Any) -> float:
        """The error of one result.

        :param want: what it should be, such as its float64 value.
        :raises NotMeasured: the user's function failed.
        """
        one, other = (torch.as_tensor(value).detach() for value in (got, want))
        if one.numel() == 0:
            return 0.0
        if not (one.is_floating_point() or one.is_complex()):
            return sum(int((a != b).sum()) for _, (a, b) in chunks(one, other)) / one.numel()
        if self.function is not None:
            return self._by_function(one, other)
        return _DISTANCES[self.name](one, other)

    def _by_function(self, result: torch.Tensor, reference: torch.Tensor) -> float:
        assert self.function is not None
        values = {"result": result, "reference": reference}
        arguments = {name: values[name] for name in self.function.arguments}
        try:
            found = float(self.function.function(**arguments))
        except containable() as error:
            raise NotMeasured(f"tolerance_metric {self.name} raised {error_text(error)}") from error
        if not found >= 0:  # or NaN
            raise NotMeasured(f"tolerance_metric {self.name} returned {found}, which is no error")
        return found


@dataclass(frozen=True)
class Budget:
    """The error that results may have.

    :ivar tolerance: as a share, by the metric.
    """

    tolerance: float
    metric: Metric

    def problem(self, got: torch.Tensor, want: torch.Tensor) -> str:
        """What is wrong with a result, held against another one that is exact; "" if nothing is."""
        if _form(got) != _form(want):
            return f"is {_form(got)}, expected {_form(want)}"
        try:
            return self.excess(self.metric.distance(got, want))
        except NotMeasured as why:
            return str(why)

    def excess(self, error: float) -> str:
        """What is wrong with an error; "" if it is allowed."""
        if error <= self.tolerance:
            return ""
        return (
            f"its error against float64 is {error:.2g} ({self.metric.name}), tolerance allows "
            f"{self.tolerance:g}"
        )

    def excess_at_choice(self, error: float) -> str:
        """What is wrong with an error on the inputs that a choice is made on."""
        if error <= SHARE_AT_CHOICE * self.tolerance:
            return ""
        return self.excess(error) or (
            f"its error against float64 is {error:.2g} ({self.metric.name}), more than "
            f"{SHARE_AT_CHOICE} of the tolerance of {self.tolerance:g}, and other inputs have "
            "other errors"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of {tuple(value.shape)}"
    return "a number" if isinstance(value, int | float | complex) else type(value).__name__


# --- the metrics ----------------------------------------------------------------------------------


def _pieces(got: torch.Tensor, want: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in float64 and in pieces, with zeros where both aren't finite in the same way.

    Differences are infinite where one of them alone is.
    """
    for _, (one, other) in chunks(got, want):
        mine, wanted = map(_real, (one, other))
        same = (mine == wanted) | (mine.isnan() & wanted.isnan())
        special = ~(mine.isfinite() & wanted.isfinite())
        mine = torch.where(special, torch.where(same, 0.0, torch.inf), mine)
        yield mine, torch.where(special, 0.0, wanted)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    wide = widened(tensor)
    return torch.view_as_real(wide.resolve_conj()).flatten() if wide.is_complex() else wide


def _share(part: float, whole: float) -> float:
    if not math.isfinite(part):
        return math.inf
    return part / whole if whole else (math.inf if part else 0.0)


def _norm(got: torch.Tensor, want: torch.Tensor) -> float:
    errors = sizes = 0.0
    for mine, wanted in _pieces(got, want):
        errors += float((mine - wanted).square().sum())
        sizes += float(wanted.square().sum())
    return _share(errors**0.5, sizes**0.5)


def _max(got: torch.Tensor, want: torch.Tensor) -> float:
    error = size = 0.0
    for mine, wanted in _pieces(got, want):
        error = max(error, float((mine - wanted).abs().max()))
        size = max(size, float(wanted.abs().max()))
    return _share(error, size)


def _cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    product = own = other = 0.0
    for mine, wanted in _pieces(got, want):
        product += float(mine.dot(wanted))
        own += float(mine.square().sum())
        other += float(wanted.square().sum())
    if not own and not other:
        return 0.0
    if not math.isfinite(own) or not own or not other:
        return math.inf
    return max(0.0, 1 - product / math.sqrt(own * other))


_DISTANCES = {"norm": _norm, "max": _max, "cosine": _cosine}

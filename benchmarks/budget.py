"""Is a budget of accuracy kept on inputs that the choice didn't see?

Each model is compiled with one format at a time, and the narrowest version that was judged to be
within the budget is the one that runs, whether it is the fastest here or not. Four calls decide:
one on which candidates are judged, and three that are compared. The errors of five further calls
against float64 count. With a tolerance of 0 results have to be those that there are without one.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

import fuseboard
from benchmarks.budget_models import DECIDING, BudgetModel, build
from benchmarks.processes import last_line
from fuseboard.fuse import narrow

#: Format and tolerance.
BUDGETS = (("bfloat16", 1e-2), ("int8", 1e-2), ("int8", 5e-2))
#: What an error on other inputs may be, in terms of the budget.
FACTOR = 1.5
BACKENDS = "mkldnn", "eager"
_ROUNDS = 5

_PROGRAM = """
import json, sys
from benchmarks import budget
print(json.dumps(budget.measure_here(*json.loads(sys.argv[1]))))
"""


@dataclass
class Kept:
    """One model with one format.

    :ivar ran: the candidate that answers calls in the end.
    :ivar places: how many were narrowed, and of how many; empty where nothing was within.
    :ivar judged: the error on the inputs on which it was judged.
    :ivar errors: of the calls that nobody looked at, in their order.
    :ivar times_eager: eager's processor time over its own.
    :ivar trips: what ended it.
    """

    model: str
    number_format: str
    tolerance: float
    ran: str
    places: list[int] = field(default_factory=list)
    judged: float | None = None
    errors: list[float] = field(default_factory=list)
    times_eager: float = 1.0
    trips: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(error <= FACTOR * self.tolerance for error in self.errors)


@dataclass
class Budgeted:
    """One model's process."""

    model: str
    kept: list[Kept]
    exact: bool


def narrowest(calls: Any) -> list[fuseboard.Measurement]:
    """For ``stages.measure``: what comes later is faster. Narrower candidates come last."""
    for call in calls:
        call()
    times = [1000.0 / 2**number for number in range(len(calls))]
    return [fuseboard.Measurement(us, us, us, calls=1) for us in times]


def compiled(module: Any, backends: Sequence[str], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    given = {"backends": [*backends], "margin": 0.0, "settle": "first_call", "block": ["narrow"]}
    given |= {"stages": {"measure": "benchmarks.budget:narrowest"}}
    run: Callable[..., Any] = torch.compile(module, backend="fuseboard", options=given | options)
    return run


@contextmanager
def offering(number_format: str) -> Iterator[None]:
    """Has the built-in plugin's rewrites to one format offered, and no others."""

    class Narrow:
        @fuseboard.hookimpl
        def fuseboard_narrow(self, graph: Any) -> Any:
            offered = narrow.fuseboard_narrow(graph) or []
            return [one for one in offered if one.format == number_format]

    plugin = Narrow()
    fuseboard.register(plugin, "one-format")
    try:
        yield
    finally:
        fuseboard.unregister("one-format")


@torch.no_grad()
def measure_model(
    name: str,
    model: BudgetModel,
    number_format: str,
    tolerance: float,
    backends: Sequence[str] = BACKENDS,
) -> Kept:
    """Here, in this process."""
    precise = copy.deepcopy(model.module).double()
    with offering(number_format), TemporaryDirectory(prefix="benchmarks-") as folder:
        run = compiled(model.module, backends, tolerance=tolerance, cache_dir=folder)
        for inputs in model.inputs[:DECIDING]:
            run(*inputs)
        (graph,) = [one for one in fuseboard.last_report().graphs if one.kind == "inference"]
        chosen = next((one for one in graph.candidates if one.state == "chosen"), None)
        found = Kept(name, number_format, tolerance, graph.instead or chosen.name)
        found.trips = [trip.error for trip in graph.trips]
        if chosen is not None and chosen.tolerance:
            found.judged = chosen.error
            found.places = _places(graph, chosen)
        for inputs in model.inputs[DECIDING:]:
            wide = [one.double() if one.is_floating_point() else one for one in inputs]
            found.errors.append(_error(run(*inputs), precise(*wide)))
        found.times_eager = _times(model.module, run, model.inputs)
    return found


def _places(graph: Any, chosen: Any) -> list[int]:
    for part in graph.parts:
        if chosen.exact and chosen.name.endswith(part.name):
            return [sum(not one.exact for one in part.places), len(part.places)]
    return []


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _times(one: Callable[..., Any], other: Callable[..., Any], pool: list[Any]) -> float:
    """Processor time of one over the other's: the median over rounds in turn."""
    ratios = []
    for number in range(_ROUNDS):
        took = []
        for run in (one, other):
            begin = time.process_time()
            run(*pool[number])
            took.append(time.process_time() - begin)
        ratios.append(took[0] / took[1])
    return median(ratios)


@torch.no_grad()
def is_exact(model: BudgetModel, backends: Sequence[str] = BACKENDS) -> bool:
    """Whether a tolerance of 0 changes no bit of what there is without one."""
    answers = []
    for options in ({}, {"tolerance": 0.0}):
        with TemporaryDirectory(prefix="benchmarks-") as folder:
            run = compiled(model.module, backends, cache_dir=folder, **options)
            answers.append([run(*inputs) for inputs in model.inputs])
    return all(torch.equal(*pair) for pair in zip(*answers, strict=True))


def measure_here(name: str) -> dict[str, Any]:
    model = build(name)
    kept = [vars(measure_model(name, model, *one)) for one in BUDGETS]
    return {"kept": kept, "exact": is_exact(model)}


def measure_budgets(names: Iterable[str], report: Callable[[str], None]) -> Iterator[Budgeted]:
    """A process for each model, with empty caches, one after the other."""
    for name in names:
        report(f"budget · {name}")
        found = json.loads(last_line(_PROGRAM, json.dumps([name])))
        yield Budgeted(name, [Kept(**one) for one in found["kept"]], found["exact"])


def budget_table(found: Iterable[Budgeted]) -> Table:
    table = Table(title="errors against float64, relative to the norm", title_justify="left")
    for column in ("model", "format", "budget", "runs", "judged", "unseen", "× eager", "holds"):
        table.add_column(column, overflow="fold")
    for model in found:
        for one in model.kept:
            places = f", {one.places[0]} of {one.places[1]} places" if one.places else ""
            table.add_row(
                model.model,
                one.number_format,
                f"{one.tolerance:g}",
                one.ran + places + "".join(f"; {trip}" for trip in one.trips),
                "" if one.judged is None else f"{one.judged:.2g}",
                " ".join(f"{error:.2g}" for error in one.errors),
                f"{one.times_eager:.2f}",
                "yes" if one.holds else "no",
            )
        table.add_row(model.model, "exact", "0", "", "", "", "", "yes" if model.exact else "no")
    return table

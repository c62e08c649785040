"""AOTAutograd's graph, held against Dynamo's by value.

Candidates are held against the graph that AOTAutograd captured. It takes some ops apart to capture
them, and a few of them wrongly (resizing an image picks other pixels), so the graph itself is held
against what eager computes: a run of Dynamo's graph is judged as if it were a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from fuseboard import torch_internals
from fuseboard.errors import RegionError, WrongValues
from fuseboard.lower.failure import decide, describe, trip
from fuseboard.lower.runner import Runner
from fuseboard.profile.candidates import Candidate
from fuseboard.profile.reference import Reference, make_reference, replayable
from fuseboard.profile.values import judge


def check_capture(
    runner: Runner,
    candidates: Sequence[Candidate],
    due: Sequence[Candidate],
    references: Mapping[Any, Reference | str] | None,
    inputs: Sequence[Any],
) -> None:
    """Where the captured graph isn't what eager computes, leave only Dynamo's graph in the choice.

    :param due: those that are new in this comparison: it is done once.
    :param references: of the regions that candidates were held against, on the same inputs.
    :raises RegionError: the policy is to raise.
    """
    eager = next((one for one in due if one.given is not None and one.proven), None)
    problem = "" if eager is None else _problem(eager, references or {}, inputs)
    if not problem:
        return
    session, report = runner.session, runner.report
    error = WrongValues("AOTAutograd", "capture", f"{problem} (by Dynamo's own graph)")
    if decide(session, report.name, "AOTAutograd", "capture", error) == "raise":
        raise RegionError(f"graph {report.name!r}: {describe(error)}") from error
    trip(report, "AOTAutograd", "capture", report.name, error, "Dynamo's own graph")
    for candidate in candidates:
        if candidate is not eager and not candidate.out:
            candidate.drop("failed", describe(error))


def _problem(
    eager: Candidate, references: Mapping[Any, Reference | str], inputs: Sequence[Any]
) -> str:
    """How Dynamo's graph parts from the captured one; "" where it doesn't."""
    given = eager.given
    assert given is not None
    graph = given.lowered.region.graph
    if replayable(graph):
        return ""
    reference = _known(given.cut.outputs, references)
    with torch_internals.real_tensors():
        if reference is None:
            reference = make_reference(graph, inputs)
        verdict = judge(reference, given.lowered.call(list(inputs)))
    return verdict.problem if verdict.by_value else ""


def _known(outputs: list[Node], references: Mapping[Any, Reference | str]) -> Reference | None:
    """A reference that has all of the outputs, in their order."""
    for key, reference in references.items():
        if isinstance(reference, str):
            continue
        made = list(key[key.index(None) + 1 :])
        if set(outputs) <= set(made):
            return reference.of([made.index(node) for node in outputs])
    return None

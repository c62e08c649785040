"""Compiled code that can't be pickled, as archives that its backend writes instead."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from fuseboard.board import Session
from fuseboard.contracts import Region
from fuseboard.errors import PackageError, containable
from fuseboard.run import portable
from fuseboard.run.failure import describe
from fuseboard.run.program import Program
from fuseboard.run.sites import Lowered, Site
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.archives import ArchivedCode
from fuseboard.torch_api.copies import copy_graph


def with_archives(program: Program, session: Session, real: Sequence[Any]) -> Program:
    """The program with archives of compiled code in the place of code that can't be pickled.

    :raises PackageError: a backend writes none.
    """
    sites: list[Site] = []
    made: dict[str, ArchivedCode] = {}
    values: dict[Node, Any] = {}
    for site in program.sites:
        lowered = site.lowered
        if site.is_eager or _can_be_pickled(lowered.call):
            sites.append(site)
            continue
        values = values or _values(program.context.graph, real)
        if lowered.region.signature not in made:
            inputs = [values[node] for node in site.cut.inputs]
            made[lowered.region.signature] = _archive(session, lowered.region, inputs)
        code, count = made[lowered.region.signature], len(site.cut.inputs)
        own = Lowered(lowered.region, code, code, tuple(range(count)))
        sites.append(replace(site, lowered=own))
    return Program(program.context, sites)


def _can_be_pickled(value: Any) -> bool:
    try:
        return bool(portable.to_bytes(value))
    except Exception:  # whatever the code of an object in it raises; the archive is the answer
        return False


def _values(graph: GraphModule, real: Sequence[Any]) -> dict[Node, Any]:
    """What each node of a graph computes."""
    interpreter = Interpreter(graph, garbage_collect_values=False)
    with torch_internals.real_tensors():
        interpreter.run(*real)
    return interpreter.env


def _archive(session: Session, region: Region, inputs: Sequence[Any]) -> ArchivedCode:
    """
    :raises PackageError: the region's backend writes none, or what it wrote can't be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="fuseboard_") as folder:
        path = Path(folder) / "region.pt2"
        try:
            answer = session.call(
                "fuseboard_export",
                region.backend,
                graph=copy_graph(region.graph),
                inputs=inputs,
                names=[f"input_{number}" for number in range(len(inputs))],
                weights=(),
                path=path,
            )
            if answer is not None:
                return ArchivedCode(path.read_bytes())
        except containable() as error:  # a plugin may raise anything
            raise PackageError(
                "model",
                f"{region.backend} can't write what it compiled to a file: {describe(error)}. "
                "Leave it out by the setting backends",
            ) from error
    raise PackageError(
        "model",
        f"what {region.backend} compiled can't be stored: leave it out by the setting backends",
    )

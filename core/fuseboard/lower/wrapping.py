"""What goes around a lowered region: every plugin that implements ``fuseboard_wrap``, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.contracts import Boxed, LoweredRegion, Region, Stage
from fuseboard.errors import LoweringError, PluginError
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.run.failure import contained, trip


def wrap_region(
    lowered: LoweredRegion,
    region: Region,
    planned: Region,
    session: Session,
    report: GraphReport,
    region_report: RegionReport,
    lower_part: Callable[[GraphModule, Sequence[int]], Boxed],
) -> LoweredRegion:
    """The region inside whatever wraps it; a wrapper that fails trips and is left out.

    :param region: as it was lowered; its graph is the wrappers' to look at.
    :param planned: as it was cut. What is told in a later call refers to it, so that the other
        graph can be let go.
    :param lower_part: the hook's argument.
    :raises RegionError: a wrapper failed and the policy is to raise.
    """
    for plugin in session.with_hook("fuseboard_wrap"):
        instead = f"{region.backend} without {plugin}"
        failed = _failed(plugin, planned, session, report, instead)
        tell = _tell(failed, region_report)
        try:
            answer: LoweredRegion | None = session.call(
                "fuseboard_wrap",
                plugin,
                lowered=lowered,
                region=region,
                tell=tell,
                lower_part=lower_part,
            )
        except (PluginError, LoweringError) as error:
            failed("lower", error)
            continue
        if answer is None:
            continue
        region_report.notes.extend(note for note in answer.notes if note not in lowered.notes)
        if answer.call is not lowered.call:
            region_report.notes.append(f"wrapped by {plugin}")
        lowered = answer
    return lowered


def _failed(
    plugin: str, region: Region, session: Session, report: GraphReport, instead: str
) -> Callable[[Stage, BaseException], None]:
    """What records a failure of a wrapper, or raises it."""

    def failed(stage: Stage, error: BaseException) -> None:
        contained(session, dataclasses.replace(region, backend=plugin), stage, error)
        trip(session, report, plugin, stage, region.name, error, instead, region.source)

    return failed


def _tell(
    failed: Callable[[Stage, BaseException], None], report: RegionReport
) -> Callable[[str | BaseException], None]:
    """The hook's argument ``tell``."""

    def tell(what: str | BaseException) -> None:
        if isinstance(what, BaseException):
            failed("run", what)
        elif what not in report.notes:
            report.notes.append(what)

    return tell

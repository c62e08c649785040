"""The failure policy: what a failure is called, what happens after it, where it is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fuseboard.board import Session
from fuseboard.contracts import Event, FailureAction, Region, Stage, Trip
from fuseboard.errors import PluginError, RegionError, error_text
from fuseboard.report.data import GraphReport

log = logging.getLogger("fuseboard")

#: Contains a plugin's failure: (report, plugin, stage, error, what ran instead).
Tripped = Callable[[GraphReport, str, Stage, Exception, str], None]

#: What to do about a failure that is raised.
CONTAINING = "'next' and 'eager' contain it"


def ask(
    session: Session, region: str, plugin: str, stage: Stage, error: BaseException
) -> tuple[FailureAction, str]:
    """Ask the failure hook; the setting ``on_failure`` answers where no plugin does.

    The setting also answers where that plugin fails.

    :returns: the action, and who chose it, for a message.
    """
    try:
        who, action = session.first(
            "fuseboard_on_failure", region=region, plugin=plugin, stage=stage, error=error
        )
    except PluginError as problem:
        log.warning("%s: %s; the setting on_failure decides", region, problem)
        who, action = "settings", session.settings.on_failure
    if who == "settings":
        origin = session.settings.origin("on_failure")
        return action, f"the policy is on_failure={action!r}, set in {origin}"
    return action, f"the hook fuseboard_on_failure of {who!r} answered {action!r}"


def decide(
    session: Session, region: str, plugin: str, stage: Stage, error: BaseException
) -> FailureAction:
    """The action after a failure; see :func:`ask`."""
    return ask(session, region, plugin, stage, error)[0]


def contained(
    session: Session, region: Region, stage: Stage, error: BaseException
) -> FailureAction:
    """What follows a region's failure: another backend, or eager.

    :raises RegionError: the policy is to raise; chained to the error.
    """
    action, who = ask(session, region.name, region.backend, stage, error)
    if action == "raise":
        raise region_error(region, stage, error, f"{who}; {CONTAINING}") from error
    return action


def contain(
    session: Session, name: str, plugin: str, stage: Stage, error: BaseException, what: str
) -> None:
    """Go on after a failure that isn't a region's, unless the policy is to raise.

    :param name: of the graph or the region, for the hook.
    :param what: failed, for the message; "" where the error says it.
    :raises RegionError: the policy is to raise; chained to the error.
    """
    action, who = ask(session, name, plugin, stage, error)
    if action == "raise":
        text = f"{what}: {describe(error).rstrip('.')}" if what else str(error)
        raise RegionError(f"{text}. Not contained: {who}; {CONTAINING}.") from error


def trip(
    session: Session,
    report: GraphReport,
    plugin: str,
    stage: Stage,
    region: str,
    error: BaseException | str,
    instead: str,
    source: str = "",
) -> None:
    """Record a contained failure: in the report, as one warning, and for observers."""
    session.notify(record_trip(report, plugin, stage, region, error, instead, source))


def record_trip(
    report: GraphReport,
    plugin: str,
    stage: Stage,
    region: str,
    error: BaseException | str,
    instead: str,
    source: str = "",
    exceeded: bool = False,
) -> Event:
    """The same for a caller that holds a lock, under which no observer may run.

    :param exceeded: results of a call were farther from float64 than they may be.
    :returns: what observers are to be told of.
    """
    text = describe(error)
    contained = Trip(plugin, stage, region, text, instead, source)
    report.trips.append(contained)
    place = f" ({source})" if source else ""
    log.warning(
        "%s: %s tripped in %s%s: %s; ran %s instead", region, plugin, stage, place, text, instead
    )
    return Event("trip", report.name, details={**vars(contained), "exceeded": exceeded})


def describe(error: BaseException | str) -> str:
    """An error on one line, with the cause that a plugin's error wraps."""
    if isinstance(error, str):
        return error
    text = error_text(error)
    if isinstance(error, PluginError):
        text = error.problem
    return " ".join(text.split())[:500]


def region_error(region: Region, stage: Stage, error: BaseException, why: str) -> RegionError:
    """The exception for a failure that isn't contained; the caller chains it to ``error``.

    :param why: it isn't.
    """
    source = f", from {region.source}" if region.source else ""
    return RegionError(
        f"plugin {region.backend!r} failed in stage {stage!r} on region {region.name!r}{source}: "
        f"{describe(error).rstrip('.')}. Not contained: {why}."
    )

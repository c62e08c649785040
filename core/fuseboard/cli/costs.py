"""``fuseboard costs``: what was measured and chosen, and files of it to pass on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuseboard.errors import CostsError, SettingsError
from fuseboard.module_names import readable

if TYPE_CHECKING:
    from fuseboard.profile.costs.database import CandidateCost, CostDatabase, Decision

costs = typer.Typer(
    no_args_is_help=True, help="Show, forget or pass on what was measured and chosen."
)

_KEY_SHOWN = 12
_LEVELS = ("graph", "step", "capture", "call")
_DAY_S = 86_400.0


def _database() -> CostDatabase:
    """The one of the settings that hold here; without torch."""
    from fuseboard.config import resolve
    from fuseboard.profile.costs.database import database

    settings = resolve()
    if not settings.cache:
        raise SettingsError(
            f"cache = false, set in {settings.origin('cache')}: measured choices are kept in each "
            "process alone, so there is no database"
        )
    return database(settings)


def _decisions(database: CostDatabase) -> list[Decision]:
    """All of them.

    :raises CostsError: the file can't be read.
    """
    found = database.decisions()
    if database.problem:
        raise CostsError(f"{database.path} can't be read")  # a warning has said why
    return found


# --- looking --------------------------------------------------------------------------------------


@costs.command("list")
def list_(
    level: Annotated[
        str, typer.Option(help="Only decisions on this: graph, region, step or capture.")
    ] = "",
    unsettled: Annotated[
        bool, typer.Option("--unsettled", help="Only those that have candidates left to try.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the decisions, the newest first: what won, how long a call takes, what came second."""
    if level and level not in _LEVELS:
        allowed = ", ".join(_LEVELS)
        raise typer.BadParameter(f"{level!r}: allowed: {allowed}", param_hint="--level")
    database = _database()
    chosen = [
        decision
        for decision in _decisions(database)
        if level in ("", decision.level) and not (unsettled and decision.settled)
    ]
    if as_json:
        from fuseboard.profile.costs.rows import encode

        shown = {"path": str(database.path), "decisions": [encode(one) for one in chosen]}
        print(json.dumps(shown, indent=2))
        return
    console = Console()
    for decision in chosen:
        for line in _lines(decision):
            console.print(line, soft_wrap=True)
    of = f" of {database.path}" if database.path and database.path.exists() else ": no file yet"
    console.print(Text(f"{len(chosen)} decisions{of}"), soft_wrap=True)


def _lines(decision: Decision) -> tuple[Text, Text]:
    """What was decided on, and what came of it."""
    ranked = _ranked(decision)
    best = next((one for one in ranked if one.name == decision.winner), None)
    rivals = [one for one in ranked if one is not best and not one.problem]
    # What could have been chosen and was timed; the winner may not be the fastest, by the margin.
    rival = next((one for one in rivals if one.latency_us is not None), None)
    first = Text(f"{decision.key[:_KEY_SHOWN]}  ", style="bold")
    first.append(f"{decision.level:7}  {_date(decision.created)}  ", "not bold dim")
    first.append(_shortened(decision.title) or "?", "not bold")
    second = Text(" " * (_KEY_SHOWN + 2))
    second.append(decision.winner, "green").append(f" {_latency(best)}".rstrip())
    if rival is not None:
        second.append(f", next best {rival.name} {_latency(rival)}")
    if decision.level != "capture":  # whether it is Dynamo's graph: nothing was tried
        tried = sum(one.tried or one is best for one in ranked)
        second.append(f", {tried} tried")
    if not decision.settled:
        second.append(", more to try", "yellow")
    return first, second


def _shortened(title: str) -> str:
    """In the user's words, with the file's name alone: ``show`` has all of it."""
    return re.sub(r"\([^()]*[/\\]([^/\\()]+:\d+\))", r"(\1", readable(title))


@costs.command()
def show(
    key: Annotated[str, typer.Argument(help="A decision's key, or the start of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show one decision: every candidate with its time, or why it couldn't be chosen; the key."""
    from fuseboard.profile.costs.rows import encode

    decision = _found(_decisions(_database()), key)
    if as_json:
        print(json.dumps(encode(decision), indent=2))
        return
    console = Console()
    state = "settled" if decision.settled else "candidates are left to try"
    title = readable(decision.title) or decision.key
    console.print(Text(f"{title}: {decision.winner}", style="bold"), soft_wrap=True)
    console.print(f"{decision.level}, {_date(decision.created)}, {state}")
    table = Table()
    for column in ("candidate", "a call", "interval", "compiling", "peak", "problem"):
        table.add_column(column, overflow="fold")
    for one in _ranked(decision):
        style = "green" if one.name == decision.winner else "dim" if one.problem else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(one)))
    console.print(table)
    parts = Table("part of the key", "value")
    for name, value in sorted(decision.parts.items()):
        parts.add_row(Text(name), Text(value, overflow="fold"))
    console.print(parts)
    console.print(Text(f"key {decision.key}"), soft_wrap=True)


def _found(decisions: list[Decision], key: str) -> Decision:
    """The one decision whose key begins so.

    :raises CostsError: there is none, or more than one.
    """
    matching = [decision for decision in decisions if key and decision.key.startswith(key)]
    if len(matching) != 1:
        how = "several keys begin" if matching else "no key begins"
        raise CostsError(f"{how} with {key!r}; `fuseboard costs list` shows them")
    return matching[0]


def _ranked(decision: Decision) -> list[CandidateCost]:
    """Candidates by their time; those without one last."""
    return sorted(
        decision.candidates,
        key=lambda one: (bool(one.problem), one.latency_us is None, one.latency_us or 0.0),
    )


def _cells(one: CandidateCost) -> list[str]:
    interval = ""
    if one.low_us is not None and one.high_us is not None:
        interval = f"{_time(one.low_us)} to {_time(one.high_us)}"
    return [
        one.name,
        _latency(one),
        interval,
        "" if one.compile_s is None else f"{one.compile_s:.1f} s",
        "" if one.peak_bytes is None else f"{one.peak_bytes / 1e6:.1f} MB",
        one.problem,
    ]


def _latency(one: CandidateCost | None) -> str:
    return "" if one is None or one.latency_us is None else _time(one.latency_us)


def _time(us: float) -> str:
    """Three digits of a time."""
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= 0.9995 * scale:  # what rounds to it
            return f"{us / scale:#.3g} {unit}".replace(". ", " ")
    return f"{us:#.3g} µs".replace(". ", " ")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# --- removing -------------------------------------------------------------------------------------


@costs.command()
def forget(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of decisions, or the starts of them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All decisions.")] = False,
    winner: Annotated[str, typer.Option(help="Those that this candidate won.")] = "",
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Those made before that.")
    ] = None,
) -> None:
    """Remove decisions, so that they are measured anew. Of several conditions all have to hold."""
    conditions = [bool(keys), bool(winner), older_than is not None]
    if not any([*conditions, everything]):
        raise typer.BadParameter("say what: keys, --all, --winner or --older-than")
    if everything and any(conditions):
        raise typer.BadParameter("--all leaves no room for conditions")
    database = _database()
    decisions = _decisions(database)
    if keys:
        decisions = [_found(decisions, key) for key in dict.fromkeys(keys)]
    before = None if older_than is None else time.time() - older_than * _DAY_S
    chosen = [
        decision.key
        for decision in decisions
        if winner in ("", decision.winner) and (before is None or decision.created < before)
    ]
    Console().print(Text(f"forgot {database.forget(chosen)} decisions"), soft_wrap=True)


# --- passing on -----------------------------------------------------------------------------------


@costs.command()
def export(
    path: Annotated[Path, typer.Argument(help="The file, in JSON.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write all decisions to one file, for other machines of the same kind."""
    if path.exists() and not force:
        raise CostsError(f"{path} is there already; --force replaces it")
    text = f"wrote {_database().export(path)} decisions to {path}"
    Console().print(Text(text), soft_wrap=True)


@costs.command("import")
def import_(
    paths: Annotated[list[Path], typer.Argument(help="Files that were exported, or databases.")],
) -> None:
    """Merge files into the database. Of two decisions on the same thing the newer one stays.

    One that has candidates left to try never replaces one that hasn't.
    """
    database = _database()
    for path in paths:
        counts: Any = database.import_(path)
        text = f"{path}: {counts.added} added, {counts.replaced} replaced, {counts.skipped} skipped"
        damaged = f", {counts.damaged} damaged and left out" if counts.damaged else ""
        style = "yellow" if counts.damaged else ""
        Console().print(Text(text + damaged, style=style), soft_wrap=True)

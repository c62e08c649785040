"""``fuseboard conformance``: what a backend still gets wrong."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

if TYPE_CHECKING:
    from fuseboard.testing import CheckResult

_STYLES = {"pass": "green", "declined": "dim", "wrong": "red", "error": "red"}
_SHOWN_OPS = 6


def conformance(
    backend: Annotated[str, typer.Argument(help="The backend's name, as in settings.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print a Markdown table of the ops, for a README.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="SUBSTR", help="Run the checks whose name contains this.")
    ] = "",
) -> None:
    """Run the conformance suite on a backend; exit status 1 if anything is wrong.

    One line a check: the verdict, its name, what is wrong or why nothing was taken, the ops that
    the backend took. Where something is wrong, the line says where the check's program is written
    and what it was given.
    """
    from fuseboard.testing import checks_for, run_checks

    if problem := _unusable(backend):
        raise typer.BadParameter(problem, param_hint="BACKEND")

    count = len(checks_for(backend, only))
    if count == 0:
        raise typer.BadParameter(f"no check's name contains {only!r}", param_hint="--only")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(backend, total=count)
        results = run_checks(backend, only, done=lambda result: progress.advance(task))
    if as_json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
    elif table:
        print(op_table(results))
    else:
        _print(results)
    if any(result.failed for result in results):
        raise typer.Exit(1)


def _unusable(name: str) -> str:
    """Why a backend can't be checked here; "" if it can."""
    from fuseboard.board import board
    from fuseboard.config.sources import nearest

    states = {state.name: state for state in board.states()}
    if name not in states:
        known = nearest(name, states) or f" Installed: {', '.join(sorted(states))}."
        return f"no plugin is named {name!r}.{known}"
    state = states[name]
    return "" if state.state == "ready" else f"{name!r} is {state.state}: {state.reason}"


def _print(results: list[CheckResult]) -> None:
    """One line for each check. A terminal folds those of failed ones and crops the others."""
    from fuseboard.report import words

    console = Console(highlight=False)
    width = max(len(result.check) for result in results)
    for result in results:
        verdict = "declined all" if result.verdict == "declined" else result.verdict
        line = Text(f"{verdict:12}  ", style=_STYLES[result.verdict])
        line.append(f"{result.check:{width}}  ", style="default")
        taken = _ops(result.taken)
        line.append("  ".join(filter(None, (words.shorten(result.text), taken))), style="default")
        if not console.is_terminal:
            print(line.plain.rstrip())
        else:
            console.print(line, no_wrap=not result.failed, overflow="ellipsis")
    counts = [
        f"{sum(result.verdict == verdict for result in results)} {verdict}" for verdict in _STYLES
    ]
    console.print(Text(", ".join(counts)))


def op_table(results: list[CheckResult]) -> str:
    """A Markdown table: for each op of the checks how many of them the backend ran, and which
    of those fail, whichever of their ops is to blame; or why it declined the op.
    """
    ran: Counter[str] = Counter()
    failed: defaultdict[str, list[str]] = defaultdict(list)
    declined: dict[str, str] = {}
    for result in results:
        for op in result.taken:
            ran[op] += 1
            if result.failed:
                failed[op].append(result.check)
        declined.update(result.declined)
    lines = ["| op | runs in checks | what is known |", "|---|---|---|"]
    for op in sorted(ran.keys() | declined.keys()):
        known = declined.get(op, "")
        if op in failed:
            known = f"in checks that fail: {', '.join(failed[op])}"
        elif op in ran:
            known = f"as in eager; elsewhere declined: {known}" if known else "as in eager"
        known = known.replace("|", r"\|")
        lines.append(f"| `{op}` | {ran[op]} | {known} |")
    return "\n".join(lines)


def _ops(taken: dict[str, int]) -> str:
    """``aten.add.Tensor × 2, ...``, the most frequent ones."""
    ops = sorted(taken.items(), key=lambda item: -item[1])
    shown = [op if count == 1 else f"{op} × {count}" for op, count in ops[:_SHOWN_OPS]]
    more = len(ops) - len(shown)
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)

"""``fuseboard conformance``: what a backend still gets wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fuseboard.testing import CheckResult

_STYLES = {"pass": "green", "declined": "dim", "wrong": "red", "error": "red"}
_SHOWN_OPS = 6


def conformance(
    backend: Annotated[str, typer.Argument(help="The backend's name, as in settings.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    only: Annotated[
        str, typer.Option(metavar="SUBSTR", help="Run the checks whose name contains this.")
    ] = "",
) -> None:
    """Run the conformance suite on a backend; exit status 1 if anything is wrong."""
    from fuseboard.testing import checks_for, run_checks

    count = len(checks_for(backend, only))
    if count == 0:
        raise typer.BadParameter(f"no check's name contains {only!r}", param_hint="--only")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(backend, total=count)
        results = run_checks(backend, only, done=lambda result: progress.advance(task))
    if as_json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
    else:
        _print(results)
    if any(result.failed for result in results):
        raise typer.Exit(1)


def _print(results: list[CheckResult]) -> None:
    table = Table()
    for column in ("check", "verdict", "ops that it took", "message"):
        table.add_column(column, overflow="fold", no_wrap=column in ("check", "verdict"))
    for result in results:
        verdict = "declined all" if result.verdict == "declined" else result.verdict
        table.add_row(
            Text(result.check),
            Text(verdict, style=_STYLES[result.verdict]),
            Text(_ops(result.taken)),
            Text(result.message),
        )
    counts = [
        f"{sum(result.verdict == verdict for result in results)} {verdict}" for verdict in _STYLES
    ]
    console = Console()
    console.print(table)
    console.print(Text(", ".join(counts)))


def _ops(taken: dict[str, int]) -> str:
    """``aten.add.Tensor × 2, ...``, the most frequent ones."""
    ops = sorted(taken.items(), key=lambda item: -item[1])
    shown = [op if count == 1 else f"{op} × {count}" for op, count in ops[:_SHOWN_OPS]]
    more = len(ops) - len(shown)
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)

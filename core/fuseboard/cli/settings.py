"""``fuseboard settings``: every setting, its value, and where that was set."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def settings(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check them against the installed plugins as well (imports torch)."
        ),
    ] = False,
) -> None:
    """Show the settings that hold in this directory and environment, and where each was set."""
    from fuseboard.config import describe, resolve

    now = resolve()
    rows = describe(now)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, default=str))
    else:
        table = Table()
        for column in ("setting", "value", "set in", "what it is for"):
            table.add_column(column, overflow="fold")
        for row in rows:
            style = "dim" if row.origin == "default" else "bold"
            cells = (row.key, _shown(row.value), row.origin)
            table.add_row(*(Text(cell, style=style) for cell in cells), Text(row.description))
        Console().print(table)
    if check:
        from fuseboard.board import board

        for note in board.session(now).notes:
            Console(stderr=True).print(Text(note, style="yellow"), soft_wrap=True)


def _shown(value: Any) -> str:
    """As one would write it in TOML."""
    return "not set" if value is None else json.dumps(value, default=str)

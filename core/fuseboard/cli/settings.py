"""``fuseboard settings``: every setting, its value, and where that was set."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
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
        console = Console(highlight=False)
        for row in rows:
            is_set = row.origin != "default"
            line = Text(f"{row.key} = {_shown(row.value)}", style="bold" if is_set else "")
            line.append(f"  (set in {row.origin})" if is_set else "  (default)", "not bold dim")
            console.print(line, soft_wrap=True)
            console.print(Padding(Text(row.description, "dim"), (0, 0, 0, 4), expand=False))
    if check:
        from fuseboard.board import board

        for note in board.session(now).notes:
            Console(stderr=True).print(Text(note, style="yellow"), soft_wrap=True)


def _shown(value: Any) -> str:
    """As one would write it in TOML."""
    return "not set" if value is None else json.dumps(value, default=str)

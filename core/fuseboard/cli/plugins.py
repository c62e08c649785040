"""``fuseboard plugins``: what is on the board, and in which state."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"ready": "green", "unavailable": "yellow", "blocked": "dim", "quarantined": "red"}


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the plugins: backends in order of priority, then the others."""
    from fuseboard.board import board

    # The log would say above the table what is said below it.
    logging.getLogger("fuseboard").addHandler(logging.NullHandler())
    states = board.states()
    if as_json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
        return
    table = Table()
    for column in ("name", "version", "stages", "devices", "state"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "state"))
    for state in states:
        style = _STYLES[state.state]
        cells = (state.name, state.version, ", ".join(state.stages), ", ".join(state.devices))
        table.add_row(*map(Text, cells), Text(state.state, style=style))
    console = Console()
    console.print(table)
    # Not in a column: a command to copy would be folded.
    for state in states:
        if state.reason:
            text = Text(f"{state.name} is {state.state}", style=_STYLES[state.state])
            console.print(text.append(f": {state.reason}", "default"), soft_wrap=True)
        elif state.takes_part:
            text = Text(f"{state.name} takes part {state.takes_part}")
            console.print(text, soft_wrap=True)

"""The command ``fuseboard``. Each subcommand is a function in the module of its name.

Those modules import what is heavy inside their functions: ``fuseboard --help`` needs no torch.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fuseboard.errors import FuseboardError

#: Every subcommand, in the order in which ``--help`` lists them.
COMMANDS = (
    "plugins",
    "settings",
    "cache",
    "costs",
    "explain",
    "passes",
    "patterns",
    "export",
    "package",
    "memory",
    "profile",
    "bisect",
    "conformance",
    "new-plugin",
    "demo",
)

#: What the shell gets for a mistake of the user's, as from a wrong option.
USER_ERROR = 2


class _Group(TyperGroup):
    """Shows errors that fuseboard raises on purpose in red, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FuseboardError as error:
            text = Text(f"fuseboard: {error}", style="red")
            Console(stderr=True).print(text, soft_wrap=True)
            raise typer.Exit(USER_ERROR) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fuseboard {metadata.version('fuseboard')}, torch {metadata.version('torch')}")
        raise typer.Exit


def _print_what_can_be_printed() -> None:
    """A ``?`` for what the output's encoding lacks: ``µs`` mustn't end a command with an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")


# Without typer's own tracebacks: an error in the user's code, with torch's frames above it, would
# be hundreds of lines of boxes.
app = typer.Typer(
    cls=_Group, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """One torch.compile backend into which all the others plug."""
    if context.invoked_subcommand != "profile":  # whose output is the script's own
        _print_what_can_be_printed()


def _paragraphs(command: Any) -> str:
    """A docstring without its line breaks, which typer would keep beside those of the terminal."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


for _name in COMMANDS:
    _function = _name.replace("-", "_")
    _command = getattr(import_module(f"fuseboard.cli.{_function}"), _function)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, help=_paragraphs(_command))(_command)

"""``fuseboard new-plugin``: a distribution with a whole backend in it, to make one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

#: What the template is called wherever its name has to change. Its package is
#: ``fuseboard_mychip``.
TEMPLATE_NAME = "mychip"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def new_plugin(
    name: Annotated[
        str, typer.Argument(help="The backend's name in settings: lower-case words joined by '-'.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory", "-d", help="Where to write it; fuseboard-NAME here by default."
        ),
    ] = None,
) -> None:
    """Write a plugin's distribution: hooks, compiler, tests, conformance suite, CI.

    It works as written, with NumPy for an engine, and its tests pass. Replace the engine step by
    step: its README says where.
    """
    if problem := _unusable(name):
        raise typer.BadParameter(problem, param_hint="NAME")
    place = directory or Path(f"fuseboard-{name}")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise typer.BadParameter(
            f"{place} exists; choose another --directory", param_hint="--directory"
        )
    for path, text in plugin_files(name).items():
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(
        f"{place} holds the backend {name!r}; NumPy does its work until your engine does.\n\n"
        f"  cd {place}\n"
        f"  pip install -e '.[dev]'\n"
        f"  pytest                        # its own tests, and fuseboard's conformance suite\n"
        f"  fuseboard conformance {name} --table\n\n"
        f"README.md in it says what to replace, in order."
    )


def plugin_files(name: str) -> dict[Path, str]:
    """The files of a new plugin: relative path → text.

    :param name: the backend's name. Its distribution is called ``fuseboard-<name>``, its package
        ``fuseboard_<name>``, with ``_`` for ``-``.
    """

    def renamed(text: str) -> str:
        package = name.replace("-", "_")
        return text.replace(f"fuseboard_{TEMPLATE_NAME}", f"fuseboard_{package}").replace(
            TEMPLATE_NAME, name
        )

    template = _template()
    return {
        Path(renamed(str(path.relative_to(template)))): renamed(path.read_text(encoding="utf-8"))
        for path in sorted(template.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def _template() -> Path:
    """The template's directory: in the wheel beside this package, in a checkout under examples."""
    package = Path(__file__).parents[1]
    installed = package / "plugin_template"
    return installed if installed.is_dir() else package.parents[1] / "examples" / "plugin_template"


def _unusable(name: str) -> str:
    """Why a backend can't have this name; "" if it can."""
    from fuseboard.board import board

    if not _NAME.fullmatch(name):
        return f"{name!r}: lower-case letters and digits, words joined by '-', a letter first"
    if name in {state.name for state in board.states()}:
        return f"a plugin named {name!r} is installed already; `fuseboard plugins` lists them"
    return ""

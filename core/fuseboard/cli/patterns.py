"""``fuseboard patterns``: whether the files of traced patterns are current, and writing them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuseboard.errors import FuseboardError, error_text

if TYPE_CHECKING:
    from fuseboard.fuse.patterns.rewriting import Patterns


class PatternsError(FuseboardError):
    """A module can't be imported, or has no patterns."""


def patterns(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE...", help="Where the patterns are: my_package.norms."),
    ],
    write: Annotated[bool, typer.Option("--write", help="Trace them and write the files.")] = False,
) -> None:
    """Say whether the files of traced patterns are current for the installed torch.

    A module's patterns are its attributes of type fuseboard.Patterns. Those without a directory are
    traced at each start, and have no files. The exit status is 1 where a file isn't current.
    """
    stale = 0
    for name in modules:
        for attribute, found in _patterns(name):
            count = len(found.patterns)
            place = found.files.directory if found.files else "no directory: traced at each start"
            print(f"{name}.{attribute}: {count} pattern{'s' * (count != 1)}, {place}")
            if write and found.files:
                for pattern in found.patterns:
                    changed = found.files.write(pattern)
                    print(f"  {pattern.name}: {'written' if changed else 'current'}")
            elif found.files:
                problems = list(found.files.problems(found.patterns))
                stale += len(problems)
                print("\n".join(f"  {problem}" for problem in problems or ["current"]))
    if stale:
        raise typer.Exit(1)


def _patterns(name: str) -> Iterator[tuple[str, Patterns]]:
    """
    :raises PatternsError: there are none.
    """
    from fuseboard.errors import containable
    from fuseboard.fuse.patterns.rewriting import Patterns

    try:
        module: Any = importlib.import_module(name)
    except containable() as error:  # importing runs the author's code: anything may be raised
        raise PatternsError(f"importing {name!r} raised {error_text(error)}") from error
    found = {key: value for key, value in vars(module).items() if isinstance(value, Patterns)}
    if not found:
        raise PatternsError(f"module {name!r} has no attribute of type fuseboard.Patterns")
    yield from found.items()

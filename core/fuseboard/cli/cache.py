"""``fuseboard cache``: what backends compiled and left for later processes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fuseboard.lower.artifacts import ArtifactRow, Store

_STYLES = {"artifact": "green", "tried": "dim", "crash": "red", "aside": "yellow"}

cache = typer.Typer(no_args_is_help=True, help="Show or clear what is kept for later processes.")


def _store() -> Store:
    """The one of the settings that hold here; without torch."""
    from fuseboard.config import resolve
    from fuseboard.lower.artifacts import store_at

    settings = resolve()
    return store_at(settings.cache_dir, settings.cache_size_mb)


@cache.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the artifacts, the most recently used first, and where they are.

    ``crash``: compiling it ended a process, so it isn't tried again. ``tried``: it didn't end one.
    ``aside``: a damaged file.
    """
    store = _store()
    rows = list(store.rows())
    if as_json:
        listed = [
            {
                "kind": row.kind,
                "path": str(row.path),
                "bytes": row.bytes,
                "used": row.used,
                "problem": row.problem,
                "key": dict(row.parts),
            }
            for row in rows
        ]
        print(json.dumps({"directory": str(store.directory), "files": listed}, indent=2))
        return
    console = Console()
    if rows:
        table = Table()
        for column in ("kind", "backend", "graph", "size", "used", "made with"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(Text(row.kind, style=_STYLES[row.kind]), *map(Text, _cells(row)))
        console.print(table)
    total = sum(row.bytes for row in rows)
    limit = store.limit_bytes
    console.print(
        Text(f"{len(rows)} files, {_size(total)} of at most {_size(limit)}, in {store.directory}"),
        soft_wrap=True,
    )


def _cells(row: ArtifactRow) -> tuple[str, str, str, str, str]:
    parts = row.parts
    torch_version = parts.get("torch", "").partition(" ")[0]
    made = f"torch {torch_version}, {parts.get('threads', '?')} threads" if parts else ""
    return (
        parts.get("backend", ""),
        row.path.name[:8],
        _size(row.bytes),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(row.used)),
        f"{made}: {row.problem}" if row.problem else made,
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


@cache.command()
def clear(
    backend: Annotated[
        str, typer.Option("--backend", help="Only what this backend made, or crashed on.")
    ] = "",
    crashes: Annotated[
        bool, typer.Option("--crashes", help="Only the records of crashes: they are tried again.")
    ] = False,
) -> None:
    """Remove what is there; it is compiled again when it is needed."""
    store = _store()
    made_by = {row.parts["backend"] for row in store.rows() if "backend" in row.parts}
    if backend and backend not in made_by:
        others = (
            f"what is there was made by {', '.join(sorted(made_by))}" if made_by else "no files"
        )
        Console().print(
            Text(f"nothing of {backend!r} in {store.directory}: {others}"), soft_wrap=True
        )
        return

    def wanted(row: ArtifactRow) -> bool:
        if backend and row.parts.get("backend") != backend:
            return False
        return row.kind == "crash" if crashes else True

    count, size = store.clear(wanted)
    Console().print(
        Text(f"removed {count} files, {_size(size)}, from {store.directory}"), soft_wrap=True
    )

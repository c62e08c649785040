"""``fuseboard cache``: what backends compiled and left for later processes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuseboard.cli.explain import Target, call_at
from fuseboard.errors import FuseboardError
from fuseboard.profile.costs.database import database

if TYPE_CHECKING:
    from fuseboard.config.model import Settings
    from fuseboard.lower.artifacts import ArtifactRow, Store

_STYLES = {"artifact": "green", "tried": "dim", "crash": "red", "aside": "yellow"}
#: How much of a part of a key is shown.
_SHOWN = 200

cache = typer.Typer(
    no_args_is_help=True, help="Show, clear or pass on what is kept for later processes."
)


class CacheError(FuseboardError):
    """A pack can't be written or read."""


def _settings() -> Settings:
    """Those that hold here, of the cache of this machine alone."""
    from fuseboard.config import resolve

    return resolve().model_copy(update={"cache_remote": None})


def _store() -> Store:
    """The one of the settings that hold here; without torch."""
    from fuseboard.lower.artifacts import store_at

    return store_at(_settings())


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


# --- for several machines -------------------------------------------------------------------------

_ADDRESS = "A directory, a file that ends with .zip, or an address that fsspec knows (s3://...)."


@cache.command()
def pack(address: Annotated[str, typer.Argument(metavar="ADDRESS", help=_ADDRESS)]) -> None:
    """Write what is there, with what was decided, for machines of the same kind.

    What isn't settled and what crashed stays here.
    """
    from fuseboard.lower import packing

    if "://" in address and address.endswith(".zip"):
        raise CacheError(f"{address}: a zip is written on this machine, and copied then")
    settings = _settings()
    with packing.written(address) as target:
        artifacts, decisions = packing.pack(target, _store(), database(settings))
    if target.problem:
        raise CacheError(f"{address} can't be written: {target.problem}")
    said = f"{artifacts} artifacts and {decisions} decisions are in {address}"
    Console().print(Text(said), soft_wrap=True)


@cache.command()
def unpack(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help=_ADDRESS)],
    trust: Annotated[
        bool, typer.Option("--trust", help="Also if others can write there. Artifacts are code.")
    ] = False,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Also what is for other machines, as in an image.")
    ] = False,
) -> None:
    """Take what a pack holds. Nothing of it is run; what is damaged is left out."""
    from fuseboard.lower import packing

    here = None if any_machine else packing.machine()
    source = packing.read_from(address, trust)
    done = packing.unpack(source, _store(), database(_settings()), here)
    console = Console()
    said = f"{done.artifacts} artifacts and {done.decisions} decisions were taken"
    console.print(Text(said), soft_wrap=True)
    for path, problem in sorted(done.problems.items()):
        console.print(Text(f"left out: {path}: {problem}", style="yellow"), soft_wrap=True)
    for part, count in done.foreign.most_common():
        said = f"left out: {count} files are for another {part}; see --any-machine"
        console.print(Text(said, style="yellow"), soft_wrap=True)
    if source.problem:
        raise CacheError(f"{address} can't be read: {source.problem}")


@cache.command("why-miss")
def why_miss(target: Target) -> None:
    """Call a model once, and say what was looked for in the cache and wasn't found, and why.

    Nothing is compiled for that: it ends when everything was looked for.
    """
    with redirect_stdout(sys.stderr):
        model, args, kwargs = call_at(target)
        import torch

        from fuseboard.totals import totals
        from fuseboard.workshop.desk import desk

        run: Any = torch.compile(model, backend="fuseboard")
        run(*args, **kwargs)
        desk().wait_for_known()
    console, counts = Console(), totals.read()
    for missed in counts.misses:
        why = "there is nothing for the same graph" if not missed.differs else "what is there has"
        console.print(Text(f"not found for {missed.what}: {why}"), soft_wrap=True)
        for part, (here, there) in missed.differs.items():
            console.print(Text(f"  another {part}: {_difference(here, there)}"), soft_wrap=True)
    console.print(Text(f"{counts.lookups['hits']} found, {counts.lookups['misses']} not"))


def _difference(here: str, there: str) -> str:
    """What differs in a part of a key: of words, those that one of the two has."""
    words, others = here.split(), there.split()
    only, missing = (
        " ".join(word for word in some if word not in rest)[:_SHOWN]
        for some, rest in ((words, others), (others, words))
    )
    return f"here {only or 'nothing more'!r}, there {missing or 'nothing more'!r}"

"""``fuseboard bisect``: who makes a script fail."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from fuseboard.cli.explain import AsJson, TargetError, check_writable

if TYPE_CHECKING:
    from fuseboard.bisection.run import Outcome, Step
    from fuseboard.bisection.search import Culprit


def bisect(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python script that fails; runs as __main__.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")
    ] = None,
    trips: Annotated[
        bool, typer.Option("--trips", help="A failure that was contained counts as well.")
    ] = False,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="A run that takes longer fails.")
    ] = 600.0,
    max_runs: Annotated[int, typer.Option(min=2, help="So many runs at most.")] = 20,
    repro: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write a script with the ops to blame and nothing else."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the plugin, the stage, and the rewrite or the op that make a script fail.

    SCRIPT ends with an exception or an exit status where something is wrong: let it compare with
    eager, or assert how long a call takes. It runs again and again, each time in a process of its
    own, with something switched off; a run fails if it ends as the first one did.
    """
    from fuseboard.bisection.script import bisect as search

    if not script.is_file():
        raise TargetError(f"there is no file {str(script)!r}. Name a Python script to run.")
    if repro is not None:
        check_writable("--repro", repro)
    console, runs = Console(stderr=True, highlight=False), []

    def done(step: Step, outcome: Outcome) -> None:
        runs.append({"run": step.label, "failure": outcome.message, "seconds": outcome.seconds})
        ended = Text(outcome.message or "passes", "red" if outcome.failure else "green")
        line = Text(f"run {len(runs):2}  {step.label}: ").append(ended)
        console.print(line.append(f" ({outcome.seconds:.1f} s)"), soft_wrap=True)

    with console.status("fuseboard: running the script"):
        found = search(
            script,
            args or [],
            trips=trips,
            limit_s=limit,
            max_runs=max_runs,
            reproduction=repro,
            done=done,
        )
    if repro is not None and not found.reproduction:
        print("no reproduction: no few ops of one graph are to blame", file=sys.stderr)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "runs": runs}, indent=2))
    else:
        for line in _lines(found, len(runs)):
            print(line)


def _lines(found: Culprit, runs: int) -> list[str]:
    """What was found, for people."""
    lines = [f"{found.summary} ({runs} runs)"]
    lines += [f"  {rewrite}" for rewrite in found.rewrites]
    if len(found.ops) > 1:
        lines.append(f"  only together, in this order: {', '.join(found.ops)}")
    if found.region:
        lines.append(f"  in {found.region}{f', from {found.source}' if found.source else ''}")
    if found.workaround:
        shown = ", ".join(f"{name}={value!r}" for name, value in found.workaround.items())
        ends = {True: "the script passes", False: "the script still fails", None: "not tried"}
        lines.append(f"  with fuseboard.settings({shown}): {ends[found.is_confirmed]}")
    return lines

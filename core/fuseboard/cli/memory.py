"""``fuseboard memory``: what memory budgets cost a model in step time, as a table and a plot."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fuseboard.cli import INTERRUPTED
from fuseboard.cli.explain import AsJson, Target, TargetError, call_at, check_writable
from fuseboard.errors import SettingsError

if TYPE_CHECKING:
    from fuseboard.profile.observe.memory import MemoryPoint


def memory(
    target: Target,
    budgets: Annotated[
        str, typer.Option(help="Budgets to measure, from 0 to 1, with commas between.")
    ] = "1,0.75,0.5,0.25,0",
    seconds: Annotated[
        float, typer.Option(min=0, help="How long each budget's steps are timed.")
    ] = 2.0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Draw peak against step time into a picture."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a training step in eager and under each memory budget.

    FUNCTION returns a model and its arguments, (model, args) or (model, args, kwargs), as for
    fuseboard explain. The backward starts at the result's loss if it has one, else at all outputs
    that require grad. The settings that hold here hold for what is compiled.

    Ctrl-C ends it early and shows what was measured.
    """
    wanted = _numbers(budgets)
    if plot is not None:
        _need_matplotlib()
        plot = plot.absolute()  # the code may change the directory
        check_writable("--plot", plot)
    with redirect_stdout(sys.stderr):
        model, args, kwargs = call_at(target)
    points, interrupted = _measured(model, args, kwargs, wanted, seconds)
    if as_json:
        print(json.dumps({"target": target, "points": [p.as_dict() for p in points]}, indent=2))
    else:
        Console().print(table(points))
    if plot is not None and points:
        draw(points, plot)
        print(f"The plot is in {plot}", file=sys.stderr if as_json else sys.stdout)
    if interrupted:
        print("fuseboard: interrupted; the other budgets weren't measured", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"--budgets {text!r}: allowed: numbers from 0 to 1 with commas between, such as 1,0.5,0"
        ) from None


def _need_matplotlib() -> None:
    """Before minutes of measuring: whether a plot can be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise TargetError(
            "--plot needs matplotlib, which isn't installed. Try: pip install "
            "'fuseboard[benchmarks]', or leave --plot out."
        )


def _measured(
    model: Any, args: Any, kwargs: Any, budgets: list[float], seconds: float
) -> tuple[list[MemoryPoint], bool]:
    """The points, and whether Ctrl-C ended the measuring."""
    from fuseboard.profile.observe.memory import memory_points, with_pareto

    points: list[MemoryPoint] = []
    interrupted = False
    try:
        with redirect_stdout(sys.stderr):
            for point in memory_points(model, args, budgets, kwargs=kwargs, seconds=seconds):
                points.append(point)
    except KeyboardInterrupt:
        interrupted = True
    return with_pareto(points), interrupted


# --- showing ------------------------------------------------------------------------------------


def table(points: list[MemoryPoint]) -> Table:
    """One row a point; percentages are of eager's."""
    shown = Table(title="A training step, by memory budget", box=box.SIMPLE, padding=0)
    shown.add_column("budget", no_wrap=True)
    for name in ("saved", "peak", "of eager", "step us", "quartiles", "of eager", "Pareto"):
        shown.add_column(name, justify="right", no_wrap=True)
    failures = any(point.trips for point in points)
    if failures:
        shown.add_column("trips", justify="right")
    eager = next((point for point in points if point.budget is None), None)
    for point in points:
        row = [
            _name(point),
            _mib(point.saved_bytes),
            _mib(point.peak_bytes),
            _share(point.peak_bytes, eager.peak_bytes if eager else None),
            f"{point.latency_us:.0f}",
            f"{point.low_us:.0f}-{point.high_us:.0f}",
            _share(point.latency_us, eager.latency_us if eager else None),
            "*" if point.pareto else "",
        ]
        shown.add_row(*row, *([str(point.trips)] if failures else []))
    shown.caption = (
        "saved, peak: MiB. * no other row is as good in both peak and step, and better in one"
    )
    return shown


def _name(point: MemoryPoint) -> str:
    return "eager" if point.budget is None else f"{point.budget:g}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _share(value: float, whole: float | None) -> str:
    return f"{value / whole:.0%}" if whole else ""


def draw(points: list[MemoryPoint], path: Path) -> None:
    """Peak against step time, the quartiles as bars, Pareto points filled and joined."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    front = sorted((p for p in points if p.pareto), key=lambda p: p.peak_bytes)
    axes.plot([_x(p) for p in front], [p.latency_us / 1e3 for p in front], "-", color="0.7")
    for point in points:
        low, high = point.latency_us - point.low_us, point.high_us - point.latency_us
        axes.errorbar(
            _x(point),
            point.latency_us / 1e3,
            yerr=[[low / 1e3], [high / 1e3]],
            fmt="o",
            color="tab:orange" if point.budget is None else "tab:blue",
            markerfacecolor=None if point.pareto else "white",
        )
        axes.annotate(
            _name(point), (_x(point), point.latency_us / 1e3), (5, 5), textcoords="offset points"
        )
    axes.set_xlabel("peak of a training step, MiB")
    axes.set_ylabel("step, ms (median, quartiles)")
    axes.set_title("Memory budgets; filled: no other point is better in both", fontsize=10)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        # Such as an ending that matplotlib has no format for.
        raise TargetError(f"--plot {str(path)!r} can't be written: {error}") from error


def _x(point: MemoryPoint) -> float:
    return point.peak_bytes / 2**20

"""``fuseboard profile``: run a script under torch's profiler, write the trace, sum it up."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuseboard.cli import INTERRUPTED
from fuseboard.cli.explain import TargetError, check_writable

if TYPE_CHECKING:
    from fuseboard.profile.observe.trace_summary import RegionTime, Summary

_MOST_ROWS = 30


def profile(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python script; it runs as __main__.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="The trace's file, .json or .json.gz; else a folder for SCRIPT.trace.json.",
        ),
    ] = Path(),
    memory: Annotated[
        bool, typer.Option(help="Record allocations: a time line, and the peaks.")
    ] = True,
    stacks: Annotated[
        bool, typer.Option(help="Record Python's calls as well; that slows the script down.")
    ] = False,
) -> None:
    """Run a script under torch.profiler, write a trace for Perfetto, and sum it up.

    The trace shows each region of compiled code with its backend and module, compilations stage by
    stage, and allocated memory. The whole run is recorded, and kept in memory until it ends: let
    the script do a few steps.

    The script's output, exception and exit code are its own. After an exception or Ctrl-C the trace
    holds what there was until then.
    """
    if not script.is_file():
        raise TargetError(f"there is no file {str(script)!r}. Name a Python script to run.")
    path = _writable(out, script).absolute()  # the script may change the directory
    from fuseboard.torch_api.profiler import keep_cupti

    if note := keep_cupti():
        print(f"fuseboard: {note}", file=sys.stderr)
    problem = _traced(script, args or [], path, memory, stacks)
    _pass_on(problem)


def _writable(out: Path, script: Path) -> Path:
    """The file for the trace, before the script runs.

    :raises OutputError: it can't be written.
    """
    is_file = out.suffixes[-1:] == [".json"] or out.suffixes[-2:] == [".json", ".gz"]
    path = out if is_file else out / f"{script.stem}.trace.json"
    check_writable(f"--out {str(out)!r}:", path, make_folder=not is_file)
    return path


def _traced(
    script: Path, args: list[str], path: Path, memory: bool, stacks: bool
) -> BaseException | None:
    """Run the script, write the trace, print the summary; what the script raised.

    :raises TargetError: the script ran, and there is no trace of it.
    """
    import torch

    from fuseboard.profile.observe.trace import annotate, read_trace, write_trace
    from fuseboard.profile.observe.trace_summary import summarise
    from fuseboard.report.data import ledger
    from fuseboard.report.dynamo import watch
    from fuseboard.torch_api.profiler import is_recording

    recorder = torch.profiler.profile(profile_memory=memory, with_stack=stacks)
    with ledger.collect() as graphs, watch() as seen:
        recorder.start()
        problem = _run(script, args)
        recorded = is_recording()
        if recorded:
            recorder.stop()
    if not recorded:
        if problem is not None:
            return problem
        raise TargetError(
            f"there is no trace: {str(script)!r} uses a profiler of torch's itself, and there can "
            "be one at a time. Run it with python: regions are named in its own traces as well."
        )
    recorder.export_chrome_trace(str(path))
    try:
        trace = read_trace(path)
    except ValueError as error:  # torch writes names into it as they are
        print(f"fuseboard: the trace in {path} can't be summed up: {error}", file=sys.stderr)
        return problem
    annotate(trace, graphs, seen.breaks)
    write_trace(trace, path)
    sys.stdout.flush()
    show(summarise(trace), Console(stderr=True))
    print(
        f"The trace is in {path}; https://ui.perfetto.dev and chrome://tracing show it.",
        file=sys.stderr,
    )
    return problem


def _run(script: Path, args: list[str]) -> BaseException | None:
    """As ``python SCRIPT ARGS`` would."""
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:  # Ctrl-C and exit() as well: the trace is written first
        return error
    return None


def _pass_on(problem: BaseException | None) -> None:
    """End as the script ended."""
    if problem is None:
        return
    if isinstance(problem, SystemExit):
        if isinstance(problem.code, str):
            print(problem.code, file=sys.stderr)
        raise typer.Exit(problem.code if isinstance(problem.code, int) else int(bool(problem.code)))
    shown = problem.with_traceback(_own(problem.__traceback__))
    traceback.print_exception(shown)
    raise typer.Exit(INTERRUPTED if isinstance(problem, KeyboardInterrupt) else 1)


def _own(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames of this module and of runpy that led to the script."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames


# --- showing ------------------------------------------------------------------------------------


def show(summary: Summary, console: Console) -> None:
    """Regions, what surrounds them, compilations, memory, and what to do about it."""
    if summary.regions:
        console.print(_table(summary))
    for line in (*_lines(summary), *(f"- {sentence}" for sentence in summary.advice)):
        console.print(Text(line), soft_wrap=True)


def _table(summary: Summary) -> Table:
    on_device = any(row.device_us for row in summary.regions)
    shown = Table(title="Regions, in calls that didn't compile", box=box.SIMPLE, padding=(0, 1))
    shown.add_column("region", overflow="fold")
    shown.add_column("backend", no_wrap=True)
    for name in ("calls", "total ms", "mean us", "share"):
        shown.add_column(name, justify="right", no_wrap=True)
    if on_device:
        shown.add_column("device ms", justify="right", no_wrap=True)
    for row in summary.regions[:_MOST_ROWS]:
        shown.add_row(*_cells(row, on_device))
    left_out = len(summary.regions) - _MOST_ROWS
    if left_out > 0:
        shown.caption = f"and {left_out} more, each of which takes less"
    return shown


def _cells(row: RegionTime, on_device: bool) -> list[str]:
    file, _, line = row.source.rpartition(":")
    source = f"{Path(file).name}:{line}" if file else ""  # else it names the module once more
    where = " ".join(filter(None, (row.modules, source)))
    return [
        f"{row.region}\n  {where}" if where else row.region,
        row.backend,
        str(row.calls),
        f"{row.total_us / 1e3:.2f}",
        f"{row.mean_us:.0f}",
        f"{row.share:.0%}",
        *([f"{row.device_us / 1e3:.2f}"] if on_device else []),
    ]


def _lines(summary: Summary) -> list[str]:
    lines = []
    if summary.calls:
        each_us = summary.calls_us / summary.calls
        outside = summary.outside_us / (summary.calls_us or 1.0)
        kinds = f" ({summary.backwards} of them backwards)" if summary.backwards else ""
        lines.append(
            f"{summary.calls} compiled calls{kinds} of {each_us:.0f} us on average, "
            f"{outside:.0%} of it outside of regions"
        )
    if summary.first_calls:
        lines.append(
            f"{summary.first_calls} more calls compiled, verified or compared: "
            f"{summary.first_s:.2f} s, left out above"
        )
    if summary.guards:
        lines.append(
            f"guards were checked {summary.guards} times, {summary.guards_us / summary.guards:.0f} "
            "us each"
        )
    if summary.resumed or summary.breaks:
        count = sum(found.get("count", 1) for found in summary.breaks)
        lines.append(
            f"{count} graph breaks while compiling; {summary.resumed} compiled pieces ran inside "
            "of others, each after one"
        )
    if summary.compilations:
        lines.append(f"{summary.compilations} compilations took {summary.compile_s:.2f} s")
    lines.extend(_stage_lines(summary))
    for device in summary.devices:
        lines.append(
            f"device {device.device}: {device.kernels} kernels, busy "
            f"{device.busy_us / 1e3:.2f} ms, idle {device.idle_share:.0%} between them"
        )
    for name, peak in sorted(summary.peak_bytes.items()):
        lines.append(f"peak of allocated memory, {name}: {peak / 2**20:.1f} MiB more than at first")
    return lines


def _stage_lines(summary: Summary) -> list[str]:
    """What fuseboard's stages took, a line a graph."""
    graphs: dict[str, list[str]] = {}
    for (graph, stage), seconds in summary.stages.items():
        graphs.setdefault(graph, []).append(f"{stage} {seconds:.3f} s")
    return [f"  {graph}: {', '.join(stages)}" for graph, stages in graphs.items()]

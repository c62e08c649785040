"""Result files and tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.arms import CONTROL
from benchmarks.compile_time import PARTS, Compile, how_cut
from benchmarks.findings import Finding
from benchmarks.pairs import Pair
from benchmarks.protocol import Protocol
from benchmarks.settling import CALLS, Settling
from benchmarks.stats import CONFIDENCE
from benchmarks.suite import Record, Summary

#: Raised by one whenever a field changes its meaning or goes.
SCHEMA = 1


def document(
    kind: str,
    machine: dict[str, Any],
    protocol: Protocol,
    results: Sequence[Any],
    *,
    summary: Sequence[Any] = (),
    complete: bool,
) -> dict[str, Any]:
    """A result file as plain data. ``complete`` is False where a run was interrupted."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "complete": complete,
        "confidence": CONFIDENCE,
        "machine": machine,
        "protocol": protocol.as_dict(),
        "results": [_plain(result) for result in results],
        "summary": [_plain(entry) for entry in summary],
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Writes ``KIND-DATE.json`` and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = content["machine"]["date"][:19].replace(":", "").replace("-", "")
    path = folder / f"{content['kind']}-{stamp}.json"
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    commit = machine["commit"][:10] or "unknown"
    changed = ", with local changes" if machine["modified"] else ""
    console.print(
        escape(
            f"{machine['cpu']} ({', '.join(machine['cpu_flags'])}), {machine['cores']} cores, "
            f"load {machine['load']:.2f}\n"
            f"Python {machine['python']}, {versions}; commit {commit}{changed}; {machine['date']}"
        )
    )
    if machine["load"] > 0.5:
        console.print("[yellow]The machine is busy with something else: figures will be noisy.")


def print_records(console: Console, records: Sequence[Record]) -> None:
    """A row for each record; what has to be said in words comes below the table."""
    table = Table(title="Speed over eager in the same process", title_justify="left", box=SIMPLE)
    table.add_column("model", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    columns = ("thr", "ms", "guards", "speedup [95%]", "of medians", "cold s", "warm s")
    for name in (*columns, "settle s", "break-even", "MiB", "graphs", "breaks"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for r in records:
        if previous not in ("", r.model):
            table.add_section()
        previous = r.model
        table.add_row(
            r.model,
            r.arm,
            str(r.threads),
            _number(r.arm_ms, ".3f"),
            _number(r.guards_ms, ".2f"),
            escape(str(r.speedup)) if r.status in ("ok", "fell back") and r.speedup else r.status,
            _number(r.speedup_of_medians, ".3f"),
            _number(r.cold_first_s, ".2f"),
            _number(r.warm_first_s, ".2f"),
            _number(r.settle_s, ".1f"),
            _break_even(r),
            _number(r.peak_bytes and r.peak_bytes / 2**20, ".0f"),
            _number(r.graphs, "d"),
            _number(r.graph_breaks, "d"),
        )
    console.print(table)
    for r in records:
        if r.status != "ok" or r.notes:
            words = "; ".join(dict.fromkeys(r.notes))
            console.print(escape(f"{r.model}, {r.arm}, {r.threads} thr: {r.status}. {words}"))


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _break_even(record: Record) -> str:
    if record.break_even_calls is not None:
        return f"{record.break_even_calls:,}"
    compiled = record.speedup is not None and record.arm != CONTROL
    return "never" if compiled else "-"


def summary_table(summaries: Iterable[Summary]) -> Table:
    table = Table(
        title="Geometric means; a failure or a wrong result counts as 1.0",
        title_justify="left",
        box=SIMPLE,
    )
    table.add_column("arm", no_wrap=True)
    for name in ("thr", "models", "over eager", "over the best rival", "over the best per model"):
        table.add_column(name, justify="right")
    table.add_column("failures", overflow="fold")
    for s in summaries:
        table.add_row(
            s.arm,
            str(s.threads),
            str(s.models),
            f"{s.speedup:.3f}",
            f"{s.against_best:.3f} ({s.best})",
            f"{s.against_oracle:.3f}",
            ", ".join(s.failures) or "none",
        )
    return table


def pairs_table(pairs: Sequence[Pair]) -> Table:
    a, b = pairs[0].a, pairs[0].b
    table = Table(
        title=f"{a} against {b}: above 1, {a} is faster", title_justify="left", box=SIMPLE
    )
    table.add_column("model", no_wrap=True)
    for name in ("thr", "beside eager [95%]", "call against call [95%]", f"{a} ms", f"{b} ms"):
        table.add_column(name, justify="right")
    table.add_column("notes", overflow="fold")
    for pair in pairs:
        calls = [f"{pair.call_ms(arm):.3f}" if pair.of(arm) else "-" for arm in (a, b)]
        speed, latency = (escape(str(e)) if e else "-" for e in (pair.speed, pair.latency))
        table.add_row(pair.model, str(pair.threads), speed, latency, *calls, escape(pair.failure))
    return table


def print_compiles(console: Console, compiles: Sequence[Compile]) -> None:
    """A row for each arm on each model; below it how fuseboard cut the graphs."""
    table = Table(title="Cold compiles, seconds", title_justify="left", box=SIMPLE)
    table.add_column("model", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    columns = ("Dynamo", "AOTAutograd", "of which split", "lowering", "first call", "a call")
    for name in (*columns, "first compile of a process", "failure"):
        table.add_column(name, justify="right")
    measured = [c for c in compiles if c.workers]
    for c in measured:
        table.add_row(c.model, c.arm, *(f"{c.seconds(part):.2f}" for part in PARTS), c.failure)
    console.print(table)
    for c in compiles:
        if not c.workers and c.failure:
            console.print(escape(f"{c.model}, {c.arm}: {c.failure}"))
    for c in measured:
        for graph in c.graphs:
            if graph["regions"]:
                console.print(escape(f"{c.model}: {how_cut(graph)}"))


def settling_table(settlings: Iterable[Settling]) -> Table:
    table = Table(title="From the first call to settled ones", title_justify="left")
    for column in (
        "model",
        "",
        "first answer",
        "× Dynamo's",
        "longest later",
        "× settled",
        f"worst {CALLS} × settled",
        "× eager",
        "settled after",
        "settled call",
        "MiB",
        "runs",
        "missed",
    ):
        table.add_column(column, overflow="fold")
    for one in settlings:
        for name, run in (("eager", one.eager), ("cold", one.cold), ("warm", one.warm)):
            after = "never" if run.settled_s is None else f"{run.settled_s:.1f} s"
            misses = [miss.partition(": ")[2] for miss in one.misses() if miss.startswith(name)]
            compared = name != "eager"
            table.add_row(
                one.model,
                name,
                f"{run.first_s:.2f} s",
                f"{one.first(run):.2f}" if compared else "",
                f"{1e3 * run.longest_s:.0f} ms" if compared else "",
                f"{one.longest(run):.2f}" if compared else "",
                f"{one.stretch(run):.2f}" if compared else "",
                f"{one.stretch_of_eagers(run):.2f}" if compared else "",
                after if compared else "",
                f"{1e3 * run.settled_call_s:.1f} ms",
                f"{run.peak_mib}",
                escape(run.winner),
                ", ".join(misses),
            )
    return table


def findings_table(findings: Iterable[Finding]) -> Table:
    table = Table(title="What must hold", title_justify="left", show_lines=True)
    table.add_column("claim", overflow="fold", ratio=3)
    table.add_column("measured", overflow="fold", ratio=4)
    table.add_column("holds", no_wrap=False, ratio=1)
    colours = {"yes": "green", "within the interval": "green", "no": "red"}
    for finding in findings:
        colour = colours.get(finding.holds, "yellow")
        table.add_row(escape(finding.claim), escape(finding.measured), f"[{colour}]{finding.holds}")
    return table

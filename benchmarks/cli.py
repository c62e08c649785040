"""The command line: a run over models and arms, ``check``, ``imports`` and ``list``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import (
    claims,
    compile_time,
    decode,
    losses,
    package,
    pairs,
    partitioning,
    plot,
    ranks,
    results,
    settling,
    suite,
)
from benchmarks.arms import ARMS, select_arms
from benchmarks.findings import Finding
from benchmarks.imports import REPEATS, measure_imports
from benchmarks.machine import describe
from benchmarks.models import MODELS, select_models
from benchmarks.protocol import FULL, QUICK
from benchmarks.session import Session

app = typer.Typer(
    add_completion=False,
    help="Measure fuseboard beside eager and Inductor. Without a command: models times arms.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: A file or a pipe has no width of its own; the widest table needs this much.
console = Console(width=None if sys.stdout.isatty() else 150)
RESULTS = Path(__file__).parent / "results"
INTERRUPTED = 130

Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds: a look, not a figure.")]
Out = Annotated[Path, typer.Option("--out", help="Where the JSON and the plot go.")]


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    models: Annotated[
        str,
        typer.Option(help="Names, globs, inference, training, kernel or all; separated by commas."),
    ] = "all",
    arms: Annotated[str, typer.Option(help="Names or all; separated by commas.")] = "all",
    threads: Annotated[str, typer.Option(help="Thread counts, such as 1,2.")] = "1",
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two arms in processes that take turns."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="With --pair: processes of each arm.")
    ] = pairs.REPEATS,
    quick: Quick = False,
    out: Out = RESULTS,
) -> None:
    """Measure models with arms, or compare a --pair; print tables, write JSON and a plot."""
    if context.invoked_subcommand is not None:
        return
    chosen = _checked(select_models, _split(models), "--models")
    counts = _thread_counts(threads)
    if pair is None:
        _run_suite(
            suite.plan(chosen, _checked(select_arms, _split(arms), "--arms"), counts), quick, out
        )
        return
    both = _checked(select_arms, pair, "--pair")
    fit = [m for m in chosen if m.kind != "training" or all(arm.training for arm in both)]
    todo = [pairs.Pair(model.name, *pair, count) for count in counts for model in fit]
    _run_pairs(todo, repeats, quick, out)


def _run_suite(cases: list[suite.Case], quick: bool, out: Path) -> None:
    protocol = QUICK if quick else FULL
    machine = _begin()
    records: list[suite.Record] = []

    def work() -> None:
        with Session(protocol, suite.WORKERS_PER_CASE * len(cases), console) as session:
            suite.run(session, cases, records)

    complete = _interruptible(work)
    summary = suite.summarise(records)
    results.print_records(console, records)
    console.print(results.summary_table(summary))
    content = results.document(
        "suite", machine, protocol, records, summary=summary, complete=complete
    )
    path = _write(out, content)
    if any(record.counted is not None for record in records):
        _plot(records, path.with_suffix(".png"))
    _end(complete)


def _run_pairs(todo: list[pairs.Pair], repeats: int, quick: bool, out: Path) -> None:
    protocol = QUICK if quick else FULL
    machine = _begin()
    done: list[pairs.Pair] = []

    def work() -> None:
        with Session(protocol, 2 * repeats * len(todo), console) as session:
            for pair in todo:
                pairs.run(session, pair, repeats, done)

    complete = _interruptible(work)
    if done:
        console.print(results.pairs_table(done))
    _write(out, results.document("pair", machine, protocol, done, complete=complete))
    _end(complete)


@app.command()
def check(
    only: Annotated[str, typer.Option(help="Names of checks or globs, separated by commas.")] = "*",
    quick: Quick = False,
    out: Out = RESULTS,
) -> None:
    """Measure just what the project's claims need and say which of them hold.

    The exit code is 0 whether they hold or not: this measures, it doesn't test.
    """
    chosen = _checked(claims.select_checks, _split(only), "--only")
    protocol, scale = (QUICK, claims.QUICK) if quick else (FULL, claims.FULL)
    machine = _begin()
    findings: list[Finding] = []

    def work() -> None:
        total = sum(one.workers(scale) for one in chosen)
        with Session(protocol, total, console) as session:
            claims.run(session, chosen, scale, findings)

    complete = _interruptible(work)
    console.print(results.findings_table(findings))
    missed = sum(finding.holds == "no" for finding in findings)
    console.print(f"{len(findings)} measured, {missed} not reached.")
    _write(out, results.document("check", machine, protocol, findings, complete=complete))
    _end(complete)


@app.command("imports")
def imports_command(
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = REPEATS,
    out: Out = RESULTS,
) -> None:
    """Measure what ``import fuseboard`` costs beyond torch's own import."""
    machine = _begin()
    with console.status("imports") as status:
        finding = claims.import_finding(measure_imports(repeats, status.update))
    console.print(results.findings_table([finding]))
    _write(out, results.document("imports", machine, FULL, [finding], complete=True))


@app.command("package")
def package_command(
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = package.REPEATS,
    out: Out = RESULTS,
) -> None:
    """Measure a package's start-up beside warm Inductor's, its call beside ONNX Runtime's own."""
    machine = _begin()
    with console.status("package") as status:
        cost = package.measure_package(repeats, status.update)
    console.print(
        f"first result of a BERT, after torch is imported: {cost.loaded_s.value:.2f} s loaded, "
        f"{cost.inductor_s.value:.2f} s by Inductor with filled caches\n"
        f"call of an MLP: {cost.call_us:.0f} us packaged, {cost.direct_us:.0f} by ONNX Runtime "
        f"directly: {cost.ratio:.3f} (CPU time of one thread)"
    )
    _write(out, results.document("package", machine, FULL, [cost], complete=True))


@app.command("compile-time")
def compile_time_command(
    models: Annotated[
        str, typer.Option(help="Names or globs, separated by commas.")
    ] = "llama4-1x128,llama24-1x128,train-llama4,train-llama24",
    repeats: Annotated[int, typer.Option(min=1, help="Cold processes of each arm.")] = 2,
    quick: Quick = False,
    out: Out = RESULTS,
) -> None:
    """Take cold compiles apart: Dynamo, AOTAutograd, lowering; fuseboard beside Inductor."""
    chosen = _checked(select_models, _split(models), "--models")
    protocol = QUICK if quick else FULL
    machine = _begin()
    done: list[compile_time.Compile] = []

    def work() -> None:
        total = len(chosen) * len(compile_time.ARMS) * repeats
        with Session(protocol, total, console) as session:
            compile_time.measure(session, [model.name for model in chosen], repeats, done)

    complete = _interruptible(work)
    results.print_compiles(console, done)
    _write(out, results.document("compile-time", machine, protocol, done, complete=complete))
    _end(complete)


@app.command("partitioning")
def partitioning_command(
    nodes: Annotated[int, typer.Option(min=100, help="Ops of each graph.")] = partitioning.NODES,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each case.")] = (
        partitioning.REPEATS
    ),
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time goes.")] = False,
    out: Out = RESULTS,
) -> None:
    """Time the partitioner step by step on large made-up graphs."""
    machine = _begin()
    with console.status("partitioning") as status:
        cases = partitioning.measure_partitioning(nodes, repeats, status.update, profile)
    console.print(results.findings_table(map(claims.partitioning_finding, cases)))
    for case in cases:
        if case.profile:
            console.print(f"{case.case}\n{case.profile}", markup=False, highlight=False)
    _write(out, results.document("partitioning", machine, FULL, cases, complete=True))


@app.command("losses")
def losses_command(
    backends: Annotated[str, typer.Option(help="Separated by commas.")] = "inductor,eager",
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each arm.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each process.")] = 3,
    out: Out = RESULTS,
) -> None:
    """Peak and time of a training step with a large vocabulary, without and with one op for it."""
    machine = _begin()
    done: list[losses.Loss] = []
    with console.status("losses") as status:
        for backend in _split(backends):
            done.append(losses.measure_losses(backend, repeats, steps, status.update))
    console.print(losses.losses_table(done))
    _write(out, results.document("losses", machine, FULL, done, complete=True))


@app.command("decode")
def decode_command(
    models: Annotated[str, typer.Option(help="Names, separated by commas.")] = "",
    caches: Annotated[str, typer.Option(help="static, dynamic.")] = decode.CACHES[0],
    out: Out = RESULTS,
) -> None:
    """Tokens a second of transformers' generate, and what the first token takes."""
    chosen = _split(models) or decode.installed_models()[-1:]
    for option, names, known in (
        ("--models", chosen, decode.MODELS),
        ("--caches", _split(caches), decode.CACHES),
    ):
        if unknown := sorted(set(names) - set(known)):
            raise typer.BadParameter(
                f"{unknown[0]!r}: one of {', '.join(known)}", param_hint=option
            )
    machine = _begin()
    done: list[decode.Decoding] = []
    total = len(chosen) * len(_split(caches))
    with console.status("decode") as status:
        for one in decode.measure_decoding(chosen, _split(caches), status.update):
            done.append(one)
            complete = len(done) == total
            _write(out, results.document("decode", machine, FULL, done, complete=complete))
            console.print(decode.decoding_table([one]))


@app.command("ranks")
def ranks_command(
    size: Annotated[int, typer.Option(help="How many ranks, from 2.", min=2)] = 2,
    out: Out = RESULTS,
) -> None:
    """A step of training under DDP on several ranks, beside Inductor and eager."""
    machine = _begin()
    with console.status("ranks") as status:
        done = ranks.measure_ranks(size, status.update)
    console.print(ranks.ranks_table(done, size))
    _write(out, results.document("ranks", machine, FULL, done, complete=True))


@app.command("budget")
def budget_command(
    models: Annotated[
        str, typer.Option(help="Names, separated by commas; all of them by default.")
    ] = "",
    out: Out = RESULTS,
) -> None:
    """Errors on inputs that weren't seen, within each budget of accuracy and each format."""
    from benchmarks import budget, budget_models  # torch: nobody's memory is measured here

    chosen = _split(models) or list(budget_models.NAMES)
    if unknown := sorted(set(chosen) - set(budget_models.NAMES)):
        raise typer.BadParameter(
            f"{unknown[0]!r}: one of {', '.join(budget_models.NAMES)}", param_hint="--models"
        )
    machine = _begin()
    done: list[budget.Budgeted] = []
    with console.status("budget") as status:
        for one in budget.measure_budgets(chosen, status.update):
            done.append(one)
            complete = len(done) == len(chosen)
            _write(out, results.document("budget", machine, FULL, done, complete=complete))
            console.print(budget.budget_table([one]))
    console.print(budget.budget_table(done))


@app.command("settle")
def settle_command(
    models: Annotated[str, typer.Option(help="Names or globs, separated by commas.")] = ",".join(
        settling.MODELS
    ),
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    out: Out = RESULTS,
) -> None:
    """Time every call from the first to a settled one: what a program notices of compiling."""
    chosen = _checked(select_models, _split(models), "--models")
    machine = _begin()
    done: list[settling.Settling] = []
    with console.status("settle") as status:
        for one in settling.measure_settling([m.name for m in chosen], threads, status.update):
            done.append(one)
            complete = len(done) == len(chosen)
            _write(out, results.document("settle", machine, FULL, done, complete=complete))
            console.print(results.settling_table([one]))
    console.print(results.settling_table(done))


@app.command("list")
def list_command() -> None:
    """List models, arms and checks."""
    for title, entries in (("models", MODELS), ("arms", ARMS)):
        table = Table("name", "description", title=title, title_justify="left")
        for entry in entries.values():
            table.add_row(entry.name, entry.description)
        console.print(table)
    console.print("checks:", ", ".join(one.name for one in claims.CHECKS))


def _split(value: str) -> list[str]:
    return value.replace(",", " ").split()


def _checked(select: Callable[[Any], list[Any]], names: Any, option: str) -> list[Any]:
    """What ``select`` finds; its KeyError as a usage error."""
    try:
        return select(names)
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0]), param_hint=option) from error


def _thread_counts(value: str) -> list[int]:
    parts = _split(value)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{value!r}: whole numbers from 1", param_hint="--threads")
    return [int(part) for part in parts]


def _begin() -> dict[str, Any]:
    machine = describe()
    results.print_machine(console, machine)
    return machine


def _interruptible(work: Callable[[], None]) -> bool:
    """Whether ``work`` came to its end. Ctrl-C stops it and keeps what it had measured."""
    try:
        work()
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted. This is what was measured so far:")
        return False
    return True


def _end(complete: bool) -> None:
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _write(out: Path, content: dict[str, Any]) -> Path:
    path = results.write(out, content)
    console.print(f"written: {path}", soft_wrap=True)
    return path


def _plot(records: list[suite.Record], path: Path) -> None:
    try:
        plot.plot_speedups(records, path)
    except ImportError as error:
        console.print(f"no plot: {error}; pip install matplotlib", style="yellow")
        return
    console.print(f"written: {path}", soft_wrap=True)

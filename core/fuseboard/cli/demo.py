"""``fuseboard demo``: a pretrained model answers questions about Python's standard library."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fuseboard.cli import INTERRUPTED
from fuseboard.errors import FuseboardError

if TYPE_CHECKING:
    from fuseboard.contracts import Measurement
    from fuseboard.demo.docstrings import Docstring
    from fuseboard.demo.search import Embed, Found, Model
    from fuseboard.explanations.explanation import Explanation

QUESTIONS = (
    "How do I find the common prefix of several paths?",
    "How can I cache what a function returns?",
    "How do I delete a whole directory with everything in it?",
    "How can I keep a list sorted while adding to it?",
    "How do I split a command line into words as a shell would?",
)

#: Answers that must be the same, and those that are printed.
COMPARED, PRINTED = 5, 2

#: Seconds of measuring.
RACE_S = 12.0


def demo(
    texts: Annotated[
        int, typer.Option(min=0, help="Search so many docstrings, evenly spread; 0 takes all.")
    ] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads for torch; 0 leaves its own.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; what is done goes to stderr.")
    ] = False,
) -> None:
    """Answer questions with a pretrained model, through fuseboard and through eager.

    all-MiniLM-L6-v2 embeds the docstrings of Python's standard library and five questions; the
    nearest docstrings are the answers. Exits with 1 if fuseboard ranks them differently than eager.
    """
    console = Console(stderr=as_json, highlight=False)
    try:
        outcome = _Demo(console, texts, threads).run()
    except KeyboardInterrupt:
        console.print("\nStopped.", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(outcome.as_dict(), indent=2))
    if not outcome.same:
        raise typer.Exit(1)


@dataclass
class Outcome:
    """What the demo found.

    :ivar difference: the largest between a component of eager's vectors and of fuseboard's; the
        vectors have length 1.
    :ivar speeds: arm → how long a batch takes.
    :ivar first_s: arm → seconds until the first batch was done, the compile included.
    """

    entries: list[Docstring]
    batch: int
    eager: list[Found] = field(default_factory=list)
    board: list[Found] = field(default_factory=list)
    difference: float = 0.0
    speeds: dict[str, Measurement] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    explanation: Explanation | None = None

    @property
    def same(self) -> bool:
        """Whether every question got the same best answers in the same order."""
        return [f.positions for f in self.eager] == [f.positions for f in self.board]

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        return {
            "texts": len(self.entries),
            "same_ranking": self.same,
            "largest_difference": self.difference,
            "questions": [
                {
                    "question": question,
                    "answers": [
                        {**dataclasses.asdict(self.entries[i]), "score": score}
                        for i, score in zip(found.positions, found.scores, strict=True)
                    ],
                }
                for question, found in zip(QUESTIONS, self.board, strict=True)
            ],
            "speed": {
                name: {
                    **dataclasses.asdict(one),
                    "embeddings_per_s": self.batch / one.latency_us * 1e6,
                    "first_batch_s": self.first_s[name],
                }
                for name, one in self.speeds.items()
            },
            "left_out": self.left_out,
            "report": self.explanation.as_dict() if self.explanation else None,
        }


class _Demo:
    """The steps, each of which says what it does."""

    def __init__(self, console: Console, texts: int, threads: int) -> None:
        self.console = console
        self.texts = texts
        self.threads = threads

    def run(self) -> Outcome:
        from fuseboard.demo.search import require_packages

        require_packages()  # before torch is imported, which takes seconds
        self._say("Loading torch and all-MiniLM-L6-v2, 22 million weights")
        with self._busy("loading"):
            import torch

            from fuseboard.demo import docstrings, search

            if self.threads:
                torch.set_num_threads(self.threads)
            model = search.load()
            entries = docstrings.collect(self.texts)
        count = torch.get_num_threads()
        self._tell(
            f"{len(entries)} docstrings of Python's standard library to search; float32, "
            f"{count} thread{'' if count == 1 else 's'}"
        )
        if self.texts:
            self._tell(Text("without --texts there are more, and better answers", style="dim"))
        outcome = Outcome(entries, search.BATCH)
        embed = search.embedding(model.network)
        board = self._search(outcome, model, embed)
        self._answers(outcome)
        self._compare(outcome)
        self._race(outcome, model, embed, board)
        self._report(outcome)
        return outcome

    # --- searching ------------------------------------------------------------------------------

    def _search(self, outcome: Outcome, model: Model, embed: Embed) -> Embed:
        """Embed everything in eager and through fuseboard; the compiled function."""
        import numpy
        import torch

        from fuseboard.demo import search, speed
        from fuseboard.explanations.explanation import explained

        board: Embed = torch.compile(speed.own_code(embed, "embed_fuseboard"), backend="fuseboard")
        texts = [f"{entry.name}: {entry.text}" for entry in outcome.entries]
        vectors = {}
        self._say('Embedding them in eager, then by torch.compile(model, backend="fuseboard")')
        for name, function in (("eager", embed), ("fuseboard", board)):
            with explained() as explanation:
                outcome.first_s[name] = self._first(function, model, name)
            with self._bar(name, len(texts) + len(QUESTIONS)) as move:
                index = search.embed_all(function, model, texts, move)
                asked = search.embed_all(function, model, QUESTIONS, lambda _: None)
                move(len(texts) + len(QUESTIONS))
            vectors[name] = (index, asked)
        if not explanation.graphs:
            raise FuseboardError(
                "Dynamo gave fuseboard no graph, so there is nothing to compare. Is it switched "
                "off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE)?"
            )
        outcome.explanation = explanation
        outcome.eager = search.best(*vectors["eager"], COMPARED)
        outcome.board = search.best(*vectors["fuseboard"], COMPARED)
        outcome.difference = max(
            float(numpy.abs(a - b).max())
            for a, b in zip(vectors["eager"], vectors["fuseboard"], strict=True)
        )
        return board

    def _first(self, function: Embed, model: Model, name: str) -> float:
        """Seconds of a first batch."""
        import torch

        batch = model.batches(QUESTIONS)[0]
        start = time.perf_counter()
        with self._busy(f"{name}: first batch"), torch.no_grad():
            function(*batch)
        return time.perf_counter() - start

    def _answers(self, outcome: Outcome) -> None:
        self._say("Asking (answers by fuseboard, with cosine similarity)")
        for question, found in zip(QUESTIONS, outcome.board, strict=True):
            self.console.print(Text(f"\n  {question}", style="bold cyan"))
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            for position, score in list(zip(found.positions, found.scores, strict=True))[:PRINTED]:
                entry = outcome.entries[position]
                cell = Text(entry.name, style="bold green").append(f"\n{entry.line}", "not bold")
                table.add_row(f"{score:.2f}", cell)
            self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def _compare(self, outcome: Outcome) -> None:
        self._say("Comparing with eager")
        if outcome.same:
            verdict = Text(f"the same {COMPARED} answers in the same order to every question")
            verdict.stylize("green")
        else:
            wrong = [
                question
                for question, a, b in zip(QUESTIONS, outcome.eager, outcome.board, strict=True)
                if a.positions != b.positions
            ]
            verdict = Text(f"other answers than eager's to: {' '.join(wrong)}", style="bold red")
        self._tell(verdict)
        self._tell(f"largest difference in a vector of length 1: {outcome.difference:.1e}")

    # --- racing ---------------------------------------------------------------------------------

    def _race(self, outcome: Outcome, model: Model, embed: Embed, board: Embed) -> None:
        """Eager, Inductor and fuseboard in turn."""
        import torch

        from fuseboard.lower.background import wait
        from fuseboard.profile.choose.measure import measure
        from fuseboard.report.data import ledger

        start = time.perf_counter()
        with self._busy("fuseboard: trying what takes longer to compile, too"):
            wait(progress=False)
        if outcome.explanation is not None:
            outcome.explanation.graphs = ledger.current(outcome.explanation.graphs)
        self._tell(f"fuseboard's choice settled after another {time.perf_counter() - start:.1f} s")
        self._say("Measuring: the three in turn, on the same batch")
        arms: dict[str, Embed] = {"eager": embed}
        plain = self._inductor(outcome, model, embed)
        if plain is not None:
            arms["inductor"] = plain
        arms["fuseboard"] = board
        batch = model.batches([f"{e.name}: {e.text}" for e in outcome.entries])[0]

        calls = [partial(arm, *batch) for arm in arms.values()]
        with torch.no_grad(), self._busy("measuring"):
            outcome.speeds = dict(zip(arms, measure(calls, RACE_S), strict=True))
        self._speeds(outcome)

    def _inductor(self, outcome: Outcome, model: Model, embed: Embed) -> Embed | None:
        """The function compiled by Inductor alone; None, with the reason told, if it can't be."""
        from torch._dynamo.exc import BackendCompilerFailed

        from fuseboard.demo import speed

        why_not = speed.why_no_inductor()
        if why_not is None:
            plain, compiled = speed.inductor(embed)
            what = "inductor compiles C++: up to a minute the first time"
            try:
                outcome.first_s["inductor"] = self._first(plain, model, what)
            except BackendCompilerFailed as error:
                why_not = str(error).partition("\n")[0]
            else:
                if compiled:
                    return plain
                why_not = "Dynamo gave it no graph"
        outcome.left_out["inductor"] = why_not
        return None

    def _speeds(self, outcome: Outcome) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("")
        for column in ("embeddings/s", "ms a batch", "against eager", "first batch"):
            table.add_column(column, justify="right")
        eager_us = outcome.speeds["eager"].latency_us
        for name, one in outcome.speeds.items():
            table.add_row(
                Text(name, style="bold" if name == "fuseboard" else ""),
                f"{outcome.batch / one.latency_us * 1e6:.0f}",
                f"{one.latency_us / 1e3:.1f}",
                f"{eager_us / one.latency_us:.2f}",
                f"{outcome.first_s[name]:.1f} s",
            )
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
        for name, reason in outcome.left_out.items():
            self._tell(Text(f"without {name}: {reason}", style="yellow"))
        board = outcome.speeds["fuseboard"]
        for name, other in outcome.speeds.items():
            if name != "fuseboard":
                times = other.latency_us / board.latency_us
                self._tell(
                    f"fuseboard is {_judged(board, other)} {name} here: {times:.2f} times its "
                    f"speed by the medians of {board.calls} and {other.calls} calls"
                )

    def _report(self, outcome: Outcome) -> None:
        from fuseboard.explanations.text import show

        assert outcome.explanation is not None
        self._say("What ran where, as `fuseboard explain` shows it for code of your own")
        note = "its times are those by which the candidates were compared, before the race above"
        self._tell(Text(note, style="dim"))
        show(outcome.explanation, self.console)

    # --- telling --------------------------------------------------------------------------------

    def _say(self, step: str) -> None:
        self.console.print(Text(f"\n■ {step}", style="bold"))

    def _tell(self, line: str | Text) -> None:
        self.console.print(Padding(line, (0, 0, 0, 2), expand=False))

    def _busy(self, what: str) -> AbstractContextManager[Any]:
        """A spinner, on terminals."""
        return self.console.status(what) if self.console.is_terminal else nullcontext()

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; gone when it is full. Yields what moves it to a number."""
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as progress:
            task = progress.add_task(what, total=total)
            yield lambda now: progress.update(task, completed=now)


def _judged(board: Measurement, other: Measurement) -> str:
    """Times in words: a difference counts if three quarters of the calls lie beyond the other's."""
    if board.high_us < other.low_us:
        return "faster than"
    return "slower than" if board.low_us > other.high_us else "about as fast as"

"""One run of the benchmarks: its protocol, its progress bar, its caches."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.processes import Caches, Outcome, Phase, empty_caches, measure
from benchmarks.protocol import Protocol


class Session:
    """Starts workers one after another and shows how far it got.

    :ivar total: how many workers are expected; the bar's estimate rests on it.
    """

    def __init__(self, protocol: Protocol, total: int, console: Console | None = None) -> None:
        self.protocol = protocol
        self._stack = ExitStack()
        self._caches: dict[tuple[str, str, int], Caches] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Session:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._stack.close()

    def caches(self, model: str, arm: str, threads: int) -> Caches:
        """The folder of one model and arm: empty when first asked for, kept while the run lasts."""
        key = (model, arm, threads)
        if key not in self._caches:
            self._caches[key] = self._stack.enter_context(empty_caches())
        return self._caches[key]

    def measure(
        self, model: str, arm: str, threads: int, phase: Phase, caches: Caches | None = None
    ) -> Outcome:
        """One worker. Without ``caches``, those of its model and arm."""
        where = self.caches(model, arm, threads) if caches is None else caches

        def report(step: str) -> None:
            label = f"{model} · {arm} · {threads} thr · {step}"
            self._progress.update(self._task, description=label)

        outcome = measure(model, arm, threads, phase, self.protocol, where, report)
        self._progress.advance(self._task)
        return outcome

    def advance(self, description: str) -> None:
        """One step of another kind than a worker is done."""
        self._progress.update(self._task, description=description, advance=1)

"""The composite: a candidate in which each piece of a graph runs where it is fastest.

Pieces that are alike are timed once, each backend on the values that reach the piece in a call.
These decisions are kept by themselves: another graph with such pieces takes them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from fuseboard.board import Session
from fuseboard.contracts import Boxed, Measurement, Plan
from fuseboard.errors import CONTAINED, LoweringError
from fuseboard.lower.eager import boxed_function
from fuseboard.lower.failure import describe, trip
from fuseboard.lower.lowering import Lowering
from fuseboard.partition.pieces import Piece
from fuseboard.partition.places import Place
from fuseboard.partition.regions import Cut
from fuseboard.partition.signature import signature
from fuseboard.profile.choose.book import Book
from fuseboard.profile.choose.candidates import Candidate
from fuseboard.profile.choose.winner import choose
from fuseboard.report.data import CandidateReport, GraphReport
from fuseboard.run.copies import Copies
from fuseboard.run.program import Board
from fuseboard.run.weights import run_prepare

#: Calls of graphs that take less are not worth a look at their pieces, in microseconds: a region
#: more costs several.
WORTH_US = 2_000.0

#: More unlike pieces than this aren't timed.
MAX_KINDS = 100


@dataclass
class _Kind:
    """Pieces that are alike.

    :ivar times: backend → microseconds, once they are known.
    """

    piece: Piece
    able: tuple[str, ...]
    code: Boxed
    book: Book
    winner: str = ""
    times: dict[str, float] = field(default_factory=dict)


class Composite:
    """Makes the composite's regions.

    :ivar candidate: has no regions before it is composed.
    :ivar plan: once it is composed.
    :param alone: backend → the candidate of it alone: those that compile quickly.
    :param lowering: makes one for pieces; strict.
    :param pieces: cuts the graph into them.
    :param regions: moves views to where they are free; the placements then, and their regions.
    """

    def __init__(
        self,
        session: Session,
        candidate: Candidate,
        alone: Mapping[str, Candidate],
        lowering: Callable[[], Lowering],
        pieces: Callable[[], list[Piece]],
        regions: Callable[[Mapping[str, str]], tuple[dict[str, str], list[Cut]]],
    ) -> None:
        self.candidate = candidate
        self.plan = Plan({}, {})
        self._session = session
        self._alone = alone
        self._lowering = lowering
        self._pieces = pieces
        self._regions = regions

    @property
    def name(self) -> str:
        return self.candidate.name

    def is_worth_trying(self, winner: Candidate) -> bool:
        """Whether there is a choice, and calls are long enough.

        :param winner: of the other candidates.
        """
        return len(self._backends()) > 1 and (winner.told.latency_us or 0.0) >= WORTH_US

    def _backends(self) -> list[str]:
        """Those to choose from."""
        return [backend for backend, one in self._alone.items() if one.told.state != "failed"]

    def recall(self, board: Board) -> bool:
        """Give the candidate its regions by what is known of its pieces; False where some isn't."""
        try:
            return not self._compose(board, None)
        except CONTAINED as error:  # a plugin may raise anything
            # Nothing is lost but time: all candidates are measured again, this one among them.
            board.report.notes.append(
                f"{self.name} isn't taken from the cost database: {describe(error)}"
            )
            return False

    def compose(self, board: Board, inputs: Sequence[Any]) -> bool:
        """Give the candidate its regions, or drop it with the reason where nothing is to be gained.

        :param inputs: of a call.
        """
        start = time.perf_counter()
        try:
            why_not = self._compose(board, inputs)
        except CONTAINED as error:  # eager raises as well, or no backend runs a piece
            why_not = describe(error)
        self.candidate.told.compile_s = time.perf_counter() - start
        if why_not:
            self.candidate.drop("untried", why_not)
        return not why_not

    def _compose(self, board: Board, inputs: Sequence[Any] | None) -> str:
        """Why there is nothing to gain; "" if there may be."""
        backends = self._backends()
        lowering = self._lowering()
        pieces = self._pieces()
        kinds = self._kinds(board, pieces, backends, lowering.static)
        unlike = len({id(kind) for kind in kinds})
        if unlike > MAX_KINDS:
            return f"it has {unlike} unlike pieces, more than {MAX_KINDS}"
        if not all(kind.winner for kind in kinds):
            if inputs is None:
                return "its pieces aren't in the cost database"
            self._measure(board, pieces, kinds, inputs, lowering)
        alone = {b: sum(_time(kind, b) for kind in kinds) for b in backends}
        best_us = sum(_time(kind, kind.winner) for kind in kinds)
        leader = min(alone, key=alone.__getitem__)
        saved = 1 - best_us / alone[leader] if alone[leader] else 0.0
        if saved <= self._session.settings.margin:
            return f"its pieces take {max(saved, 0):.1%} less at best than with {leader} alone"
        best = {
            node.name: kind
            for piece, kind in zip(pieces, kinds, strict=True)
            for node in piece.cut.nodes
        }
        placements, cuts = self._regions({name: kind.winner for name, kind in best.items()})
        reasons = {name: _reason(kind, placements[name]) for name, kind in best.items()}
        self.plan = Plan(placements, reasons)
        self.candidate.cuts = cuts
        return ""

    def _kinds(
        self,
        board: Board,
        pieces: Sequence[Piece],
        backends: Collection[str],
        fixed: Collection[Node],
    ) -> list[_Kind]:
        """The kind of each piece, with what was measured before."""
        known: dict[str, _Kind] = {}
        found = []
        for piece in pieces:
            graph = piece.cut.graph
            static = tuple(i for i, node in enumerate(piece.cut.inputs) if node in fixed)
            able = tuple(b for b in piece.able if b in backends) or piece.able[:1]
            name = signature(graph, " ".join(able), static)
            if name not in known:
                aside = GraphReport(board.report.name, board.kind, board.report.frame)
                book = Book.of(self._session, graph, board.kind, static, aside, "region")
                code = boxed_function(graph, f"{board.report.name}_piece{len(known)}")
                known[name] = _Kind(piece, able, code, book)
                _take_over(known[name])
            found.append(known[name])
        return found

    def _measure(
        self,
        board: Board,
        pieces: Sequence[Piece],
        kinds: Sequence[_Kind],
        inputs: Sequence[Any],
        lowering: Lowering,
    ) -> None:
        """Run the graph piece by piece, and time each kind where it is met first."""
        left = {id(kind) for kind in kinds if not kind.winner}
        budget_s = self._session.settings.measure_s / len(left)
        values: dict[Node, Any] = dict(
            zip(board.graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
        )
        readers: dict[Node, int] = {}
        for number, piece in enumerate(pieces):
            readers.update(dict.fromkeys(piece.cut.inputs, number))
        for number, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
            given = [values[node] for node in piece.cut.inputs]
            if not kind.winner:
                self._decide(kind, lowering, given, budget_s, board.report)
                left.discard(id(kind))
            if not left:
                return
            results = kind.code(list(given))
            values.update(zip(piece.cut.outputs, results, strict=True))
            for node in piece.cut.inputs:
                if readers[node] == number:
                    values.pop(node, None)

    def _decide(
        self,
        kind: _Kind,
        lowering: Lowering,
        given: Sequence[Any],
        budget_s: float,
        report: GraphReport,
    ) -> None:
        """Time the backends on a piece, and keep which is fastest."""
        told = {backend: CandidateReport(backend) for backend in kind.able}
        calls: dict[str, _OnCopies] = {}
        try:
            right = self._that_run(kind, lowering, given, told, calls)
            _, measured = self._session.first(
                "fuseboard_measure", calls=[calls[b] for b in right], budget_s=budget_s
            )
        finally:
            written = {backend: call.copies.written() for backend, call in calls.items()}
        times: dict[str, Measurement] = dict(zip(right, measured, strict=True))
        for backend, where in written.items():
            if where:
                times.pop(backend, None)
                told[backend].problem = problem = f"it wrote to the inputs {where} of a piece"
                trip(report, backend, "profile", report.name, problem, "the other backends there")
        if not times:
            raise LoweringError(f"a piece that {kind.able[0]} claimed isn't run by it")
        kind.times = {backend: one.latency_us for backend, one in times.items()}
        kind.winner = list(times)[choose(list(times.values()), self._session.settings.margin)]
        for backend, one in times.items():
            row = told[backend]
            row.latency_us, row.low_us, row.high_us = one.latency_us, one.low_us, one.high_us
        kind.book.record(kind.winner, list(told.values()), settled=True)

    def _that_run(
        self,
        kind: _Kind,
        lowering: Lowering,
        given: Sequence[Any],
        told: Mapping[str, CandidateReport],
        calls: dict[str, _OnCopies],
    ) -> list[str]:
        """The backends that run a piece; what the others say against it is kept with its times.

        :param calls: filled in, also with those that raise.
        """
        found = []
        for backend in kind.able:
            try:
                calls[backend] = _on(backend, kind.piece.cut, lowering, given)
                calls[backend]()
                found.append(backend)
            except Exception as error:  # a plugin may raise anything; another one has the piece
                told[backend].problem = describe(error)
        if not found:
            raise LoweringError(f"a piece that {kind.able[0]} claimed isn't run by it")
        return found


class _OnCopies:
    """A call of a piece, on copies of its inputs as often as it is made."""

    def __init__(self, call: Boxed, given: Sequence[Any], prepared: Sequence[Any]) -> None:
        self._call = call
        self.copies = Copies([*given, *prepared], sealed=len(prepared))

    def __call__(self) -> Any:
        return self._call(list(self.copies.values))


def _on(backend: str, cut: Cut, lowering: Lowering, given: Sequence[Any]) -> _OnCopies:
    """A piece on a backend, its weights prepared."""
    place = Place(cut.place.stage, backend)
    own = Cut(place, cut.owner, cut.nodes, cut.inputs, cut.outputs, cut.written)
    lowered = lowering.lower(own, "piece", whole=False)
    prepared: Sequence[Any] = ()
    if lowered.prepare is not None:
        prepared = run_prepare([(lowered.prepare, lowered.uses)])(given)
    return _OnCopies(lowered.call, [given[i] for i in lowered.keeps], prepared)


def _take_over(kind: _Kind) -> None:
    """What an earlier process or graph measured, where it measured all of the backends."""
    if len(kind.able) == 1:
        kind.winner = kind.able[0]
        return
    decision = kind.book.find()
    if decision is None or decision.winner not in kind.able:
        return
    if {cost.name for cost in decision.candidates} == set(kind.able):
        kind.winner = decision.winner
        kind.times = {c.name: c.latency_us for c in decision.candidates if c.latency_us}


def _time(kind: _Kind, backend: str) -> float:
    """What a piece takes on a backend, or on the first that takes it; nothing without a choice."""
    if backend in kind.times:
        return kind.times[backend]
    return next(iter(kind.times.values()), 0.0)


def _reason(kind: _Kind, backend: str) -> str:
    if backend != kind.winner:
        return "a view, beside what reads it or what it is a view of"
    if len(kind.able) == 1:
        return f"{backend} is all there is for it here"
    times = ", ".join(f"{name} {us:.0f} us" for name, us in kind.times.items())
    return f"chosen by what pieces like this take: {times}"

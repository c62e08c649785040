"""Regions in a checked call: their outputs are compared with their contract and eager's values.

A region runs on copies of its inputs, which are compared with the inputs after the call. Where
every call is checked, later calls use the inputs themselves, since code may keep something for
addresses that come again; what it writes to them is undone from copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from fuseboard.beside import is_beside
from fuseboard.board import Session
from fuseboard.board.deadline import deadline
from fuseboard.contracts import Boxed, Region, Verdict
from fuseboard.errors import (
    ContractError,
    HookTimeout,
    PluginError,
    WrongValues,
    containable,
    error_text,
)
from fuseboard.profile.judge.copies import Copies, KeptCopies, WriteWatch
from fuseboard.profile.judge.divergence import first_divergence
from fuseboard.profile.judge.reference import Reference, Rule, make_reference, replayable
from fuseboard.profile.judge.replays import generators_put_back, why_it_writes
from fuseboard.profile.judge.same_results import difference_of_dynamo_graph
from fuseboard.profile.judge.verify import reused_outputs, verify
from fuseboard.report.data import GraphReport
from fuseboard.run.eager import boxed_function
from fuseboard.run.failure import decide, describe, trip
from fuseboard.run.portable import itself
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.state import CALL_PARTS, StateGuard

#: Seconds that a region's call may take while it is judged, on top of a multiple of what eager and
#: the float64 run took; ``hook_limit_s`` is the limit in any case.
CALL_LIMIT_S, CALL_LIMIT_FACTOR = 60.0, 20.0

#: So many calls follow a region's first one; their results must be in other memory.
_FURTHER_CALLS = 2


@dataclass
class RegionChecks:
    """What checked functions hold regions against, and which code has passed.

    :ivar values: hold outputs against a float64 run of the region, where its code hasn't passed.
    :ivar strides: compare strides with torch's fake values, where eager's aren't known. A region
        that was compared with eager before may have other ones.
    :ivar inputs: a region whose code hasn't passed runs on copies of its inputs (``copied``); on
        the inputs, with its writes undone (``watched``); or on the inputs, unchecked (``unseen``).
    :ivar again: check also code that has passed.
    :ivar passed: code with right values, by its ``id``; the entry keeps the code alive.
    :ivar references: of regions that several programs share, so that each is computed once. None:
        they aren't kept.
    :ivar input_copies: copies of the graph's inputs.
    """

    values: bool = True
    strides: bool = True
    inputs: Literal["copied", "watched", "unseen"] = "copied"
    again: bool = False
    passed: dict[int, Any] = field(default_factory=dict)
    references: dict[Any, Reference | str] | None = None
    input_copies: KeptCopies | None = None


class CheckedRegion:
    """A region's callable in a checked call.

    :param region: as it was cut; its graph is what the values are held against.
    :param code: what isomorphic regions share.
    :param expected: fake values of its outputs.
    :param lower_part: compiles a part of the region as the region was compiled.
    :param inner: positions of outputs that nothing but other regions reads.
    :param is_eager: the code is the region's graph, op by op.
    :param dynamo_graph_as: the code is Dynamo's graph; this is what was captured of it.
    :param prepared: so many of the last arguments were prepared from weights.
    :param trusted: only the board's own code runs.
    :param seen: called with the results of a call that was right.
    :param key: regions of the same inputs, ops and outputs have one; None means unlike all others.
    """

    def __init__(
        self,
        region: Region,
        call: Boxed,
        code: Boxed,
        expected: tuple[Any, ...],
        session: Session,
        report: GraphReport,
        checks: RegionChecks,
        key: Any = None,
        lower_part: Callable[[GraphModule], Boxed] | None = None,
        inner: frozenset[int] = frozenset(),
        is_eager: bool = False,
        dynamo_graph_as: GraphModule | None = None,
        prepared: int = 0,
        trusted: bool = False,
        seen: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        self._region = region
        self._call = call
        self._code = code
        self._session = session
        self._report = report
        self._checks = checks
        self._expected = expected
        self._key = key
        self._lower_part = lower_part
        self._inner = inner
        self._is_eager = is_eager
        self._dynamo_graph_as = dynamo_graph_as
        self._prepared = prepared
        self._trusted = trusted
        self._seen = seen

    def __call__(self, args: list[Any], values: Sequence[Any] | None = None) -> Sequence[Any]:
        """
        :param args: what the region's code takes.
        :param values: the region's own inputs, where the code takes others.
        :raises WrongValues: it computes something else.
        :raises ContractError: it breaks another promise.
        :raises NotEnoughMemory: there is no room for copies of its inputs.
        """
        inputs = list(args)
        own = inputs if values is None else values
        start = time.perf_counter()
        reference = self._reference(own)
        result = self._result(args, time.perf_counter() - start)
        verdict = self._verdict(result, inputs, reference)
        if verdict.by_value and reference is not None:
            verdict = self._verdict_of_eager(verdict, own, result, reference.rules)
        if not verdict.ok:
            where = self._where(own) if verdict.by_value else ""
            raise self._broken(verdict.problem + where, verdict.by_value)
        if reference is not None:
            self._must_have_memory_of_its_own(result, inputs, time.perf_counter() - start)
            self._checks.passed[id(self._code)] = self._code
        if self._seen is not None:
            self._seen(result)
        return result

    @property
    def _has_passed(self) -> bool:
        return id(self._code) in self._checks.passed and not self._checks.again

    def _result(self, args: list[Any], reference_s: float) -> Sequence[Any]:
        """
        :raises ContractError: it wrote to what it was given.
        """
        graph, how = self._region.graph, self._checks.inputs
        if how == "unseen" or self._trusted or self._has_passed or why_it_writes(graph):
            return self._guarded(args, reference_s)
        whole = any("as_strided" in str(node.target) for node in graph.graph.nodes)
        copies = Copies(args, self._prepared, whole, self._checks.input_copies)
        for number in copies.bare:
            self._note(f"{self._region.name}: whether it writes to input {number} isn't known")
        watch = WriteWatch(copies) if how == "watched" else None
        try:
            result = self._guarded(args if watch is not None else list(copies.values), reference_s)
        finally:
            written = copies.written() if watch is None else watch.undo()
        if written:
            raise self._broken(f"the lowered region wrote to its inputs {written}")
        return result if watch is not None else copies.back(result)

    def _must_have_memory_of_its_own(
        self, result: Sequence[Any], inputs: list[Any], taken_s: float
    ) -> None:
        """Call it twice more: what it returned before must stay what it is.

        :raises ContractError: it returns memory that an earlier result is in, or it wrote to its
            inputs.
        """
        if self._trusted or self._checks.inputs != "copied":
            return
        held = list(result)
        for _ in range(_FURTHER_CALLS):
            with generators_put_back():  # eager draws once a call
                again = self._result(list(inputs), taken_s)
            if reused := reused_outputs(held, again, inputs):
                raise self._broken(f"it returns memory that earlier results are in, as {reused}")
            held.extend(again)

    def _guarded(self, args: list[Any], reference_s: float) -> Sequence[Any]:
        """The call, within a limit of time, and held to leaving the process as it is.

        :param reference_s: what eager and the float64 run took.
        :raises HookTimeout: it took longer than it may.
        :raises ContractError: it changed something; that is put back.
        """
        if self._is_eager:
            return self._call(args)
        limit_s = self._session.settings.hook_limit_s
        if self._checks.values:
            limit_s = min(limit_s, CALL_LIMIT_S + CALL_LIMIT_FACTOR * reference_s)

        def late() -> Exception:
            return HookTimeout(
                self._region.backend, "fuseboard_lower", f"a call took over {limit_s:.3g} s"
            )

        with StateGuard(CALL_PARTS) as state, deadline(limit_s, late):
            result = self._call(args)
        if left := state.changed("answers"):
            raise self._broken(f"its call changed {left}, which was put back")
        return result

    def _reference(self, inputs: Sequence[Any]) -> Reference | None:
        """What the outputs are held against; None where they aren't judged by value.

        Raises what eager raises on these inputs, which is the user's own error.
        """
        checks = self._checks
        if not checks.values or self._is_eager or self._has_passed:
            return None
        known = None
        if checks.references is not None and self._key is not None:
            known = checks.references.get(self._key)
        if known is None:
            known = replayable(self._region.graph) or self._run(self._region.graph, inputs)
            if checks.references is not None and self._key is not None:
                checks.references[self._key] = known
        if isinstance(known, str):
            self._note(f"{self._region.name} isn't judged by value: {known}")
            return None
        for note in known.notes:
            self._note(f"{self._region.name}: {note}")
        return known

    def _run(self, graph: GraphModule, inputs: Sequence[Any]) -> Reference | str:
        with torch_internals.real_tensors():
            try:
                return replace(make_reference(graph, inputs), inner=self._inner)
            except Exception as error:  # an op may raise anything, in float64 alone or in eager too
                boxed_function(graph, f"{self._region.name}.eager")(list(inputs))
                return error_text(error)

    def _verdict_of_eager(
        self, verdict: Verdict, inputs: Sequence[Any], result: Any, rules: Sequence[Rule]
    ) -> Verdict:
        """Look again at values of Dynamo's graph, which is eager: its roundings are no fault.

        It is wrong where it is called in another state than it assumes, as ``torch.func`` without
        gradients gives zeros.
        """
        if self._dynamo_graph_as is None:
            return verdict
        with torch_internals.real_tensors():
            if difference_of_dynamo_graph(self._dynamo_graph_as, inputs, result, rules):
                return verdict
        self._note(f"Dynamo's own graph rounds otherwise than what was captured: {verdict.problem}")
        return Verdict(True)

    def _where(self, inputs: Sequence[Any]) -> str:
        """The first op with wrong values, as a further sentence; "" where it isn't known."""
        lower = self._lower_part
        if lower is None:
            return ""
        try:
            with torch_internals.real_tensors():
                divergence = first_divergence(
                    self._region.graph, inputs, lambda graph, _: lower(graph)
                )
        except containable() as error:  # the backend may do anything with a part
            return f". The first wrong op isn't known: {describe(error)}"
        if divergence is None:
            return ". Compiled once more, it was right"
        among = (
            ""
            if divergence.within == 1
            else f" or one of the {divergence.within - 1} ops before it"
        )
        source = f" ({divergence.source})" if divergence.source else ""
        return f". The first op whose values are wrong: {divergence.target}{source}{among}"

    def _note(self, text: str) -> None:
        if text not in self._report.notes:
            self._report.notes.append(text)

    def _broken(self, problem: str, by_value: bool = False) -> ContractError:
        kind = WrongValues if by_value else ContractError
        return kind(self._region.backend, "fuseboard_lower", problem)

    def _laid_out_as(self, result: Any) -> tuple[Any, ...]:
        """The fake values of the outputs, with a result's strides where it has as many."""
        if not isinstance(result, list | tuple) or len(result) != len(self._expected):
            return self._expected
        return tuple(
            want.new_empty_strided(want.shape, got.stride())
            if _strided(want) and _strided(got) and want.dim() == got.dim()
            else want
            for want, got in zip(self._expected, result, strict=True)
        )

    def _verdict(self, result: Any, inputs: list[Any], reference: Reference | None) -> Verdict:
        """The verify hook's verdict; where the hook fails, the policy's or the default's.

        Beside the user's calls the default is used: another process has judged the region, and a
        hook could change this process while user code runs.
        """
        region, session, report = self._region, self._session, self._report
        arguments: dict[str, Any] = {
            "region": region,
            "expected": self._expected if self._checks.strides else self._laid_out_as(result),
            "result": result,
            "inputs": inputs,
            "reference": reference,
        }
        if is_beside():
            return verify(**arguments)
        try:
            _, verdict = session.first("fuseboard_verify", **arguments)
        except PluginError as error:
            if decide(session, region.name, error.plugin, "profile", error) == "raise":
                raise
            instead = "the default check"
            trip(
                session, report, error.plugin, "profile", region.name, error, instead, region.source
            )
            verdict = verify(**arguments)
        return verdict  # type: ignore[no-any-return]


class CheckedPrepare:
    """Prepares values from weights: the first time on copies, to see that it doesn't write to them.

    :param call: boxed.
    :param plugin: the author of the code.
    """

    def __init__(self, call: Boxed, plugin: str) -> None:
        self._call = call
        self._plugin = plugin
        self._has_passed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._call,)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """
        :raises ContractError: it wrote to the weights.
        :raises NotEnoughMemory: there is no room for copies of them.
        """
        if self._has_passed:
            return self._call(args)
        copies = Copies(args)
        try:
            result = self._call(list(copies.values))
        finally:
            written = copies.written()
        if written:
            problem = f"what prepares weights wrote to those at {written}"
            raise ContractError(self._plugin, "fuseboard_fuse", problem)
        self._has_passed = True
        return copies.back(result)  # type: ignore[no-any-return]


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided

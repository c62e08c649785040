"""Regions with symbolic sizes on backends that can't have them: code for each combination of sizes.

A call makes a key of the region's sizes and looks the code up. What isn't there yet is compiled in
that call, as a static graph on the backend's usual way; its first results are checked as a region's
first results always are. Once ``max_shapes`` combinations are compiled, others run in eager.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.config.model import Settings
from fuseboard.contracts import Boxed, Event, Region
from fuseboard.errors import containable
from fuseboard.lower.static import StaticGraph, with_sizes
from fuseboard.ops.effects import has_effects
from fuseboard.partition.signature import signature
from fuseboard.report.data import GraphReport, RegionReport
from fuseboard.run.checked import CheckedRegion, RegionChecks
from fuseboard.run.codegen import Source
from fuseboard.run.eager import boxed_function
from fuseboard.run.failure import contained, trip
from fuseboard.run.sizes import size_sources
from fuseboard.run.weights import WeightSets, any_version, run_prepare
from fuseboard.torch_api import symbols as torch_symbols
from fuseboard.torch_api.compiling import CompileLock

#: Held while something is compiled: backwards are compiled outside of Dynamo, and specialisations
#: in the middle of a call.
compile_lock = CompileLock()


class Code(Protocol):
    """A lowered region; see :class:`fuseboard.lower.lowering.Lowered`."""

    @property
    def call(self) -> Boxed: ...
    @property
    def keeps(self) -> tuple[int, ...]: ...
    @property
    def prepare(self) -> Boxed | None: ...
    @property
    def uses(self) -> tuple[int, ...]: ...


class Specialised:
    """A region's code, by sizes.

    :param region: with symbolic sizes; runs in eager where there is no code for a combination.
    :param lower: compiles a static region; what it has to say goes into the report it is given.
    :ivar call: boxed; a key, a look into the table, the code's own call.
    """

    def __init__(
        self,
        region: Region,
        session: Session,
        report: GraphReport,
        region_report: RegionReport,
        lower: Callable[[Region, RegionReport], Code],
    ) -> None:
        self._region = region
        self._session = session
        self._report = report
        self._region_report = region_report
        self._lower = lower
        self._repeatable = not any(map(has_effects, region.graph.graph.nodes))
        self._table: dict[Any, Boxed] = {}
        self._placeholders = region.graph.graph.find_nodes(op="placeholder")
        self._sizes = size_sources([node.meta.get("val") for node in self._placeholders])
        self._eager = boxed_function(region.graph, f"{region.name}.eager")
        # Dynamo must not trace what compiles in the middle of a call.
        self._made: Callable[[list[Any]], Boxed | None] = torch.compiler.disable(self._make)
        self._key, self.call = self._generate()
        self._add_example()

    # --- the hot path -------------------------------------------------------------------------

    def _generate(self) -> tuple[Callable[[list[Any]], Any], Boxed]:
        """The functions that make a key, and that look it up."""
        key = ", ".join(text for text, _ in self._sizes)
        key = key if len(self._sizes) == 1 else f"({key})"
        source = Source()
        source.line(f"return {key}")
        key_function = source.function(source.unique("key"), "args")
        source = Source()
        name = source.unique(self._region.name.replace(".", "_"))
        find = source.bind(self._table.get, "find")
        source.line(f"code = {find}({key})")
        source.line("if code is None:")
        source.line(f"return {source.bind(self._missing, 'missing')}(args)", 2)
        source.line("return code(args)")
        return key_function, source.function(name, "args")

    # --- a new combination ----------------------------------------------------------------------

    def _add_example(self) -> None:
        """Compile for the sizes that the whole graph is being compiled for.

        What fails here is the region's failure: another backend gets it.
        """
        mode = torch_symbols.static_fake_mode()
        with torch_symbols.compiling_in_a_call(mode):
            values = [node.meta.get("val") for node in self._placeholders]
            example = [
                torch_symbols.static_fake(mode, value)
                if isinstance(value, torch.Tensor)
                else torch_symbols.in_the_example(value)
                for value in values
            ]
            self._compile(self._key(example), example, mode)

    def _missing(self, args: list[Any]) -> Sequence[Any]:
        """A call whose sizes aren't in the table."""
        return (self._made(args) or self._eager)(args)

    def _make(self, args: list[Any]) -> Boxed | None:
        """Code for these sizes, compiled now; None where there are too many already."""
        limit = self._session.settings.max_shapes
        if len(self._table) >= limit:
            self._note_limit(limit)
            return None
        with compile_lock:
            key = self._key(args)
            if key in self._table:  # another thread was quicker
                return self._table[key]
            if len(self._table) >= limit:
                self._note_limit(limit)
                return None
            mode = torch_symbols.static_fake_mode()
            try:
                with torch_symbols.compiling_in_a_call(mode):
                    inputs = [
                        torch_symbols.static_fake(mode, arg)
                        if isinstance(arg, torch.Tensor)
                        else arg
                        for arg in args
                    ]
                    self._compile(key, inputs, mode)
            except containable() as error:  # a plugin may raise anything; the policy decides
                self._give_up(key, "lower", error)
            return self._table[key]

    def _compile(self, key: Any, inputs: Sequence[Any], mode: Any) -> None:
        """Fill in the table's entry for a key; at the very end, so that there is no half of one."""
        start = time.perf_counter()
        label = self._label(key)
        made = with_sizes(self._region.graph, inputs, mode)
        static = tuple(i for i, old in enumerate(made.keeps) if old in self._region.static_inputs)
        region = dataclasses.replace(
            self._region,
            name=f"{self._region.name}.shape{len(self._table)}",
            graph=made.graph,
            static_inputs=static,
            signature=signature(made.graph, self._region.backend, (self._region.kind, static)),
        )
        expected = _outputs(made.graph)
        own_report = RegionReport(region.name, region.backend, {})
        lowered = self._lower(region, own_report)
        code = _from_region_inputs(made, lowered, self._session.settings)
        entry = code
        if self._session.settings.verify != "off":
            entry = _FirstCall(self, key, region, code, expected)
        report = self._region_report
        if not report.specialised:
            report.fusions, report.hoisted = own_report.fusions, own_report.hoisted
            report.loaded = own_report.loaded
        report.notes.extend(note for note in own_report.notes if note not in report.notes)
        report.specialised.append(label)
        seconds = time.perf_counter() - start
        details = {"region": region.name, "backend": region.backend, "sizes": label}
        self._session.notify(Event("lower", self._report.name, seconds, details))
        self._table[key] = entry

    # --- what happened --------------------------------------------------------------------------

    def passed(self, key: Any, checked: Boxed, code: Boxed) -> None:
        """A first call went well: go over to the code itself, unless every call is checked."""
        if self._session.settings.verify_every is None:
            with compile_lock:
                if self._table.get(key) is checked:
                    self._table[key] = code

    def recover(
        self, key: Any, checked: Boxed, error: BaseException, inputs: list[Any], state: torch.Tensor
    ) -> Sequence[Any]:
        """After a first call failed: eager's answer, or eager's exception, which is the user's.

        A call whose effects may have happened isn't repeated; the runner blames the whole region.
        """
        if not self._repeatable:
            raise error
        torch.set_rng_state(state)
        try:
            results = self._eager(inputs)
        except containable() as users_own:
            raise users_own from None
        with compile_lock:
            if self._table.get(key) is checked:
                self._give_up(key, "run", error)
        return results

    def _give_up(self, key: Any, stage: Any, error: BaseException) -> None:
        """Run one combination of sizes in eager from now on.

        :raises RegionError: the policy is to raise.
        """
        region, label = self._region, self._label(key)
        contained(self._session, region, stage, error)
        instead = f"eager where {label}"
        trip(
            self._session,
            self._report,
            region.backend,
            stage,
            region.name,
            error,
            instead,
            region.source,
        )
        self._table[key] = self._eager
        own_report = self._region_report
        own_report.specialised[:] = [sizes for sizes in own_report.specialised if sizes != label]
        own_report.notes.append(f"eager runs where {label}, since {region.backend} tripped")

    def _note_limit(self, limit: int) -> None:
        text = (
            f"{self._region.backend} has code for max_shapes = {limit} combinations of sizes; "
            "further ones run in eager"
        )
        if text not in self._region_report.notes:
            self._region_report.notes.append(text)

    def _label(self, key: Any) -> str:
        """A combination of sizes, as people read it."""
        values = (key,) if len(self._sizes) == 1 else key
        pairs = (f"{name} = {value}" for (_, name), value in zip(self._sizes, values, strict=True))
        return ", ".join(pairs) or "its sizes are what they are"


class _FirstCall:
    """A specialisation whose results are still to be checked."""

    def __init__(
        self,
        owner: Specialised,
        key: Any,
        region: Region,
        code: Boxed,
        expected: tuple[Any, ...],
    ) -> None:
        session, report = owner._session, owner._report
        checks = RegionChecks(again=session.settings.verify_every is not None)
        self._owner, self._key, self._code = owner, key, code
        captured = dataclasses.replace(region, graph=owner._region.graph)
        self._checked = CheckedRegion(captured, code, code, expected, session, report, checks)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        inputs, state = list(args), torch.get_rng_state()
        try:
            results = self._checked(args)
        except containable() as error:
            return self._owner.recover(self._key, self, error, inputs, state)
        self._owner.passed(self._key, self, self._code)
        return results


def _outputs(graph: GraphModule) -> tuple[Any, ...]:
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    return tuple(n.meta["val"] if isinstance(n, Node) else n for n in output.args[0])


def _from_region_inputs(made: StaticGraph, lowered: Code, settings: Settings) -> Boxed:
    """Static code as a function of the symbolic region's inputs."""
    source = Source()
    kept = [f"args[{made.keeps[i]}]" for i in lowered.keeps]
    if lowered.prepare is not None:
        uses = tuple(range(len(lowered.uses)))
        sets = WeightSets.of(run_prepare([(lowered.prepare, uses)]), settings)
        sets.version_of = any_version  # weights may be inference tensors
        weights = "".join(f"args[{made.keeps[i]}], " for i in lowered.uses)
        source.line(f"prepared = {source.bind(sets.values_for, 'values_for')}(({weights}))")
        kept.append("*prepared")
    source.line(f"inputs = [{', '.join(kept)}]")
    source.line("args.clear()")
    source.line(f"return {source.bind(lowered.call, 'static')}(inputs)")
    return source.function(source.unique("specialised"), "args")

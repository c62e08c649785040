"""The runner: one generated flat function that calls a graph's regions.

The first call goes through a *checked* version of the same code: each region's outputs are held
against its contract, a failing region is replaced, and outputs that share storage they mustn't
share are cloned from then on. After a call without a failure the plain version takes over; it
holds the weights check, the region calls, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import Boxed, GraphKind
from fuseboard.lower.checked import CheckedRegion
from fuseboard.lower.codegen import Source
from fuseboard.lower.eager import boxed_function
from fuseboard.lower.failure import decide, region_error, trip
from fuseboard.lower.liveness import drops, needed_nodes
from fuseboard.lower.lowering import Lowered
from fuseboard.lower.weights import WeightSets, address_of, any_version, run_prepare
from fuseboard.partition.board_nodes import shared_outputs
from fuseboard.partition.regions import Cut
from fuseboard.partition.stages import has_effects
from fuseboard.profile.verify import shares_storage
from fuseboard.report.data import GraphReport

_WEIGHTS_CHECK = (
    "if tuple(map({version}, {w})) != {e}.versions"
    " or tuple(map({address}, {w})) != {e}.addresses"
    " or [cell.value for cell in {e}.cells] != {e}.samples:"
)


@dataclass
class Site:
    """One call of a region in the graph."""

    cut: Cut
    lowered: Lowered


class Runner:
    """Runs one graph. ``function`` is what a call executes.

    :param graph: the graph as it was cut, without changes by any backend.
    :param captured: the graph as AOTAutograd gave it; runs in eager after a failure.
    :param visible: how many leading outputs the caller sees.
    """

    def __init__(
        self,
        graph: GraphModule,
        captured: GraphModule,
        kind: GraphKind,
        sites: list[Site],
        kept: Sequence[Node],
        session: Session,
        report: GraphReport,
        visible: int | None,
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.sites = sites
        self.kept = kept
        self.session = session
        self.report = report
        self._captured = captured
        self._lock = threading.RLock()
        self._cloned: frozenset[int] = frozenset()
        output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
        self._results: tuple[Any, ...] = tuple(output.args[0])
        self._visible = len(self._results) if visible is None else visible
        self._may_share = shared_outputs(self._results)
        self._sets = self._weight_sets()
        self.always_checked = session.settings.verify == "always"
        off = session.settings.verify == "off"
        self.function: Boxed = self._build(checked=not off)

    def boxed(self) -> Boxed:
        """What AOTAutograd calls: looks up the current function, nothing more."""

        def run(args: list[Any]) -> Sequence[Any]:
            return self.function(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    # --- generating ---------------------------------------------------------------------------

    def _weight_sets(self) -> WeightSets | None:
        """The prepared values of all sites; None where nothing is hoisted."""
        self._weights: list[Node] = []
        self._first_value: dict[int, int] = {}
        functions: list[tuple[Boxed, tuple[int, ...]]] = []
        total = 0
        for number, site in enumerate(self.sites):
            lowered = site.lowered
            if lowered.prepare is None:
                continue
            used = [site.cut.inputs[i] for i in lowered.uses]
            self._weights.extend(node for node in used if node not in self._weights)
            functions.append((lowered.prepare, tuple(self._weights.index(n) for n in used)))
            self._first_value[number] = total
            total += lowered.values
        if not functions:
            return None
        return WeightSets(
            run_prepare(functions),
            self.session.settings.max_weight_sets,
        )

    def _build(self, checked: bool) -> Boxed:
        """Write and compile the function."""
        if not checked and self._passes_through():
            return self._build_passing()
        source = Source()
        name = source.unique(self.report.name)
        contained = checked or self.kind != "backward"
        names: dict[Node, str] = {}
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        for node in placeholders:
            names[node] = source.unique(node.name)
        for node in self.graph.graph.find_nodes(op="get_attr"):
            names[node] = source.bind(getattr(self.graph, str(node.target)), node.name)
        if placeholders:
            source.line(f"{', '.join(names[node] for node in placeholders)}, = args")
        source.line("args.clear()")
        everything = ", ".join(names[node] for node in placeholders)
        indent = 2
        site_local = source.unique("site")
        random_state = source.unique("random_state")
        if checked:
            source.line(f"{random_state} = {source.bind(torch.get_rng_state, 'rng')}()")
        source.line(f"{site_local} = -1")
        source.line("try:")
        self._write_weights_check(source, names, indent)
        self._write_body(source, names, indent, checked, contained, site_local)
        result = self._result(source, names)
        if checked:
            finish = source.bind(self._finish, "finish")
            prepared = f", *{self._values}" if self._sets is not None else ""
            result = f"{finish}({result}, [{everything}{prepared}])"
        source.line(f"return {result}", indent)
        source.line("except Exception as error:")
        if contained:
            state = f", {random_state}" if checked else ""
            recover = self._bound(source, self._recover)
            source.line(f"return {recover}(error, {site_local}, [{everything}]{state})", 2)
        else:
            blame = self._bound(source, self._blame)
            source.line(f"raise {blame}(error, {site_local}) from error", 2)
        return source.function(name, "args")

    def _bound(self, source: Source, handler: Callable[..., Any]) -> str:
        """The name of a handler that knows which code the function was built from."""
        lowered = tuple(site.lowered for site in self.sites)
        return source.bind(partial(handler, lowered), handler.__name__.strip("_"))

    def _passes_through(self) -> bool:
        """One region is all there is: its list is the call's, its results are the call's."""
        if len(self.sites) != 1 or self._sets is not None or self._cloned:
            return False
        cut = self.sites[0].cut
        return (
            cut.inputs == self.graph.graph.find_nodes(op="placeholder")
            and tuple(cut.outputs) == self._results
            and len(self.sites[0].lowered.keeps) == len(cut.inputs)
        )

    def _build_passing(self) -> Boxed:
        """The plain function where there is nothing to do but to call the region."""
        source = Source()
        name = source.unique(self.report.name)
        region = source.bind(self.sites[0].lowered.call, "region0")
        if self.kind != "backward":
            source.line("inputs = args.copy()")
        source.line("try:")
        source.line(f"return {region}(args)", 2)
        source.line("except Exception as error:")
        if self.kind == "backward":
            source.line(f"raise {self._bound(source, self._blame)}(error, 0) from error", 2)
        else:
            source.line(f"return {self._bound(source, self._recover)}(error, 0, inputs)", 2)
        return source.function(name, "args")

    def _write_weights_check(self, source: Source, names: dict[Node, str], indent: int) -> None:
        if self._sets is None:
            return
        sets = source.bind(self._sets, "sets")
        weights, entry = source.unique("weights"), source.unique("entry")
        self._values = source.unique("prepared")
        check = _WEIGHTS_CHECK.format(
            w=weights,
            e=entry,
            version=source.bind(self._sets.version_of, "version_of"),
            address=source.bind(address_of, "address_of"),
        )
        source.line(f"{weights} = ({', '.join(names[n] for n in self._weights)},)", indent)
        source.line(f"{entry} = {sets}.last", indent)
        # Before the check: another thread, or the collector, may drop the entry at any moment.
        source.line(f"{self._values} = {entry}.values", indent)
        source.line(check, indent)
        source.line(f"{self._values} = {sets}.find({weights})", indent + 1)

    def _write_body(
        self,
        source: Source,
        names: dict[Node, str],
        indent: int,
        checked: bool,
        contained: bool,
        local: str,
    ) -> None:
        """Region calls in order, then the board's own nodes that outputs need."""
        steps: list[Site | Node] = [*self.sites, *needed_nodes(self.kept, self._results)]
        flow = [
            (step.all_input_nodes, [step])
            if isinstance(step, Node)
            else (step.cut.inputs, step.cut.outputs)
            for step in steps
        ]
        dropped = drops(flow, self._results, keep_inputs=contained)
        for number, step in enumerate(steps):
            if isinstance(step, Node):
                if number == len(self.sites):
                    source.line(f"{local} = {number}", indent)
                names[step] = source.unique(step.name)
                source.line(f"{names[step]} = {source.call(step, names)}", indent)
            else:
                source.line(f"{local} = {number}", indent)
                self._write_site(source, names, indent, number, checked)
            gone = [names[node] for node in dropped[number] if node in names]
            if gone:
                source.line(f"del {', '.join(gone)}", indent)

    def _write_site(
        self, source: Source, names: dict[Node, str], indent: int, number: int, checked: bool
    ) -> None:
        site = self.sites[number]
        lowered = site.lowered
        call: Callable[..., Any] = lowered.call
        if checked:
            expected = tuple(node.meta["val"] for node in site.cut.outputs)
            call = CheckedRegion(
                lowered.region, call, expected, self.session, self.report, self.always_checked
            )
        arguments = [names[site.cut.inputs[i]] for i in lowered.keeps]
        if number in self._first_value:
            first = self._first_value[number]
            arguments += [f"{self._values}[{first + i}]" for i in range(lowered.values)]
        for node in site.cut.outputs:
            names[node] = source.unique(node.name)
        targets = "".join(f"{names[node]}, " for node in site.cut.outputs)
        assign = f"{targets.rstrip()} = " if targets else ""
        callee = source.bind(call, f"region{number}_{lowered.region.backend}")
        source.line(f"{assign}{callee}([{', '.join(arguments)}])", indent)

    def _result(self, source: Source, names: dict[Node, str]) -> str:
        items = []
        for number, value in enumerate(self._results):
            text = source.literal(value, names)
            items.append(f"{text}.clone()" if number in self._cloned else text)
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    # --- when something is wrong ----------------------------------------------------------------

    def _finish(self, results: tuple[Any, ...], inputs: list[Any]) -> tuple[Any, ...]:
        """End of a checked call: clone what shares storage, go over to the plain code."""
        wrong = shares_storage(results, inputs, self._may_share, self._visible)
        with self._lock:
            if wrong:
                self._cloned |= frozenset(wrong)
                self.report.notes.append(
                    f"outputs {wrong} are cloned: the compiled code returned storage that eager's "
                    "results don't share"
                )
            if wrong or not self.always_checked:
                self.function = self._build(checked=self.always_checked)
        return tuple(r.clone() if i in wrong else r for i, r in enumerate(results))

    def _recover(
        self,
        lowered: Sequence[Lowered],
        error: Exception,
        number: int,
        inputs: list[Any],
        random_state: torch.Tensor | None = None,
    ) -> Sequence[Any]:
        """After a region raised: eager's answer, or eager's exception.

        An exception that eager raises as well is the user's own and passes through unchanged.
        A call whose effects may have happened isn't repeated; its failure is raised.

        :param lowered: what the function that failed was built from; another thread may have
            replaced some of it since.
        :param number: the site that was running; -1 for what comes before the first.
        """
        if number < 0 and self._admits_inference_tensors():
            return self.function(inputs)
        if any(map(has_effects, (n for s in self.sites[: number + 1] for n in s.cut.nodes))):
            raise self._blame(lowered, error, number, "effects of this call can't be repeated")
        if random_state is not None:
            torch.set_rng_state(random_state)
        try:
            results = boxed_function(self._captured, f"{self.report.name}.eager")(list(inputs))
        except Exception as users_own:
            raise users_own from None
        if number < 0:
            number = self._failed_prepare(lowered, inputs)
        if not 0 <= number < len(lowered):
            raise error
        self._contain(lowered[number], error, "eager")
        return results

    def _blame(
        self,
        lowered: Sequence[Lowered],
        error: Exception,
        number: int,
        why: str = "the call's saved tensors are gone",
    ) -> Exception:
        """After a region raised in a call that can't be repeated.

        What takes its place runs from the next call on.
        """
        if not 0 <= number < len(lowered) or isinstance(error, torch.OutOfMemoryError):
            return error
        region = lowered[number].region
        if region.backend == "eager":
            return error
        self._contain(lowered[number], error, "nothing in this call, eager from the next one on")
        return region_error(region, "run", error, why)

    def _contain(self, lowered: Lowered, error: Exception, instead: str) -> None:
        """Run what failed, and all that shares its code, in eager from now on.

        :raises RegionError: the policy is to raise, or it was eager that failed.
        """
        region = lowered.region
        action = decide(self.session, region.name, region.backend, "run", error)
        if action == "raise" or region.backend == "eager":
            raise region_error(region, "run", error) from error
        with self._lock:
            failed = [site for site in self.sites if site.lowered.code is lowered.code]
            if not failed:
                return  # another thread met the same failure and was quicker
            trip(self.report, region.backend, "run", region.name, error, instead, region.source)
            for site in failed:
                own = replace(site.lowered.region, backend="eager")
                call = boxed_function(own.graph, f"{own.name}.eager")
                site.lowered = Lowered(own, call, call, tuple(range(len(site.cut.inputs))))
            self._sets = self._weight_sets()
            self.function = self._build(checked=True)

    def _admits_inference_tensors(self) -> bool:
        """Whether the weights' check failed for inference tensors, and was built again for them."""
        sets = self._sets
        if sets is None or sets.version_of is any_version:
            return False
        with self._lock:
            sets.version_of = any_version
            self.function = self._build(checked=True)
        return True

    def _failed_prepare(self, lowered: Sequence[Lowered], inputs: list[Any]) -> int:
        """The site whose prepare graph raises on these inputs; -1 if none does."""
        values = dict(zip(self.graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for number, (site, code) in enumerate(zip(self.sites, lowered, strict=True)):
            if code.prepare is not None:
                try:
                    with torch.no_grad():
                        code.prepare([values[site.cut.inputs[i]] for i in code.uses])
                except Exception:  # it is what is being looked for; known already
                    return number
        return -1

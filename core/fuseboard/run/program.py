"""A way to run a graph: its regions' code, and the flat functions that call it.

Each function is generated. The *plain* one holds the weights check and the region calls, and sends
some calls to one that looks at what they return, too; the *checked* one holds each region's outputs
against its contract; a *trial* lets exceptions pass, so that programs can be compared. The plain
one alone writes to the call's inputs: what isn't known to be right yet writes to copies. Past 400
lines: the functions share the parts that they are written from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import Boxed, GraphKind
from fuseboard.errors import containable
from fuseboard.ops.liveness import drops, needed_nodes
from fuseboard.partition.regions import Cut
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.report.data import GraphReport
from fuseboard.run.checked import CheckedRegion, RegionChecks
from fuseboard.run.codegen import Source
from fuseboard.run.outputs import is_cheap, write_check, write_detour
from fuseboard.run.portable import PortableProgram, Preparing
from fuseboard.run.sites import Lowered, Site
from fuseboard.run.weights import WeightSets, address_of
from fuseboard.torch_api.profiler import Spanned

_WEIGHTS_CHECK = (
    "if tuple(map({version}, {w})) != {e}.versions"
    " or tuple(map({address}, {w})) != {e}.addresses"
    " or not {e}.samples.unchanged():"
)

#: In the place of a site's number: the call was made without prepared values.
UNPREPARED = -2


@dataclass(frozen=True)
class GraphContext:
    """What all programs of one graph share.

    :ivar graph: the graph as it was cut, without changes by any backend.
    :ivar board_nodes: the board's own nodes, in order.
    :ivar results: what the graph returns.
    :ivar bucket: an expression of ``args`` that tells like sizes from others; "" for static graphs.
    :ivar buckets: of the calls that were checked.
    :ivar budget: how far its results may be from float64; None where they are exact.
    """

    graph: GraphModule
    kind: GraphKind
    board_nodes: Sequence[Node]
    results: tuple[Any, ...]
    session: Session
    report: GraphReport
    bucket: str = ""
    buckets: set[Any] = field(default_factory=set)
    budget: Budget | None = None

    def of_version(
        self, graph: GraphModule, board_nodes: Collection[Node], budget: Budget
    ) -> GraphContext:
        """That of another version of the graph, with the same inputs and as many results."""
        results: Any = graph.graph.output_node().args[0]
        own = list(board_nodes)
        return replace(self, graph=graph, board_nodes=own, results=tuple(results), budget=budget)


class Handlers(Protocol):
    """What a function calls when something is wrong; see :class:`fuseboard.run.runner.Runner`."""

    def finish(
        self, program: Program, results: tuple[Any, ...], inputs: list[Any]
    ) -> tuple[Any, ...]: ...

    def recover(
        self,
        lowered: Sequence[Lowered],
        error: BaseException,
        number: int,
        inputs: list[Any],
        random_state: torch.Tensor | None = None,
    ) -> Sequence[Any]: ...

    def blame(
        self, lowered: Sequence[Lowered], error: BaseException, number: int
    ) -> BaseException: ...

    def new_sizes(self, program: Program, args: list[Any]) -> Sequence[Any]: ...

    def run_unprepared(self, sets: WeightSets, inputs: list[Any]) -> Sequence[Any]: ...


class Program:
    """Regions in the order to call them, with the prepared values of their weights.

    :ivar sets: None where nothing is hoisted.
    """

    def __init__(self, context: GraphContext, sites: list[Site]) -> None:
        self.context = context
        self.sites = sites
        self._weights: list[Node] = []
        self._first_value: dict[int, int] = {}
        self._prepares: list[tuple[Boxed, tuple[int, ...]]] = []
        self.sets = self._weight_sets()

    def _weight_sets(self) -> WeightSets | None:
        functions = self._prepares
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
        prepare = Spanned(Preparing(tuple(functions)), f"prepare {self.context.report.name}")
        return WeightSets.of(prepare, self.context.session.settings)

    # --- the functions --------------------------------------------------------------------------

    def plain(self, handlers: Handlers, cloned: frozenset[int]) -> Boxed:
        """What calls run.

        :param cloned: positions of outputs that are cloned.
        """

        def made(looks: bool, looking: Boxed | None = None) -> Boxed:
            if self._passes_through(cloned):
                return self._passing(handlers, looks, looking)
            return self._contained(handlers, cloned, None, looks, looking)

        watched = [site for site in self.sites if site.outputs and not site.trusted]
        if not watched:
            return made(looks=False)
        looking = made(looks=True)
        nodes = [node for site in watched for node in site.cut.nodes]
        if is_cheap(sum(len(site.outputs) for site in watched), nodes):
            return looking
        return made(looks=False, looking=looking)

    def checked(self, handlers: Handlers, cloned: frozenset[int], checks: RegionChecks) -> Boxed:
        """What the first call runs."""
        return self._contained(handlers, cloned, checks)

    def trial(self, checks: RegionChecks | None) -> Boxed:
        """The program without containment: whatever goes wrong is raised.

        :param checks: where outputs are to be checked.
        """
        source = Source()
        name = source.unique(f"{self.context.report.name}_trial")
        names, _ = self._open(source)
        self._write_weights_check(source, names, 1)
        self._write_body(source, names, 1, checks, contained=False, local="", copies=True)
        source.line(f"return {self._result(source, names, frozenset())}")
        source.spans.clear()  # it may be timed, and spans take time
        return source.function(name, "args")

    def portable(self, cloned: frozenset[int], weights: range) -> PortableProgram:
        """The program for another process.

        :param cloned: positions of outputs that are cloned.
        :param weights: positions of the inputs that don't come with each call.
        """
        inputs = self.context.graph.graph.find_nodes(op="placeholder")
        used = {site.cut.inputs[i] for site in self.sites for i in site.lowered.keeps}
        used.update(one for node in self.context.board_nodes for one in node.all_input_nodes)
        used.update(one for one in self.context.results if isinstance(one, Node))
        given = tuple(number for number in range(len(inputs)) if number not in weights)
        held = tuple(number for number in weights if inputs[number] in used)
        source = Source()
        name = source.unique("packaged")
        self._values = source.unique("prepared")
        source.line(f"{self._values} = args.pop()")
        names, _ = self._open(source, [inputs[number] for number in (*given, *held)])
        self._write_body(source, names, 1, None, contained=False, local="", copies=True)
        source.line(f"return {self._result(source, names, cloned)}")
        source.spans.clear()
        places = [inputs.index(node) for node in self._weights]
        prepares = [(one, tuple(places[i] for i in used)) for one, used in self._prepares]
        run = source.function(name, "args")
        return PortableProgram(run, (given, held), Preparing(tuple(prepares)))

    def _contained(
        self,
        handlers: Handlers,
        cloned: frozenset[int],
        checks: RegionChecks | None,
        looks: bool = False,
        looking: Boxed | None = None,
    ) -> Boxed:
        source = Source()
        name = source.unique(self.context.report.name)
        write_detour(source, looking)
        checked = checks is not None
        contained = checked or self.context.kind != "backward"
        if not checked:
            self._write_sizes_check(source, handlers)
        names, everything = self._open(source)
        indent = 2
        site_local = source.unique("site")
        random_state = source.unique("random_state")
        if checked:
            source.line(f"{random_state} = {source.bind(torch.get_rng_state, 'rng')}()")
        source.line(f"{site_local} = -1")
        source.line("try:")
        unprepared = (
            "" if checked else self._unprepared_call(source, handlers, site_local, everything)
        )
        self._write_weights_check(source, names, indent, unprepared)
        self._write_body(source, names, indent, checks, contained, site_local, looks)
        result = self._result(source, names, cloned)
        if checked:
            finish = source.bind(partial(handlers.finish, self), "finish")
            prepared = f", *{self._values}" if self.sets is not None else ""
            result = f"{finish}({result}, [{everything}{prepared}])"
        source.line(f"return {result}", indent)
        inputs = f"[{everything}]" + (f", {random_state}" if checked else "")
        self._write_except(source, handlers, site_local, inputs if contained else "")
        return source.function(name, "args")

    def _open(
        self, source: Source, inputs: Sequence[Node] | None = None
    ) -> tuple[dict[Node, str], str]:
        """Unpack the inputs and name the constants; also all inputs as one text.

        :param inputs: those that come; None: all of the graph's.
        """
        names: dict[Node, str] = {}
        graph = self.context.graph
        placeholders = graph.graph.find_nodes(op="placeholder") if inputs is None else inputs
        for node in placeholders:
            names[node] = source.unique(node.name)
        for node in graph.graph.find_nodes(op="get_attr"):
            names[node] = source.bind(getattr(graph, str(node.target)), node.name)
        if placeholders:
            source.line(f"{', '.join(names[node] for node in placeholders)}, = args")
        source.line("args.clear()")
        return names, ", ".join(names[node] for node in placeholders)

    def _bound(self, source: Source, handler: Callable[..., Any], name: str) -> str:
        """The name of a handler that knows which code the function was built from."""
        lowered = tuple(site.lowered for site in self.sites)
        return source.bind(partial(handler, lowered), name)

    def _passes_through(self, cloned: frozenset[int]) -> bool:
        """One region is all there is: its list is the call's, its results are the call's."""
        if len(self.sites) != 1 or self.sets is not None or cloned or self.sites[0].in_place:
            return False
        cut = self.sites[0].cut
        return (
            cut.inputs == self.context.graph.graph.find_nodes(op="placeholder")
            and tuple(cut.outputs) == self.context.results
            and len(self.sites[0].lowered.keeps) == len(cut.inputs)
        )

    def _passing(self, handlers: Handlers, looks: bool, looking: Boxed | None) -> Boxed:
        """The plain function where there is nothing to do but to call the region."""
        source = Source()
        name = source.unique(self.context.report.name)
        write_detour(source, looking)
        backward = self.context.kind == "backward"
        region = source.bind_apart(self.sites[0].lowered.call, "region0")
        source.spans[region] = self.sites[0].span
        self._write_sizes_check(source, handlers)
        if not backward:
            source.line("inputs = args.copy()")
        source.line("try:")
        site = self.sites[0]
        if looks:
            names = [source.unique(node.name) for node in site.cut.outputs]
            given_back = ", ".join(names) + ","
            source.line(f"{given_back} = {region}(args)", 2)
            write_check(source, 2, site.lowered.author, site.outputs, names)
            source.line(f"return {given_back}", 2)
        else:
            source.line(f"return {region}(args)", 2)
        self._write_except(source, handlers, "0", "" if backward else "inputs")
        return source.function(name, "args")

    # --- their parts ----------------------------------------------------------------------------

    def _write_except(self, source: Source, handlers: Handlers, site: str, inputs: str) -> None:
        """Answer a failure, or raise it.

        :param site: the number of the site that was running.
        :param inputs: by which the call can be answered in another way; "" where it can't.
        """
        source.line(f"except {source.bind(containable, 'containable')}() as error:")
        if inputs:
            recover = self._bound(source, handlers.recover, "recover")
            source.line(f"return {recover}(error, {site}, {inputs})", 2)
        else:
            blame = self._bound(source, handlers.blame, "blame")
            source.line(f"raise {blame}(error, {site}) from error", 2)

    def _write_sizes_check(self, source: Source, handlers: Handlers) -> None:
        """Check the first call of each new bucket of sizes."""
        context = self.context
        if context.bucket and context.session.settings.verify != "off":
            checked = source.bind(partial(handlers.new_sizes, self), "new_sizes")
            source.line(f"if {context.bucket} not in {source.bind(context.buckets, 'buckets')}:")
            source.line(f"return {checked}(args)", 2)

    def _unprepared_call(
        self, source: Source, handlers: Handlers, site_local: str, everything: str
    ) -> str:
        """Statements that make the call without prepared values."""
        if self.sets is None:
            return ""
        unprepared = source.bind(partial(handlers.run_unprepared, self.sets), "run_unprepared")
        return f"{site_local} = {UNPREPARED}; return {unprepared}([{everything}])"

    def _write_weights_check(
        self, source: Source, names: dict[Node, str], indent: int, unprepared: str = ""
    ) -> None:
        """Look up the prepared values.

        :param unprepared: what to do where it isn't worth preparing them; "" if they have to be.
        """
        if self.sets is None:
            return
        sets = source.bind(self.sets, "sets")
        weights, entry = source.unique("weights"), source.unique("entry")
        self._values = source.unique("prepared")
        check = _WEIGHTS_CHECK.format(
            w=weights,
            e=entry,
            version=source.bind(self.sets.version_of, "version_of"),
            address=source.bind(address_of, "address_of"),
        )
        source.line(f"{weights} = ({', '.join(names[n] for n in self._weights)},)", indent)
        source.line(f"{entry} = {sets}.last", indent)
        # Before the check: another thread, or the collector, may drop the entry at any moment.
        source.line(f"{self._values} = {entry}.values", indent)
        source.line(check, indent)
        if not unprepared:
            source.line(f"{self._values} = {sets}.find({weights})", indent + 1)
            return
        source.line(f"{self._values} = {sets}.find_if_worth({weights})", indent + 1)
        source.line(f"if {self._values} is None:", indent + 1)
        source.line(unprepared, indent + 2)

    def _write_body(
        self,
        source: Source,
        names: dict[Node, str],
        indent: int,
        checks: RegionChecks | None,
        contained: bool,
        local: str,
        looks: bool = False,
        copies: bool = False,
    ) -> None:
        """Region calls in order, then the board's own nodes that outputs need.

        :param local: the variable that holds the number of the running site; "" for none.
        :param copies: writes are made to copies of the inputs.
        """
        results = self.context.results
        returned = {node for site in self.sites for node in site.cut.outputs}
        kept = [node for node in self.context.board_nodes if node not in returned]
        wanted = [value for value in results if value not in returned]
        steps: list[Site | Node] = [*self.sites, *needed_nodes(kept, wanted)]
        flow = [
            (step.all_input_nodes, [step])
            if isinstance(step, Node)
            else (step.cut.inputs, step.cut.outputs)
            for step in steps
        ]
        dropped = drops(flow, results, keep_inputs=contained)
        for number, step in enumerate(steps):
            if local and number <= len(self.sites):
                source.line(f"{local} = {number}", indent)
            ended = dropped[number]
            if isinstance(step, Node):
                names[step] = source.unique(step.name)
                source.line(f"{names[step]} = {source.call(step, names)}", indent)
            else:
                # Inputs with no further reader are freed by the region itself, as it reads them.
                handed_over = set() if checks is not None else set(step.cut.inputs) & set(ended)
                handed_over &= names.keys()  # a portable program has no inputs that it doesn't read
                function = None if copies or checks is not None else step.in_place
                if function is not None:
                    self._write_in_place(source, names, indent, step, function)
                else:
                    self._write_site(source, names, indent, number, checks, looks, handed_over)
                ended = [node for node in ended if node not in handed_over]
            _write_del(source, [names[node] for node in ended if node in names], indent)

    def _write_site(
        self,
        source: Source,
        names: dict[Node, str],
        indent: int,
        number: int,
        checks: RegionChecks | None,
        looks: bool,
        handed_over: Collection[Node],
    ) -> None:
        """One region's call.

        :param handed_over: its inputs without later readers.
        """
        site = self.sites[number]
        lowered = site.lowered
        call: Callable[..., Any] = lowered.call
        arguments = [names[site.cut.inputs[i]] for i in lowered.keeps]
        if number in self._first_value:
            first = self._first_value[number]
            arguments += [f"{self._values}[{first + i}]" for i in range(lowered.values)]
        given = f"[{', '.join(arguments)}]"
        span: Callable[[], str] = site.span
        if checks is not None:
            context, label = self.context, site.span()
            expected = tuple(node.meta["val"] for node in site.cut.outputs)
            given_to_all = all(node.op == "placeholder" for node in site.cut.inputs)
            key = (*site.cut.inputs, None, *site.cut.outputs) if given_to_all else None
            call = CheckedRegion(
                lowered.blamed,
                Spanned(call, label),  # always: next to a check it takes no time
                lowered.code,
                expected,
                context.session,
                context.report,
                checks,
                key,
                lowered.lower_part,
                self._inner_outputs(site.cut),
                is_eager=site.is_eager,
                dynamo_graph_as=site.dynamo_graph_as,
                prepared=lowered.values,
                trusted=site.trusted,
                seen=site.see,
            )
            span = partial("verify {}".format, label)
            given += f", ({''.join(f'{names[node]}, ' for node in site.cut.inputs)})"
        if handed_over:
            source.line(f"given = {given}", indent)
            given = "given"
            _write_del(source, [names[n] for n in site.cut.inputs if n in handed_over], indent)
        for node in site.cut.outputs:
            names[node] = source.unique(node.name)
        targets = "".join(f"{names[node]}, " for node in site.cut.outputs)
        assign = f"{targets.rstrip()} = " if targets else ""
        callee = source.bind_apart(call, f"region{number}_{lowered.region.backend}")
        source.spans[callee] = span
        source.line(f"{assign}{callee}({given})", indent)
        if looks and site.outputs and not site.trusted:
            variables = [names[node] for node in site.cut.outputs]
            write_check(source, indent, lowered.author, site.outputs, variables)

    def _write_in_place(
        self, source: Source, names: dict[Node, str], indent: int, site: Site, function: Boxed
    ) -> None:
        """A write to an input."""
        given = ", ".join(names[node] for node in site.cut.inputs)
        (node,) = site.cut.outputs
        names[node] = source.unique(node.name)
        callee = source.bind_apart(function, site.lowered.region.name.replace(".", "_"))
        source.spans[callee] = site.span
        source.line(f"{names[node]}, = {callee}([{given}])", indent)

    def _inner_outputs(self, cut: Cut) -> frozenset[int]:
        """Positions of a region's outputs that nothing but other regions reads."""
        outside = {*self.context.results, *self.context.board_nodes}
        return frozenset(
            number
            for number, node in enumerate(cut.outputs)
            if node not in outside and outside.isdisjoint(node.users)
        )

    def _result(self, source: Source, names: dict[Node, str], cloned: frozenset[int]) -> str:
        items = []
        for number, value in enumerate(self.context.results):
            text = source.literal(value, names)
            items.append(f"{text}.clone()" if number in cloned else text)
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _write_del(source: Source, names: Sequence[str], indent: int) -> None:
    if names:
        source.line(f"del {', '.join(names)}", indent)

"""What was compiled in one process, for another one: packed there, and made again here.

No graph is captured, planned, decomposed or traced a second time. AOTAutograd's wrappers come as
torch's own bundle, graphs as bytes, regions as their backends were given them. What remains to be
done is to cut the graphs into their regions, to load or to lower these, and to write the functions
that call them.
"""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.capture.comparison import Spreads
from fuseboard.capture.original import boxed_original
from fuseboard.contracts import GraphKind
from fuseboard.errors import LoweringError, error_text
from fuseboard.fuse.passes import FusionCounter
from fuseboard.lower.lowering import Lowering
from fuseboard.lower.op_levels import LevelKey
from fuseboard.lower.overriding import Decided
from fuseboard.partition.inner_plans import InnerPlans
from fuseboard.partition.regions import cut_regions
from fuseboard.partition.signature import signature
from fuseboard.partition.writes import Write
from fuseboard.pipeline.call import Compiled
from fuseboard.pipeline.graph_call import GraphCall
from fuseboard.pipeline.staged_graph import Record
from fuseboard.profile.choose.candidates import note_gain_of_preparing
from fuseboard.profile.judge.accuracy import Budget, Metric
from fuseboard.report.data import GraphReport
from fuseboard.report.names import next_name
from fuseboard.run.captured_graph import CapturedBackward, CapturedGraph
from fuseboard.run.checked import RegionChecks
from fuseboard.run.program import Program
from fuseboard.run.runner import Runner
from fuseboard.run.sites import Site
from fuseboard.torch_api import custom_ops
from fuseboard.torch_api.aot_functions import noting_functions
from fuseboard.torch_api.dynamo_graphs import tracing_apart
from fuseboard.torch_api.graphs import graph_from_bytes, graph_to_bytes
from fuseboard.torch_api.symbols import GuardWatch
from fuseboard.workshop.sizes import NoCondition, SizeCondition


@dataclass(frozen=True)
class CarriedGraph:
    """One graph that AOTAutograd captured, and how it was cut.

    :ivar fused: None where it is the captured one.
    :ivar board_nodes: names of the board's own nodes.
    :ivar writes: the nodes of each write that can be made in place.
    :ivar weight_positions: inputs that are weights, unchanged until they tell otherwise.
    :ivar visible: how many leading outputs the caller sees; None: all.
    :ivar inner_plans: for the graphs of higher-order nodes.
    :ivar is_pinned: the user wants something in it on another backend than eager.
    :ivar runs_original: in eager it runs best as Dynamo has it.
    :ivar fusions_offered: of the graph as a whole; those of its regions are numbered on.
    :ivar decomposed: graphs of regions that were decomposed for a plugin; None for those that
        weren't.
    :ivar facts: what was known of the sizes of a region before it was lowered, by signature.
    :ivar overridden: where who decides a stage by the settings did so.
    :ivar tolerance: the error that the fused graph's results may have; None where it is exact.
    """

    kind: GraphKind
    entry: int
    captured: bytes
    fused: bytes | None
    board_nodes: tuple[str, ...]
    placements: dict[str, str]
    regions: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    weight_positions: frozenset[int]
    visible: int | None
    inner_plans: InnerPlans
    is_pinned: bool
    runs_original: bool
    fusions_offered: int
    decomposed: dict[LevelKey, bytes | None]
    facts: dict[str, str]
    overridden: frozenset[Decided]
    tolerance: float | None
    report: GraphReport


@dataclass(frozen=True)
class CarriedProgram:
    """All that runs the calls of one graph of Dynamo's.

    :ivar bundle: AOTAutograd's wrappers.
    :ivar backwards: for each entry whether it is that of a backward graph.
    :ivar mutated: positions of the inputs that a call writes to.
    :ivar spreads: how far apart roundings brought its results and those of Dynamo's graph.
    :ivar condition: which calls it answers; None where all sizes are plain.
    :ivar op_modules: those that define ops of its graphs.
    """

    bundle: bytes
    entries: tuple[str, ...]
    backwards: tuple[bool, ...]
    graphs: tuple[CarriedGraph, ...]
    mutated: frozenset[int]
    count: int
    autocast: bool
    spreads: Spreads
    condition: SizeCondition | None
    op_modules: tuple[str, ...]


class NotCarried(Exception):
    """It can't be sent, or doesn't fit where it arrived; the text says why."""


# --- there ----------------------------------------------------------------------------------------


def pack(
    compiled: Compiled, spreads: Spreads, condition: Callable[[], SizeCondition | None]
) -> bytes:
    """What another process makes the same of.

    :param spreads: of :meth:`fuseboard.capture.comparison.CaptureCheck.spreads_as_it_runs`.
    :param condition: which calls it answers; is asked when all else is done.
    :raises NotCarried: something in it means nothing there.
    """
    from fuseboard.torch_api.bundles import bundle_of

    call = compiled.call
    records = call.pipeline.records
    assert records is not None
    assert compiled.captured is not None
    try:
        program = CarriedProgram(
            bundle=bundle_of(compiled.captured),
            entries=tuple(entry.name for entry in call.captured_graphs),
            backwards=tuple(isinstance(entry, CapturedBackward) for entry in call.captured_graphs),
            graphs=tuple(pack_graph(record, call.captured_graphs) for record in records),
            mutated=call.mutated,
            count=call.input_count,
            autocast=call.autocast,
            spreads=spreads,
            condition=condition(),
            op_modules=op_modules(records),
        )
        return pickle.dumps(program)
    except (LoweringError, NoCondition) as error:
        raise NotCarried(str(error)) from error
    except Exception as error:  # whatever the code of an object in it raises when it is pickled
        raise NotCarried(error_text(error)) from error


def op_modules(records: Sequence[Record]) -> tuple[str, ...]:
    """The modules that define ops of some graphs."""
    graphs = (one for record in records for one in (record.staged.captured, record.staged.graph))
    found = {name for graph in graphs for name in custom_ops.defining_modules(graph)}
    return tuple(sorted(found - {custom_ops.MAIN}))


def pack_graph(record: Record, entries: Sequence[CapturedGraph]) -> CarriedGraph:
    """
    :raises NotCarried: it has no plan, or not all of it runs as it was lowered.
    """
    staged, runner, plan = record.staged, record.runner, record.plan
    if plan is None:
        raise NotCarried("one of its graphs has no plan")
    sites = [inner for site in runner.program.sites for inner in site.with_inner()]
    if any(site.tripped or site.lowered.region.backend != site.cut.backend for site in sites):
        raise NotCarried("a region of it runs in eager since it tripped")
    used = {site.lowered.region.signature for site in sites}
    return CarriedGraph(
        kind=staged.kind,
        entry=next(i for i, entry in enumerate(entries) if entry is runner.captured),
        captured=_bytes_of(staged.captured),
        fused=None if _are_alike(staged.captured, staged.graph) else _bytes_of(staged.graph),
        board_nodes=tuple(node.name for node in staged.board_nodes),
        placements=dict(plan.placements),
        regions=plan.regions,
        writes=tuple(write.names for write in staged.writes),
        weight_positions=staged.weight_positions,
        visible=staged.roles.visible_outputs if staged.kind == "forward" else None,
        inner_plans=staged.inner_plans,
        is_pinned=runner.is_pinned,
        runs_original=runner.uncompiled is not runner.captured.eager,
        fusions_offered=staged.counter.offered,
        decomposed={
            key: None if graph is None else _bytes_of(graph)
            for key, graph in record.decomposed.items()
            if key[1] in used
        },
        facts={name: text for name, text in record.facts.items() if name in used},
        overridden=frozenset(one for one in record.overridden if one[1] in used),
        tolerance=None if staged.narrowed is None else staged.narrowed.budget.tolerance,
        report=staged.report,
    )


def _are_alike(one: GraphModule, other: GraphModule) -> bool:
    """Whether two graphs are the same, down to the names of their nodes."""
    names = [[node.name for node in graph.graph.nodes] for graph in (one, other)]
    return names[0] == names[1] and signature(one, "", ()) == signature(other, "", ())


def _bytes_of(graph: GraphModule) -> bytes:
    return graph_to_bytes(graph, [], metadata=("val", "nn_module_stack", "stack_trace"))


# --- here -----------------------------------------------------------------------------------------


def unpack(
    data: bytes,
    session: Session,
    graph: GraphModule,
    inputs: Sequence[Any],
    frame: str,
    number: int,
) -> tuple[Compiled, CarriedProgram]:
    """What was packed, around Dynamo's graph of this process; and what it was packed as.

    What is learned of sizes here, by code in the cache that was made for some, is a part of the
    condition, too.

    :param inputs: a call's, real; they are not kept.
    :param frame: names the user's function in reports.
    :param number: of the backend's call.
    :raises NotCarried: it doesn't fit, or something that it needs is gone from the cache.
    """
    from fuseboard.torch_api.bundles import from_bundle

    carried: CarriedProgram = pickle.loads(data)
    for name in carried.op_modules:  # of ops that a rewrite brought: this process may not have them
        importlib.import_module(name)
    call = GraphCall(session, graph, frame, number=number)
    call.mutated, call.input_count, call.autocast = carried.mutated, carried.count, carried.autocast
    by_entry = {one.entry: one for one in carried.graphs}
    graphs = Graphs(carried.condition)
    for number, is_backward in enumerate(carried.backwards):
        if (one := by_entry.get(number)) is None:
            raise NotCarried("its backward hasn't run where it was tried")
        read, name = graphs.reader(one.captured), carried.entries[number]
        entry = (
            CapturedBackward(read, name, call.note_backward)
            if is_backward
            else CapturedGraph(read, name)
        )
        call.captured_graphs.append(entry)
        if one.fused is not None:
            entry.compiled_graph = graphs.read(one.fused)
        with tracing_apart(()):  # as where it was tried: passes of torch's look for one
            run_carried(call, one, inputs, graphs)
    codes = [captured.boxed() for captured in call.captured_graphs]
    with noting_functions() as functions:
        captured_run = from_bundle(carried.bundle, codes)
    call.complete_gradients(functions)
    run = call.watch_autocast(captured_run)
    compiled = Compiled(call.unless_unfit(run, inputs), call, captured=captured_run)
    return compiled, dataclasses.replace(carried, condition=_condition(carried, graphs, inputs))


class Graphs:
    """Reads graphs, each with a ShapeEnv of its own.

    :param condition: what the other process had learned.
    :ivar learned: what is learned of their sizes here, to read them included.
    """

    def __init__(self, condition: SizeCondition | None) -> None:
        self._has_plain_sizes = condition is None
        self._guards = 0 if condition is None else condition.guards
        self.learned: list[GuardWatch] = []

    def read(self, data: bytes) -> GraphModule:
        graph, _, mode = graph_from_bytes(data)
        self.learned.append(GuardWatch(mode, self._guards))
        return graph

    def reader(self, data: bytes) -> Callable[[], GraphModule]:
        """What reads a graph once it is needed: most of those that were rewritten never are.

        It is read at once where something may be learned by it.
        """
        if self._has_plain_sizes:
            return lambda: graph_from_bytes(data)[0]
        graph = self.read(data)
        return lambda: graph


def _condition(
    carried: CarriedProgram, graphs: Graphs, inputs: Sequence[Any]
) -> SizeCondition | None:
    """
    :raises NotCarried: it doesn't hold for the call.
    """
    if carried.condition is None:
        return None
    condition = carried.condition
    try:
        for learned in graphs.learned:
            condition = condition.with_terms(learned)
    except NoCondition as error:
        raise NotCarried(str(error)) from error
    if not condition.holds()(inputs):
        raise NotCarried(f"it is for calls where {condition.described()}")
    return condition


def run_carried(
    call: GraphCall,
    carried: CarriedGraph,
    inputs: Sequence[Any],
    graphs: Graphs,
) -> None:
    """Let the calls of the newest entry go to a program."""
    session, settings, entry = call.session, call.session.settings, call.captured_graphs[-1]
    graph = entry.compiled_graph
    nodes = {node.name: node for node in graph.graph.nodes}
    kept = [nodes[name] for name in carried.board_nodes]
    report = _as_ours(carried.report, call)
    allowed = carried.tolerance
    budget = None if allowed is None else Budget(allowed, Metric.of(session))
    runner = Runner(graph, entry, carried.kind, kept, session, report, carried.visible, budget)
    runner.is_pinned = carried.is_pinned
    if carried.runs_original:
        runner.uncompiled = boxed_original(call.graph, torch.is_grad_enabled())
    call.pipeline.runners.append(runner)
    placeholders = graph.graph.find_nodes(op="placeholder")
    lowering = Lowering(
        session=session,
        report=report,
        kind=carried.kind,
        static=frozenset(n for i, n in enumerate(placeholders) if i in carried.weight_positions),
        claimed={info.name: frozenset() for info in session.backends},
        inner_plans=carried.inner_plans,
        counter=FusionCounter(
            settings.fuse_limit, frozenset(settings.fuse_skip), carried.fusions_offered
        ),
        hoisting=settings.hoist and carried.kind == "inference",
        real=_real_inputs(placeholders, carried, inputs),
        strict=True,
        carried={
            key: None if one is None else graphs.read(one)
            for key, one in carried.decomposed.items()
        },
        facts=dict(carried.facts),
        overridden=set(carried.overridden),
    )
    writes = [Write(tuple(nodes[name] for name in names)) for names in carried.writes]
    cuts = cut_regions(graph, carried.placements, kept, carried.regions, writes)
    report.regions.clear()
    with report.timed("load"):
        sites = [
            Site(cut, lowering.lower(cut, f"{report.name}.region{i}", len(cuts) == 1))
            for i, cut in enumerate(cuts)
        ]
    program = Program(runner.context, sites)
    note_gain_of_preparing(program.sets, report.candidates, settings.margin)
    again = settings.verify_every is not None
    inputs_are: Any = "watched" if again else "unseen"
    runner.install(program, RegionChecks(False, strides=False, inputs=inputs_are, again=again))


def _as_ours(report: GraphReport, call: GraphCall) -> GraphReport:
    """The report of the other process, under this one's names."""
    name = next_name(report.kind)

    def renamed(text: str) -> str:
        return text.replace(f"{report.name}.", f"{name}.", 1)

    nodes = [dataclasses.replace(node, region=renamed(node.region)) for node in report.nodes]
    return dataclasses.replace(
        report, name=name, frame=call.pipeline.frame, call=call.pipeline.number, nodes=nodes
    )


def _real_inputs(
    placeholders: Sequence[Node], carried: CarriedGraph, inputs: Sequence[Any]
) -> dict[Node, torch.Tensor]:
    if carried.kind == "backward" or len(placeholders) != len(inputs):
        return {}
    return {placeholders[i]: inputs[i] for i in carried.weight_positions if i < len(inputs)}

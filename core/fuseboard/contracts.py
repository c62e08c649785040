"""The frozen dataclasses that pass between the stages.

A *graph* here is an ATen-level ``torch.fx.GraphModule`` whose nodes carry fake values in
``node.meta["val"]``. Nodes are named by ``node.name``, which is unique in a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.fx import GraphModule, Node

GraphKind = Literal["joint", "forward", "backward", "inference"]
EventName = Literal["fuse", "plan", "lower", "choose", "graph", "trip"]
Stage = Literal["capture", "claim", "plan", "fuse", "partition", "lower", "profile", "run"]
FailureAction = Literal["raise", "next", "eager"]
#: Random numbers: those that eager draws from the same seed, or the fastest to draw.
Random = Literal["eager", "fast"]
#: How a joint graph is split into forward and backward.
JointPolicy = Literal["min_cut", "default", "recompute_all"]
#: The solvers of ``torch._functorch.config.activation_memory_budget_solver``.
Knapsack = Literal["dp", "greedy", "ilp"]
#: How a node's backend is chosen.
Policy = Literal["measured", "priority"]
#: Whether repeated blocks become regions that share code.
Repeats = Literal["auto", "always", "never"]

#: A boxed callable takes one list of tensors and ints, may empty it, and returns the outputs.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class BackendInfo:
    """A backend's description of itself, given once per process.

    :ivar device_types: ``torch.device.type`` values that it runs on.
    :ivar dtypes: floating dtypes that it may meet; None means any.
    :ivar training: it takes forward and backward graphs, not only inference graphs.
    :ivar dynamic_shapes: its regions may have symbolic sizes.
    :ivar fixes_sizes: its lowering may fix a symbolic size to the example's number, which makes
        Dynamo compile again for each other size. Without it such a region is declined, and what
        lowering it learned is undone.
    :ivar bakes_constants: lowered code holds the *values* of static inputs.
    :ivar compiles_quickly: lowering takes seconds at most (no C++ compiler, no tuning).
    :ivar wraps_only: it runs no ops itself but wraps what other backends lowered
        (``fuseboard_wrap``), or samples (``fuseboard_sampler``); it isn't in the order of backends.
    :ivar by_request: it runs only where ``backends`` names it.
    :ivar by_measurement: where ``backends`` doesn't name it, it takes part under the policy
        ``measured`` only: under ``priority`` its place in the order would be a guess.
    :ivar may_crash: its lowering can end the process (an engine that aborts on bad input). With the
        setting ``isolate`` the first try of a region is made in a child process.
    :ivar available: False with a ``reason`` that says what to install or change.
    :ivar fingerprint: changes whenever the code that it makes may change.
    :ivar distributions: those whose versions, torch's aside, a packaged region depends on. Where
        they are given, a process that loads one looks at these and doesn't ask for the fingerprint.
    :ivar options: a pydantic model of ``[tool.fuseboard.plugins.NAME]``; None means no options.
    """

    name: str
    device_types: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[torch.dtype] | None = None
    training: bool = False
    dynamic_shapes: bool = False
    fixes_sizes: bool = False
    bakes_constants: bool = False
    compiles_quickly: bool = False
    wraps_only: bool = False
    by_request: bool = False
    by_measurement: bool = False
    may_crash: bool = False
    available: bool = True
    reason: str = ""
    fingerprint: str = ""
    distributions: tuple[str, ...] | None = None
    options: type[Any] | None = None


@dataclass(frozen=True)
class Claim:
    """Nodes that a backend says it can run as one stretch.

    :ivar nodes: every node of the stretch.
    :ivar native: those among ``nodes`` that this backend runs *better than eager*; the others are
        carried along so that the stretch isn't cut. A claim with a small native part loses to a
        backend that would run all of it natively.
    :ivar together: the nodes are taken all or none, and in one region: a pattern, or a whole
        subgraph. Of overlapping claims of one backend the first wins.
    """

    nodes: frozenset[str]
    native: frozenset[str]
    together: bool = False


@dataclass(frozen=True)
class Decline:
    """A node that a backend won't run, and why (an issue number where there is one)."""

    node: str
    reason: str


@dataclass(frozen=True)
class Composite:
    """Nodes of a graph that together compute something with a name, such as a layer norm.

    It is a view: the graph stays as it is. What the names stand for, and their arguments and
    results, ``docs/plugins.md`` lists.

    :ivar form: how it is written: the op, or the pattern, that was found.
    :ivar nodes: the calls that make it up, in the graph's order. Nothing else reads what they
        compute, the results aside.
    :ivar arguments: name → node, number or text; None where this one has no such argument.
    :ivar results: name → node: those that something else reads.
    """

    name: str
    form: str
    nodes: tuple[Node, ...]
    arguments: Mapping[str, Any]
    results: Mapping[str, Node]


@dataclass(frozen=True)
class Plan:
    """Which backend runs each node, and why. Every node that computes is in both mappings.

    :ivar regions: nodes that are to be a region each, such as the instances of a repeated block,
        in an order in which they can run: disjoint, each on one backend, and none reachable from
        itself through the others. Those that are isomorphic, node by node in that order, are
        lowered once. The board groups all other nodes.
    :ivar notes: what people should know of the plan, for the report.
    """

    placements: Mapping[str, str]
    reasons: Mapping[str, str]
    regions: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """A convex part of a graph, given to one backend.

    :ivar name: unique in its graph, such as ``inference0.region1``.
    :ivar graph: this backend's *own copy*; placeholders are the region's inputs in order, the
        output node returns a flat tuple. The backend may change it.
    :ivar static_inputs: positions of placeholders that are parameters or buffers.
    :ivar signature: canonical hash; regions with equal signatures are lowered once.
    :ivar whole: the region is the whole graph.
    :ivar options: the backend's options model, filled from settings; None where it has none.
    :ivar random: ``"eager"`` (the numbers that eager draws from the same seed) or ``"fast"``.
    :ivar source: the user's line that the first op comes from, ``file:line``, for messages.
    """

    name: str
    backend: str
    kind: GraphKind
    graph: GraphModule
    signature: str
    static_inputs: tuple[int, ...] = ()
    whole: bool = False
    options: Any = None
    random: Random = "eager"
    source: str = ""


class CheckedWhenRegistered(ABC):
    """An attribute of a plugin that the board checks before the plugin takes part."""

    @abstractmethod
    def check(self) -> None:
        """
        :raises FuseboardError: the plugin can't be used.
        """

    @property
    @abstractmethod
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The author's functions that it is made of: their modules' code is the plugin's."""


@dataclass(frozen=True)
class Fusion:
    """One rewrite that a plugin offers. The board numbers, counts and applies it.

    :ivar name: what it does, such as ``conv+bn+relu``.
    :ivar nodes: names of the nodes that it replaces.
    :ivar apply: performs it on the graph that the hook was given. Fusions of one call are applied
        in order and must not overlap. New nodes need ``meta["val"]``.
    """

    name: str
    nodes: tuple[str, ...]
    apply: Callable[[], None]


@dataclass(frozen=True)
class Narrowing:
    """A graph in narrower numbers, as a plugin offers it: faster, and less accurate.

    :ivar format: names it, such as ``bfloat16``: candidates are called ``mkldnn in bfloat16``.
    :ivar changes: what it narrows and what it leaves, in a few words for the report.
    :ivar fusions: rewrites of the graph that the hook was given. Each may be applied without the
        others: ``tolerance`` may leave out modules, and what causes too large an error. Inputs and
        outputs must keep their dtypes.
    :ivar problem: why it isn't offered here, such as instructions that the processor lacks, without
        which it would be emulated, slower than float32; "" where it is.
    """

    format: str
    changes: str
    fusions: tuple[Fusion, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class LoweredRegion:
    """A region as something to call.

    :ivar call: boxed; outputs in the region's order, with the shapes, dtypes and strides of
        ``meta["val"]`` (the strides where more than one element is reached through them). One that
        pickles can be packaged (``fuseboard.package``).
    :ivar notes: what people should know, such as ops that fell back inside the backend.
    :ivar artifact: what ``fuseboard_load`` of the same backend needs to make the callable again in
        another process, without compiling; the board stores it. None where it can't be made again.
    """

    call: Boxed
    notes: tuple[str, ...] = ()
    artifact: bytes | None = None


@dataclass(frozen=True)
class Measurement:
    """How long calls took, in microseconds.

    :ivar latency_us: the median.
    :ivar low_us: the first quartile.
    :ivar high_us: the third quartile.
    """

    latency_us: float
    low_us: float
    high_us: float
    calls: int


@dataclass(frozen=True)
class Verdict:
    """Whether a lowered region kept its contract in the call that was judged.

    :ivar by_value: the problem is a wrong value.
    """

    ok: bool
    problem: str = ""
    by_value: bool = False


@dataclass(frozen=True)
class Trip:
    """A failure that the board contained.

    :ivar stage: where it happened.
    :ivar source: the user's line that the ops come from, ``file:line``, if known.
    :ivar instead: what ran in its place.
    """

    plugin: str
    stage: Stage
    region: str
    error: str
    instead: str
    source: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened to a graph, for observers.

    :ivar name: ``fuse`` (the graph as a whole was rewritten), ``plan``, ``lower`` (one region),
        ``choose`` (what runs from now on, once candidates were compared), ``graph`` (all that is
        compiled before a call is compiled) or ``trip`` (a failure was contained).
    :ivar graph: the name of its report. Of what happens in the workshop, the name that the graph
        has until something compiled takes over.
    :ivar seconds: how long it took; 0 where that isn't measured.
    :ivar details: numbers and names, by event: ``offered`` of ``fuse``, ``regions`` of ``plan``,
        ``region`` and ``backend`` of ``lower``, ``kind`` and ``trips`` of ``graph``;
        of ``choose`` the ``winner``, with ``settled``, or with ``whole`` where whole calls were
        compared; of ``trip`` what a :class:`Trip` has, and ``exceeded`` where results of a call
        were farther from float64 than the setting ``tolerance`` allows.
    :ivar process: where it happened: in the ``user``'s, or in the ``workshop``, the process that
        tries candidates beside the calls. Observers are called in the user's for both.
    """

    name: EventName
    graph: str
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    process: Literal["user", "workshop"] = "user"


# --- sampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackFrame:
    """One call on a sampled stack.

    :ivar file: as Python has it; "" where it isn't known, as for most native code.
    :ivar line: the line that ran; 0 where it isn't known.
    """

    name: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class StackSample:
    """A stack that was seen, outermost call first, ``count`` times."""

    stack: tuple[StackFrame, ...]
    thread: str = ""
    count: int = 1


@dataclass(frozen=True)
class SamplingOptions:
    """What a session asks its sampler for.

    :ivar rate_hz: samples a second.
    :ivar max_duration_s: the sampler stops after this time; the work goes on.
    :ivar tags: the user's words for the run.
    """

    rate_hz: float
    max_duration_s: float
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplerStatus:
    """The state of a sampler.

    :ivar state: ``starting`` until it takes samples, ``running`` while it does, ``processing``
        until its results are there, then ``finished``; ``failed`` where there will be no results.
    :ivar detail: of a failure, what was missing and how to get it; else what people should know,
        such as that native frames were left out.
    """

    state: Literal["starting", "running", "processing", "finished", "failed"]
    detail: str = ""


class Sampler(Protocol):
    """An external profiler for one session; it is started once. No method waits for long.

    :ivar python_frames: its stacks have the Python calls, with their lines.
    """

    python_frames: bool

    def start(self, pid: int, run_id: str, options: SamplingOptions) -> None:
        """Start sampling process ``pid``, and return before it runs. Raises if it can't."""

    def status(self) -> SamplerStatus:
        """Its state now."""

    def stop(self) -> None:
        """End sampling, and leave no process that samples. It may be called at any time, twice."""

    def results(self) -> list[StackSample] | None:
        """What was sampled, in the order of time; None while it is being processed."""

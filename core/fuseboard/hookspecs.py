"""Every hook, in stage order: the contract with plugin authors.

A plugin is a module (or object) with functions marked ``@fuseboard.hookimpl``, named by an entry
point of group ``fuseboard``. Hooks are called while graphs are compiled, verified and compared,
which may be in a call; a call of a graph that has settled calls none, unless it fails or the
setting ``verify`` wants it checked. An implementation may leave out arguments that it doesn't need.
What a hook returns is checked against the annotation here; an
answer of another type is a :class:`~fuseboard.errors.ContractError` that names plugin and hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pluggy
from torch.fx import GraphModule

from fuseboard.contracts import (
    BackendInfo,
    Boxed,
    Claim,
    Decline,
    Event,
    FailureAction,
    Fusion,
    GraphKind,
    JointPolicy,
    Knapsack,
    LoweredRegion,
    Measurement,
    Plan,
    Policy,
    Random,
    Region,
    Repeats,
    Sampler,
    Stage,
    Verdict,
)

PROJECT = "fuseboard"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


@dataclass(frozen=True)
class PassOrder:
    """Which plugins' rewrites a plugin's own come before and after.

    :ivar where: file and line of the hook that says so.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    where: str


def pass_order(
    *, before: Sequence[str] = (), after: Sequence[str] = ()
) -> Callable[[_Hook], _Hook]:
    """Say before or after which plugins a hook that rewrites whole graphs is asked.

    For ``fuseboard_fuse`` and ``fuseboard_fuse_dynamo``. Each name must be a plugin that is
    installed, though it needn't be ready or have the hook; a name that isn't there, and orders that
    make a circle, are errors before anything is compiled. Regions are rewritten by their backend.

    :raises TypeError: a name is no string, or a text stands for a sequence of names.
    """
    for what, names in (("before", before), ("after", after)):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"pass_order({what}={names!r}): not a sequence of plugins' names")

    def mark(hook: _Hook) -> _Hook:
        code = inspect.unwrap(hook).__code__
        where = f"{code.co_filename}:{code.co_firstlineno}"
        hook.fuseboard_pass_order = PassOrder(tuple(before), tuple(after), where)  # type: ignore[attr-defined]
        return hook

    return mark


# --- what a plugin is ---------------------------------------------------------------------------


@hookspec
def fuseboard_backend() -> BackendInfo | None:
    """Describe this plugin's backend. Called once per process, before any other hook of it.

    None (or no implementation) means that the plugin only takes part in other stages. It must
    not import the engine if that is slow: say ``available=False`` with a reason and a pip line
    when it can't be found.
    """


# --- capture ------------------------------------------------------------------------------------


@hookspec
def fuseboard_decompositions(
    kind: GraphKind, options: Any, random: Random
) -> dict[Any, Callable[..., Any]] | None:
    """Name the ops to decompose before regions of ``kind`` graphs reach this backend.

    A region is retraced under its backend's table if it holds an op of it. Inference graphs are
    captured without any; joint ones with those of all backends that train, in any order. With
    ``random="eager"`` an op that draws random numbers must not be decomposed into one that draws
    others. None means no decompositions.
    """


# --- fuse ---------------------------------------------------------------------------------------


@hookspec
def fuseboard_fuse_dynamo(graph: GraphModule, options: Any, random: Random) -> list[Fusion] | None:
    """Offer rewrites of Dynamo's graph, before autograd and whichever backends there are.

    Called once per graph, on every plugin in order. What is rewritten here has its backward from
    autograd. Nodes call torch's functions and methods as the user's code does; they may write to
    tensors, and ``meta["val"]`` has their fake values, which new nodes need as well. A rewrite
    takes out what it replaces: what nobody reads stays, since it may have effects. Results, their
    strides and their gradients must be kept. Dynamo's own graph is what all is held against.
    """


@hookspec
def fuseboard_fuse(
    graph: GraphModule, kind: GraphKind, region: Region | None, options: Any, random: Random
) -> list[Fusion] | None:
    """Offer rewrites of a graph or a region.

    Called first with ``region=None`` on each joint and inference graph as a whole, for every
    plugin in order; then once per region, for the region's own backend, with ``graph`` being
    ``region.graph``. A whole graph's ``graph.meta["decompositions"]`` is what it was captured with:
    op → function. Rewrites must keep results, strides and ``meta["val"]``. Whatever they
    make to depend on static inputs alone (a packed weight, a folded batch norm) the board
    hoists out of the calls.
    """


# --- partition ----------------------------------------------------------------------------------


@hookspec(firstresult=True)
def fuseboard_partition_joint(
    joint: GraphModule,
    inputs: Sequence[Any],
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    memory_budget: float,
    policy: JointPolicy,
    knapsack: Knapsack,
    keywords: dict[str, Any],
) -> tuple[GraphModule, GraphModule] | None:
    """Split a joint graph into forward and backward.

    The forward returns its outputs and then what it saves; the backward takes (symbolic ints,
    saved, tangents), as torch's partitioners do. ``memory_budget`` runs from 0 (recompute all)
    to 1 (save all that min-cut would); ``policy`` and ``knapsack`` are the settings
    ``joint_policy`` and ``knapsack``. ``keywords`` are further ones that AOTAutograd passed.
    """


@hookspec
def fuseboard_claim(
    graph: GraphModule, kind: GraphKind, options: Any
) -> list[Claim | Decline] | None:
    """Say which nodes this backend can run, and decline the others with reasons.

    It may over-claim: the board arbitrates. A node that is neither claimed nor declined counts
    as declined without a reason. ``graph`` is a copy that must not be changed.
    """


@hookspec(firstresult=True)
def fuseboard_plan(
    graph: GraphModule,
    kind: GraphKind,
    claims: dict[str, list[Claim | Decline]],
    backends: Sequence[BackendInfo],
    pins: Mapping[str, str],
    policy: Policy,
    min_region_us: float,
    merge_regions: bool,
    repeats: Repeats,
) -> Plan | None:
    """Decide which backend runs each node.

    ``claims`` and ``backends`` are in order of priority; the last backend is always ``eager``,
    which claims everything. ``pins`` maps nodes to the backends that the user wants for them, where
    these claim them: a plan must follow it. The further arguments are the settings of those names.
    Nodes that a backend claims ``together`` only are placed on it all or none, in one region.
    The answer must be the same on every rank: it may depend on the arguments only.
    """


# --- lower --------------------------------------------------------------------------------------


@hookspec
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """Compile one region, or return None to decline it after all.

    Called once per signature for each candidate that holds such a region, on the plugin that the
    plan chose, after its fusions and with constants hoisted; and on parts of a region, where its
    values were wrong and the first op to blame is looked for. ``inputs`` are fake tensors and
    SymInts in placeholder order; where sizes are symbolic the tracing context is active, so guards
    are recorded. A fake mode is active in most calls and not in all of them, since backwards and
    further candidates are lowered later: :func:`fuseboard.real_tensors` leaves it.

    The graph has placeholders, calls of functions, ``get_attr`` nodes (constants, which are real
    tensors, and the graphs that ops such as ``cond`` hold) and an output. After a decomposition
    it holds ops that no claim was asked about. ``docs/plugins.md`` has the rules for results.

    :raises LoweringError: the plugin claimed the region but can't compile it.
    """


@hookspec
def fuseboard_load(artifact: bytes, region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """Make a lowered region again from ``LoweredRegion.artifact``, without compiling.

    Called instead of ``fuseboard_lower``, on the same backend, where an earlier process (or this
    one) stored an artifact under an equal key. The key holds the region's graph and inputs, the
    backend's fingerprint and options, what is known of symbolic sizes, the versions of torch and
    fuseboard, the processor, the number of threads, and for ``bakes_constants`` the contents of
    the static inputs; so an artifact needs to be checked for none of these. ``region.graph`` and
    ``inputs`` are as for ``fuseboard_lower``. None means that the artifact can't be used after all;
    one that raises trips. In both cases the region is lowered. The answer's own ``artifact`` is
    ignored.
    """


@hookspec
def fuseboard_wrap(
    lowered: LoweredRegion,
    region: Region,
    options: Any,
    tell: Callable[[str | BaseException], None],
    lower_part: Callable[[GraphModule, Sequence[int]], Boxed],
) -> LoweredRegion | None:
    """Put something around a region that another backend lowered, such as a CUDA graph.

    Called for each region, those that share lowered code included, right after ``fuseboard_lower``
    or ``fuseboard_load``, on every plugin that implements it, in order; each is given what the one
    before it made. The region keeps its backend.
    ``region.graph`` is the graph that was lowered and must not be changed; its placeholders are the
    inputs of ``lowered.call``, whose contract holds for the answer's call as well. ``options`` are
    this plugin's own. ``tell`` may be called at any time, in calls of the region too: a text
    becomes a note of the region, an exception that the wrapper contained becomes a trip (and is
    raised as a RegionError if the policy says so); the wrapper then calls ``lowered.call``.
    ``lower_part`` has a graph of some of the region's nodes, with their fake values, compiled by
    the region's backend, without wrappers; it is told the positions of those of its inputs that
    are static. None means that the region stays as it is; to say why, answer with the same call
    and a note. A hook that fails trips, and the region runs without it.
    """


@hookspec
def fuseboard_export(
    graph: GraphModule,
    inputs: Sequence[Any],
    names: Sequence[str],
    weights: Sequence[int],
    path: Path,
    options: Any,
) -> tuple[Any, ...] | None:
    """Write a whole inference graph to a file that runs without torch, and run that file.

    Called by ``fuseboard export``, on one plugin after another until one answers. ``graph`` is a
    copy of the graph, with nothing decomposed that a backend might want whole, and static sizes;
    ``inputs`` are real tensors in the order of its placeholders, ``names`` what to call them,
    ``weights`` the positions of those that belong into the file. The answer is what the file as
    written computes from the other inputs, in the order of the graph's outputs. None means that the
    plugin doesn't write files with ``path``'s ending.

    :raises LoweringError: something in the graph can't be written.
    """


# --- profile ------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def fuseboard_verify(
    region: Region,
    expected: Sequence[Any],
    result: Sequence[Any],
    inputs: Sequence[Any],
    reference: Any,
) -> Verdict | None:
    """Judge real outputs of a lowered region.

    ``expected`` are the fake outputs of the region as captured; ``reference`` is what the captured
    region computes on these inputs by eager and in float64, None where values aren't to be judged
    (known good code, random numbers, effects). The default checks count, type, dtype, shape,
    strides, and then each element (``docs/verification.md``).
    """


@hookspec(firstresult=True)
def fuseboard_measure(
    calls: Sequence[Callable[[], Any]], budget_s: float
) -> list[Measurement] | None:
    """Time calls in turn (never one after the other's end) for ``budget_s`` seconds.

    Calls to warm up may come on top. One measurement per call, in order. The default interleaves
    rounds and reports quartiles.
    """


@hookspec
def fuseboard_sampler(options: Any) -> Sampler | None:
    """Give an external profiler that samples this process's stacks, for one session.

    Called when a :class:`~fuseboard.SamplingProfiler` starts, on every plugin in order, each time
    for a new object; nothing may be started yet. Samplers whose stacks have Python frames are tried
    first, and the next one where one can't start. A plugin whose profiler isn't installed says so
    in ``fuseboard_backend`` (``available=False``, ``wraps_only=True``): the user is then told its
    reason. None means that this plugin can't sample here.
    """


# --- when something goes wrong, and for observers -----------------------------------------------


@hookspec(firstresult=True)
def fuseboard_on_failure(
    region: str, plugin: str, stage: Stage, error: BaseException
) -> FailureAction | None:
    """Choose what happens after a failure: ``raise``, the ``next`` backend, or ``eager``.

    The default answers with the setting ``on_failure``.
    """


@hookspec
def fuseboard_event(event: Event) -> None:
    """Observe a compile. An observer that raises is reported and can't break the compile."""

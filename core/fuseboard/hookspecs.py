"""Every hook, in stage order: the contract with plugin authors.

A plugin is a module (or object) with functions marked ``@fuseboard.hookimpl``, named by an entry
point of group ``fuseboard``. Hooks are called while graphs are compiled, verified and compared,
which may happen during a call. Once a graph has settled its calls run no hook, unless a call fails
or the setting ``verify`` asks for a check. An implementation may leave out arguments that it
doesn't need. The board checks what a hook returns against the annotation here; an answer of
another type is a :class:`~fuseboard.errors.ContractError` that names plugin and hook.
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
    Narrowing,
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
    """The plugins before and after which a plugin rewrites graphs.

    :ivar where: file and line of the hook that was decorated.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    where: str


def pass_order(
    *, before: Sequence[str] = (), after: Sequence[str] = ()
) -> Callable[[_Hook], _Hook]:
    """Decorate a hook that rewrites whole graphs: it is called before or after other plugins'.

    For ``fuseboard_fuse`` and ``fuseboard_fuse_dynamo``. Each name must be an installed plugin; it
    needn't be ready or have the hook. An unknown name and a circular order are errors before
    anything is compiled. The order of rewrites of regions isn't affected: each region is rewritten
    by its own backend.

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


# --- plugin: what it is -------------------------------------------------------------------------


@hookspec
def fuseboard_backend() -> BackendInfo | None:
    """Describe this plugin's backend. Called once per process, before the plugin's other hooks.

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

    A region is retraced under its backend's table if it holds an op of the table. Inference graphs
    are captured without decompositions, joint graphs with those of all backends that train. With
    ``random="eager"`` an op that draws random numbers must not be decomposed into one that draws
    other numbers. None means no decompositions.
    """


# --- fuse ---------------------------------------------------------------------------------------


@hookspec
def fuseboard_fuse_dynamo(graph: GraphModule, options: Any, random: Random) -> list[Fusion] | None:
    """Offer rewrites of Dynamo's graph, before autograd and for all backends.

    Called once per graph, on every plugin in order. Autograd derives the backward from the
    rewritten graph. Nodes call torch's functions and methods as the user's code does and may write
    to tensors; ``meta["val"]`` has their fake values, which new nodes need as well. A rewrite
    erases the nodes that it replaces: the board keeps nodes without users, since they may have
    effects. Results, their strides and their gradients must stay the same. The board compares the
    rewritten graph with Dynamo's own.
    """


@hookspec
def fuseboard_fuse(
    graph: GraphModule, kind: GraphKind, region: Region | None, options: Any, random: Random
) -> list[Fusion] | None:
    """Offer rewrites of a graph or a region.

    Called first with ``region=None`` on each joint and inference graph as a whole, for every
    plugin in order; then once per region, for the region's own backend, with ``graph`` being
    ``region.graph``. ``graph.meta["decompositions"]`` of a whole graph is the table that it was
    captured with: op → function. Rewrites must keep results, strides and ``meta["val"]``. The board
    hoists out of the calls what depends on static inputs alone (a packed weight, a folded batch
    norm).
    """


@hookspec
def fuseboard_narrow(graph: GraphModule, kind: GraphKind, options: Any) -> list[Narrowing] | None:
    """Offer to have a graph computed in narrower numbers, which loses accuracy.

    Called where the setting ``tolerance`` allows an error, after all other rewrites of the graph as
    a whole, on every plugin in order; under the policy ``measured`` alone. ``graph`` is an
    inference graph, or with ``tolerance_training`` a forward or backward graph. It is called again,
    with a copy of the graph each time, for each version that is made of it. Such a version is
    claimed, planned and lowered like the graph itself, its regions are judged by what it computes,
    and its results by ``tolerance`` against float64.
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
    ``joint_policy`` and ``knapsack``. ``keywords`` are AOTAutograd's further arguments.
    """


@hookspec
def fuseboard_claim(
    graph: GraphModule, kind: GraphKind, options: Any
) -> list[Claim | Decline] | None:
    """Claim the nodes that this backend can run, and decline the others with reasons.

    A backend may claim too much: the board arbitrates. A node that is neither claimed nor declined
    counts as declined without a reason. ``graph`` is a copy that must not be changed.
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
    repeats: Repeats,
) -> Plan | None:
    """Decide which backend runs each node.

    ``claims`` and ``backends`` are in order of priority; the last backend is always ``eager``,
    which claims everything. ``pins`` maps nodes to the backends that the user wants for them, as
    far as these claim them; a plan must follow it. The further arguments are the settings of those
    names. Nodes of a claim with ``together`` are placed on its backend all or none, in one region.
    The answer must be the same on every rank, so it may depend on the arguments only.
    """


# --- lower --------------------------------------------------------------------------------------


@hookspec
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """Compile one region, or return None to decline it after all.

    Called once per signature for each candidate that holds such a region, on the plugin that the
    plan chose, after the plugin's fusions and with constants hoisted. Also called on parts of a
    region whose values were wrong, to find the first wrong op. ``inputs`` are fake tensors and
    SymInts in placeholder order; where sizes are symbolic the tracing context is active, so guards
    are recorded. A fake mode is active in most calls, but not in all: backwards and further
    candidates are lowered later. :func:`fuseboard.real_tensors` leaves it.

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
    the static inputs; an implementation need check none of these. ``region.graph`` and ``inputs``
    are as for ``fuseboard_lower``. None means that the artifact can't be used after all, an
    exception is a trip; in both cases the region is lowered. The answer's own ``artifact`` is
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
    or ``fuseboard_load``, on every plugin that implements it, in order; each wraps the answer of
    the one before. The region keeps its backend.

    ``region.graph`` is the graph that was lowered and must not be changed; its placeholders are the
    inputs of ``lowered.call``. The answer's call must keep the contract of ``lowered.call``.
    ``options`` are this plugin's own. ``tell`` may be called at any time, also during calls of the
    region: a text becomes a note of the region; an exception that the wrapper contained becomes a
    trip (and is raised as a RegionError if the policy says so), after which the wrapper calls
    ``lowered.call``. ``lower_part(graph, static)`` compiles a graph of some of the region's nodes,
    with their fake values, by the region's backend and without wrappers; ``static`` are the
    positions of its static inputs. None means that the region stays as it is; to say why, answer
    with the same call and a note. A hook that fails trips, and the region runs without it.
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
    """Write an inference graph to a file that runs without this process, and run that file.

    Called by ``fuseboard export`` for a whole graph with static sizes, on one plugin after another
    until one answers; and by ``fuseboard.package`` for a ``.pt2`` of a region, on its backend,
    where the region's callable can't be pickled. ``graph`` is a copy of the graph before any
    decomposition; ``inputs`` are real tensors and ints in the order of its placeholders, ``names``
    their names in the file, ``weights`` the positions of those to be stored in the file. A file
    with the suffix ``.pt2`` is torch's archive of compiled code; it takes the tensors among the
    other inputs. The answer is what the written file computes from the other inputs, in the order
    of the graph's outputs. None means that the plugin doesn't write files with the suffix of
    ``path``.

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
    region computes on these inputs in eager and in float64; None where values aren't judged (code
    that was right before, random numbers, effects). The default checks count, type, dtype, shape,
    strides, and then each element (``docs/verification.md``).
    """


@hookspec(firstresult=True)
def fuseboard_measure(
    calls: Sequence[Callable[[], Any]], budget_s: float
) -> list[Measurement] | None:
    """Time calls in turn, round by round, for ``budget_s`` seconds.

    Warm-up calls may come on top. Return one measurement per call, in order. The default rotates
    the order within rounds and reports quartiles.
    """


@hookspec
def fuseboard_sampler(options: Any) -> Sampler | None:
    """Return an external profiler that samples this process's stacks, for one session.

    Called when a :class:`~fuseboard.SamplingProfiler` starts, on every plugin in order; each call
    returns a new object that hasn't been started. Samplers with Python frames in their stacks are
    tried first; where one can't start, the next is tried. A plugin whose profiler isn't installed
    says so in ``fuseboard_backend`` (``available=False``, ``wraps_only=True``), and the user is
    shown its reason. None means that this plugin can't sample here.
    """


# --- events: when something goes wrong, and for observers ---------------------------------------


@hookspec(firstresult=True)
def fuseboard_on_failure(
    region: str, plugin: str, stage: Stage, error: BaseException
) -> FailureAction | None:
    """Choose what happens after a failure: ``raise``, the ``next`` backend, or ``eager``.

    The default answers with the setting ``on_failure``.
    """


@hookspec
def fuseboard_event(event: Event, options: Any) -> None:
    """Observe compiles and failures. An observer that raises is reported and can't break a compile.

    Called in the user's process, also for what happens in the workshop, in the thread in which it
    happens or becomes known; a call waits for it where something fails in the call.
    """

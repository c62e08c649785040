"""What each hook may answer: pluggy doesn't look at return types, so the board does.

Each checker takes the answer and the call's arguments and yields what is wrong with it. None is
always allowed but from a hook that must decide; the board leaves it out before it asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from pydantic import BaseModel
from torch.fx import GraphModule

from fuseboard.contracts import (
    BackendInfo,
    Claim,
    Decline,
    FailureAction,
    Fusion,
    LoweredRegion,
    Measurement,
    Narrowing,
    Plan,
    Verdict,
)
from fuseboard.errors import ContractError, containable

Problems = Iterator[str]
Arguments = Mapping[str, Any]

_SHOWN = 120


def check_answer(plugin: str, hook: str, answer: Any, arguments: Arguments) -> None:
    """Hold an answer against its hook's contract.

    :raises ContractError: names plugin, hook, what was returned and what is allowed.
    """
    allowed, checker = _CHECKERS[hook]
    for problem in checker(answer, arguments):
        raise ContractError(
            plugin, hook, f"it returned {show(answer)}: {problem}. Allowed: {allowed}, or None."
        )


def show(value: Any) -> str:
    """A value in few words. A value whose ``repr`` fails is shown by its type."""
    try:
        text = " ".join(repr(value).split())
    except containable() as error:  # a plugin's object may do anything, even here
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    short = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return f"{short} of type {type(value).__name__}"


def _is(value: Any, kind: type | tuple[type, ...], what: str) -> Problems:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        yield f"{what} is {show(value)}, not {' or '.join(k.__name__ for k in kinds)}"


def _items(value: Any, kind: type | tuple[type, ...]) -> Problems:
    """A list, and every item of the right type."""
    if not isinstance(value, list):
        yield "it isn't a list"
        return
    for place, item in enumerate(value):
        yield from _is(item, kind, f"item {place}")


def _node_names(arguments: Arguments) -> set[str]:
    return {node.name for node in arguments["graph"].graph.nodes}


def _strange(names: Any, known: set[str]) -> Problems:
    for name in sorted(set(names) - known, key=str):
        yield f"node {name!r} isn't in the graph"


# --- one checker a hook -------------------------------------------------------------------------


_FLAGS = (
    "training",
    "dynamic_shapes",
    "fixes_sizes",
    "bakes_constants",
    "compiles_quickly",
    "wraps_only",
    "by_request",
    "by_measurement",
    "may_crash",
    "available",
)


def _backend(answer: Any, arguments: Arguments) -> Problems:
    if not isinstance(answer, BackendInfo):
        yield "it isn't a BackendInfo"
        return
    yield from _is(answer.name, str, "name")
    yield from _names(answer.device_types, (frozenset, set), "device_types")
    if answer.dtypes is not None:
        yield from _is(answer.dtypes, (frozenset, set), "dtypes")
        for dtype in answer.dtypes if isinstance(answer.dtypes, (frozenset, set)) else ():
            yield from _is(dtype, torch.dtype, "an item of dtypes")
    for flag in _FLAGS:
        yield from _is(getattr(answer, flag), bool, flag)
    yield from _is(answer.reason, str, "reason")
    yield from _is(answer.fingerprint, str, "fingerprint")
    if answer.distributions is not None:
        yield from _names(answer.distributions, tuple, "distributions")
    model = answer.options
    if model is not None and not (isinstance(model, type) and issubclass(model, BaseModel)):
        yield f"options is {show(model)}, not a pydantic model class"


def _names(value: Any, kind: type | tuple[type, ...], what: str) -> Problems:
    """A collection of this kind, of strings."""
    if not isinstance(value, kind):
        yield from _is(value, kind, what)
        return
    for item in value:  # type: ignore[attr-defined]
        yield from _is(item, str, f"an item of {what}")


def _decompositions(answer: Any, arguments: Arguments) -> Problems:
    yield from _is(answer, dict, "the answer")
    for op, function in answer.items() if isinstance(answer, dict) else ():
        if not callable(function):
            yield f"what decomposes {op} is {show(function)}, which can't be called"


def _fusions(answer: Any, arguments: Arguments) -> Problems:
    yield from _items(answer, Fusion)
    known = _node_names(arguments)
    taken: dict[str, str] = {}
    for fusion in answer:
        yield from _is(fusion.name, str, "name")
        yield from _names(fusion.nodes, tuple, f"nodes of {fusion.name!r}")
        yield from _strange(fusion.nodes, known)
        if not callable(fusion.apply):
            yield f"apply of {fusion.name!r} can't be called"
        for node in fusion.nodes:
            if node in taken:
                yield f"{fusion.name!r} and {taken[node]!r} overlap at node {node!r}"
            taken[node] = fusion.name


def _narrowings(answer: Any, arguments: Arguments) -> Problems:
    yield from _items(answer, Narrowing)
    for one in answer:
        for field in ("format", "changes", "problem"):
            yield from _is(getattr(one, field), str, field)
        yield from _is(one.fusions, tuple, f"fusions of {one.format!r}")
        yield from _fusions(list(one.fusions), arguments)


def _pair(answer: Any, arguments: Arguments) -> Problems:
    if not isinstance(answer, tuple) or len(answer) != 2:
        yield "it isn't a tuple of two"
        return
    for part, graph in zip(("forward", "backward"), answer, strict=True):
        yield from _is(graph, GraphModule, f"the {part}")


def _claims(answer: Any, arguments: Arguments) -> Problems:
    yield from _items(answer, (Claim, Decline))
    known = _node_names(arguments)
    for item in answer:
        if isinstance(item, Decline):
            yield from _is(item.node, str, "node of a Decline")
            yield from _is(item.reason, str, f"the reason for {item.node!r}")
            yield from _strange([item.node], known)
            continue
        for part, names in (("nodes", item.nodes), ("native", item.native)):
            yield from _names(names, (frozenset, set), part)
            yield from _strange(names, known)
        yield from _is(item.together, bool, "together")
        for name in sorted(item.native - item.nodes):
            yield f"a Claim's native node {name!r} isn't among its nodes"


def _plan(answer: Any, arguments: Arguments) -> Problems:
    if not isinstance(answer, Plan):
        yield "it isn't a Plan"
        return
    known = _node_names(arguments)
    backends = {info.name for info in arguments["backends"]}
    for what in ("placements", "reasons"):
        table = getattr(answer, what)
        if not isinstance(table, Mapping):
            yield from _is(table, Mapping, what)
            return
        yield from _names(list(table.values()), list, what)
        yield from _strange(table, known)
    yield from _groups(answer.regions, known)
    yield from _names(answer.notes, tuple, "notes")
    for node, backend in answer.placements.items():
        if backend not in backends:
            yield f"node {node!r} is placed on {backend!r}, not on one of {sorted(backends)}"
        if node not in answer.reasons:
            yield f"node {node!r} has no reason"


def _groups(regions: Any, known: set[str]) -> Problems:
    yield from _is(regions, tuple, "regions")
    for number, region in enumerate(regions):
        yield from _names(region, tuple, f"regions[{number}]")
        yield from _strange(region, known)
        if not region:
            yield f"regions[{number}] is empty"


def _lowered(answer: Any, arguments: Arguments) -> Problems:
    if not isinstance(answer, LoweredRegion):
        yield "it isn't a LoweredRegion"
        return
    if not callable(answer.call):
        yield f"call is {show(answer.call)}, which can't be called"
    yield from _names(answer.notes, tuple, "notes")
    if answer.artifact is not None:
        yield from _is(answer.artifact, bytes, "artifact")


def _exported(answer: Any, arguments: Arguments) -> Problems:
    yield from _is(answer, tuple, "what the file computes")
    outputs = arguments["graph"].graph.output_node().args[0]
    count = len(outputs) if isinstance(outputs, list | tuple) else 1
    if len(answer) != count:
        yield f"{len(answer)} results for {count} outputs"


def _verdict(answer: Any, arguments: Arguments) -> Problems:
    if not isinstance(answer, Verdict):
        yield "it isn't a Verdict"
        return
    yield from _is(answer.ok, bool, "ok")
    yield from _is(answer.problem, str, "problem")


def _measurements(answer: Any, arguments: Arguments) -> Problems:
    yield from _items(answer, Measurement)
    calls: Sequence[Any] = arguments["calls"]
    if len(answer) != len(calls):
        yield f"{len(answer)} measurements for {len(calls)} calls"


def _sampler(answer: Any, arguments: Arguments) -> Problems:
    for method in ("start", "status", "stop", "results"):
        if not callable(getattr(answer, method, None)):
            yield f"it has no method {method}"
    yield from _is(getattr(answer, "python_frames", None), bool, "python_frames")


def _action(answer: Any, arguments: Arguments) -> Problems:
    if answer not in get_args(FailureAction):
        yield "there is no such action"


def _nothing(answer: Any, arguments: Arguments) -> Problems:
    yield "observers answer nothing"


_CHECKERS: dict[str, tuple[str, Callable[[Any, Arguments], Problems]]] = {
    "fuseboard_backend": ("a BackendInfo", _backend),
    "fuseboard_decompositions": ("a dict from ops to callables", _decompositions),
    "fuseboard_fuse_dynamo": ("a list of Fusions that don't overlap", _fusions),
    "fuseboard_fuse": ("a list of Fusions that don't overlap", _fusions),
    "fuseboard_narrow": ("a list of Narrowings", _narrowings),
    "fuseboard_partition_joint": ("a tuple of two GraphModules, forward and backward", _pair),
    "fuseboard_claim": ("a list of Claims and Declines about nodes of the graph", _claims),
    "fuseboard_plan": ("a Plan with a backend and a reason for each node", _plan),
    "fuseboard_lower": ("a LoweredRegion", _lowered),
    "fuseboard_load": ("a LoweredRegion", _lowered),
    "fuseboard_wrap": ("a LoweredRegion", _lowered),
    "fuseboard_export": ("a tuple with one result for each output of the graph", _exported),
    "fuseboard_verify": ("a Verdict", _verdict),
    "fuseboard_measure": ("a list with one Measurement a call", _measurements),
    "fuseboard_sampler": ("a Sampler", _sampler),
    "fuseboard_on_failure": ("'raise', 'next' or 'eager'", _action),
    "fuseboard_event": ("nothing", _nothing),
}

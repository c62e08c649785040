"""The default stages: a plugin like any other, asked last.

Each default is imported when it is first needed. ``fuseboard_on_failure`` has none here: the
setting of that name answers, and settings are the session's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard.contracts import (
    BackendInfo,
    Claim,
    Decline,
    Event,
    GraphKind,
    JointPolicy,
    Knapsack,
    Measurement,
    Plan,
    Policy,
    Region,
    Repeats,
    Verdict,
)
from fuseboard.hookspecs import hookimpl

log = logging.getLogger("fuseboard")


@hookimpl
def fuseboard_partition_joint(
    joint: GraphModule,
    inputs: Sequence[Any],
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    memory_budget: float,
    policy: JointPolicy,
    knapsack: Knapsack,
    keywords: dict[str, Any],
) -> tuple[GraphModule, GraphModule]:
    """Split by the policy, within the memory budget."""
    from fuseboard.partition.joint import split_joint

    return split_joint(
        joint, inputs, num_fwd_outputs, static_inputs, memory_budget, policy, knapsack, keywords
    )


@hookimpl
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
) -> Plan:
    """Place nodes by the policy."""
    from fuseboard.partition.plan import make_plan

    return make_plan(
        policy,
        graph=graph,
        kind=kind,
        claims=claims,
        backends=backends,
        pins=pins,
        min_region_us=min_region_us,
        merge_regions=merge_regions,
        repeats=repeats,
    )


@hookimpl
def fuseboard_verify(
    region: Region,
    expected: Sequence[Any],
    result: Sequence[Any],
    inputs: Sequence[Any],
    reference: Any,
) -> Verdict:
    """Check count, types, shapes and strides, then values."""
    from fuseboard.profile.judge.verify import verify

    return verify(region, expected, result, inputs, reference)


@hookimpl
def fuseboard_event(event: Event) -> None:
    """Log each event at level DEBUG of the logger ``fuseboard``."""
    log.debug("%s: %s in %.3f s, %s", event.graph, event.name, event.seconds, dict(event.details))


@hookimpl
def fuseboard_measure(calls: Sequence[Callable[[], Any]], budget_s: float) -> list[Measurement]:
    """Time calls in interleaved rounds."""
    from fuseboard.profile.choose.measure import measure_calls

    return measure_calls(calls, budget_s)

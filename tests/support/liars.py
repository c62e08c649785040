"""Plan functions for ``stages.plan`` that break a rule, each in one way.

They start from an honest plan of ``lie``: everything on the first backend that claims it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard import BackendInfo, Claim, Decline, Plan
from tests.support.plans import first_claimer

Claims = dict[str, list[Claim | Decline]]


def honest(graph: GraphModule, claims: Claims, backends: Sequence[BackendInfo]) -> Plan:
    return first_claimer(graph, claims, backends)


def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with tables merged and the rest replaced; a value of None takes a key out."""
    for name in ("placements", "reasons"):
        if isinstance(fields.get(name), dict):
            both = {**getattr(plan, name), **fields[name]}
            fields[name] = {key: value for key, value in both.items() if value is not None}
    return dataclasses.replace(plan, **fields)


def _liar(**fields: Any) -> Any:
    def plan(graph: GraphModule, claims: Claims, backends: Sequence[BackendInfo]) -> Plan:
        return changed(honest(graph, claims, backends), **fields)

    return plan


unclaimed = _liar(placements={"cos": "picky"})
unknown_node = _liar(placements={"nonsuch": "eager"}, reasons={"nonsuch": "why"})
unknown_backend = _liar(placements={"cos": "tvm"})
no_placement = _liar(placements={"cos": None}, reasons={"cos": None})
no_reason = _liar(reasons={"cos": None})
empty_reason = _liar(reasons={"cos": ""})
reason_of_no_text = _liar(reasons={"cos": 3})
placement_of_no_text = _liar(placements={"cos": ["eager"]})
name_of_no_text = _liar(placements={3: "eager"}, reasons={3: "why"})
placements_as_list = _liar(placements=[("cos", "eager")])
regions_as_list = _liar(regions=[("sin",)])
region_as_set = _liar(regions=({"sin"},))
region_of_numbers = _liar(regions=((3,),))
empty_region = _liar(regions=((),))
region_of_unknown = _liar(regions=(("sin", "nonsuch"),))
region_of_input = _liar(regions=(("sin", "x_1"),))
overlapping = _liar(regions=(("sin", "cos"), ("cos", "exp")))
named_twice = _liar(regions=(("sin", "sin"),))
not_convex = _liar(regions=(("sin", "exp"),))
waiting_for_each_other = _liar(regions=(("sin", "tanh"), ("cos", "neg")))
mixed = _liar(placements={"sin": "eager"}, regions=(("sin", "cos"),))
item_alone = _liar(regions=(("getitem",),))
notes_as_text = _liar(notes="fine")


def not_a_plan(graph: GraphModule) -> Any:
    return {node.name: "eager" for node in graph.graph.nodes}


def raises(graph: GraphModule) -> Any:
    raise ValueError("no idea")


def changes_the_graph(graph: GraphModule, claims: Claims, backends: Sequence[BackendInfo]) -> Plan:
    plan = honest(graph, claims, backends)
    for node in reversed(list(graph.graph.nodes)):
        graph.graph.erase_node(node)
    return plan


def one_region(graph: GraphModule, claims: Claims, backends: Sequence[BackendInfo]) -> Plan:
    """Honest: two planned regions, and the others grouped by the board."""
    plan = honest(graph, claims, backends)
    return dataclasses.replace(plan, regions=(("sin", "cos"), ("tanh", "neg")), notes=("mine",))

"""The fuse stage: ask for rewrites, number them, apply those that aren't switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from fuseboard.board.deadline import deadline
from fuseboard.contracts import Fusion
from fuseboard.errors import ContractError, HookTimeout, PluginError, containable, error_text
from fuseboard.ops.effects import drop_unread
from fuseboard.report.data import FusionReport
from fuseboard.torch_api.state import StateGuard


@dataclass
class FusionCounter:
    """Numbers the fusions of one graph, in the order in which they are offered.

    ``fuse_limit`` and ``fuse_skip`` switch them off by number, which is how a bad rewrite is
    found by bisection.
    """

    limit: int | None = None
    skip: frozenset[int] = frozenset()
    offered: int = 0
    applied: list[FusionReport] = field(default_factory=list)

    def admits(self) -> bool:
        """Count one more fusion; whether it is to be applied."""
        number = self.offered
        self.offered += 1
        return (self.limit is None or number < self.limit) and number not in self.skip


def apply_fusions(
    graph: GraphModule,
    fusions: Sequence[Fusion],
    plugin: str,
    counter: FusionCounter,
    limit_s: float,
    hook: str = "fuseboard_fuse",
) -> list[FusionReport]:
    """Apply a plugin's fusions to the graph they were offered for; returns what was done.

    :param limit_s: how long one fusion may take.
    :param hook: which offered them. In a graph of Dynamo's what nobody reads may have effects.
    :raises PluginError: a fusion raised; the graph may be half rewritten.
    :raises HookTimeout: it took longer than its limit.
    :raises ContractError: two fusions overlap, or the graph is no longer well formed.
    """
    done: list[FusionReport] = []
    owner: dict[str, str] = {}
    for fusion in fusions:
        for name in fusion.nodes:
            if name in owner:
                raise ContractError(
                    plugin,
                    hook,
                    f"fusions {owner[name]!r} and {fusion.name!r} overlap at node {name!r}",
                )
            owner[name] = fusion.name
        number = counter.offered
        applied = counter.admits()
        if applied:
            _apply(fusion, plugin, hook, limit_s)
        done.append(FusionReport(number, fusion.name, plugin, fusion.nodes, applied))
    if any(report.applied for report in done):
        try:
            if hook != "fuseboard_fuse_dynamo":
                drop_unread(graph.graph)
            graph.graph.lint()
        except containable() as error:  # lint raises whatever it meets
            raise ContractError(
                plugin, hook, f"the rewritten graph is malformed: {error}"
            ) from error
        _check_values(graph, plugin, hook)
        graph.recompile()
    counter.applied.extend(done)
    return done


def _apply(fusion: Fusion, plugin: str, hook: str, limit_s: float) -> None:
    def late() -> Exception:
        return HookTimeout(plugin, hook, f"fusion {fusion.name!r} took over {limit_s:g} s")

    try:
        with StateGuard() as state, deadline(limit_s, late):
            fusion.apply()
    except PluginError:
        raise
    except containable() as error:
        problem = f"fusion {fusion.name!r} raised {error_text(error)}"
        raise PluginError(plugin, hook, problem) from error
    if left := state.changed("answers"):
        problem = f"fusion {fusion.name!r} changed {left}, which was put back"
        raise ContractError(plugin, hook, problem)


def _check_values(graph: GraphModule, plugin: str, hook: str) -> None:
    for node in graph.graph.nodes:
        if getattr(getattr(node.target, "_schema", None), "returns", None) == []:
            node.meta.setdefault("val", None)  # an assertion: it computes nothing
        if node.op in {"call_function", "placeholder"} and "val" not in node.meta:
            raise ContractError(plugin, hook, f"the new node {node.name!r} has no meta['val']")

"""The ledger's contexts, which may be open at the same time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from fuseboard.report.data import GraphReport, Ledger


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("before", [0, 2])
def test_each_context_collects_what_is_added_while_it_is_open(order, before):
    """Whichever is closed first, and though their lists are equal then."""
    ledger = Ledger()
    stacks = [ExitStack() for _ in order]
    lists = [stack.enter_context(ledger.collect()) for stack in stacks]
    graphs = [GraphReport("inference0", "inference") for _ in range(before)]
    for graph in graphs:
        ledger.add(graph)
    wanted = []
    for closed in order:
        stacks[closed].close()
        wanted.append((closed, len(graphs)))
        graphs.append(GraphReport("inference0", "inference"))  # equal to those before
        ledger.add(graphs[-1])
    for closed, count in wanted:
        assert len(lists[closed]) == count
        assert all(one is graph for one, graph in zip(lists[closed], graphs, strict=False))


def test_a_context_in_a_context():
    """The inner one's graphs are the outer one's, too."""
    ledger = Ledger()
    with ledger.collect() as outer:
        with ledger.collect() as inner:
            ledger.add(GraphReport("a", "inference"))
        ledger.add(GraphReport("b", "inference"))
    ledger.add(GraphReport("c", "inference"))
    assert [graph.name for graph in outer] == ["a", "b"]
    assert [graph.name for graph in inner] == ["a"]

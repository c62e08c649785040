"""A graph as boxes: repeats are folded, long stretches parted, and no box waits for itself."""

from __future__ import annotations

import random

import pytest

from fuseboard.explanations.folding import MOST_CHILDREN, Box, fold
from tests.support.explanations import graph, layered, node, whole


def shape(boxes: list[Box]) -> list:
    """Boxes as nested lists: a kind and what is inside; ops as their number."""
    return [box.node if box.kind == "op" else (box.kind, *shape(box.children)) for box in boxes]


def test_regions_that_share_code_in_a_row_are_a_repeat():
    """An embedding, three layers of two ops, a head."""
    boxes = fold(layered(3, ops=("addmm", "gelu")).graphs[0])
    assert shape(boxes) == [
        ("region", 0),
        ("repeat", ("region", 1, 2), ("region", 3, 4), ("region", 5, 6)),
        ("region", 7),
    ]
    assert boxes[1].copies == 3
    assert [box.region for box in boxes[1].children] == [1, 2, 3]


def test_two_regions_that_alternate_are_a_repeat_of_both():
    """A layer that runs on two backends in turn is still one block."""
    nodes, last = [], "x"
    for i in range(8):
        kind = "mm" if i % 2 == 0 else "relu"
        nodes.append(node(f"{kind}_{i}", last, region=f"inference0.region{i}"))
        last = nodes[-1].name
    alike = {f"inference0.region{i}": f"inference0.region{i % 2}" for i in range(2, 8)}
    (block,) = fold(graph(nodes, alike))
    assert (block.kind, block.copies) == ("repeat", 4)
    assert shape(block.children[:2]) == [
        ("copy", ("region", 0), ("region", 1)),
        ("copy", ("region", 2), ("region", 3)),
    ]


def test_equal_regions_that_arent_neighbours_arent_folded():
    """Another region between them: the order of things stays in sight."""
    nodes = [
        node("mm_0", "x", region="inference0.region0"),
        node("relu_1", "mm_0", region="inference0.region1"),
        node("mm_2", "relu_1", region="inference0.region2"),
    ]
    boxes = fold(graph(nodes, {"inference0.region2": "inference0.region0"}))
    assert shape(boxes) == [("region", 0), ("region", 1), ("region", 2)]


def test_layers_within_one_region_are_found_from_ops_and_shapes():
    """The whole graph on one backend: the block begins where one value crosses, at the layer."""
    (region,) = fold(whole(24).graphs[0])
    kinds = [box.kind for box in region.children]
    assert kinds == ["op", "repeat", "op"]
    block = region.children[1]
    assert block.copies == 24
    assert [copy.nodes() for copy in block.children[:2]] == [[*range(1, 7)], [*range(7, 13)]]


def test_another_shape_is_no_repeat():
    """Equal ops on sizes that shrink aren't shown as if they were the same."""
    nodes, last = [], "x"
    for i in range(24):
        nodes.append(node(f"mm_{i}", last, region="inference0.region0", value=f"float32[{99 - i}]"))
        last = nodes[-1].name
    (region,) = fold(graph(nodes))
    assert shape(region.children) == list(range(24))


def test_neighbouring_nodes_of_the_board_are_one_box():
    """Arithmetic on sizes isn't spread over the drawing."""
    nodes = [
        node("sym_size_0", "x", backend="board"),
        node("mul_1", "sym_size_0", backend="board"),
        node("view_2", "x", "mul_1", region="inference0.region0"),
    ]
    assert shape(fold(graph(nodes))) == [("board", 0, 1), ("region", 2)]


def test_a_region_that_reads_its_own_view_back_isnt_lost():
    """The board's view of a region's value, which the region reads as its own copy: a circle."""
    nodes = [
        node("mm_0", "x", region="inference0.region0"),
        node("view_1", "mm_0", backend="board"),
        node("relu_2", "view_1", region="inference0.region0"),
    ]
    assert shape(fold(graph(nodes))) == [("region", 0, 2), ("board", 1)]


@pytest.mark.parametrize("seed", range(20))
def test_every_node_is_in_one_box_and_levels_are_small(seed):
    """Random graphs: nothing is lost or doubled, no level is long, and reads go forwards."""
    draw = random.Random(seed)
    ops = [draw.choice(["mm", "relu", "add", "view", "sum"]) for _ in range(draw.randint(1, 700))]
    nodes = []
    for i, op in enumerate(ops):
        earlier = [nodes[draw.randrange(max(0, i - 9), i)].name for _ in range(2)] if i else ["x"]
        region = f"inference0.region{i * 3 // len(ops)}"
        nodes.append(node(f"{op}_{i}", *dict.fromkeys(earlier), region=region))
    made = graph(nodes)
    reads = {
        i: {int(n.split("_")[1]) for n in nodes[i].inputs if n != "x"} for i in range(len(ops))
    }

    def check(boxes: list[Box], inside: list[int]) -> None:
        assert sorted(i for box in boxes for i in box.nodes()) == inside
        assert len(boxes) <= MOST_CHILDREN
        seen: set[int] = set()
        for box in boxes:
            own = set(box.nodes())
            assert {j for i in own for j in reads[i] if j in inside} <= seen | own
            seen |= own
            if box.children:
                check(box.children, sorted(own))

    check(fold(made), list(range(len(ops))))


def test_a_long_chain_is_parted_where_few_values_cross():
    """Twenty stretches of different shapes, joined by one value each: no stretch is cut."""
    nodes, last = [], "x"
    for stretch in range(20):
        start, wide = last, []
        for i in range(6):
            name = f"mm_{stretch * 7 + i}"
            nodes.append(
                node(name, start, region="inference0.region0", value=f"float32[{stretch}, {i}]")
            )
            wide.append(name)
        last = f"cat_{stretch * 7 + 6}"
        nodes.append(node(last, *wide, region="inference0.region0"))
    (region,) = fold(graph(nodes))
    assert {box.kind for box in region.children} == {"part"}
    for part in region.children:
        assert part.nodes()[0] % 7 == 0


def test_twelve_thousand_nodes_are_folded():
    """A graph far larger than anybody draws has its repeats all the same."""
    (region,) = fold(whole(2_000).graphs[0])
    assert [box.copies for box in region.children if box.kind == "repeat"] == [2_000]

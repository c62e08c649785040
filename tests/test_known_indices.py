"""Indices in 0-d tensors, whose numbers Dynamo guards on: graphs hold the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuseboard.capture.known_indices import write_known_indices
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import assert_same, rnd


class Cache(nn.Module):
    """A cache that knows where to write next."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 8, 4))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x):
        self.keys[:, :, self.position] = x
        self.position += 1
        return self.keys * 1.5


def writes(keys, position, x):
    keys[:, :, position] = x
    return keys.narrow(2, position, 2) * position


def writes_only(keys, position, x):
    keys[:, :, position] = x
    return keys * position


def test_a_cache_that_moves_its_own_index():
    """AOTAutograd writes to the index last, and can't ask for its number before."""
    one, other = Cache(), Cache()
    with plugged() as backend, torch.no_grad():
        fn = compiled(one, backend)
        for seed in range(3):
            x = rnd(1, 2, 4, seed=seed)
            assert_same(fn(x), other(x))
            assert_same(dict(one.named_buffers()), dict(other.named_buffers()))
        assert not all_trips()
        assert {region.backend for region in last_graph().regions} == {backend}


def test_where_it_moved_to_is_read_anew():
    """A number that the graph wrote is in no guard of Dynamo's."""

    def moves(keys, position):
        keys[position] = 1.0
        position.add_(2)
        keys[position] = 2.0
        return keys * 1.0

    with plugged() as backend:
        fn = compiled(moves, backend)
        for start in (0, 3):
            one, other = torch.tensor(start), torch.tensor(start)
            assert_same(fn(torch.zeros(8), one), moves(torch.zeros(8), other))
            assert_same(one, other)


@pytest.mark.parametrize("position", [0, 5, -1])
def test_the_number_is_written_where_it_is_an_index(position):
    """Another process knows no more than the graph; where it is multiplied it stays a tensor."""
    function = writes if position >= 0 else writes_only
    codes, guarded = [], []

    def backend(graph, inputs):
        write_known_indices(graph)
        codes.append(graph.code)
        return graph.forward

    fn = torch.compile(function, backend=backend)
    for index in (position, position, 2):
        one, other = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4)
        x, where = rnd(1, 2, 4), torch.tensor(index)
        assert_same(fn(one, where, x), function(other, where, x))
        assert_same(one, other)
        guarded.append(len(codes))
    assert guarded == [1, 1, 2]  # Dynamo's guard: another number is another graph
    indexed = f"slice(None, None, None), {position})]"
    assert indexed in codes[0], codes[0]
    assert "* l_position_" in codes[0]

"""What a program writes to its own tensors is written there, without a copy of the tensor."""

from __future__ import annotations

import pytest
import torch

from fuseboard.torch_api.allocator import peak_bytes
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import assert_same, rnd

aten = torch.ops.aten
#: A cache of 256 KiB, of which a call writes a few rows.
SHAPE = (2, 512, 64)


def copied(cache, x, at):
    cache.index_copy_(1, at, x)
    return cache.sum(1) * x.sum()


def assigned(cache, x, at):
    cache[:, at] = x
    return cache.sum(1) * x.sum()


def sliced(cache, x, at):
    cache[:, 3:5] = x * 2
    return cache.sum(1)


def in_steps(cache, x, at):
    cache[:, 7::2][:, :2] = x
    return cache.sum(1)


def of_one_row(cache, x, at):
    cache[1, 3:5] = x[0]
    return cache.sum(1)


def within_a_part(cache, x, at):
    cache[1].index_copy_(0, at, x[0] + 1)
    return cache.sum(1)


def twice(cache, x, at):
    cache[:, 3:5] = x
    cache[:, at] = -x
    return cache.sum(1)


def filled(cache, x, at):
    cache[:, 3:5] = 2.5
    cache[:, -3:].zero_()
    cache.masked_fill_(x[:1, :1] > 0, -1.0)
    return cache.sum(1)


def scattered(cache, x, at):
    cache.scatter_(1, at.view(1, 2, 1).expand(2, 2, 64), x)
    return cache.sum(1)


WRITES = [copied, assigned, sliced, in_steps, of_one_row, within_a_part, twice, filled, scattered]


def inputs(number):
    return rnd(2, 2, 64, seed=number), torch.tensor([number, number + 9])


def check(function, run, calls=4, caches=None):
    """A compiled function's calls answer and write what eager's do."""
    ours, eagers = caches or (torch.ones(SHAPE), torch.ones(SHAPE))
    for number in range(calls):
        x, at = inputs(number)
        torch.testing.assert_close(run(ours, x, at), function(eagers, x, at))
        assert_same(ours, eagers)


def copied_bytes(run):
    """What a call allocates at once."""
    cache, (x, at) = torch.ones(SHAPE), inputs(0)
    return peak_bytes(lambda: run(cache, x, at), torch.device("cpu"))


@pytest.mark.parametrize("function", WRITES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_makes_no_copy(function, dynamic):
    """Values are eager's, and no call allocates as much as the tensor takes."""
    with torch.no_grad(), plugged("fake") as name:
        run = compiled(function, name, "eager", dynamic=dynamic, policy="priority", min_region_us=0)
        check(function, run)
        assert copied_bytes(run) < torch.ones(SHAPE).nbytes // 2
    assert not all_trips()


@pytest.mark.parametrize(
    "backend",
    ["mkldnn", *(pytest.param(b, marks=pytest.mark.thorough) for b in ("inductor", "onnxruntime"))],
)
def test_a_layer_with_a_cache_makes_no_copy_of_it(backend):
    """Whichever backend runs what is before and behind the write."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.into = torch.nn.Linear(64, 64)
            self.out = torch.nn.Linear(64, 64)

        def forward(self, cache, x, at):
            cache.index_copy_(1, at, self.into(x))
            return self.out(torch.softmax(x @ cache.mT, -1) @ cache)

    layer = Layer().eval()
    with torch.no_grad():
        run = compiled(layer, backend, "eager", policy="priority")
        check(layer, run)
        assert copied_bytes(run) < torch.ones(SHAPE).nbytes // 2
    assert {region.backend for region in last_graph().regions} == {backend, "eager"}


def old_values(cache, x, at):
    before = cache.sum(1)
    cache[:, at] = x
    return before


def source_of_old_values(cache, x, at):
    cache[:, at] = cache[:, at] + x
    return cache.sum(1)


def places_of_old_values(cache, x, at):
    cache[:, cache[0, :2, 0].long()] = x
    return cache.sum(1)


def places_in_itself(cache, x, at):
    cache.index_put_((cache.long() % 2, cache.long() % 3), x.sum())
    return cache.sum(1)


def added(cache, x, at):
    cache.index_put_((torch.arange(2)[:, None], at), x, accumulate=True)
    return cache.sum(1)


def another_tensor(cache, x, at):
    changed = cache.index_copy(1, at, x)
    cache.copy_(changed)
    return changed


def view_of_another_tensor(cache, x, at):
    changed = cache.index_copy(1, at, x)
    cache.copy_(changed)
    return changed[0]


def the_tensor_itself(cache, x, at):
    cache.index_copy_(1, at, x)
    return cache, cache[:, 2:]


NEAR_MISSES = [
    *(old_values, source_of_old_values, places_of_old_values, places_in_itself, added),
    *(another_tensor, view_of_another_tensor, the_tensor_itself),
]


@pytest.mark.parametrize("function", NEAR_MISSES)
def test_what_needs_the_old_values_or_another_tensor(function):
    """Values are eager's, and results share the memory that eager's share, and no other."""
    with torch.no_grad():
        run = compiled(function, policy="priority")
        check(function, run)
        cache, again, (x, at) = torch.ones(SHAPE), torch.ones(SHAPE), inputs(1)
        results = (run(cache, x, at), function(again, x, at))
        (ours, eagers) = ((one,) if isinstance(one, torch.Tensor) else one for one in results)
        for one, other in zip(ours, eagers, strict=True):
            assert shares(one, cache) == shares(other, again)


def shares(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def two_caches(one, other, x, at):
    one.index_copy_(1, at, x)
    return other.sum(1)


def test_a_tensor_that_shares_memory_with_another_input():
    """Also where they began to share it after the graph was compiled."""
    with torch.no_grad():
        for together in ([True], [False, True]):
            torch.compiler.reset()
            run = compiled(two_caches, policy="priority")
            for shared in together:
                apart = (torch.ones(SHAPE), torch.ones(SHAPE))
                ours, eagers = ((a, a if shared else torch.ones(SHAPE)) for a in apart)
                x, at = inputs(2)
                assert_same(run(*ours, x, at), two_caches(*eagers, x, at))
                assert_same(ours, eagers)


def test_a_tensor_that_overlaps_itself_is_refused_as_in_eager():
    with torch.no_grad():
        cache = torch.ones(2, 1, 64).expand(SHAPE)
        with pytest.raises(RuntimeError, match="single memory location"):
            compiled(copied, policy="priority")(cache, *inputs(0))


def test_training():
    """A gradient flows through what is written, and the tensor's old values are needed by none."""

    def function(cache, x, at):
        cache.index_copy_(1, at, x)
        return (cache * cache).sum()

    run = compiled(function, policy="priority")
    for number in range(3):
        gradients = []
        for one in (run, function):
            x, at = inputs(number)
            x.requires_grad_()
            one(torch.ones(SHAPE), x, at).backward()
            gradients.append(x.grad)
        assert_same(*gradients)


@pytest.mark.parametrize("function", WRITES)
def test_a_call_that_fails_behind_the_write_is_answered_by_eager(function):
    """The write is made again, and comes to the same."""
    calls = [0]

    def failing(eager_call, region):
        last = any(node.target is aten.sum.dim_IntList for node in region.graph.graph.nodes)

        def call(args):
            calls[0] += last
            if last and calls[0] == 3:
                raise RuntimeError("planted")
            return eager_call(args)

        return call

    with torch.no_grad(), plugged("bad", call=failing) as name:
        check(
            function, compiled(function, name, "eager", policy="priority", min_region_us=0), calls=5
        )
    assert [trip.plugin for trip in all_trips()] == ["bad"]


def test_only_code_that_is_known_to_be_right_writes():
    """A backend that computes wrong places to write to leaves no trace in the tensor."""

    def function(cache, x, at):
        cache.index_copy_(1, at * 2 + 1, x)
        return cache.sum(1)

    def wrong(eager_call, region):
        return lambda args: [result + 1 for result in eager_call(args)]

    with torch.no_grad(), plugged("wrong", call=wrong) as name:
        check(function, compiled(function, name, "eager", policy="priority", min_region_us=0))
    assert {trip.plugin for trip in all_trips()} == {"wrong"}


def test_repeated_blocks_around_writes():
    """Blocks that are lowered once don't lie across a write."""

    def function(cache, x, at):
        for _ in range(6):
            for _ in range(3):
                x = torch.tanh(x * 2 - 1) + torch.sigmoid(x) * torch.exp(-x * x)
            cache = cache.index_copy_(1, at, x)
            x = x + cache.sum(1, keepdim=True) / 1000
        return x

    with torch.no_grad(), plugged("fake") as name:
        run = compiled(
            function, name, "eager", policy="priority", min_region_us=0, repeats="always"
        )
        check(function, run)


def test_places_that_the_tensor_itself_says():
    """The op reads the tensor twice, and only one of them is what it writes to."""

    def function(cache):
        cache.copy_(cache.index_put((cache,), torch.tensor(7)))
        return cache.sum()

    with torch.no_grad():
        run = compiled(function, policy="priority")
        ours, eagers = (torch.arange(1, 9001) % 9000 for _ in range(2))
        for _ in range(2):
            assert_same(run(ours), function(eagers))
            assert_same(ours, eagers)

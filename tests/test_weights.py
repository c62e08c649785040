"""Prepared weights: made once, never stale, never another instance's, freed with the module."""

from __future__ import annotations

import copy
import gc
import mmap
import threading
import weakref

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from fuseboard.run import weights as weights_module
from tests.support.backends import compiled, graph_count, hoisted, last_graph
from tests.support.values import assert_same, rnd
from tests.support.weights import (
    CHANGES,
    Scaled,
    assert_equal,
    check,
    hoisting_by,
    overwrite,
    preparing_is_worth_it,
    step,
)


def live_sets() -> int:
    """Sets of weights that have prepared values, over all compiled graphs."""
    gc.collect()
    return sum(len(sets) for sets in list(weights_module._all_sets))


@pytest.fixture(autouse=True)
def _own_sets(monkeypatch):
    """What other tests compiled may still live; it isn't counted here.

    And preparing is always worth it: when it isn't, ``test_weights_waiting.py`` tells.
    """
    ledger.clear()
    monkeypatch.setattr(weights_module, "_all_sets", weakref.WeakSet())
    preparing_is_worth_it(monkeypatch)


@pytest.fixture(params=["generic", "packed"])
def hoisting(request):
    """What is hoisted, by which backend."""
    with hoisting_by(request.param) as pair:
        yield pair


# --- what changes a weight is noticed ------------------------------------------------------------


def test_a_changed_weight_is_seen_in_the_very_next_call(hoisting):
    """Whatever changed it: right values, and no graph is compiled again."""
    kind, backend = hoisting
    model = kind()
    fn = compiled(model, backend)
    check(model, fn)
    assert hoisted() == 1
    for change in CHANGES * 2:
        change(model)
        check(model, fn, after=change.__name__)
    assert graph_count("inference") == 1


def test_a_change_is_seen_under_inference_mode():
    """Calls under inference mode of a model that was made outside of it."""
    model = Scaled()
    fn = compiled(model)
    for change in [overwrite, *CHANGES]:
        change(model)
        with torch.inference_mode():
            check(model, fn, after=change.__name__)
    assert hoisted() == 1
    assert graph_count("inference") == 1


def test_zero_weights_that_become_nonzero():
    """Samples are taken where a weight isn't zero, if it is anywhere."""
    model = Scaled()
    model.weight.data.zero_()
    fn = compiled(model)
    check(model, fn)
    model.weight.data.copy_(rnd(*model.weight.shape))
    check(model, fn)


def test_a_write_to_one_row_through_data_is_unseen_until_refresh():
    """It bumps no version and misses the samples; ``refresh`` is the documented way out."""
    model = Scaled()
    fn = compiled(model)
    check(model, fn)
    stale = fn(model.inputs())
    model.weight.data[3, 100:200] = 0.0
    with torch.no_grad():
        assert_same(fn(model.inputs()), stale.detach())
    assert fuseboard.refresh(model) == 1
    check(model, fn)
    assert fuseboard.refresh(nn.Linear(2, 2)) == 0


def test_swapped_tensors():
    """``swap_tensors`` refuses what is weakly referenced; ``refresh`` lets go of it."""
    model, other = Scaled(), Scaled(seed=4)
    fn = compiled(model)
    check(model, fn)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.weight, other.weight)
    fuseboard.refresh(model)
    torch.utils.swap_tensors(model.weight, other.weight)
    check(model, fn)


def test_a_replaced_submodule():
    """Its parameters are other tensors."""
    model = nn.Sequential(Scaled(), nn.ReLU())
    fn = compiled(model)
    with torch.no_grad():
        x = model[0].inputs()
        assert_same(fn(x), model(x))
        model[0] = Scaled(seed=3)
        assert_same(fn(x), model(x))
        assert_same(fn(x), model(x))


def test_tied_weights():
    """One tensor under two names: a write through either is seen."""

    class Tied(Scaled):
        def __init__(self):
            super().__init__()
            self.other = self.weight

        def forward(self, x):
            hidden = nn.functional.linear(x, self.weight.tanh(), self.bias)
            return hidden @ self.other.exp().softmax(-1)

    model = Tied()
    fn = compiled(model)
    check(model, fn)
    assert hoisted() >= 1
    with torch.no_grad():
        model.other[2, 3] = 7.0
    check(model, fn)
    model.weight = nn.Parameter(rnd(*model.weight.shape, seed=8))  # no longer tied
    check(model, fn)
    with torch.no_grad():
        model.other[2, 3] = 9.0
    check(model, fn)


def test_weights_that_are_views_of_one_storage():
    """As optimizers with flat buffers make them: neighbours don't disturb each other."""
    model = Scaled()
    count = model.weight.numel()
    flat = rnd(2 * count)
    model.weight = nn.Parameter(flat[:count].view_as(model.weight))
    twin = copy.deepcopy(model)
    twin.weight = nn.Parameter(flat[count:].view_as(model.weight))
    one, two = compiled(model), compiled(twin)
    for _ in range(2):
        check(model, one)
        check(twin, two)
        flat[5] = 3.0  # counts up for both: they share storage and version
        flat[count + 5] = -3.0


# --- one compiled graph, several instances -------------------------------------------------------


def test_instances_that_alternate_on_one_compiled_graph(hoisting):
    """Dynamo reuses the code of a class; each instance gets what was made from its weights."""
    kind, backend = hoisting
    models = [kind(seed) for seed in range(3)]
    functions = [compiled(model, backend) for model in models]
    for _ in range(3):
        for model, fn in zip(models, functions, strict=True):
            check(model, fn, calls=1)
    assert live_sets() >= 1
    step(models[1])
    for model, fn in zip(models, functions, strict=True):
        check(model, fn)


def test_blocks_compiled_one_by_one(hoisting):
    """``module.compile`` on each block of a stack: one graph serves them all."""
    kind, backend = hoisting
    blocks = [kind(seed) for seed in range(4)]
    x = blocks[0].inputs()
    with torch.no_grad():
        expected = [block(x) for block in blocks]
        for block in blocks:
            block.compile(backend="fuseboard", options={"backends": [backend]})
        for _ in range(3):
            for block, want in zip(blocks, expected, strict=True):
                assert_equal(block(x), want)
    assert graph_count("inference") == 1
    assert last_graph().regions[0].hoisted == 1
    assert live_sets() == 4


def test_two_threads_that_alternate_instances(hoisting):
    """No thread ever gets what was made from the other's weights."""
    kind, backend = hoisting
    models = [kind(seed) for seed in range(2)]
    x = models[0].inputs()
    with torch.no_grad():
        expected = [model(x) for model in models]
    fn = compiled(lambda model, x: kind.forward(model, x), backend)
    problems = []

    def work(first: int) -> None:
        try:
            with torch.no_grad():
                for i in range(60):
                    which = (first + i) % 2
                    assert_equal(fn(models[which], x), expected[which])
        except BaseException as error:
            problems.append(error)

    with torch.no_grad():
        for model, want in zip(models, expected, strict=True):
            assert_equal(fn(model, x), want)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert hoisted() == 1


def test_a_thread_that_refreshes_while_others_call():
    """Values dropped between the check and their use: the call that holds them is right."""
    model = Scaled()
    fn = compiled(model)
    check(model, fn)
    x = model.inputs()
    with torch.no_grad():
        expected = model(x)
    done = threading.Event()

    def refresh() -> None:
        while not done.is_set():
            fuseboard.refresh(model)

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(300):
                assert_same(fn(x), expected)
    finally:
        done.set()
        thread.join()
    assert not last_graph().trips


def test_the_number_of_prepared_sets_is_bounded():
    """With more instances than sets each is still right; it is only prepared again."""
    models = [Scaled(seed) for seed in range(4)]
    fn = compiled(lambda model, x: Scaled.forward(model, x), max_weight_sets=2)
    x = models[0].inputs()
    for _ in range(2):
        for model in models:
            with torch.no_grad():
                assert_same(fn(model, x), model(x))
                assert_same(fn(model, x), model(x))
    assert live_sets() == 2


@pytest.mark.thorough
def test_prepared_values_are_freed_with_the_module(hoisting):
    """The weights aren't kept alive, and what was made from them goes with them."""
    kind, backend = hoisting
    models = [kind(seed) for seed in range(3)]
    fn = compiled(lambda model, x: kind.forward(model, x), backend)
    x = models[0].inputs()
    before = live_sets()
    with torch.no_grad():
        for model in models:
            fn(model, x)
    assert live_sets() == before + 3
    entries = [e for sets in list(weights_module._all_sets) for e in sets._entries.values()]
    values = [weakref.ref(value) for entry in entries for value in entry.values]
    dead = [weakref.ref(model.weight) for model in models[1:]]
    assert len(values) == 3
    del models[1:], model, entries
    assert live_sets() == before + 1
    assert [reference() for reference in dead] == [None, None]
    assert sum(reference() is not None for reference in values) == 1


@pytest.mark.thorough
def test_a_module_at_the_address_of_a_freed_one():
    """Memory is reused within a few calls: an address is no identity."""
    fn = compiled(lambda model, x: Scaled.forward(model, x))
    addresses, repeated = set(), 0
    for seed in range(8):
        model = Scaled(seed)
        repeated += model.weight.data_ptr() in addresses
        addresses.add(model.weight.data_ptr())
        check(model, lambda x, model=model: fn(model, x))
        del model
        gc.collect()
    assert repeated, "no address came back: the test shows nothing"


@pytest.mark.thorough
def test_data_assigned_to_and_fro():
    """The parameter stays, its memory goes and comes back with other content."""
    model = Scaled()
    fn = compiled(model)
    check(model, fn)
    for seed in range(1, 6):
        model.weight.data = rnd(*model.weight.shape, seed=seed)
        gc.collect()
        check(model, fn)


# --- samples --------------------------------------------------------------------------------------


def unaligned(buffer) -> torch.Tensor:
    """64x64 floats that begin at an odd address."""
    tensor = torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=64 * 64).view(64, 64)
    return tensor.copy_(rnd(64, 64))


def test_memory_between_unaligned_weights_is_left_alone():
    """One lies on the heap, the other one far from it, with pages between that can't be read."""
    far = mmap.mmap(-1, 1 << 20)
    weights = [unaligned(bytearray(64 * 64 * 4 + 8)), unaligned(far), rnd(8, 8)]
    samples = weights_module.Samples(weights)
    assert samples.unchanged()
    for weight in weights:
        weight.data.mul_(1.5)
        assert not samples.unchanged()
        weight.data.div_(1.5)
        samples = weights_module.Samples(weights)


@pytest.mark.parametrize("change", [torch.t, lambda w: w.flip(0), lambda w: w.roll(1, 0)])
def test_elements_that_change_places_are_seen(change):
    """A square's diagonal stays where it is when it is transposed."""
    weight = rnd(64, 64)
    samples = weights_module.Samples([weight])
    weight.data.copy_(change(weight).clone())
    assert not samples.unchanged()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.complex128])
def test_samples_of_other_dtypes(dtype):
    weight = torch.ones(33, 7).to(dtype)
    samples = weights_module.Samples([weight, torch.zeros(0, 4).to(dtype)])
    assert samples.unchanged()
    weight.data.zero_()
    assert not samples.unchanged()

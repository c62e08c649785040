"""Prepared weights: made once, never stale, never another instance's, freed with the module."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.lower import weights as weights_module
from fuseboard.report.data import ledger
from tests.support.backends import compiled, graph_count, hoisted, last_graph, pack_linears, plugged
from tests.support.values import assert_same, rnd


@pytest.fixture(autouse=True)
def _clear_ledger():
    ledger.clear()


@pytest.fixture(params=["generic", "packed"])
def hoisting(request):
    """What is hoisted, by which backend: weight-only ops of the user's, or a packed weight."""
    if request.param == "generic":
        yield Scaled, "eager"
    else:
        with plugged("packer", fuse=pack_linears):
            yield Linear, "packer"


class Linear(nn.Module):
    """Small: a rewrite's packing is hoisted whatever its size."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(rnd(7, width, seed=seed))
        self.bias = nn.Parameter(rnd(7, seed=seed + 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def inputs(self) -> torch.Tensor:
        return rnd(3, self.weight.shape[1], seed=5)


class Scaled(Linear):
    """Large enough that computing the weight once pays."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, 2731)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight * 2).tanh(), self.bias)


def check(
    model: nn.Module, fn, x: torch.Tensor | None = None, calls: int = 2, after: str = "compiling"
) -> None:
    """The compiled model gives eager's values, in two calls in a row."""
    x = model.inputs() if x is None else x
    with torch.no_grad():
        for _ in range(calls):
            assert_equal(fn(x), model(x), after)


def assert_equal(got: torch.Tensor, want: torch.Tensor, after: str = "") -> None:
    """Up to the order of the sums in a product with a packed weight; a stale one is far off."""
    torch.testing.assert_close(
        got, want, rtol=1e-5, atol=2e-6, msg=lambda text: f"after {after}: {text}"
    )


def live_sets() -> int:
    """Sets of weights that have prepared values, over all compiled graphs."""
    gc.collect()
    return sum(len(sets) for sets in list(weights_module._all_sets))


# --- what changes a weight is noticed ------------------------------------------------------------


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(model.inputs()).square().sum().backward()
    optimizer.step()


def load(model):
    model.load_state_dict(type(model)(seed=9).state_dict())


def load_assign(model):
    model.load_state_dict(type(model)(seed=9).state_dict(), assign=True)


def copy_(model):
    with torch.no_grad():
        model.weight.copy_(rnd(*model.weight.shape, seed=8))


def one_element(model):
    with torch.no_grad():
        model.weight[3, 5] += 1


def through_a_view(model):
    with torch.no_grad():
        model.weight.view(-1)[17] = 4.0


def through_detach(model):
    model.weight.detach()[1, 1] = 4.0


def in_inference_mode(model):
    with torch.inference_mode():
        model.weight[2, 2] = 4.0


def replace_parameter(model):
    model.weight = nn.Parameter(rnd(*model.weight.shape, seed=8))


def data_assigned(model):
    model.weight.data = rnd(*model.weight.shape, seed=8)


def data_copied(model):
    model.weight.data.copy_(rnd(*model.weight.shape, seed=8))


def data_scaled(model):
    model.weight.data.mul_(1.5)


def data_negated(model):
    model.weight.data.neg_()


def data_zeroed(model):
    model.weight.data.zero_()


def data_filled_after_zero(model):
    model.weight.data.fill_(0.25)


CHANGES = [
    step,
    load,
    load_assign,
    copy_,
    one_element,
    through_a_view,
    through_detach,
    in_inference_mode,
    replace_parameter,
    data_assigned,
    data_copied,
    data_scaled,
    data_negated,
    data_zeroed,
    data_filled_after_zero,
]


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
    for change in [copy_, *CHANGES]:
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


def test_data_assigned_to_and_fro():
    """The parameter stays, its memory goes and comes back with other content."""
    model = Scaled()
    fn = compiled(model)
    check(model, fn)
    for seed in range(1, 6):
        model.weight.data = rnd(*model.weight.shape, seed=seed)
        gc.collect()
        check(model, fn)


# --- what isn't hoisted --------------------------------------------------------------------------


def test_hoisting_can_be_switched_off():
    """``hoist=False``: everything is computed in each call."""
    model = Scaled()
    fn = compiled(model, hoist=False)
    check(model, fn)
    assert hoisted() == 0


def test_what_is_small_is_not_hoisted():
    """Checking the weights would cost what it saves."""
    model = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    fn = compiled(model)
    with torch.no_grad():
        x = rnd(2, 8)
        assert_same(fn(x), model(x))
    assert hoisted() == 0


def test_training_graphs_are_not_hoisted(hoisting):
    """Gradients flow to the weights themselves."""
    kind, backend = hoisting
    model, twin = kind(), kind()
    fn = compiled(model, backend)
    for _ in range(3):
        losses = [f(model.inputs()).square().sum() for f in (fn, twin)]
        for loss in losses:
            loss.backward()
        assert_equal(model.weight.grad, twin.weight.grad)
        step(model)
        step(twin)
    assert hoisted("forward") == 0
    assert hoisted("backward") == 0


def test_a_training_step_and_evaluation_in_turn(hoisting):
    """The inference graph sees each step of the optimizer."""
    kind, backend = hoisting
    model = kind()
    fn = compiled(model, backend)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        fn(model.inputs()).square().sum().backward()
        optimizer.step()
        check(model, fn)
    assert hoisted() == 1


def test_a_buffer_that_the_graph_mutates_is_not_hoisted():
    """It changes within the call; batch norm's statistics are such buffers."""

    class Counts(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", rnd(7, 2731))

        def forward(self, x):
            result = x @ (self.seen * 3).tanh().t()
            self.seen.add_(1)
            return result + x @ (self.seen * 3).tanh().t()

    model, twin = Counts(), Counts()
    fn = compiled(model)
    x = model.inputs()
    with torch.no_grad():
        for _ in range(3):
            assert_same(fn(x), twin(x))
            assert_same(model.seen, twin.seen)
    assert hoisted() == 0


def test_a_buffer_that_is_only_read_is_hoisted():
    """A mask or a table made at construction."""

    class Table(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", rnd(7, 2731))

        def forward(self, x):
            return x @ self.table.exp().t()

    model = Table()
    fn = compiled(model)
    check(model, fn)
    assert hoisted() == 1
    model.table = rnd(7, 2731, seed=3)
    check(model, fn)
    model.table.add_(1)
    check(model, fn)


def test_random_ops_on_weights_are_not_hoisted():
    """Each call draws anew: dropout on a weight."""

    class Dropped(Scaled):
        def forward(self, x):
            return x @ nn.functional.dropout(self.weight, 0.5, training=True).t()

    model = Dropped()
    fn = compiled(model)
    x = model.inputs()
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            got = fn(x)
            torch.manual_seed(seed)
            assert_same(got, model(x))
    assert hoisted() == 0


def test_the_caller_never_gets_a_prepared_tensor():
    """What is returned may be written to; the next call is right all the same."""

    class Returns(Scaled):
        def forward(self, x):
            table = self.weight.tanh() * 2
            return x @ table.t(), table, table.t(), table.clone()

    model = Returns()
    fn = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            got = fn(model.inputs())
            assert_same(got, model(model.inputs()))
            for tensor in got:
                tensor.zero_()


def test_a_backend_that_returns_a_prepared_tensor():
    """It takes a copy for needless; the board makes it."""

    class Returns(Scaled):
        def forward(self, x):
            table = self.weight.tanh() * 2
            return x[0] * table, table.clone()

    def skip_clone(eager_call, region):
        def call(args):
            results = list(eager_call(list(args)))
            for arg in args:
                if isinstance(arg, torch.Tensor) and torch.equal(arg, results[1]):
                    results[1] = arg
            return tuple(results)

        return call

    with plugged(call=skip_clone) as name:
        model = Returns()
        fn = compiled(model, name)
        with torch.no_grad():
            for _ in range(3):
                got = fn(model.inputs())
                assert_same(got, model(model.inputs()))
                got[1].zero_()
        assert hoisted() == 1


# --- all kinds of weights ------------------------------------------------------------------------


def test_inference_tensors_as_weights(hoisting):
    """They have no version: samples alone tell, for whole-tensor writes."""
    kind, backend = hoisting
    with torch.inference_mode():
        model = kind()
        fn = compiled(model, backend)
        check(model, fn)
        model.weight.copy_(rnd(*model.weight.shape, seed=4))
        check(model, fn)
        model.weight = nn.Parameter(rnd(*model.weight.shape, seed=5))
        check(model, fn)


def test_inference_tensors_after_ordinary_ones():
    """One function, first with ordinary weights, then with inference tensors, and back."""
    ordinary = Scaled(0)
    with torch.inference_mode():
        inference = Scaled(1)
    fn = compiled(lambda model, x: Scaled.forward(model, x))
    for context in (torch.no_grad, torch.inference_mode):
        for model in (ordinary, inference, ordinary):
            for _ in range(2):
                with context():
                    assert_same(fn(model, model.inputs()), model(model.inputs()))
                with torch.inference_mode():
                    model.weight.add_(1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_weights_of_every_dtype(dtype):
    """Samples are bytes, whatever they mean."""

    class Wide(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.register_buffer("table", table(seed))

        def forward(self, x):
            return x + self.table.to(torch.complex128).cumsum(1)

    def table(seed):
        real = rnd(9, 2000, seed=seed) * 40
        if dtype.is_complex:
            return torch.complex(real, real + 1).to(dtype)
        return (real > 0) if dtype is torch.bool else real.to(dtype)

    model, x = Wide(0), rnd(9, 2000).to(torch.complex128)
    fn = compiled(model)
    check(model, fn, x)
    assert hoisted() == 1
    model.table.data.copy_(table(1))
    check(model, fn, x)
    model.table.copy_(table(2))
    check(model, fn, x)
    if dtype.is_complex:
        model.table.data.copy_(model.table.conj().resolve_conj())  # the real parts stay
        check(model, fn, x)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "expanded", "slice"])
def test_weights_that_are_not_contiguous(layout):
    """Samples are read where the elements are."""

    def make(seed):
        whole = rnd(6, 10, 30, 40, seed=seed)
        return {
            "transposed": lambda: whole.transpose(0, 3),
            "channels_last": lambda: whole.to(memory_format=torch.channels_last),
            "expanded": lambda: whole[:1].expand(6, 10, 30, 40),
            "slice": lambda: whole[1:, ::2, 3:],
        }[layout]()

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", make(0))

        def forward(self, x):
            return x + self.table.exp().sum()

    model, x = Wide(), rnd(3)
    fn = compiled(model)
    check(model, fn, x)
    assert hoisted() == 1
    model.table.data.mul_(1.5) if layout != "expanded" else model.table.data[:1].mul_(1.5)
    check(model, fn, x)
    model.table = make(3)
    check(model, fn, x)


def test_weights_without_elements():
    """Nothing to sample, no address: still right."""

    class Empty(Scaled):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 5))

        def forward(self, x):
            wide = torch.cat([self.none.sum(0).expand(2731, 5), (self.weight * 2).t()], 1)
            return x @ wide.tanh()

    model = Empty()
    fn = compiled(model)
    check(model, fn)
    assert hoisted() == 1
    copy_(model)
    check(model, fn)


def test_two_weights_at_one_address_of_which_one_is_dead():
    """``Parameter(other.data)`` shares memory, and has a version of its own."""
    model = Scaled()
    twin = Scaled()
    fn = compiled(lambda model, x: Scaled.forward(model, x))
    twin.weight = nn.Parameter(model.weight.data)
    x = model.inputs()
    with torch.no_grad():
        assert_same(fn(twin, x), twin(x))
        assert_same(fn(model, x), model(x))
        del twin
        gc.collect()
        assert_same(fn(model, x), model(x))
        model.weight[1, 1] = 3.0
        assert_same(fn(model, x), model(x))
    assert not last_graph().trips


def test_autocast_around_the_calls():
    """What is prepared has the dtypes that were traced, whatever holds when it is made."""
    model = Scaled()
    fn = compiled(model)
    x = model.inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(fn(x), model(x))
        copy_(model)
        assert_same(fn(x), model(x))


def test_dynamic_batch_with_prepared_weights(hoisting):
    """One graph for every batch size, one set of prepared values."""
    kind, backend = hoisting
    model = kind()
    fn = compiled(model, backend, dynamic=True)
    width = model.weight.shape[1]
    for batch in (2, 5, 9):
        check(model, fn, rnd(batch, width, seed=batch))
        step(model)
    assert graph_count("inference") == 1
    assert hoisted() == 1

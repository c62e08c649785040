"""What is computed once per set of weights, what never is, and weights of every kind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.support.backends import compiled, graph_count, hoisted, last_graph, plugged
from tests.support.values import assert_same, rnd
from tests.support.weights import Scaled, assert_equal, check, hoisting_by, overwrite, step


@pytest.fixture(params=["generic", "packed"])
def hoisting(request):
    """What is hoisted, by which backend."""
    with hoisting_by(request.param) as pair:
        yield pair


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


class Quantised(nn.Module):
    """A weight of integers; ``unpack`` makes numbers of them."""

    def __init__(self, stored, unpack, shape=(160, 160)):
        super().__init__()
        self.register_buffer("stored", stored)
        self.unpack, self.shape = unpack, shape

    def forward(self, x):
        weight = (self.unpack(self.stored).to(x.dtype) - 3) * 0.5
        return nn.functional.linear(x, weight.view(self.shape))


BYTES = torch.randint(0, 128, (160, 160), generator=torch.Generator().manual_seed(0))
QUANTISED = {
    "int8": (BYTES.to(torch.int8), lambda stored: stored),
    "uint8": (BYTES.to(torch.uint8), lambda stored: stored),
    "int16": (BYTES.to(torch.int16), lambda stored: stored),
    "float8": ((BYTES / 8).to(torch.float8_e4m3fn), lambda stored: stored),
    "int4": (
        BYTES[:, :80].to(torch.uint8),
        lambda stored: torch.stack([stored & 15, stored >> 4], -1),
    ),
    "int32": (
        BYTES[:, :20].to(torch.int32),
        lambda stored: (stored[..., None] >> torch.arange(0, 32, 4)) & 15,
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.whole
def test_a_quantised_weight_is_not_kept_as_floats(name):
    """Nor unpacked: what calls would read then is larger than what is stored."""
    model = Quantised(*QUANTISED[name])
    fn = compiled(model)
    check(model, fn, rnd(3, 160))
    assert hoisted() == 0


def test_a_quantised_table_that_is_looked_up_is_kept_as_floats():
    """Calls read some rows of it, and would compute all."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", BYTES.to(torch.int8))

        def forward(self, x):
            return nn.functional.embedding(x, self.table.float() * 0.5)

    model = Table()
    fn = compiled(model)
    check(model, fn, torch.tensor([3, 7]))
    assert hoisted() == 1


def test_inference_tensors_as_weights(hoisting):
    """They have no version, so nothing is kept that was prepared from them."""
    kind, backend = hoisting
    with torch.inference_mode():
        model = kind()
        fn = compiled(model, backend)
        check(model, fn)
        model.weight.copy_(rnd(*model.weight.shape, seed=4))
        check(model, fn)
        model.weight = nn.Parameter(rnd(*model.weight.shape, seed=5))
        check(model, fn)
        for row in range(7):  # samples would miss some
            model.weight[row].mul_(-3)
            check(model, fn)
            model.bias[row] += 1
            check(model, fn)
    (note,) = [note for note in last_graph().notes if "inference tensors" in note]
    assert note.startswith("nothing is prepared from 2 weights")


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
                    model.weight[3].mul_(-3)


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
    overwrite(model)
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
        overwrite(model)
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

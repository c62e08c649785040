"""Specialisations that fail: at the first sizes, at others, in a call, half way."""

from __future__ import annotations

import threading

import pytest
import torch

import fuseboard
from tests.support.backends import all_trips, last_graph, plugged
from tests.support.contained import Boom
from tests.support.specialising import batch_of, check, f, lowering, specialised, static
from tests.support.values import assert_same, rnd


def fail_at(batch):
    def fail(region):
        if batch_of(region) == batch:
            raise Boom(f"not at {batch}")

    return lowering(fail)


def test_a_backend_that_fails_at_the_first_sizes():
    """The region goes to the next backend."""
    with static(lower=fail_at(4)), plugged("other"):
        check(specialised(f, "static", "other"), f, 4, 5)
    assert last_graph().regions[0].backend == "other"
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "lower")


def test_a_backend_that_fails_at_other_sizes():
    """These run in eager, the others stay."""
    with static(lower=fail_at(5)):
        check(specialised(f), f, 4, 5, 6, 5)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "lower")
    assert trip.instead == "eager where x.size()[0] = 5, x.size()[1] = 3"
    (region,) = last_graph().regions
    assert region.backend == "static"
    assert [text.split(",")[0] for text in region.specialised] == [
        "x.size()[0] = 4",
        "x.size()[0] = 6",
    ]


def wrong_at(batch, wrong):
    def call(eager_call, region):
        return wrong if batch_of(region) == batch else eager_call

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        lambda args: (torch.zeros(7),),
        lambda args: (),
        lambda args: (torch.zeros(3, 5).t(),),
        lambda args: 1 / 0,
    ],
    ids=["shape", "count", "strides", "raises"],
)
def test_wrong_results_at_other_sizes(wrong):
    """The first call with these sizes notices, and answers with eager's results."""
    with static(call=wrong_at(5, wrong)):
        check(specialised(f), f, 4, 5, 6, 5, 4)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "run")
    assert trip.instead == "eager where x.size()[0] = 5, x.size()[1] = 3"


def test_raising_is_the_policy():
    """The first call with sizes that fail raises, and so does the next."""
    with static(lower=fail_at(5)):
        fn = specialised(f, on_failure="raise")
        check(fn, f, 4)
        for _ in range(2):
            with pytest.raises(fuseboard.RegionError, match="not at 5"), torch.no_grad():
                fn(rnd(5, 3))
        check(fn, f, 4, 6)


def test_the_users_own_error():
    """An index out of range is eager's exception, and nobody trips."""

    def g(x, i):
        return x[i] + 1

    with static():
        fn = specialised(g)
        with torch.no_grad():
            fn(rnd(4, 3), torch.tensor([0, 1]))
            for n in (5, 4):
                with pytest.raises(IndexError, match="out of bounds"):
                    fn(rnd(n, 3), torch.tensor([0, 7]))
            assert_same(fn(rnd(5, 3), torch.tensor([0, 4])), rnd(5, 3)[[0, 4]] + 1)
    assert not all_trips()


def test_an_interrupt_leaves_no_half_made_entry():
    """The next call with these sizes compiles them."""
    tries = []

    def interrupt(region):
        if batch_of(region) == 5:
            tries.append(1)
            if len(tries) == 1:
                raise KeyboardInterrupt

    with static(lower=lowering(interrupt)):
        fn = specialised(f)
        check(fn, f, 4)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            fn(rnd(5, 3))
        check(fn, f, 5, 4, 5)
    assert len(tries) == 2
    assert len(last_graph().regions[0].specialised) == 2


def test_threads():
    """Each combination is compiled once, however many ask for it at a time."""
    lowered, wrong = [], []

    def slow(region):
        lowered.append(batch_of(region))

    with static(lower=lowering(slow)):
        fn = specialised(f, max_shapes=4)
        check(fn, f, 4)
        barrier = threading.Barrier(4)

        def work():
            barrier.wait()
            for n in (5, 6, 7, 8, 9) * 3:
                with torch.no_grad():
                    if not torch.equal(fn(rnd(n, 3)), f(rnd(n, 3))):
                        wrong.append(n)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(lowered) == len(set(lowered)) == 4
    assert not all_trips()


def test_draws_of_a_call_that_failed_are_drawn_again():
    """The seed's numbers, though the first try had drawn some."""

    def g(x):
        return x + torch.rand_like(x)

    def call(eager_call, region):
        def run(args):
            eager_call(args)
            raise Boom("after drawing")

        return run if batch_of(region) == 5 else eager_call

    with static(call=call), torch.no_grad():
        fn = specialised(g)
        for n in (4, 5, 6):
            torch.manual_seed(n)
            got = fn(rnd(n, 3))
            torch.manual_seed(n)
            assert_same(got, g(rnd(n, 3)))
    assert len(all_trips()) == 1

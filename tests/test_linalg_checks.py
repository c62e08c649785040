"""``linalg.inv`` and its like: torch orders their checks among the effects, yet they only raise."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import all_trips, compiled, last_graph, plugged

QUICK = {"compiles_quickly": True}


pytestmark = pytest.mark.usefixtures("policy_measured")


def whiten(x):
    return torch.linalg.solve(x @ x.T + torch.eye(4), x).relu() * 2


def test_they_are_chosen_by_measurement():
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    with plugged("fake", info=QUICK), torch.no_grad():
        fn = compiled(whiten, "fake", "eager")
        for _ in range(3):
            torch.testing.assert_close(fn(x), whiten(x))
    report = last_graph()
    assert {"eager", "fake+eager"} <= {candidate.name for candidate in report.candidates}
    assert not any("planned by priority" in note for note in report.notes)
    assert all_trips() == []


def test_their_values_are_judged():
    """So is what depends on them; the note of the float64 run's checks is left out."""

    def slightly_off(eager_call, region):
        return lambda args: [v * 1.001 if v.is_floating_point() else v for v in eager_call(args)]

    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    with plugged("fake", call=slightly_off, info=QUICK), torch.no_grad():
        torch.testing.assert_close(compiled(whiten, "fake", "eager")(x), whiten(x))
    (trip,) = all_trips()
    assert "float64" in trip.error
    assert not any("its own dtypes" in note for note in last_graph().notes)


def test_the_users_own_error_stays_eagers():
    def inverse(x):
        return torch.linalg.inv(x).relu() * 2

    with plugged("fake", info=QUICK), torch.no_grad():
        fn = compiled(inverse, "fake", "eager")
        for _ in range(3):
            with pytest.raises(torch.linalg.LinAlgError):
                fn(torch.zeros(4, 4))
        torch.testing.assert_close(fn(torch.eye(4)), inverse(torch.eye(4)))
    assert all_trips() == []


def test_in_training_too():
    x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(whiten(x).sum(), x)
    with plugged("fake", info=QUICK):
        fn = compiled(whiten, "fake", "eager")
        for _ in range(3):
            torch.testing.assert_close(torch.autograd.grad(fn(x).sum(), x)[0], wanted)
    assert not any("planned by priority" in note for note in last_graph("forward").notes)
    assert all_trips() == []

"""Small programs under whatever state a user's call has: values, gradients and the process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseboard.backend  # noqa: F401  # rich draws from Python's generator when it is imported
from fuseboard.contracts import Measurement
from tests.support.backends import forget_other_graphs, observing
from tests.support.observations import broken, differences, mend, observations, state
from tests.support.small_programs import TRANSFORMS, Program
from tests.support.surroundings import Case, Scene, random_case

#: Backends that compile quickly, so that what they made of a graph is tried in its first calls.
QUICK = {"backends": ["mkldnn", "onnxruntime", "eager"], "measure_s": 0.01}

#: Which candidates win: by their times, the first of each comparison, or the last.
WINNERS = ("timed", "first", "last")


@pytest.fixture(autouse=True)
def _measured(monkeypatch, tmp_path):
    """As users run it, with a cost database of the test's own; what breaks is mended after it."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    forget_other_graphs(monkeypatch)
    yield
    mend()


def held_against_eager(case: Case, winner: str = "timed", calls: int = 6, **options: Any) -> None:
    """A case's calls do what eager's do, and leave the process as eager leaves it.

    What neither Dynamo by itself nor AOTAutograd on eager's kernels does as eager isn't held.
    """
    want = observations(case, lambda function: function, calls)
    assert not broken(), "eager itself broke something"
    before = state()
    with _winning(winner):
        got = observations(case, _compiled("fuseboard", **options), calls)
    after = state()
    spoiled = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert (spoiled, broken()) == ({}, {}), str(case)
    wrong = differences(case, got, want)
    if any(wrong):
        dynamos = differences(case, observations(case, _compiled("eager"), calls), want)
        aots = differences(case, observations(case, _compiled("aot_eager"), calls), want)
        for one, by_dynamo, by_aot in zip(wrong, dynamos, aots, strict=True):
            for name in by_dynamo.keys() & by_aot.keys():
                one.pop(name, None)
    told = [
        f"call {n}, {name}: {what}" for n, one in enumerate(wrong) for name, what in one.items()
    ]
    assert not told, "\n".join([str(case), *told])


def _compiled(backend: str, **options: Any) -> Any:
    """Compiles anew, as a process that has traced nothing yet.

    What torch keeps of earlier traces (``FakeTensorMode.cache``) makes some later ones fail, with
    any backend: the Hessian of a view of a view is traced once ("has_fw_view() INTERNAL ASSERT").
    """

    def compile_it(function: Any) -> Any:
        torch._dynamo.reset()
        FakeTensorMode.cache_clear()
        return torch.compile(function, backend=backend, options=options or None)

    return compile_it


def _winning(winner: str) -> Any:
    """A measuring hook by which a candidate wins wherever it stands; each is called twice."""

    def measure(calls: Any) -> list[Measurement]:
        for call in calls:
            call()
            call()
        order = range(len(calls)) if winner == "first" else range(len(calls), 0, -1)
        return [Measurement(*(3 * [10.0 * (1 + place)]), 1) for place in order]

    return nullcontext() if winner == "timed" else observing("stopwatch", measure=measure)


# --- one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("grad", "vmap_grad", "grad_grad"),
        ("vjp", "jacrev", "maml"),
        ("jvp", "jacfwd", "hessian"),
    ],
    ids="+".join,
)
@pytest.mark.thorough
def test_functorchs_transforms_inside(names):
    """Their levels are in Dynamo's graph, which is the first candidate."""
    program = Program(tuple((name, (("tanh", ()), ("own_writes", ()))) for name in names))
    scenes = (Scene(input="constant"), Scene(backward="once"))
    held_against_eager(Case(program, scenes, training=False), "first", calls=4, **QUICK)


@pytest.mark.parametrize("drive", ["dual", "jvp", "jacfwd"])
def test_tangents_through_an_engine_of_its_own(drive):
    """Such an engine knows nothing of forward AD."""
    case = Case(
        Program((("linear", ()), ("gelu", ()), ("softmax", ()))),
        (Scene(input="constant"), Scene(input="constant", drive=drive)),
        training=False,
    )
    held_against_eager(case, calls=4, backends=["onnxruntime"])


@pytest.mark.parametrize(
    "scene",
    [
        Scene(backward="batched"),
        Scene(backward="batched_later"),
        Scene(drive="vectorised", input="constant"),
    ],
    ids=lambda scene: scene.backward or scene.drive,
)
def test_batched_gradients(scene):
    """Whatever a backward sees first."""
    program = Program((("linear", ()), ("gelu", ()), ("softmax", ())))
    held_against_eager(Case(program, (scene, Scene(backward="once"))), **QUICK)


@pytest.mark.parametrize("winner", ["first", "last"])
def test_a_backward_under_another_autocast(winner):
    """Code that opts out of the caller's, and a backward outside or inside of it."""
    program = Program((("autocast_off", (("matmul", ()), ("gelu", ()), ("linear", ()))),))
    outside = Scene(("autocast",), backward="once")
    case = Case(program, (outside, Scene(backward="once")))
    held_against_eager(replace(case, exact=True), winner, calls=4, **QUICK)


@pytest.mark.parametrize("step", ["sin", "tripled", "vmap", "cond", "checkpoint"])
def test_a_mode_that_changes_functions(step):
    """Acts once, wherever the function is called."""
    inner = (("sin", ()),) if step in TRANSFORMS else ()
    scenes = (Scene(("doubling",), input="constant"), Scene(("doubling",), backward="once"))
    case = Case(Program(((step, inner),)), scenes, training=False)
    held_against_eager(case, "first", calls=4, **QUICK)


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.thorough
def test_a_program_does_what_eager_does(seed):
    """Values, gradients, layouts, writes, aliases, random numbers; and the process is as before."""
    held_against_eager(random_case(seed), WINNERS[seed % 3], **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1036))
def test_more_programs_do_what_eager_does(seed):
    """The same for many more."""
    held_against_eager(random_case(seed), WINNERS[seed % 3], **QUICK)

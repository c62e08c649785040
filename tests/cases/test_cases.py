"""The cases: those drawn from public bug reports, and those of what surrounds a call.

``run_cases.py`` runs them in processes of their own, as other backends are judged; here they run in
one process, which is five times as quick.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from fuseboard.board import board
from fuseboard.workshop import slices
from fuseboard.workshop.desk import desk
from fuseboard.workshop.life import Life
from tests.support.eager_loses import MEASURE
from tests.support.observations import mend

HERE = Path(__file__).parent
FILES = ("cases_dev", "cases_surroundings", "cases_programs")
NAMES = {
    file: re.findall(r"^def (case_\w+)\(compile_fn\)", (HERE / f"{file}.py").read_text(), re.M)
    for file in FILES
}
#: Backends that compile quickly, so that all that they make of a graph is tried in a case's calls.
QUICK = ["mkldnn", "onnxruntime", "eager"]

every_case = pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file in FILES for name in NAMES[file]]
)
vendored_case = pytest.mark.parametrize("name", NAMES["cases_dev"])


@pytest.fixture(scope="module")
def modules():
    found = {}
    for file in FILES:
        spec = importlib.util.spec_from_file_location(f"{file}_under_test", HERE / f"{file}.py")
        found[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found[file]  # so that pickling by name works
        spec.loader.exec_module(found[file])
    yield found
    for module in found.values():
        del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def _mended():
    """What a failing case leaves open doesn't fail others."""
    yield
    mend()


@pytest.fixture
def _measured(monkeypatch, tmp_path):
    """As users run it: candidates are verified and timed in the case's calls."""
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))


@pytest.fixture
def _swapped(_measured, monkeypatch):
    """By the defaults; what the workshop chose takes over before the first call is answered."""
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    # The call under way waits for the work that would pause for it.
    monkeypatch.setattr(slices, "PAUSE_S", 0.0)
    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", lambda trial: 1)
    begin = Life.begin

    def begin_and_wait(life):
        run = begin(life)
        life._has_begun = True
        desk().submit(life)
        end = time.monotonic() + 120
        while life.waiting and time.monotonic() < end:
            time.sleep(0.01)
        return run

    monkeypatch.setattr(Life, "begin", begin_and_wait)


def run(modules, file: str, name: str, backends: list[str] | None, **options: object) -> None:
    if backends is not None:
        options["backends"] = backends
    own = {"options": options} if options else {}
    getattr(modules[file], name)(lambda f, **kw: torch.compile(f, backend="fuseboard", **own, **kw))


@pytest.mark.parametrize(
    ("file", "count"), [("cases_dev", 38), ("cases_surroundings", 24), ("cases_programs", 11)]
)
def test_all_cases_are_found(file, count):
    """The vendored file is whole, and no name of our own is misspelt."""
    assert len(NAMES[file]) == count


@pytest.mark.whole
@vendored_case
def test_case(modules, name):
    """What eager promises holds."""
    run(modules, "cases_dev", name, ["eager"])


@every_case
def test_case_with_mkldnn(modules, file, name):
    """With oneDNN's operators where there is something for them."""
    run(modules, file, name, ["mkldnn", "eager"])


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize("name", NAMES["cases_surroundings"])
def test_case_that_chooses(modules, name):
    """While candidates are tried, and when one was chosen."""
    run(modules, "cases_surroundings", name, QUICK, measure_s=0.01)


@pytest.mark.thorough
@pytest.mark.usefixtures("_measured")
@every_case
def test_case_that_settles_in_its_first_call(modules, file, name):
    """What was compiled answers from the first call on."""
    run(modules, file, name, QUICK, settle="first_call", measure_s=0.01)


@pytest.mark.thorough
@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize("backend", ["eager", "mkldnn", "onnxruntime"])
@pytest.mark.parametrize("name", NAMES["cases_surroundings"])
def test_case_with_one_backend_alone(modules, name, backend):
    """Nothing else answers what it declines, but eager."""
    run(modules, "cases_surroundings", name, [backend])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inductor-freezing", "onnxruntime", "tvm"])
@vendored_case
def test_case_with_an_engine_of_its_own(modules, name, engine):
    """With eager for what the engine declines."""
    (state,) = (state for state in board.states() if state.name == engine)
    if state.state != "ready":
        pytest.skip(state.reason)
    run(modules, "cases_dev", name, [engine, "eager"])


@pytest.mark.slow
@pytest.mark.usefixtures("_measured")
@vendored_case
def test_case_as_users_run_it(modules, name):
    """By the defaults."""
    run(modules, "cases_dev", name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("_swapped")
@every_case
def test_case_beside_whose_calls_it_is_compiled(modules, file, name):
    """Loaded, and answering; in the workshop it has won against Dynamo's own graph."""
    run(modules, file, name, QUICK, measure_s=0.01, margin=0.0, stages={"measure": MEASURE})

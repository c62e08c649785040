"""The cases drawn from public bug reports, each through the board.

``run_cases.py`` runs them in processes of their own, as other backends are judged; here they run in
one process, which is five times as quick.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from fuseboard.board import board

FILE = Path(__file__).with_name("cases_dev.py")
NAMES = re.findall(r"^def (case_\w+)\(compile_fn\)", FILE.read_text(), re.M)


@pytest.fixture(scope="module")
def cases():
    spec = importlib.util.spec_from_file_location("cases_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases_under_test"] = module  # so that pickling by name works
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cases_under_test"]


def run(cases, name: str, backends: list[str] | None) -> None:
    options = {} if backends is None else {"options": {"backends": backends}}
    getattr(cases, name)(lambda f, **kw: torch.compile(f, backend="fuseboard", **options, **kw))


def test_all_cases_are_found():
    """The vendored file is whole."""
    assert len(NAMES) == 38


@pytest.mark.parametrize("backends", [["eager"], ["mkldnn", "eager"]], ids="+".join)
@pytest.mark.parametrize("name", NAMES)
def test_case(cases, name, backends):
    """What eager promises holds."""
    run(cases, name, backends)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inductor-freezing", "onnxruntime", "tvm"])
@pytest.mark.parametrize("name", NAMES)
def test_case_with_an_engine_of_its_own(cases, name, engine):
    """With eager for what the engine declines."""
    (state,) = (state for state in board.states() if state.name == engine)
    if state.state != "ready":
        pytest.skip(state.reason)
    run(cases, name, [engine, "eager"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_case_in_default_order(cases, name):
    """With every backend that doesn't wait to be named, by priority; Inductor is among them."""
    run(cases, name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_case_as_users_run_it(cases, name, monkeypatch, tmp_path):
    """By the defaults: candidates are verified and timed in the case's calls."""
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    run(cases, name, None)

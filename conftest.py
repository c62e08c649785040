"""What every test runs under: own caches, no settings of the machine, a fresh Dynamo."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent

# Before torch is imported: Inductor reads its cache's place once. Compiled code in the user's own
# cache may come from another torch or from a bug since fixed; `make clean` removes this one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / "build" / "inductor-cache")
# Artifacts of the runs before: code of a plugin that has changed since, and the user's own.
os.environ["XDG_CACHE_HOME"] = str(ROOT / "build" / "cache")
shutil.rmtree(ROOT / "build" / "cache" / "fuseboard", ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
# Settings of whoever runs the tests would change what is tested.
for _name in [name for name in os.environ if name.startswith("FUSEBOARD_")]:
    del os.environ[_name]
# What a terminal's owner prefers, and what services that run tests set, changes what is printed.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
    os.environ.pop(_name, None)
# Most tests are about one stage, and say which backend runs what. What measuring chooses depends on
# the machine: tests of the policy `measured`, and the cases, ask for it.
os.environ["FUSEBOARD_POLICY"] = "priority"
# Tests of the policy `measured` are about the comparison itself, which they watch within calls;
# those of the workshop, which makes it in another process, ask for that.
os.environ["FUSEBOARD_SETTLE"] = "in_calls"

# A shell without job control starts what runs in the background with Ctrl-C ignored, and every
# child with it: tests that press it would wait for their time limit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402  # after the environment is set
import torch  # noqa: E402

import fuseboard  # noqa: E402
from fuseboard.lower import background  # noqa: E402
from fuseboard.report.data import ledger  # noqa: E402
from fuseboard.workshop import desk as desks  # noqa: E402

# Dynamo times the guards of each compile, for telemetry, with the processor's caches emptied:
# 30 ms each, in two thousand compiles (``torch/_dynamo/guards.py``, 2.13).
torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0

# torch makes its structured trace, hundreds of records a compile, where this logger has a handler.
# pytest gives one of its own to each logger that doesn't propagate.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture
def policy_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Choices are measured, as by default, and kept in a cache of the test's own."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The defaults, which compile beside calls; a cache of the test's own."""
    monkeypatch.delenv("FUSEBOARD_POLICY")
    monkeypatch.delenv("FUSEBOARD_SETTLE")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    background._unsettled.clear()
    ledger.clear()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled beside the calls wins the trial in calls."""
    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", lambda trial: 1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which something was traced; Dynamo doesn't count."""
    found: list[str] = []
    trace = torch.fx.Tracer.trace

    def noted(*arguments: Any, **keywords: Any) -> Any:
        found.append(threading.current_thread().name)
        return trace(*arguments, **keywords)

    monkeypatch.setattr(torch.fx.Tracer, "trace", noted)
    return found


@pytest.fixture
def own_desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[desks.Desk]:
    """A desk that no other test has started; its workshop ends with the test."""
    desk = desks.Desk()
    monkeypatch.setattr(desks, "_desk", desk)
    yield desk
    desk.end()


@pytest.fixture
def plugin_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], ModuleType]]:
    """Registers a plugin, a module that the workshop finds, which does something in ``lower``."""
    from tests.support.beside import PLUGIN

    names = []

    def make(name: str, act: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(name=name, act=act))
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module(name)
        fuseboard.register(module, name)
        names.append(name)
        return module

    yield make
    for name in names:
        fuseboard.unregister(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--sample`` is what `make test` runs, so that it is run."""
    parser.addoption(
        "--sample",
        action="store_true",
        help="of each parametrised test run one case, and none that is marked thorough or slow",
    )
    parser.addoption("--rest", action="store_true", help="run what --sample leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test-all` runs besides. The same everywhere: nothing is drawn."""
    sample, rest = config.getoption("--sample"), config.getoption("--rest")
    if not sample and not rest:
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for cases in by_test.values():
        if any(cases[0].get_closest_marker(name) for name in ("slow", "thorough")):
            continue
        # One from the middle: the first and the last are mostly special ones.
        whole = cases[0].get_closest_marker("whole")
        kept.update(cases if whole else [cases[len(cases) // 2]])
    left_out = [item for item in items if (item in kept) == rest]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item in kept) != rest]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage among what tests make, not among all that is imported by now; and seldom:
    most of what a compile makes lives for as long as the test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_unconfigure(config: pytest.Config) -> None:
    """At the end modules go as they do otherwise: nanobind's would tell of leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No test meets code, reports, seeds or a precision that another one left behind."""
    torch._dynamo.reset()
    ledger.clear()
    torch.manual_seed(0)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    yield
    assert torch.is_grad_enabled() == grad, "the test left autograd switched"
    assert torch.get_default_dtype() == dtype, "the test left another default dtype"

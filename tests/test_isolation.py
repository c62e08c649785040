"""``isolate``: what may end the process is tried in a child process first."""

from __future__ import annotations

import _thread
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from typer.testing import CliRunner

import fuseboard
from fuseboard.cli.main import app
from fuseboard.lower.artifacts import ARTIFACT, CRASH, TRIED
from fuseboard.report.data import ledger
from tests.support import crashing_plugin
from tests.support.backends import all_trips, compiled, last_graph, plugged, registered
from tests.support.own_op import doubled

NEVER_AGAIN = (
    "it isn't tried again until the backend's fingerprint changes; "
    "`fuseboard cache clear --crashes` forgets it"
)


@pytest.fixture(autouse=True)
def fresh():
    crashing_plugin.here.append("tests")
    ledger.clear()
    yield
    crashing_plugin.here.clear()


@pytest.fixture
def place(tmp_path):
    return tmp_path


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * torch.tensor([1.0, 2.0, 3.0])) + 1


def call(place: Path, how: str, size: int = 5, **options: Any) -> None:
    """Compile ``f`` with the backend, and hold it against eager."""
    torch._dynamo.reset()
    settings = {
        "isolate": True,
        "cache_dir": str(place / "cache"),
        "plugins.crashing.how": how,
        "plugins.crashing.log": str(place / "log"),
        **options,
    }
    x = torch.randn(size, 3)
    with registered(crashing_plugin, "crashing"), torch.no_grad():
        torch.testing.assert_close(compiled(f, "crashing", "eager", **settings)(x), f(x))


def tries(place: Path) -> list[str]:
    """Where it was compiled, in order."""
    log = place / "log"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def files(place: Path, ending: str) -> list[Path]:
    return sorted(place.rglob(f"*{ending}"))


# --- the child works ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_parent_loads_what_the_child_compiled(place):
    """Constants of the graph and torch's threads reach the child; the parent compiles nothing.

    The next compile takes it from the cache, without a child.
    """
    call(place, "works")
    (region,) = last_graph().regions
    assert tries(place) == ["child"]
    assert region.backend == "crashing"
    assert region.notes == [
        "from the child",
        f"loaded: child [[1.0, 2.0, 3.0]] {torch.get_num_threads()}",
        "compiled in a child process",
    ]
    assert all_trips() == []
    call(place, "works")
    assert tries(place) == ["child"]
    assert [region.loaded for graph in ledger.graphs() for region in graph.regions] == [False, True]


@pytest.mark.thorough
def test_without_an_artifact_the_parent_compiles_as_well(place):
    """That it can be done is remembered: the second time no child is needed."""
    call(place, "bare")
    assert tries(place) == ["child", "parent"]
    assert len(files(place, TRIED)) == 1
    call(place, "bare")
    assert tries(place) == ["child", "parent", "parent"]
    assert all_trips() == []


@pytest.mark.thorough
def test_it_works_without_a_cache(place):
    """Nothing is kept then."""
    call(place, "works", cache=False)
    assert tries(place) == ["child"]
    assert not (place / "cache").exists()


@pytest.mark.thorough
def test_symbolic_sizes_reach_the_child(place):
    """With what is known of them; guards that lowering adds there are added here."""
    torch._dynamo.reset()
    settings = {
        "isolate": True,
        "cache_dir": str(place / "cache"),
        "plugins.crashing.how": "guards",
        "plugins.crashing.log": str(place / "log"),
    }
    with registered(crashing_plugin, "crashing"), torch.no_grad():
        function = compiled(torch.relu, "crashing", "eager", dynamic=True, **settings)
        for size in (9, 8, 4):
            x = torch.randn(size, 3)
            torch.testing.assert_close(function(x), torch.relu(x))
    graphs = ledger.graphs()
    assert tries(place) == ["child", "child"]  # 8 was compiled with 9, and 4 wasn't
    assert [region.backend for graph in graphs for region in graph.regions] == ["crashing", "eager"]


@pytest.mark.parametrize("settings", [{"isolate": False}, {}], ids=["off", "default"])
def test_nothing_is_isolated_unless_it_is_asked_for(place, settings):
    """The default is off."""
    call(place, "works", **{"isolate": False, **settings})
    assert tries(place) == ["parent"]


def test_backends_that_dont_crash_are_not_isolated(place):
    """Only those that say ``may_crash``."""
    torch._dynamo.reset()
    with plugged("fake"), torch.no_grad():
        compiled(f, "fake", isolate=True, cache_dir=str(place))(torch.randn(5, 3))
    assert last_graph().regions[0].backend == "fake"


# --- the child ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("complains", "SIGABRT: terminate called after an assertion"),
        ("segfaults", "SIGSEGV"),
        ("exits", "exit code 3"),
    ],
)
@pytest.mark.thorough
def test_a_crash_trips_and_the_next_backend_runs(place, how, name):
    """The trip holds the signal's name, and what the process said last."""
    call(place, how)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("crashing", "lower", "eager")
    assert trip.error == f"LoweringError: in a child process it ended with {name}"
    assert last_graph().regions[0].backend == "eager"
    assert tries(place) == ["child"]


@pytest.mark.thorough
def test_a_crash_isnt_tried_again(place, monkeypatch):
    """In no process, until the fingerprint changes; the report says so, and what forgets it."""
    call(place, "aborts")
    assert len(files(place, CRASH)) == 1
    ledger.clear()
    call(place, "aborts")
    (trip,) = all_trips()
    assert trip.error.endswith(f"in an earlier child process it ended with SIGABRT; {NEVER_AGAIN}")
    assert tries(place) == ["child"]
    monkeypatch.setenv("CRASHING_FINGERPRINT", "2")
    call(place, "aborts")
    assert tries(place) == ["child", "child"]
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(place / "cache"))
    result = CliRunner().invoke(app, ["cache", "clear", "--crashes"])
    assert result.stdout.startswith("removed 2 files")
    call(place, "aborts")
    assert tries(place) == ["child", "child", "child"]


@pytest.mark.thorough
def test_a_process_that_was_killed_is_tried_again(place):
    """As one is where memory runs short: that isn't the backend's doing."""
    call(place, "SIGKILL")
    assert all_trips()[0].error == "LoweringError: in a child process it ended with SIGKILL"
    assert files(place, CRASH) == []
    call(place, "SIGKILL")
    assert last_graph().regions[0].backend == "crashing"
    assert tries(place) == ["child", "child"]


@pytest.mark.thorough
def test_a_crash_raises_where_the_policy_says_so(place):
    """As any failure to lower."""
    with pytest.raises(BackendCompilerFailed, match=r"RegionError.* SIGABRT"):
        call(place, "aborts", on_failure="raise")


@pytest.mark.parametrize("how", ["sleeps", "hangs"])
@pytest.mark.thorough
def test_a_child_that_takes_too_long_is_ended(place, how):
    """After ``hook_limit_s``, though no Python code could stop it; it counts as a crash."""
    call(place, how, hook_limit_s=2.0)
    (trip,) = all_trips()
    assert "it gave no answer within hook_limit_s = 2" in trip.error
    assert len(files(place, CRASH)) == 1
    (pid,) = (int(line.split()[1]) for line in (place / "log").read_text().splitlines())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.thorough
def test_ctrl_c_ends_the_child_and_its_children(place, monkeypatch):
    """The interrupt goes on; no process is left."""
    grandchild = place / "grandchild"
    monkeypatch.setenv("CRASHING_GRANDCHILD", str(grandchild))

    def interrupt():
        deadline = time.monotonic() + 120
        while not grandchild.exists() or not grandchild.read_text():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call(place, "has a child")
    thread.join()
    for pid in ((place / "log").read_text().split()[1], grandchild.read_text()):
        assert _gone(int(pid))
    assert files(place, CRASH) == []


def _gone(pid: int) -> bool:
    """Whether a process has ended, soon."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # whoever adopted it hasn't asked for it yet
            return True
        time.sleep(0.05)
    return False


# --- the child says no ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "LoweringError: not today"), ("breaks", "it raised RuntimeError: no engine")],
)
@pytest.mark.thorough
def test_what_is_raised_in_the_child_trips_here(place, how, said):
    """It is no crash: it may be tried again."""
    call(place, how)
    (trip,) = all_trips()
    assert trip.error == f"LoweringError: in a child process: {said}"
    assert files(place, CRASH) == []


@pytest.mark.thorough
def test_the_child_may_decline(place):
    """As the backend may in the parent."""
    call(place, "declines")
    (trip,) = all_trips()
    assert "declined the region" in trip.error
    assert tries(place) == ["child"]


def test_a_plugin_that_no_child_can_import_is_not_used(place):
    """The reason says what it would need; it is never lowered in this process."""
    torch._dynamo.reset()
    lowered = []

    def lower(region):
        lowered.append(region)
        return fuseboard.lower_eagerly(region)

    with plugged("fake", lower=lower, info={"may_crash": True}), torch.no_grad():
        x = torch.randn(5, 3)
        function = compiled(f, "fake", isolate=True, cache_dir=str(place))
        torch.testing.assert_close(function(x), f(x))
    (trip,) = all_trips()
    assert "it is an object of this process" in trip.error
    assert lowered == []
    assert os.listdir(place) == [] or files(place, ARTIFACT) == []


@pytest.mark.thorough
def test_a_region_that_a_child_cannot_read_is_not_tried(place):
    """It holds an op that only this process has; what might crash isn't tried here instead."""
    settings = {"isolate": True, "plugins.crashing.log": str(place / "log")}
    x = torch.randn(5, 3)
    with registered(crashing_plugin, "crashing"), torch.no_grad():
        fn = compiled(lambda x: doubled(x) + 1, "crashing", "eager", **settings)
        torch.testing.assert_close(fn(x), x * 2 + 1)
    assert tries(place) == []
    (trip,) = all_trips()
    assert "crashing can't be tried in a child process, which can't read the region" in trip.error
    assert "doubled" in trip.error

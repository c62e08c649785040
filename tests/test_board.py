"""The board: finding plugins, order, block, quarantine, sessions, and calls of hooks."""

from __future__ import annotations

import importlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pluggy
import pytest
import torch
from pydantic import BaseModel
from torch.fx import GraphModule

import fuseboard
from fuseboard import hookspecs
from fuseboard.board import Board, answers, registration, selection, session
from fuseboard.board.registry import BUILT_IN
from fuseboard.config import resolve
from fuseboard.contracts import Event, Verdict
from fuseboard.errors import LoweringError, PluginError, RegistrationError, SettingsError
from fuseboard.profile.choose import stored_decision
from tests.board_fakes import (
    FakeDistribution,
    FakeEntryPoint,
    a_board,
    a_graph,
    backend,
    plugin,
)
from tests.support.misbehaving import Panic


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    """Settings of the checkout don't matter here."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)


class Options(BaseModel):
    threads: int = 1
    tune: bool = False


def three_backends() -> Board:
    """slow and a_slow compile slowly, quick quickly; watcher has no backend."""
    return a_board(
        FakeEntryPoint("slow", backend("slow", options=Options)),
        FakeEntryPoint("a_slow", backend("a_slow")),
        FakeEntryPoint("quick", backend("quick", compiles_quickly=True)),
        FakeEntryPoint("watcher", plugin(event=lambda event: None)),
    )


def names(board: Board, **options) -> list[str]:
    """The backends of a session, in order."""
    return [info.name for info in board.session(resolve(options)).backends]


def settings_error(board: Board, **options) -> str:
    """The text of the SettingsError that opening a session raises."""
    with pytest.raises(SettingsError) as caught:
        board.session(resolve(options))
    return str(caught.value)


# --- order, block, availability -----------------------------------------------------------------


def test_a_backend_by_request_runs_only_where_it_is_named():
    """It is listed last, and takes part once ``backends`` names it."""
    board = a_board(
        FakeEntryPoint("asked", backend("asked", compiles_quickly=True, by_request=True)),
        FakeEntryPoint("slow", backend("slow")),
    )
    assert names(board) == ["slow", "eager"]
    assert names(board, backends=["asked", "eager"]) == ["asked", "eager"]
    states = [state.name for state in board.states() if state.devices]
    assert states == ["slow", "eager", "asked"]


def test_default_order_is_quick_ones_then_by_name_then_eager():
    """What compiles no C++ comes first; eager is the last resort."""
    assert names(three_backends()) == ["quick", "a_slow", "slow", "eager"]


def test_settings_order_the_backends_and_eager_is_appended():
    """The user's order is kept; eager takes what is left."""
    opened = three_backends().session(resolve({"backends": ["slow", "quick"]}))
    assert [info.name for info in opened.backends] == ["slow", "quick", "eager"]
    assert opened.eager_is_fallback_only
    opened = three_backends().session(resolve({"backends": ["slow", "eager"]}))
    assert not opened.eager_is_fallback_only
    assert not three_backends().session(resolve()).eager_is_fallback_only


def test_what_comes_after_eager_is_left_out_with_a_note():
    """eager takes everything, so nothing after it could get a node."""
    opened = three_backends().session(resolve({"backends": ["quick", "eager", "slow"]}))
    assert [info.name for info in opened.backends] == ["quick", "eager"]
    assert opened.notes == ["left out: 'slow' comes after 'eager', which takes everything"]


def test_a_blocked_plugin_takes_no_part_and_is_not_imported():
    """Block is also the way round a plugin whose import does harm."""
    harmful = FakeEntryPoint("harmful", SystemExit("harm"))
    board = a_board(harmful, FakeEntryPoint("quick", backend("quick")))
    assert names(board, block=["harmful"]) == ["quick", "eager"]
    assert harmful.loads == 0
    state = {s.name: s for s in board.states(resolve({"block": ["harmful", "quick"]}))}
    assert (state["harmful"].state, state["quick"].state) == ("blocked", "blocked")
    expected = "named by the setting 'block', set in torch.compile(options=)"
    assert state["harmful"].reason == state["quick"].reason == expected
    assert names(board, block=["harmful", "quick"]) == ["eager"]


def test_blocking_what_is_not_installed_is_noted_only():
    """A list of blocked plugins is good on machines that haven't got them."""
    opened = three_backends().session(resolve({"block": ["slwo"]}))
    assert opened.notes == [
        "block = ['slwo'], set in torch.compile(options=): no plugin named 'slwo' is installed. "
        "Did you mean 'slow'?"
    ]


@pytest.mark.parametrize("name", ["eager", "defaults"])
def test_what_all_else_falls_back_to_cannot_be_blocked(name):
    """There would be nothing left to run."""
    assert "can't be blocked" in settings_error(three_backends(), block=[name])


def test_an_unavailable_backend_is_left_out():
    """Silently where nobody named it; ``states`` has its reason."""
    board = a_board(FakeEntryPoint("tvm", backend("tvm", available=False, reason="no tvm here")))
    assert names(board) == ["eager"]
    assert board.session(resolve()).notes == []
    state = next(s for s in board.states() if s.name == "tvm")
    assert (state.state, state.reason) == ("unavailable", "no tvm here")


def test_a_named_unavailable_backend_is_noted_or_fails_loudly():
    """Loudly where nothing else that the user named is left."""
    board = a_board(
        FakeEntryPoint("tvm", backend("tvm", available=False, reason="no tvm here")),
        FakeEntryPoint("quick", backend("quick")),
    )
    opened = board.session(resolve({"backends": ["tvm", "quick"]}))
    assert [info.name for info in opened.backends] == ["quick", "eager"]
    assert opened.notes == ["left out: 'tvm' is unavailable: no tvm here"]
    for alone in (["tvm"], ["tvm", "eager"]):
        assert settings_error(board, backends=alone) == (
            f"backends = {alone!r}, set in torch.compile(options=): "
            "'tvm' is unavailable: no tvm here"
        )
    assert "'quick' is blocked" in settings_error(board, backends=["quick"], block=["quick"])


# --- names that aren't there --------------------------------------------------------------------


def test_an_unknown_backend_reads_well(monkeypatch):
    """What was given, the near one, what is installed, and the pip line where there is an extra."""
    assert settings_error(three_backends(), backends=["quik"]) == (
        "backends = ['quik'], set in torch.compile(options=): no plugin named 'quik'. "
        "Did you mean 'quick'? Installed: a_slow, attention, eager, linear_cross_entropy, narrow, "
        "quick, shared_heads, simplify, slow, watcher."
    )
    monkeypatch.setattr(selection, "_extras", lambda: ["tvm"])
    text = settings_error(three_backends(), backends=["tvm"])
    assert text.endswith("Try: pip install 'fuseboard[tvm]'.")


def test_a_plugin_without_a_backend_cannot_be_named_as_one():
    """It is asked without being named."""
    text = settings_error(three_backends(), backends=["watcher"])
    assert "plugin 'watcher' has no backend" in text
    assert "(events)" in text


def test_options_of_an_unknown_plugin_are_an_error():
    """With the near one."""
    text = settings_error(three_backends(), plugins={"slo": {"threads": 2}})
    assert text.startswith("plugins.slo: no plugin named 'slo'. Did you mean 'slow'? Installed:")
    assert text.endswith("Set in torch.compile(options=).")


def test_a_preset_may_speak_of_a_plugin_that_is_not_installed():
    """``mode="max-autotune"`` works on a board without inductor."""
    assert names(three_backends(), mode="max-autotune") == ["quick", "a_slow", "slow", "eager"]


# --- options ------------------------------------------------------------------------------------


def test_options_are_the_backend_s_own_model(monkeypatch):
    """Filled from the settings; text from the environment is read as the option's type."""
    assert three_backends().session(resolve()).options("slow") == Options()
    assert three_backends().session(resolve()).options("quick") is None
    monkeypatch.setenv("FUSEBOARD_PLUGINS__SLOW__TUNE", "1")
    opened = three_backends().session(resolve({"plugins.slow.threads": 3}))
    assert opened.options("slow") == Options(threads=3, tune=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"plugins.slow.thread": 3},
            "plugins.slow.thread = 3: plugin 'slow' has no option 'thread'. Did you mean "
            "'threads'? Its options are threads, tune. Set in torch.compile(options=).",
        ),
        (
            {"plugins.slow.threads": "many"},
            "plugins.slow.threads = 'many': Input should be a valid integer, unable to parse "
            "string as an integer. Set in torch.compile(options=).",
        ),
        (
            {"plugins.quick.x": 3},
            "plugins.quick.x = 3: plugin 'quick' has no options. "
            "Set in torch.compile(options=); take it out.",
        ),
    ],
)
def test_wrong_options_of_a_plugin_fail_when_the_session_opens(given, expected):
    """Before anything is compiled, whether the model forbids extra keys or not."""
    assert settings_error(three_backends(), **given) == expected


# --- finding and registering --------------------------------------------------------------------


def test_a_plugin_that_cannot_be_imported_leaves_the_others_alone(caplog):
    """It is quarantined with the reason, which is logged once; who names it gets the cause."""
    broken = FakeEntryPoint("broken", ImportError("no module named tvm"))
    board = a_board(broken, FakeEntryPoint("quick", backend("quick")))
    with caplog.at_level(logging.WARNING, "fuseboard"):
        assert names(board) == names(board) == ["quick", "eager"]
    assert [r.message for r in caplog.records] == [
        "fuseboard: plugin 'broken' is quarantined, and takes no part: its import raised "
        "ImportError: no module named tvm"
    ]
    assert broken.loads == 1
    with pytest.raises(RegistrationError, match=r"backends = \['broken', 'quick'\]") as caught:
        board.session(resolve({"backends": ["broken", "quick"]}))
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(RegistrationError, match=r"stages\.plan = 'broken'"):
        board.session(resolve({"stages.plan": "broken"}))


def test_a_plugin_whose_import_calls_exit_does_not_end_the_program():
    """It is quarantined like one whose import raises, with what it called."""
    point = FakeEntryPoint("leaver", SystemExit("needs a license"))
    board = a_board(point, FakeEntryPoint("quick", backend("quick")))
    assert names(board) == ["quick", "eager"]
    (state,) = (state for state in board.states() if state.name == "leaver")
    assert (state.state, state.reason) == (
        "quarantined",
        "its import called sys.exit('needs a license')",
    )


def test_entry_points_are_looked_for_once_and_on_first_use():
    """Making a board costs nothing."""
    asked = []
    board = Board(entry_points=lambda: asked.append(1) or [])
    assert asked == []
    board.names()
    board.states()
    assert asked == [1]


def test_an_interrupted_import_is_tried_again():
    """Ctrl-C isn't the plugin's fault."""
    point = FakeEntryPoint("quick", KeyboardInterrupt())
    board = a_board(point)
    with pytest.raises(KeyboardInterrupt):
        board.session(resolve())
    point.plugin = backend("quick")
    assert names(board) == ["quick", "eager"]


def test_two_distributions_with_one_name():
    """The first keeps it, the second is quarantined and both distributions are named."""
    board = a_board(
        FakeEntryPoint("quick", backend("quick"), FakeDistribution("first")),
        FakeEntryPoint("quick", backend("quick"), FakeDistribution("second")),
        FakeEntryPoint("eager", backend("eager"), FakeDistribution("third")),
    )
    first, second = (s for s in board.states() if s.name == "quick")
    assert (first.state, first.source) == ("ready", "entry point of first")
    assert (second.state, second.source) == ("quarantined", "entry point of second")
    assert "the name 'quick' is taken (entry point of first)" in second.reason
    third = next(s for s in board.states() if s.source == "entry point of third")
    assert "the name 'eager' is taken (built in)" in third.reason


def test_states_show_all_there_is_to_know():
    """Name, version, stages and devices, backends in their order."""
    board = three_backends()
    board.register(backend("mine", {"fuse": lambda graph: None, "lower": lambda region: None}))
    states = board.states(resolve({"backends": ["slow"]}))
    assert [s.name for s in states] == [
        "slow",
        "quick",
        "a_slow",
        "mine",
        "eager",
        *sorted(BUILT_IN.keys() - {"eager"}),
        "watcher",
    ]
    mine, watcher = states[3], states[-1]
    assert (mine.source, mine.stages) == ("registered at run time", ("fuse", "lower"))
    assert (watcher.version, watcher.stages, watcher.devices) == ("1.2", ("events",), ())
    assert states[0].devices == ("cpu",)
    assert states[6].stages == ("partition", "profile", "events")


def test_register_and_unregister_at_run_time():
    """The name comes from the backend, or from the module."""
    board = a_board()
    mine = backend("mine")
    board.register(mine)
    assert names(board) == ["mine", "eager"]
    board.unregister("mine")
    assert names(board) == ["eager"]
    board.register(mine)
    module = ModuleType("watching")
    module.fuseboard_event = fuseboard.hookimpl(lambda event: None)
    board.register(module)
    assert board.names() == sorted([*BUILT_IN, "mine", "watching"])


def test_hooks_may_be_methods_of_another_object():
    """As on a plugin that is put together from parts."""

    class Part:
        @fuseboard.hookimpl
        def fuseboard_claim(self, graph):
            return [fuseboard.Decline("relu", "the part's")]

    board = a_board()
    whole = backend("whole")
    whole.fuseboard_claim = Part().fuseboard_claim
    board.register(whole)
    answer = board.session(resolve()).call(
        "fuseboard_claim", "whole", graph=a_graph(), kind="joint"
    )
    assert answer == [fuseboard.Decline("relu", "the part's")]


@pytest.mark.parametrize(
    ("module", "package", "home"),
    [
        ("own_backend.py", "", "own_backend.py"),
        ("engine/__init__.py", "engine", "engine"),
        ("engine/second.py", "engine", "engine"),  # it uses what lies beside it
    ],
)
def test_a_plugins_code_is_its_package(tmp_path, module, package, home):
    """Artifacts and decisions are good for what is in it."""
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    file.touch()
    owner = ModuleType("own_backend")
    owner.__file__, owner.__package__ = str(file), package
    owner.fuseboard_backend = backend("own").fuseboard_backend
    board = a_board()
    board.register(owner, "own")
    assert board.session(resolve()).homes("own") == (tmp_path / home, Path(__file__).parent)


def test_a_plugins_code_is_also_where_its_patterns_are(tmp_path, monkeypatch):
    """A pattern that is imported from another package is noticed when it changes."""
    package, plugin = tmp_path / "shared_patterns", tmp_path / "uses_them.py"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import fuseboard, torch\n"
        "def search(x): return x.cos().sin()\n"
        "cosine = fuseboard.Pattern('cosine', search, [torch.empty(2)], torch.sin)\n"
    )
    plugin.write_text(
        "import fuseboard, shared_patterns\n"
        "patterns = fuseboard.Patterns([shared_patterns.cosine])\n"
        "@fuseboard.hookimpl\n"
        "def fuseboard_fuse(graph, kind): return patterns.fusions(graph, kind)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    board = a_board()
    board.register(importlib.import_module("uses_them"), "own")
    session = board.session(resolve())
    assert session.homes("own") == (plugin, package)

    def parts():
        return stored_decision._session_parts(session)["rewriters"]

    before = parts()
    package.joinpath("__init__.py").write_text("# changed")
    assert parts() != before


def test_a_board_without_eager_says_so():
    """There is nothing to fall back to: an error, chained to the reason."""
    board = Board(entry_points=list, built_in={"eager": "no_such_module"})
    with pytest.raises(RegistrationError, match=r"plugin 'eager'.* is quarantined") as caught:
        board.session(resolve())
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_session_outlives_its_plugins():
    """Tuning and backward graphs go on with the snapshot after ``unregister``."""
    board = a_board()
    board.register(backend("mine", {"claim": lambda graph: []}))
    opened = board.session(resolve())
    board.unregister("mine")
    assert opened.call("fuseboard_claim", "mine", graph=a_graph(), kind="inference") == []


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        (lambda: backend("quick"), None, r"the name 'quick' is taken \(entry point of fake-dist\)"),
        (lambda: backend("eager"), None, r"the name 'eager' is taken \(built in\)"),
        (lambda: backend("x"), "y", r"calls itself 'x'; the two names must be equal"),
        (lambda: plugin(event=lambda event: None), None, r"pass register\(plugin, name=...\)"),
    ],
)
def test_register_refuses_a_wrong_name(given, name, expected):
    """Taken, unequal or missing."""
    with pytest.raises(RegistrationError, match=expected):
        three_backends().register(given(), name)


def test_one_object_under_two_names_is_refused():
    """It would be called twice."""
    board, watcher = a_board(), plugin(event=lambda event: None)
    board.register(watcher, "one")
    with pytest.raises(RegistrationError, match="the same object is registered as 'one'"):
        board.register(watcher, "two")


def test_unregister_refuses_what_is_not_there_or_built_in():
    """With the near one."""
    with pytest.raises(RegistrationError, match=r"no plugin 'quik'\. Did you mean 'quick'"):
        three_backends().unregister("quik")
    with pytest.raises(RegistrationError, match="built in"):
        three_backends().unregister("eager")


def test_threads_that_open_sessions_at_once_load_each_plugin_once():
    """The lock is held over the imports."""

    class Slow:
        def __new__(cls):
            time.sleep(0.05)
            return backend("slow")

    point, seen = FakeEntryPoint("slow", Slow), []
    board = a_board(point)
    threads = [threading.Thread(target=lambda: seen.append(names(board))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [["slow", "eager"]] * 4
    assert point.loads == 1


def test_a_plugin_may_register_another_while_it_is_imported():
    """Discovery can be entered again by what it imports."""
    board = None

    class Family:
        def __new__(cls):
            board.register(backend("child"))
            return backend("parent")

    board = a_board(FakeEntryPoint("parent", Family))
    assert names(board) == ["child", "parent", "eager"]


@pytest.mark.thorough
def test_the_board_of_the_process_has_what_is_installed():
    """Real entry points, in a process of their own: what needs torch alone is ready, and what needs
    an engine or a GPU is that, or says what it lacks."""
    code = (
        "import dataclasses, json; from fuseboard.board import board;"
        "print(json.dumps([dataclasses.asdict(s) for s in board.states()]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    states = {s["name"]: (s["state"], s["reason"]) for s in json.loads(out.stdout)}
    for name in ("mkldnn", "inductor", *BUILT_IN):
        assert states.pop(name) == ("ready", "")
    assert states["cudagraphs"][0] == ("ready" if torch.cuda.is_available() else "unavailable")
    assert {"onnxruntime", "triton", "tvm"} <= states.keys()
    for name, (state, reason) in states.items():
        assert state == "ready" or (state == "unavailable" and reason), name


# --- calling hooks ------------------------------------------------------------------------------


def opened(hooks, **options) -> session.Session:
    """A session on a board with a backend ``mine`` that has these hooks."""
    return a_board(FakeEntryPoint("mine", backend("mine", hooks, options=Options))).session(
        resolve(options)
    )


def test_call_passes_the_arguments_that_the_plugin_takes():
    """And fills ``options`` in where the caller gave none."""
    seen = []
    mine = opened({"claim": lambda options, kind: seen.append((options, kind))})
    assert mine.call("fuseboard_claim", "mine", graph=a_graph(), kind="joint") is None
    given = Options(threads=9)
    mine.call("fuseboard_claim", "mine", graph=a_graph(), kind="joint", options=given)
    assert seen == [(Options(), "joint"), (given, "joint")]


def test_call_is_none_where_the_plugin_has_no_such_hook():
    """Or returned None itself."""
    assert opened({}).call("fuseboard_lower", "mine", region=None, inputs=[]) is None


def test_a_plugin_s_exception_is_wrapped_and_chained():
    """It names plugin and hook; LoweringError, which is a plugin's to raise, passes as it is."""

    def fails(error):
        def lower(region):
            raise error

        return opened({"lower": lower})

    with pytest.raises(PluginError, match="plugin 'mine', hook fuseboard_lower") as caught:
        fails(ValueError("odd shape")).call("fuseboard_lower", "mine", region=None, inputs=[])
    assert "it raised ValueError: odd shape" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    refused = LoweringError("no rule for fft")
    for error in (refused, KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            fails(error).call("fuseboard_lower", "mine", region=None, inputs=[])
        assert caught.value is error


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, Panic])
def test_a_hook_that_would_end_the_program_is_a_failure_like_any_other(kind):
    """``sys.exit`` in a plugin doesn't end the user's program."""

    def lower(region):
        raise kind("bye")

    with pytest.raises(PluginError, match=f"it raised {kind.__name__}: bye"):
        opened({"lower": lower}).call("fuseboard_lower", "mine", region=None, inputs=[])


def test_what_a_signal_handler_raises_in_a_hook_is_the_user_s():
    """Unless it is an Exception, which might be anybody's."""

    def handler(number, frame):
        raise Panic("time is up")

    def lower(region):
        signal.raise_signal(signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Panic, match="time is up"):
            opened({"lower": lower}).call("fuseboard_lower", "mine", region=None, inputs=[])
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_plugin_s_own_wrapper_runs_around_its_hook():
    """pluggy's wrappers work."""

    class Wrapped:
        @fuseboard.hookimpl
        def fuseboard_backend(self):
            return fuseboard.BackendInfo(name="wrapped")

        @fuseboard.hookimpl
        def fuseboard_claim(self, graph):
            return []

        @fuseboard.hookimpl(wrapper=True, specname="fuseboard_claim")
        def around(self, graph):
            answers = yield
            return [answers[0] + [fuseboard.Decline("relu", "the wrapper's")]]

    board = a_board()
    board.register(Wrapped())
    answer = board.session(resolve()).call(
        "fuseboard_claim", "wrapped", graph=a_graph(), kind="joint"
    )
    assert answer == [fuseboard.Decline("relu", "the wrapper's")]


def test_first_asks_in_order_and_says_who_answered():
    """Backends by priority, then other plugins, then the defaults."""
    board = a_board(
        FakeEntryPoint("b", backend("b", {"verify": lambda: Verdict(False, "b")})),
        FakeEntryPoint("a", backend("a", {"verify": lambda: None})),
        FakeEntryPoint("other", plugin(verify=lambda: Verdict(False, "other"))),
    )
    judged = {"region": None, "expected": (), "result": (), "inputs": ()}
    first = board.session(resolve()).first("fuseboard_verify", **judged)
    assert first == ("b", Verdict(False, "b"))
    others = board.session(resolve({"backends": ["a"]})).first("fuseboard_verify", **judged)
    assert others == ("other", Verdict(False, "other"))
    who, _ = board.session(resolve({"block": ["a", "b", "other"]})).first(
        "fuseboard_measure", calls=[lambda: None], budget_s=0.01
    )
    assert who == "defaults"


def test_on_failure_falls_back_to_the_setting():
    """A plugin may decide otherwise."""
    failed = {"region": "r", "plugin": "mine", "stage": "lower", "error": ValueError()}
    asked = opened({}, on_failure="eager").first("fuseboard_on_failure", **failed)
    assert asked == ("settings", "eager")
    decided = opened({"on_failure": lambda plugin: plugin == "mine" and "raise"})
    assert decided.first("fuseboard_on_failure", **failed) == ("mine", "raise")


def test_each_asks_every_active_plugin_in_order():
    """Without those that don't have the hook, or aren't active."""
    board = a_board(
        *(FakeEntryPoint(n, backend(n, {"fuse": lambda graph: []})) for n in ("a", "b", "c")),
        FakeEntryPoint("other", plugin(fuse=lambda graph: None)),
    )
    opened = board.session(resolve({"backends": ["c", "a"]}))
    assert opened.with_hook("fuseboard_fuse") == ("c", "a", "shared_heads", "simplify", "other")


def test_an_observer_that_raises_is_named_once_and_breaks_nothing(caplog):
    """The others are still told."""
    heard = []

    def fails(event):
        raise ValueError("deaf")

    board = a_board(
        FakeEntryPoint("a", plugin(event=fails)),
        FakeEntryPoint("b", plugin(event=lambda event: heard.append(event.name))),
    )
    opened = board.session(resolve())
    with caplog.at_level(logging.WARNING, "fuseboard"):
        opened.notify(Event("graph", "g0"))
        opened.notify(Event("plan", "g0"))
    assert heard == ["graph", "plan"]
    assert opened.notes == ["plugin 'a', hook fuseboard_event: it raised ValueError: deaf"]
    assert len(caplog.records) == 1


# --- overrides of a stage -----------------------------------------------------------------------

ERROR = {"region": "r", "plugin": "p", "stage": "run", "error": ValueError("x")}


def choose(error):
    """An override that takes one of the hook's arguments."""
    return "raise" if isinstance(error, ValueError) else None


def choose_all(**everything):
    return "eager" if set(everything) == set(ERROR) else None


def choose_wrongly(region):
    return "explode"


def choose_too_much(eror):
    return "raise"


def choose_badly(region):
    raise OSError("disk")


A_NUMBER = 3


def test_a_stage_can_be_given_to_a_plugin():
    """It is asked before the others, also where it comes later in order."""
    board = a_board(
        FakeEntryPoint("a", backend("a", {"on_failure": lambda: "next"})),
        FakeEntryPoint("b", backend("b", {"on_failure": lambda: "raise"})),
    )
    ask = board.session(resolve({"stages.on_failure": "b"})).first
    assert ask("fuseboard_on_failure", **ERROR) == ("b", "raise")
    assert board.session(resolve()).first("fuseboard_on_failure", **ERROR) == ("a", "next")


@pytest.mark.parametrize(("function", "answer"), [("choose", "raise"), ("choose_all", "eager")])
def test_a_stage_can_be_given_to_a_function(function, answer):
    """By a dotted path; it gets those arguments that it takes."""
    path = f"{__name__}:{function}"
    ask = a_board().session(resolve({"stages.on_failure": path})).first
    assert ask("fuseboard_on_failure", **ERROR) == (path, answer)


def test_an_override_that_returns_none_leaves_it_to_the_plugins():
    """As an implementation of the hook would."""
    ask = a_board().session(resolve({"stages.on_failure": f"{__name__}:choose"})).first
    given = {**ERROR, "error": KeyError()}
    assert ask("fuseboard_on_failure", **given) == ("settings", "next")


@pytest.mark.parametrize(
    ("function", "expected"),
    [("choose_wrongly", "it returned 'explode'"), ("choose_badly", "it raised OSError: disk")],
)
def test_an_override_is_held_to_the_contract_too(function, expected):
    """Errors name its path."""
    path = f"{__name__}:{function}"
    with pytest.raises(PluginError, match=expected) as caught:
        a_board().session(resolve({"stages.on_failure": path})).first(
            "fuseboard_on_failure", **ERROR
        )
    assert caught.value.plugin == path


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("quik", "neither an installed plugin nor a path package.module:function. Did you mean"),
        ("quick", "plugin 'quick' has no fuseboard_plan. Plugins that have it: defaults."),
        ("no_such_module:f", "importing 'no_such_module' raised ModuleNotFoundError"),
        (f"{__name__}:choos", "has no 'choos'. Did you mean 'choose'?"),
        (f"{__name__}:A_NUMBER", "is a int, not a function"),
        (f"{__name__}:choose_too_much", "it takes 'eror', which isn't passed to it by keyword."),
        (":f", "a path is written package.module:function"),
    ],
)
def test_an_override_that_is_not_there_fails_when_the_session_opens(target, expected):
    """Before anything is compiled, with the setting's key, value and origin."""
    text = settings_error(three_backends(), **{"stages.plan": target})
    assert expected in text
    assert text.startswith(f"stages.plan = {target!r}, set in torch.compile(options=): ")


def test_an_override_that_names_an_unavailable_or_blocked_plugin_fails():
    """With the reason."""
    hooks = {"plan": lambda graph: None}
    board = a_board(FakeEntryPoint("tvm", backend("tvm", hooks, available=False, reason="gone")))
    assert "'tvm' is unavailable: gone" in settings_error(board, **{"stages.plan": "tvm"})
    assert "'tvm' is blocked" in settings_error(board, **{"stages.plan": "tvm", "block": ["tvm"]})


# --- the tables that the board keeps about hooks ------------------------------------------------


def test_the_board_knows_every_hook():
    """Its stage, its arguments and a check of its answer: for each hook of the contract."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    hooks = {name for name in vars(manager.hook) if not name.startswith("_")}
    assert hooks == set(registration.STAGE_OF)
    assert hooks == set(answers._CHECKERS)
    assert hooks == set(selection.ARGUMENTS)


def test_the_default_stages_answer_with_what_the_contract_asks():
    """The defaults are plugins like any other: their answers are checked as well."""
    opened = a_board().session(resolve())
    graph = a_graph()
    names = {node.name for node in graph.graph.nodes if node.op == "call_function"}
    claims = {"eager": [fuseboard.Claim(frozenset(names), frozenset(names))]}
    for node in graph.graph.nodes:
        node.meta["val"] = torch.empty(3)
    who, plan = opened.first(
        "fuseboard_plan",
        policy="priority",
        graph=graph,
        kind="inference",
        claims=claims,
        backends=opened.backends,
        pins={},
        min_region_us=50.0,
        repeats="auto",
    )
    assert who == "defaults"
    assert set(plan.placements.values()) == {"eager"}
    calls = [lambda: None, lambda: None]
    who, measured = opened.first("fuseboard_measure", calls=calls, budget_s=0.01)
    assert (who, len(measured)) == ("defaults", 2)
    assert isinstance(graph, GraphModule)


@pytest.mark.parametrize("first", [True, False])
def test_nobody_takes_the_name_of_a_plugin_that_comes_with_the_board(first):
    """Whichever is found first, the board's own is loaded and the other one is told of."""
    own = FakeEntryPoint("mkldnn", lambda: None, FakeDistribution("fuseboard"))
    own.plugin = backend("mkldnn")
    other = FakeEntryPoint("mkldnn", backend("mkldnn"), FakeDistribution("somebody-elses"))
    points = (own, other) if first else (other, own)
    states = [state for state in a_board(*points).states() if state.name == "mkldnn"]
    assert [state.source for state in states] == [
        "entry point of fuseboard",
        "entry point of somebody-elses",
    ]
    assert [state.state for state in states] == ["ready", "quarantined"]
    assert "the name 'mkldnn' is taken (entry point of fuseboard)" in states[1].reason
    assert not other.loads


def test_a_plugin_that_changes_the_process_when_it_is_found_is_quarantined():
    """What its import, or ``fuseboard_backend``, changed is put back, and the reason says what."""
    threads = torch.get_num_threads()

    class Changing:
        @fuseboard.hookimpl
        def fuseboard_backend(self):
            torch.set_num_threads(threads + 1)
            return fuseboard.BackendInfo(name="changing")

    def load():
        torch.set_default_dtype(torch.float64)
        return backend("imported")

    imported = FakeEntryPoint("imported", None)
    imported.load = load
    states = {s.name: s for s in a_board(FakeEntryPoint("changing", Changing), imported).states()}
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert [states[name].state for name in ("changing", "imported")] == ["quarantined"] * 2
    assert f"torch.set_num_threads from {threads} to {threads + 1}" in states["changing"].reason
    assert "the default dtype from torch.float32 to torch.float64" in states["imported"].reason
    with pytest.raises(RegistrationError, match=r"changed torch\.set_num_threads"):
        a_board().register(Changing())
    assert torch.get_num_threads() == threads

"""One lying plugin per rule of the board: what it does, and what is said about it.

Rules about whole plugins end in quarantine; rules about answers in a ContractError that names
plugin, hook, what was returned and what is allowed.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import BaseModel

import fuseboard
from fuseboard import (
    BackendInfo,
    Claim,
    Decline,
    Fusion,
    LoweredRegion,
    Measurement,
    Narrowing,
    Plan,
    Verdict,
    hookspecs,
)
from fuseboard.board.registry import BUILT_IN
from fuseboard.config import resolve
from fuseboard.errors import ContractError, HookTimeout, RegistrationError
from tests.board_fakes import FakeEntryPoint, a_board, a_graph, backend, plugin
from tests.support.samplers import FakeSampler


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    """Settings of the checkout don't matter here."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)


# --- rules about the plugin: it is quarantined --------------------------------------------------


def misspelt_hook():
    return plugin(lowre=lambda region: None)


def misspelt_by_specname():
    return SimpleHashable(f=fuseboard.hookimpl(specname="fuseboard_clam")(lambda graph: None))


def unmarked_hook():
    return SimpleHashable(fuseboard_lower=lambda region: None)


def no_hook():
    return ModuleType("empty")


def unknown_argument():
    return plugin(lower=lambda regoin, inputs: None)


def argument_with_default():
    return plugin(lower=lambda region, inputs=(): None)


def unhashable():
    return SimpleNamespace(fuseboard_event=fuseboard.hookimpl(lambda event: None))


def another_name():
    return backend("somebody_else")


def backend_that_raises():
    return plugin(backend=lambda: 1 / 0)


def backend_of_another_type():
    return plugin(backend=lambda: {"name": "liar"})


def devices_as_text():
    return backend("liar", device_types="cpu")


def dtypes_as_text():
    return backend("liar", dtypes=frozenset({"float32"}))


def flag_as_text():
    return backend("liar", training="yes")


def options_as_instance():
    class Options(BaseModel):
        pass

    return backend("liar", options=Options())


def wrapper_that_does_not_yield():
    marked = fuseboard.hookimpl(wrapper=True)(lambda graph: None)
    return SimpleHashable(fuseboard_claim=marked)


class SimpleHashable(SimpleNamespace):
    __hash__ = object.__hash__


LIARS = [
    (misspelt_hook, "there is no hook 'fuseboard_lowre'. Did you mean 'fuseboard_lower'?"),
    (misspelt_by_specname, "there is no hook 'fuseboard_clam'. Did you mean 'fuseboard_claim'?"),
    (unmarked_hook, "fuseboard_lower lacks @fuseboard.hookimpl"),
    (no_hook, "it implements no hook; decorate functions of it with @fuseboard.hookimpl"),
    (
        unknown_argument,
        "fuseboard_lower has no argument 'regoin'. Did you mean 'region'? Its arguments are: "
        "region, inputs",
    ),
    (argument_with_default, "argument 'inputs' of fuseboard_lower has a default"),
    (unhashable, "it is a SimpleNamespace, which can't be hashed"),
    (another_name, "fuseboard_backend calls itself 'somebody_else'; the two names must be equal"),
    (backend_that_raises, "fuseboard_backend raised ZeroDivisionError: division by zero"),
    (backend_of_another_type, "it returned {'name': 'liar'} of type dict: it isn't a BackendInfo"),
    (devices_as_text, "device_types is 'cpu' of type str, not frozenset or set"),
    (dtypes_as_text, "an item of dtypes is 'float32' of type str, not dtype"),
    (flag_as_text, "training is 'yes' of type str, not bool"),
    (options_as_instance, "not a pydantic model class"),
    (wrapper_that_does_not_yield, "function is not a generator function"),
]


@pytest.mark.parametrize(("liar", "reason"), LIARS, ids=[liar.__name__ for liar, _ in LIARS])
def test_a_plugin_that_breaks_a_rule_is_quarantined(liar, reason):
    """With the reason; the board works without it, and who names it gets an error."""
    board = a_board(FakeEntryPoint("liar", liar()), FakeEntryPoint("honest", backend("honest")))
    state = next(s for s in board.states() if s.name == "liar")
    assert state.state == "quarantined"
    assert reason in state.reason
    assert [info.name for info in board.session(resolve()).backends] == ["honest", "eager"]
    with pytest.raises(RegistrationError, match=r"plugin 'liar' .* is quarantined: ") as caught:
        board.session(resolve({"backends": ["liar", "honest"]}))
    assert reason in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("liar", "reason"), LIARS, ids=[liar.__name__ for liar, _ in LIARS])
def test_register_refuses_a_plugin_that_breaks_a_rule(liar, reason):
    """At run time the same rule is an error at once, and leaves nothing on the board."""
    board = a_board()
    with pytest.raises(RegistrationError) as caught:
        board.register(liar(), "liar")
    assert reason in str(caught.value)
    assert "plugin 'liar'" in str(caught.value)
    assert board.names() == sorted(BUILT_IN)


def test_a_backend_that_gives_no_reason_for_being_unavailable():
    """Is unavailable all the same, and the silence is the reason."""
    board = a_board(FakeEntryPoint("liar", backend("liar", available=False)))
    state = next(s for s in board.states() if s.name == "liar")
    assert (state.state, state.reason) == ("unavailable", "it gave no reason")


def test_a_plugin_that_hangs_in_its_import_is_quarantined():
    """After ``hook_limit_s``."""

    class Hangs:
        def __new__(cls):
            time.sleep(60)

    board = a_board(FakeEntryPoint("liar", Hangs))
    state = next(s for s in board.states(resolve({"hook_limit_s": 0.1})) if s.name == "liar")
    assert (state.state, state.reason) == ("quarantined", "its import took over 0.1 s")


def test_a_plugin_that_hangs_in_its_description_is_quarantined():
    """After ``hook_limit_s``."""
    board = a_board(FakeEntryPoint("liar", plugin(backend=lambda: time.sleep(60))))
    state = next(s for s in board.states(resolve({"hook_limit_s": 0.1})) if s.name == "liar")
    assert state.reason == "hook fuseboard_backend: no answer in 0.1 s"


# --- rules about answers ------------------------------------------------------------------------


class BadRepr(str):
    def __repr__(self):
        raise RuntimeError("no repr")


def fusion(*nodes: str, name: str = "f") -> Fusion:
    return Fusion(name=name, nodes=nodes, apply=lambda: None)


GRAPH = a_graph()
ASK = {
    "fuseboard_decompositions": {"kind": "joint"},
    "fuseboard_fuse_dynamo": {"graph": GRAPH},
    "fuseboard_fuse": {"graph": GRAPH, "kind": "joint", "region": None},
    "fuseboard_narrow": {"graph": GRAPH, "kind": "inference"},
    "fuseboard_partition_joint": {
        "joint": GRAPH,
        "inputs": [],
        "num_fwd_outputs": 1,
        "static_inputs": [],
        "memory_budget": 1.0,
        "keywords": {},
    },
    "fuseboard_claim": {"graph": GRAPH, "kind": "inference"},
    "fuseboard_plan": {
        "graph": GRAPH,
        "kind": "inference",
        "claims": {},
        "backends": [BackendInfo("liar"), BackendInfo("eager")],
        "pins": {},
        "policy": "priority",
        "min_region_us": 50.0,
        "repeats": "auto",
    },
    "fuseboard_lower": {"region": None, "inputs": []},
    "fuseboard_load": {"artifact": b"", "region": None, "inputs": []},
    "fuseboard_wrap": {
        "lowered": LoweredRegion(print),
        "region": None,
        "tell": print,
        "lower_part": print,
    },
    "fuseboard_export": {
        "graph": GRAPH,
        "inputs": [],
        "names": [],
        "weights": [],
        "path": Path("f.onnx"),
    },
    "fuseboard_verify": {"region": None, "expected": [], "result": [], "inputs": []},
    "fuseboard_measure": {"calls": [lambda: None], "budget_s": 0.1},
    "fuseboard_sampler": {},
    "fuseboard_on_failure": {"region": "r", "plugin": "p", "stage": "run", "error": ValueError()},
    "fuseboard_event": {"event": fuseboard.Event("graph", "g0")},
}
LIES = [
    ("sampler", 3, "it has no method start"),
    ("sampler", FakeSampler(python_frames=None), "python_frames is None of type NoneType"),
    ("decompositions", ["aten.relu"], "the answer is ['aten.relu'] of type list"),
    ("decompositions", {"aten.relu": 3}, "what decomposes aten.relu is 3 of type int"),
    ("fuse_dynamo", (fusion("relu"),), "it isn't a list"),
    ("fuse_dynamo", [fusion("mul")], "node 'mul' isn't in the graph"),
    ("fuse", (fusion("relu"),), "it isn't a list"),
    ("fuse", [fusion("relu"), "add"], "item 1 is 'add' of type str, not Fusion"),
    ("fuse", [fusion("mul")], "node 'mul' isn't in the graph"),
    ("fuse", [Fusion("f", ["relu"], print)], "nodes of 'f' is ['relu'] of type list, not tuple"),
    ("fuse", [Fusion("f", ("relu",), None)], "apply of 'f' can't be called"),
    ("fuse", [Fusion(3, ("relu",), print)], "name is 3 of type int, not str"),
    (
        "fuse",
        [fusion("relu", "add"), fusion("add", name="g")],
        "'g' and 'f' overlap at node 'add'",
    ),
    ("narrow", (Narrowing("bfloat16", "products"),), "it isn't a list"),
    ("narrow", [fusion("relu")], "of type Fusion, not Narrowing"),
    ("narrow", [Narrowing(torch.bfloat16, "products")], "format is torch.bfloat16 of type dtype"),
    ("narrow", [Narrowing("bfloat16", "products", [])], "fusions of 'bfloat16' is [] of type list"),
    ("narrow", [Narrowing("bfloat16", "", (fusion("mul"),))], "node 'mul' isn't in the graph"),
    ("partition_joint", GRAPH, "it isn't a tuple of two"),
    ("partition_joint", (GRAPH, GRAPH, GRAPH), "it isn't a tuple of two"),
    ("partition_joint", (GRAPH, None), "the backward is None of type NoneType"),
    ("claim", Claim(frozenset(), frozenset()), "it isn't a list"),
    ("claim", ["relu"], "item 0 is 'relu' of type str, not Claim or Decline"),
    ("claim", [Claim(["relu"], frozenset())], "nodes is ['relu'] of type list"),
    ("claim", [Claim(frozenset({3}), frozenset())], "an item of nodes is 3 of type int"),
    ("claim", [Claim(frozenset({"mul"}), frozenset())], "node 'mul' isn't in the graph"),
    (
        "claim",
        [Claim(frozenset({"relu"}), frozenset({"add"}))],
        "native node 'add' isn't among its nodes",
    ),
    ("claim", [Claim(frozenset(), frozenset(), together=1)], "together is 1 of type int, not bool"),
    ("claim", [Decline("mul", "why")], "node 'mul' isn't in the graph"),
    ("claim", [Decline("relu", None)], "the reason for 'relu' is None of type NoneType"),
    ("plan", {"relu": "liar"}, "it isn't a Plan"),
    ("plan", Plan([], {}), "placements is [] of type list, not Mapping"),
    ("plan", Plan({"mul": "liar"}, {"mul": "why"}), "node 'mul' isn't in the graph"),
    ("plan", Plan({"relu": 3}, {"relu": "why"}), "an item of placements is 3 of type int"),
    (
        "plan",
        Plan({"relu": "tvm"}, {"relu": "why"}),
        "node 'relu' is placed on 'tvm', not on one of ['eager', 'liar']",
    ),
    ("plan", Plan({"relu": "liar"}, {}), "node 'relu' has no reason"),
    ("lower", lambda inputs: inputs, "it isn't a LoweredRegion"),
    ("lower", LoweredRegion(call=None), "call is None of type NoneType, which can't be called"),
    ("lower", LoweredRegion(print, notes=["a"]), "notes is ['a'] of type list, not tuple"),
    ("lower", LoweredRegion(print, artifact="x"), "artifact is 'x' of type str, not bytes"),
    ("load", print, "it isn't a LoweredRegion"),
    ("wrap", print, "it isn't a LoweredRegion"),
    ("export", [1], "what the file computes is [1] of type list, not tuple"),
    ("export", (1, 2, 3), "3 results for 1 outputs"),
    ("wrap", LoweredRegion(call="graph"), "call is 'graph' of type str, which can't be called"),
    ("verify", True, "it isn't a Verdict"),
    ("verify", Verdict(ok=torch.tensor(True)), "ok is tensor(True) of type Tensor, not bool"),
    ("measure", [1.0], "item 0 is 1.0 of type float, not Measurement"),
    ("measure", [Measurement(1.0, 1.0, 1.0, 1)] * 2, "2 measurements for 1 calls"),
    ("on_failure", "explode", "there is no such action"),
    ("on_failure", ["next"], "there is no such action"),
    ("event", True, "observers answer nothing"),
    ("on_failure", BadRepr("x"), "<BadRepr, whose repr raised RuntimeError> of type BadRepr"),
]


@pytest.mark.parametrize(("hook", "lie", "problem"), LIES, ids=[f"{h}-{p}" for h, _, p in LIES])
def test_a_wrong_answer_is_a_contract_error(hook, lie, problem):
    """It names plugin and hook, shows what was returned and says what is allowed."""
    board = a_board(FakeEntryPoint("liar", backend("liar", {hook: lambda: lie})))
    with pytest.raises(ContractError) as caught:
        board.session(resolve()).call(f"fuseboard_{hook}", "liar", **ASK[f"fuseboard_{hook}"])
    text = str(caught.value)
    assert (caught.value.plugin, caught.value.hook) == ("liar", f"fuseboard_{hook}")
    assert problem in text
    assert text.startswith(f"plugin 'liar', hook fuseboard_{hook}: it returned ")
    assert "Allowed: " in text


RIGHT = [
    ("decompositions", {torch.ops.aten.relu.default: lambda x: x}),
    ("fuse_dynamo", [fusion("relu"), fusion("add", name="g")]),
    ("fuse", [fusion("relu"), fusion("add", name="g")]),
    ("narrow", [Narrowing("bfloat16", "products", (fusion("relu"),), "no instructions for it")]),
    ("partition_joint", (GRAPH, GRAPH)),
    ("claim", [Claim(frozenset({"relu", "add"}), frozenset({"add"})), Decline("x", "an input")]),
    ("plan", Plan({"relu": "liar", "add": "eager"}, {"relu": "why", "add": "why"})),
    ("lower", LoweredRegion(print, notes=("one",))),
    ("wrap", LoweredRegion(print, notes=("one",))),
    ("verify", Verdict(ok=False, problem="strides")),
    ("measure", [Measurement(1.0, 0.9, 1.1, 30)]),
    ("on_failure", "eager"),
    *((hook.removeprefix("fuseboard_"), None) for hook in ASK),
]


@pytest.mark.parametrize(("hook", "answer"), RIGHT)
def test_a_right_answer_passes_as_it_is(hook, answer):
    """The checks refuse lies only; None is always allowed."""
    board = a_board(FakeEntryPoint("honest", backend("honest", {hook: lambda: answer})))
    arguments = dict(ASK[f"fuseboard_{hook}"])
    if hook == "plan":
        arguments["backends"] = [BackendInfo("liar"), BackendInfo("eager")]
    got = board.session(resolve()).call(f"fuseboard_{hook}", "honest", **arguments)
    assert got is answer


def test_every_hook_has_a_liar():
    """A new hook needs one."""
    hooks = {hook for hook, _, _ in LIES} | {"backend"}
    known = {n.removeprefix("fuseboard_") for n in vars(hookspecs) if n.startswith("fuseboard_")}
    assert hooks == known


# --- rules about time ---------------------------------------------------------------------------


def sleeps(region):
    time.sleep(60)


def spins(region):
    count = 0
    while True:
        count += 1


def catches_everything(region):
    count = 0
    try:
        while True:
            count += 1
    except Exception:
        return LoweredRegion(print)


def raises_something_else(region):
    count = 0
    try:
        while True:
            count += 1
    except Exception:
        raise ValueError("nothing to see here") from None


def hanging_call(lower):
    """Ask a plugin that hangs, with a limit of a tenth of a second."""
    board = a_board(FakeEntryPoint("liar", backend("liar", {"lower": lower})))
    opened = board.session(resolve({"hook_limit_s": 0.1}))
    with pytest.raises(HookTimeout) as caught:
        opened.call("fuseboard_lower", "liar", region=None, inputs=[])
    return str(caught.value)


TIMEOUT = (
    "plugin 'liar', hook fuseboard_lower: no answer within hook_limit_s = 0.1 "
    "(set in torch.compile(options=))"
)


@pytest.mark.parametrize("lower", [sleeps, spins, catches_everything, raises_something_else])
def test_a_hook_that_hangs_is_stopped(lower):
    """Also where it sleeps, or catches what should stop it."""
    assert hanging_call(lower) == TIMEOUT

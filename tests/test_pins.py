"""What the user wants where: the settings ``pin`` and ``exclude``, and ``fuseboard.prefer``."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.module_names import split_source
from fuseboard.partition import pins as pins_module
from fuseboard.partition.pins import Rule
from fuseboard.report.data import ledger
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    graph_count,
    last_graph,
    plugged,
)
from tests.support.values import rnd


class Layer(nn.Module):
    """A norm and an MLP of two linear layers, with a residual."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.broken = broken

    def forward(self, x):
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Three layers and a head."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(broken) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _two_backends():
    """``other`` takes everything, ``third`` comes after it."""
    ledger.clear()
    with plugged("other"), plugged("third"):
        yield


def run(target, *backends, grad=False, like=None, **options):
    """Compile, call, compare with eager; a training step where ``grad``."""
    fn = compiled(target, *(backends or ("other", "third", "eager")), **options)
    results = []
    for function in (fn, like or target):
        x = rnd(5, 8).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            y = function(x)
        if grad:
            y.square().sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(*results)
    assert not all_trips()


def homes(kind="inference", op=None):
    """Node → backend in the newest graph of a kind; only of ops whose name contains ``op``."""
    return {n.name: n.backend for n in last_graph(kind).nodes if op is None or op in n.op}


def reasons(kind="inference"):
    return {node.name: node.reason for node in last_graph(kind).nodes}


# --- patterns and paths --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("layers.*.mlp", ["layers.0.mlp", "layers.11.mlp.0"], ["layers.mlp", "layers.0.attn.mlp"]),
        ("layers", ["layers", "layers.0"], ["layers2", "model.layers"]),
        ("layers.1", ["layers.1.norm"], ["layers.10", "layers.0.1"]),
        ("layers.[12]", ["layers.1", "layers.2.mlp"], ["layers.3", "layers.12"]),
        ("layers.[!12]", ["layers.0"], ["layers.1"]),
        ("layer?.fc", ["layer1.fc"], ["layer.fc", "layer12.fc"]),
        ("**.mlp", ["mlp", "layers.0.mlp", "a.b.mlp.c"], ["layers.0", "amlp"]),
        ("encoder.**.q", ["encoder.q", "encoder.layers.0.attn.q"], ["decoder.q"]),
        ("**", ["a", "a.b"], []),
        ("aten.mm", ["aten.mm.default"], ["aten.addmm.default", "aten.mm2.default"]),
        ("aten.*_backward", ["aten.gelu_backward.default"], ["aten.gelu.default"]),
        ("mkldnn.*", ["mkldnn._linear_pointwise.default"], ["aten.mkldnn.default"]),
        ("aten.add.Tensor", ["aten.add.Tensor"], ["aten.add.Scalar"]),
        ("a+b.(x)", ["a+b.(x)"], ["aab.x"]),
    ],
)
def test_a_pattern_matches_part_by_part_and_what_lies_below(pattern, yes, no):
    """Wildcards stay within a part, but for ``**``; special characters mean themselves."""
    rule = Rule(pattern, "eager", "", "")
    assert [name for name in yes + no if rule.matches(name)] == yes


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("L['self'].layers.0.mlp", ("L['self']", "layers.0.mlp")),
        ("L['self']", ("L['self']", "")),
        ("G['model'].head", ("G['model']", "head")),
        ("L['mods'][0].fc", ("L['mods']", "0.fc")),
        ("L['fn'].args[0].layers.1", ("L['fn']", "args.0.layers.1")),
        ("L['self']._modules['layers']._modules['0']", ("L['self']", "layers.0")),
        ("L['self'].inner._orig_mod.fc", ("L['self']", "inner.fc")),
        ("L['x'].blocks['a b'].fc", ("L['x']", "blocks.a b.fc")),
        ("layers.0.mlp", ("", "layers.0.mlp")),
    ],
)
def test_dynamos_names_of_modules_become_paths(source, parts):
    """Whatever the function is that Dynamo started from."""
    assert split_source(source) == parts


# --- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_pinned_module_runs_on_its_backend(grad):
    """Everything inside of it, forward and backward, and nothing else."""
    run(Net(), pin={"layers.*.mlp": "third"}, grad=grad)
    if not grad:
        graph = last_graph()
        pinned = {n.op for n in graph.nodes if n.backend == "third"}
        assert pinned == {"aten.t.default", "aten.addmm.default", "aten.gelu.default"}
        assert [r.backend for r in graph.regions].count("third") == 3
        assert "pin.layers.*.mlp = 'third'" in reasons()["gelu"]
        assert list(homes(op="addmm").values()) == ["third"] * 6 + ["other"]
        return
    assert set(homes("backward", "gelu_backward").values()) == {"third"}
    assert set(homes("backward", "layer_norm").values()) == {"other"}
    matrices = list(homes("backward", "aten.mm").values())
    assert (matrices.count("other"), matrices.count("third")) == (2, 12)


def test_a_pinned_op_runs_on_its_backend():
    """By its name, with or without the overload."""
    for name in ("aten.gelu", "aten.gelu.default", "aten.ge?u"):
        torch._dynamo.reset()
        run(Net(), pin={name: "third"})
        assert set(homes(op="gelu").values()) == {"third"}
        assert set(homes(op="addmm").values()) == {"other"}


def test_items_follow_what_they_are_items_of():
    """A pinned layer norm takes its getitems along."""
    run(Net(), pin={"aten.native_layer_norm": "third"}, grad=True)
    assert set(homes("forward", "layer_norm").values()) == {"third"}
    assert set(homes("forward", "getitem").values()) == {"third"}


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        ({"layers.*.mlp": "third", "layers.1.mlp": "other"}, ["third", "other", "third"]),
        ({"layers.1.mlp": "other", "layers.*.mlp": "third"}, ["third", "other", "third"]),
        ({"layers": "third", "layers.*.mlp": "eager"}, ["eager"] * 3),
        ({"layers.*.mlp": "third", "layers.[0-9].mlp": "other"}, ["other"] * 3),
        ({"**": "third", "layers.2": "eager"}, ["third", "third", "eager"]),
        ({"aten.*": "third", "layers.2": "eager"}, ["third", "third", "eager"]),
        ({"layers": "eager", "aten.gelu": "third"}, ["third"] * 3),
    ],
)
def test_the_more_specific_pin_counts_then_the_later(pin, expected):
    """More parts without a wildcard, then more letters, then the order of the table."""
    run(Net(), pin=pin)
    assert list(homes(op="gelu").values()) == expected


def test_a_pin_counts_for_more_than_the_plans_own_rules():
    """Too little work for a region, mostly carried, too many regions: it is followed."""
    tiny = {"min_region_us": 1e6}
    run(Net(), "third", "other", "eager", pin={"head": "other"}, **tiny)
    assert homes()["addmm_6"] == "other"
    torch._dynamo.reset()
    run(Net(), pin={"layers.*.norm": "third"})  # 7 regions, where 4 are the most
    assert [r.backend for r in last_graph().regions].count("third") == 3
    torch._dynamo.reset()

    def carries(graph):
        every = frozenset(n.name for n in graph.graph.nodes if n.op == "call_function")
        return [fuseboard.Claim(every, frozenset())]

    with plugged("carrier", claim=carries):
        run(Net(), "carrier", "other", "eager", pin={"head": "carrier"})
    assert homes()["addmm_6"] == "carrier"
    assert set(homes(op="gelu").values()) == {"other"}


def test_what_isnt_pinned_still_goes_to_the_backend_that_can_run_the_rest():
    """A pin that makes many regions takes nothing from the others but its own."""
    with plugged("some", claim=claim_ops("addmm", "t")):
        run(Net(), "some", "other", "eager", min_region_us=0, pin={"aten.gelu": "eager"})
    assert set(homes(op="gelu").values()) == {"eager"}
    assert set(homes(op="addmm").values()) == {"other"}
    assert "other can run all of it" in reasons()["addmm"]


@pytest.mark.usefixtures("policy_measured")
def test_candidates_differ_in_what_isnt_pinned():
    """A pinned backend has that in each of them, and the rest only as a candidate itself."""
    run(Net(), pin={"aten.gelu": "third"})
    names = [row.name for row in last_graph().candidates]
    assert names == ["eager+third", "other+third", "third"]
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    claim = claim_ops("gelu", "native_layer_norm", "getitem")
    with plugged("some", claim=claim, info={"compiles_quickly": True}):
        run(model, "some", "eager", pin={"aten.gelu": "some"}, min_region_us=0.0)
    assert [row.name for row in last_graph().candidates] == ["eager+some", "eager+some (2)"]
    assert set(homes(op="gelu").values()) == {"some"}


def test_a_pin_that_cant_be_followed_says_why():
    """In the node's reason, in the graph's notes and in the text of an explanation."""
    with plugged("picky", claim=claim_ops("addmm", "t")):
        fn = compiled(Net(), "other", "picky", "eager", pin={"layers.1.mlp": "picky"})
        with torch.no_grad():
            explanation = fuseboard.explain(fn, rnd(5, 8))
    (graph,) = explanation.graphs
    (gelu,) = [n for n in graph.nodes if n.name == "gelu_1"]
    assert gelu.backend == "other"
    assert "not on picky, as pin.layers.1.mlp = 'picky' wants: another op" in gelu.reason
    note = (
        "pin.layers.1.mlp = 'picky', set in torch.compile(options=): followed for 4 of 5 ops; "
        "1 not: another op"
    )
    assert note in graph.notes
    assert note in " ".join(str(explanation).replace("note: ", "").split())


# --- exclude -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_backend_runs_nothing_that_it_is_excluded_from(grad):
    """The next one does, and the reason says who wanted it."""
    run(Net(), exclude={"other": ["layers.1"]}, grad=grad, min_region_us=0)
    for kind in ("forward", "backward") if grad else ("inference",):
        assert list(homes(kind, "gelu").values()) == ["other", "third", "other"]
        (graph,) = [g for g in ledger.graphs() if g.kind == kind]
        told = {n.name: n.declined.get("other", "") for n in graph.nodes}
        assert any("excluded by exclude.other = 'layers.1'" in text for text in told.values())
        assert any("set in torch.compile(options=)" in text for text in told.values())
    kind = "forward" if grad else "inference"
    assert list(homes(kind, "addmm").values()) == ["other"] * 2 + ["third"] * 2 + ["other"] * 3


def test_exclude_has_the_last_word():
    """Over a pin, and a preference."""

    def f(x):
        with fuseboard.prefer("third"):
            return torch.sigmoid(x) + x.exp()

    run(f, pin={"aten.exp": "third"}, exclude={"third": ["aten.exp", "aten.sigmoid"]})
    assert homes() == {"sigmoid": "other", "exp": "other", "add": "third"}
    assert "excluded by exclude.third = 'aten.exp'" in reasons()["exp"]
    assert "excluded by exclude.third = 'aten.sigmoid'" in reasons()["sigmoid"]


# --- prefer --------------------------------------------------------------------------------------


class Marked(nn.Module):
    """The second of three linear layers is preferred elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x).sin()
        with fuseboard.prefer("third"):
            y = self.second(x)
            y = y.sigmoid() * y  # its gradient is a sum
        return self.third(y + x)


def test_code_inside_prefer_runs_there_without_a_graph_break():
    """Forward and backward; the sum of gradients within it, too, that around it not."""
    fn = torch.compile(
        Marked(),
        backend="fuseboard",
        fullgraph=True,
        options={"backends": ["other", "third", "eager"]},
    )
    x = rnd(5, 8).requires_grad_()
    fn(x).sum().backward()
    assert not all_trips()
    assert list(homes("forward", "addmm").values()) == ["other", "third", "other"]
    assert homes("forward", "sigmoid") == {"sigmoid": "third"}
    assert list(homes("backward", "sigmoid_backward").values()) == ["third"]
    assert list(homes("backward", "aten.add").values()) == ["third", "other"]
    assert list(homes("backward", "cos").values()) == ["other"]


def test_marked_code_gives_eagers_values():
    """Forward and gradients."""
    run(Marked(), grad=True)
    run(Marked())


def test_the_innermost_preference_counts_and_a_pin_beats_it():
    """As contexts nest."""

    def f(x):
        with fuseboard.prefer("third"):
            a = x.sin()
            with fuseboard.prefer("eager"):
                b = a.exp()
            c = b.cos()
        return c.relu()

    run(f)
    assert homes() == {"sin": "third", "exp": "eager", "cos": "third", "relu": "other"}
    torch._dynamo.reset()
    run(f, pin={"aten.exp": "other", "aten.cos": "eager"})
    assert homes() == {"sin": "third", "exp": "other", "cos": "eager", "relu": "other"}


def test_preferring_a_backend_that_isnt_in_use_is_told_and_breaks_nothing():
    """A model may be written for more machines than this one."""

    def f(x):
        with fuseboard.prefer("tvm"):
            return x.sin() + 1

    run(f)
    assert set(homes().values()) == {"other"}
    (note,) = last_graph().notes
    assert note.startswith("fuseboard.prefer('tvm'): followed for 0 of 2 ops; 2 not: ")
    assert "'tvm' isn't among the backends in use, other, third, eager" in note


@pytest.mark.parametrize("value", ["", None, 3, ["inductor"]])
def test_prefer_takes_a_name(value):
    """Also in eager, at once."""
    with pytest.raises(fuseboard.SettingsError, match=r"fuseboard\.prefer\(.*\): allowed: "):
        with fuseboard.prefer(value):
            pytest.fail("it ran")


def test_prefer_does_nothing_in_eager():
    """It can stay in code that isn't compiled."""
    with fuseboard.prefer("nonsuch"):
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


# --- what is wrong -------------------------------------------------------------------------------


def error_of(target, options, *args):
    """The text of the SettingsError; nothing is lowered before it."""
    lowered = []
    with plugged("spy", call=lambda call, region: lowered.append(region) or call):
        fn = torch.compile(target, backend="fuseboard", options=options)
        with torch.no_grad(), pytest.raises(Exception, match="SettingsError") as caught:
            fn(*(args or (rnd(5, 8),)))
    assert not lowered
    assert graph_count("inference", "forward") == 0
    return str(caught.value)


SPIED = {"backends": ["spy", "other", "eager"]}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.*.mpl", "Nearest module paths: layers.*.mlp"),
        ("layer.*.mlp", "Nearest module paths: layers.*.mlp"),
        ("haed", "Nearest module paths: head"),
        ("zzzz", "Nearest module paths: head, layers"),
        ("layers.*.mlp.forward", "Nearest module paths: layers.*.mlp"),
        ("aten.adm", "Nearest ops: aten.add"),
        ("aten.gellu", "Nearest ops: aten.gelu"),
    ],
)
@pytest.mark.parametrize("setting", ["pin", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(setting, pattern, near):
    """It names the pattern, where it was set, and what is near."""
    value = {pattern: "other"} if setting == "pin" else {"other": ["head", pattern]}
    text = error_of(Net(), {**SPIED, setting: value})
    what = f"pin.{pattern} = 'other'" if setting == "pin" else f"exclude.other = {pattern!r}"
    assert f"{what}, set in torch.compile(options=): {pattern!r} matches no module" in text
    assert near in text


def test_an_error_names_a_context_as_its_place():
    """``with fuseboard.settings(...)`` speaks of one model, too."""
    with fuseboard.settings(pin={"nonsuch": "other"}):
        text = error_of(lambda x: x + 1, SPIED)
    assert "pin.nonsuch = 'other', set in fuseboard.settings(...)" in text
    assert "There are no modules in what is compiled." in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pin": {"head": "ohter"}}, "no plugin named 'ohter'. Did you mean 'other'?"),
        ({"exclude": {"ohter": ["head"]}}, "no plugin named 'ohter'. Did you mean 'other'?"),
        ({"pin": {"head": "away"}}, "'away' is unavailable: no such chip"),
        ({"exclude": {"away": ["head"]}}, "'away' is unavailable: no such chip"),
        ({"pin": {"head": "third"}}, "'third' isn't among the backends in use: spy, other, eager"),
        ({"pin": {"head": "defaults"}}, "plugin 'defaults' has no backend"),
        ({"exclude": {"eager": ["head"]}}, "'eager' takes what no other backend does"),
    ],
)
def test_a_backend_that_cant_be_had_is_an_error(options, problem):
    """Unknown, unavailable, not in use; or eager, which can't be excluded."""
    with plugged("away", info={"available": False, "reason": "no such chip"}):
        text = error_of(Net(), {**SPIED, **options})
    assert problem in text
    assert "set in torch.compile(options=)" in text


def test_an_op_that_isnt_in_the_graph_is_a_note():
    """It may be in another one: of the backward, or after a graph break."""
    run(Net(), pin={"aten.sort": "third"})
    assert (
        "pin.aten.sort = 'third', set in torch.compile(options=): matches nothing in this graph"
        in last_graph().notes
    )


def test_a_pattern_of_a_file_that_matches_nothing_is_a_warning(tmp_path, monkeypatch):
    """It was written for another model of the project: one warning, and a note."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.fuseboard.pin]\n"decoder.*.mlp" = "third"\nhead = "third"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pins_module, "_warned", set())
    with pytest.warns(UserWarning, match=r"pin\.decoder\.\*\.mlp = 'third', set in .*pyproject"):
        run(Net())
    assert homes()["addmm_6"] == "third"
    assert any("'decoder.*.mlp' matches no module" in note for note in last_graph().notes)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Net())


# --- from which function a model is called -------------------------------------------------------


MODEL = Net()


class Trainer:
    """Not a module itself."""

    def __init__(self) -> None:
        self.model = Net()

    def step(self, x):
        return self.model(x)


def closure():
    model = Net()
    return lambda x: model(x)


def through_global(x):
    return MODEL(x)


def call(model, x):
    return model(x)


def test_the_paths_of_a_sequential_are_numbers():
    """They are told one by one: all of them at once would be ``*``."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    said = error_of(model, {"backends": ["spy", "eager"], "pin": {"gelu": "spy"}})
    assert "Nearest module paths: 0, 1." in said


@pytest.mark.parametrize(
    "target",
    [Net(), through_global, closure(), Trainer().step, partial(call, Net()), Net().forward],
    ids=["module", "global", "closure", "attribute", "partial", "method"],
)
def test_paths_begin_at_the_model(target):
    """However it is reached."""
    run(target, pin={"layers.1.mlp": "third"})
    assert list(homes(op="gelu").values()) == ["other", "third", "other"]
    torch._dynamo.reset()
    ledger.clear()
    assert "Nearest module paths: layers.*.mlp" in error_of(
        target, {**SPIED, "pin": {"layers.*.mpl": "other"}}
    )


def test_a_compiled_model_inside_of_another_is_named_from_itself():
    """What is compiled is the inner one."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Net(), nn.ReLU())

        def forward(self, x):
            return self.encoder(x)

    outer = Outer()
    inner = outer.encoder[0]
    options = {"backends": ["other", "third", "eager"], "pin": {"layers.1": "third"}}
    outer.encoder[0] = torch.compile(inner, backend="fuseboard", options=options)
    with torch.no_grad():
        torch.testing.assert_close(outer(rnd(5, 8)), inner(rnd(5, 8)).relu())
    assert list(homes(op="gelu").values()) == ["other", "third", "other"]


def test_pins_hold_across_graph_breaks():
    """A pin may mean what is in another graph, or in a function that is compiled apart."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x).sin()
            torch._dynamo.graph_break()
            return self.second(x).cos()

    run(Halves(), pin={"second": "third"})
    first, second = [g for g in ledger.graphs() if g.kind == "inference"]
    assert {n.backend for n in first.nodes} == {"other"}
    assert "third" in {n.backend for n in second.nodes}
    assert any("matches nothing in this graph" in note for note in first.notes)

    ledger.clear()
    torch._dynamo.reset()
    run(Net(broken=True), pin={"layers.*.mlp": "third"})
    graphs = [g for g in ledger.graphs() if g.kind == "inference"]
    gelus = [n.backend for g in graphs for n in g.nodes if "gelu" in n.op]
    assert gelus
    assert set(gelus) == {"third"}
    norms = [n.backend for g in graphs for n in g.nodes if "layer_norm" in n.op]
    assert set(norms) == {"other"}
    torch._dynamo.reset()
    ledger.clear()
    fn = compiled(Net(broken=True), "other", "eager", pin={"layers.*.mpl": "other"})
    with torch.no_grad(), pytest.raises(Exception, match=r"Nearest module paths: layers\.\*\.mlp"):
        fn(rnd(5, 8))

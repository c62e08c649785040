"""Explanations: what ran where and why, and that explaining changes nothing."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import fuseboard
from fuseboard.cli.main import app
from fuseboard.contracts import Trip
from fuseboard.explanations.explanation import elsewhere, explained
from fuseboard.explanations.text import as_text, show
from fuseboard.report import words
from fuseboard.report.data import FusionReport, GraphReport, NodeReport, RegionReport
from tests.support.backends import plugged

EXAMPLE = Path(__file__).parents[1] / "examples" / "explain_me.py"


@pytest.fixture(autouse=True)
def _eager_only(monkeypatch):
    """No compiler: what is tested here is what is said of it."""
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")


class Counted(nn.Module):
    """A linear layer; its buffer counts the calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x).relu()


class Counting:
    """A backend that runs Dynamo's graph and remembers for which inputs it was asked."""

    def __init__(self):
        self.inputs = []

    def __call__(self, graph, inputs):
        self.inputs.append(inputs)
        return graph

    @property
    def dynamic(self):
        return [any(isinstance(i, torch.SymInt) for i in inputs) for inputs in self.inputs]


def kinds(explanation):
    return [graph.kind for graph in explanation.graphs]


def relu_twice(x):
    return torch.relu(torch.relu(x) - 1)


# --- what is found ------------------------------------------------------------------------------


def logged(function):
    """A decorator that a library puts on all its models."""

    @functools.wraps(function)
    def wrapper(self, *args):
        return function(self, *args)

    return wrapper


def passed_on(function):
    """A decorator that knows no names of arguments."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @logged
    @logged
    def forward(self, x):
        return torch.relu(x)


class PassedOn(nn.Module):
    @passed_on
    @logged
    def forward(self, x):
        return torch.relu(x)


@pytest.mark.parametrize("model", [Decorated, PassedOn])
@pytest.mark.whole
def test_a_decorated_forward_is_named_by_its_class(model):
    """The frame is the author's function, not the decorator's, which many models share."""
    (graph,) = fuseboard.explain(model(), torch.randn(3, 5)).graphs
    line = model.forward.__wrapped__.__wrapped__.__code__.co_firstlineno
    assert graph.frame.endswith(f"{model.__name__}.forward ({__file__}:{line})")


def test_graphs_have_regions_ops_and_source_lines():
    """One inference graph with its ops in one region, and the user's lines."""
    explanation = fuseboard.explain(relu_twice, torch.randn(3, 5))
    (graph,) = explanation.graphs
    assert graph.kind == "inference"
    assert "relu_twice" in graph.frame
    assert graph.backends == ("eager",)
    (region,) = graph.regions
    assert region.whole
    assert sum(region.ops.values()) == 3 == len(graph.nodes)
    line = relu_twice.__code__.co_firstlineno + 1
    assert region.sources == (f"{__file__}:{line}",)
    assert explanation.breaks == []
    assert elsewhere(graph) == []


def test_a_graph_break_has_its_reason_and_line():
    """Where Dynamo ends a graph: the function, the line, what it couldn't trace."""

    def broken(x):
        x = x.sin()
        print("not traced")
        return x.cos()

    explanation = fuseboard.explain(broken, torch.randn(4))
    (found,) = explanation.breaks
    assert "print" in found.explanation
    assert found.source == f"{__file__}:{broken.__code__.co_firstlineno + 2}"
    assert found.function == "broken"
    assert not found.uncompiled
    assert kinds(explanation) == ["inference", "inference"]
    assert "broken, resumed at line" in str(explanation)


def test_a_break_in_an_inlined_function_is_told_once_with_the_way_there():
    """The caller's trace and the function's own meet the same break."""

    def inner(x):
        print("not traced")
        return x * 2

    def outer(x):
        return inner(x.sin()) + inner(x.cos())

    explanation = fuseboard.explain(outer, torch.randn(4))
    (found,) = explanation.breaks
    assert found.count == 2
    assert found.source.endswith(f":{inner.__code__.co_firstlineno + 1}")
    assert found.stack[0].endswith("in outer")


def test_a_branch_on_a_value_is_named():
    """Dynamo's internal name for it doesn't reach the user."""

    def branch(x):
        return x + 1 if x.sum() > 0 else x - 1

    (found,) = fuseboard.explain(branch, torch.ones(4)).breaks
    assert found.reason == "Data-dependent branching"
    assert "torch.where" in found.hints[0]


def test_a_function_left_to_python_is_told():
    """A break that Dynamo can't resume from leaves the function to Python: never silent."""

    def loop(x):
        for _ in range(2):
            x = x.sin()
            print("not traced")
        return x

    explanation = fuseboard.explain(loop, torch.randn(4))
    assert [found.uncompiled for found in explanation.breaks] == [True]
    assert "left to Python" in str(explanation)


def test_a_module_that_needs_grad_shows_its_backward():
    """Joint, forward and backward graphs are seen; no ``.grad`` is touched."""
    model = Counted()
    before = model.linear.bias.grad = torch.full((3,), 7.0)
    explanation = fuseboard.explain(model, torch.randn(2, 5))
    assert kinds(explanation) == ["joint", "forward", "backward"]
    assert model.linear.weight.grad is None
    assert model.linear.bias.grad is before
    assert before.tolist() == [7.0] * 3


def test_under_no_grad_there_is_no_backward():
    """The caller's grad mode holds."""
    with torch.no_grad():
        assert kinds(fuseboard.explain(Counted(), torch.randn(2, 5))) == ["inference"]


def test_an_argument_that_the_caller_computed_keeps_its_graph():
    """The backward stops at the arguments, so the caller's own still runs."""
    leaf = torch.randn(2, 5, requires_grad=True)
    argument = leaf.exp()
    explanation = fuseboard.explain(relu_twice, argument)
    assert kinds(explanation) == ["joint", "forward", "backward"]
    argument.sum().backward()
    torch.testing.assert_close(leaf.grad, leaf.detach().exp())


def test_a_training_step_that_runs_its_own_backward():
    """The graph is gone when the step returns its loss; its backward was seen all the same."""
    model = Counted()

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    explanation = fuseboard.explain(step, torch.randn(2, 5))
    assert "backward" in kinds(explanation)
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize(
    "fn",
    [torch.sin, functools.partial(torch.add, 1), nn.ReLU(), Counted().eval().forward],
    ids=["builtin", "partial", "module", "method"],
)
def test_whatever_can_be_called_can_be_explained(fn):
    """Dynamo starts from functions and modules only; others get a function around them."""
    with torch.no_grad():
        assert kinds(fuseboard.explain(fn, torch.randn(2, 5))) == ["inference"]


# --- compiled callables -------------------------------------------------------------------------


def test_the_options_of_a_compiled_function_hold():
    """What was compiled with fuseboard is explained under its own options and ``dynamic``."""

    def doubled(x):
        return x.new_zeros(x.shape[0] * 2)

    with plugged("fast"):
        options = {"backends": ["fast", "eager"]}
        compiled = torch.compile(doubled, backend="fuseboard", dynamic=True, options=options)
        (graph,) = fuseboard.explain(compiled, torch.randn(3, 5)).graphs
    assert graph.backends == ("fast", "eager")
    assert {node.backend: node.reason for node in graph.nodes}["board"] == "arithmetic on sizes"


@pytest.mark.parametrize("compiled_in_place", [True, False])
def test_a_compiled_module_is_explained_though_it_is_compiled_already(compiled_in_place):
    """Dynamo's cache would answer its calls; the explanation compiles anew."""
    model = Counted().eval().requires_grad_(False)
    compiled = model
    if compiled_in_place:
        model.compile(backend="fuseboard")
    else:
        compiled = torch.compile(model, backend="fuseboard")
    x = torch.randn(2, 5)
    compiled(x)
    assert kinds(fuseboard.explain(compiled, x)) == ["inference"]
    assert kinds(fuseboard.explain(compiled, x)) == ["inference"]
    assert model.calls == 1


def test_another_backends_function_is_explained_with_a_note():
    """What fuseboard would make of it."""
    compiled = torch.compile(relu_twice, backend="aot_eager")
    explanation = fuseboard.explain(compiled, torch.randn(3, 5))
    assert kinds(explanation) == ["inference"]
    assert "another backend" in explanation.notes[0]
    assert explanation.notes[0] in " ".join(str(explanation).split())


# --- what nodes read and compute ----------------------------------------------------------------


def test_nodes_tell_what_they_read_compute_and_belong_to():
    """Names, dtypes and shapes, the module's path; weights are told from other inputs."""
    with torch.no_grad():
        (graph,) = fuseboard.explain(Counted(), torch.randn(2, 5)).graphs
    inputs = {node.value: node.static for node in graph.inputs}
    assert inputs["float32[3, 5]"]  # the weight
    assert not inputs["float32[2, 5]"]
    nodes = {node.op: node for node in graph.nodes}
    linear, relu = nodes["aten.addmm.default"], nodes["aten.relu.default"]
    assert (linear.value, linear.module) == ("float32[2, 3]", "linear")
    assert relu.inputs == (linear.name,)
    assert relu.name in graph.outputs
    names = {node.name for node in [*graph.inputs, *graph.nodes]}
    assert all(set(node.inputs) <= names for node in graph.nodes)
    assert set(graph.outputs) <= names


def test_symbolic_sizes_are_told_as_symbols():
    """And telling them specialises nothing."""

    def doubled(x):
        return torch.cat([x, x]).sin()

    compiled = torch.compile(doubled, backend="fuseboard", dynamic=True)
    (graph,) = fuseboard.explain(compiled, torch.randn(3, 5)).graphs
    (sine,) = [node for node in graph.nodes if node.op == "aten.sin.default"]
    assert re.fullmatch(r"float32\[2\*s\d+, s\d+\]", sine.value)


def test_backward_nodes_name_the_forwards_module():
    """What a gradient is of."""
    *_, backward = fuseboard.explain(Counted(), torch.randn(2, 5)).graphs
    assert "linear" in {node.module for node in backward.nodes}
    assert not any(node.static for node in backward.inputs)


def test_ops_without_a_line_of_the_users_are_shown():
    """A bare Sequential's ops come from torch's own files: the module stands for the line."""
    with torch.no_grad():
        text = str(fuseboard.explain(nn.Sequential(nn.Linear(5, 3)), torch.randn(2, 5)))
    assert "(Linear)" in text


# --- nothing is changed -------------------------------------------------------------------------


def test_the_users_compiled_code_stays():
    """A function compiled before isn't compiled again after any number of explanations."""
    backend = Counting()
    compiled = torch.compile(relu_twice, backend=backend)
    compiled(torch.randn(3, 5))
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert kinds(fuseboard.explain(relu_twice, torch.randn(3, 5))) == ["inference"]
    compiled(torch.randn(3, 5))
    assert len(backend.inputs) == 1
    compiled(torch.randn(3, 6))  # the recompile limit isn't used up
    assert len(backend.inputs) == 2


def test_sizes_seen_in_an_explanation_make_nothing_dynamic():
    """Dynamo makes a size dynamic that it sees change; explanations don't count."""
    backend = Counting()
    fuseboard.explain(relu_twice, torch.randn(3, 5))
    torch.compile(relu_twice, backend=backend)(torch.randn(4, 5))
    assert backend.dynamic == [False]


def test_random_numbers_and_buffers_are_as_before():
    """The call draws numbers and counts itself, and neither is left."""
    model = Counted()

    def noisy(x):
        return model(x) + torch.rand(2, 3)

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fuseboard.explain(noisy, torch.randn(2, 5, generator=torch.Generator()))
    assert torch.equal(torch.rand(3), expected)
    batch_norm = nn.BatchNorm1d(5)
    buffers = {name: buffer.clone() for name, buffer in batch_norm.named_buffers()}
    fuseboard.explain(batch_norm, torch.randn(4, 5))
    for name, buffer in batch_norm.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_dynamos_own_error_passes_through():
    """A model that can't be captured: the error is Dynamo's, and explaining goes on to work."""

    def broken(x):
        print("not traced")
        return x.sin()

    compiled = torch.compile(broken, backend="fuseboard", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        fuseboard.explain(compiled, torch.randn(3))
    assert len(fuseboard.explain(broken, torch.randn(3)).breaks) == 1


def test_the_users_own_error_passes_through():
    """An index out of range is eager's IndexError."""

    def wrong(x):
        return [x.sin()][len(x.shape)]

    with pytest.raises(IndexError):
        fuseboard.explain(wrong, torch.randn(3))


def test_a_wrong_setting_is_one_plain_error():
    """Not wrapped in Dynamo's BackendCompilerFailed, and before anything runs."""
    with fuseboard.settings(backends=["nonsuch"]), pytest.raises(fuseboard.SettingsError):
        fuseboard.explain(pytest.fail, "it ran")


# --- reasons and trips --------------------------------------------------------------------------


def picky(graph, options):
    """Claims all but relu."""

    def why_not(node):
        return "issue 12: relu of NaN" if "relu" in str(node.target) else None

    return fuseboard.claim_nodes(graph, why_not)


def test_ops_that_arent_on_the_first_backend_have_its_reason():
    """The first backend's own words, with how many ops, and where they run instead."""

    def wide(x):
        return torch.relu(torch.mm(x, x)) + 1

    with plugged("picky", claim=picky), fuseboard.settings(backends=["picky", "eager"]):
        explanation = fuseboard.explain(wide, torch.randn(400, 400))
    (group,) = elsewhere(explanation.graphs[0])
    assert group.reason == "issue 12: relu of NaN"
    assert group.backend == "eager"
    assert sum(group.ops.values()) == 1
    assert group.sources == (f"{__file__}:{wide.__code__.co_firstlineno + 1}",)
    text = str(explanation)
    assert re.search(r"not on picky, which comes first:\n +1 +issue 12: relu of NaN → eager", text)
    assert explanation.as_dict()["graphs"][0]["elsewhere"][0]["reason"] == group.reason


def raises(region):
    raise ValueError("no such instruction")


def fails_when_called(region):
    def call(args):
        raise ValueError("no such instruction")

    return fuseboard.LoweredRegion(call=call)


@pytest.mark.parametrize(("lower", "stage"), [(raises, "lower"), (fails_when_called, "run")])
def test_a_trip_is_told_with_plugin_stage_region_line_error_and_what_ran(lower, stage):
    """Nothing that the board contained is silent, at compile time or in the first call."""
    with plugged("clumsy", lower=lower), fuseboard.settings(backends=["clumsy", "eager"]):
        explanation = fuseboard.explain(relu_twice, torch.randn(30, 50))
    (trip,) = explanation.graphs[0].trips
    assert (trip.plugin, trip.stage, trip.instead) == ("clumsy", stage, "eager")
    text = " ".join(str(explanation).split())
    line = relu_twice.__code__.co_firstlineno + 1
    assert "1 trip" in text
    assert f"tripped: clumsy in stage {stage} on {trip.region}" in text
    assert f"test_explain.py:{line} " in text
    assert "ValueError: no such instruction ran instead: eager" in text


# --- as data and as text ------------------------------------------------------------------------


def test_an_explanation_is_json():
    """It holds strings and numbers only."""
    told = json.loads(json.dumps(fuseboard.explain(Counted(), torch.randn(2, 5)).as_dict()))
    assert [graph["kind"] for graph in told["graphs"]] == ["joint", "forward", "backward"]
    assert {"name", "op", "backend", "reason", "source"} <= set(told["graphs"][1]["nodes"][0])
    assert told["breaks"] == []


def test_the_last_report_is_of_the_newest_compile():
    """Its graphs only, the backward included; without a word on breaks, which nobody watched."""
    model = Counted()
    torch.compile(relu_twice, backend="fuseboard")(torch.randn(3))
    torch.compile(model, backend="fuseboard")(torch.randn(2, 5)).sum().backward()
    report = fuseboard.last_report()
    assert kinds(report) == ["joint", "forward", "backward"]
    assert report.breaks is None
    assert "graph break" not in str(report)


def test_nothing_compiled_is_said():
    """No graphs, no breaks: a sentence instead of an empty page."""
    with explained() as explanation:
        pass
    assert "Nothing was compiled" in str(explanation)


def test_text_fits_80_columns_and_is_plain():
    """Piped text has no colours, no trailing blanks, and folds with its indentation."""
    explanation = fuseboard.explain(Counted(), torch.randn(2, 5))
    graph = explanation.graphs[1]
    graph.notes.append("a word " * 30)
    graph.trips.append(Trip("liar", "lower", "r", "an error " * 20, "eager", "file.py:3"))
    lines = as_text(explanation, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def a_graph():
    """Two regions that share their code, one of them fused and hoisted, and a node of the board."""
    fusions = [FusionReport(i, "linear+gelu", "fast", ("a", "b"), applied=i > 0) for i in range(3)]
    first = RegionReport(
        name="inference0.region0",
        backend="fast",
        ops={"aten.addmm.default": 3, "aten.gelu.default": 3, "operator.getitem": 9},
        sources=("/a/model.py:30", "/a/model.py:12", "/b/other.py:5"),
        fusions=fusions,
        hoisted=4,
        notes=["sdpa fell back", "sdpa fell back"],
        lower_s=1.25,
    )
    again = RegionReport(name="inference0.region1", backend="fast", ops={}, same_as=first.name)
    return GraphReport(
        name="inference0",
        kind="inference",
        frame="3/1 Net.forward (/a/model.py:10)",
        backends=("fast", "eager"),
        nodes=[NodeReport("size", "sym_size", "board", "", "arithmetic on sizes")],
        regions=[first, again],
        seconds={"lower": 1.25},
    )


def test_regions_that_share_code_are_one_row():
    """What was lowered once is shown once, with how often it is used."""
    text = as_text(fuseboard.Explanation([a_graph()]))
    for told in (
        "Net.forward (/a/model.py:10)",
        "compile 3/1",
        "region0 ×2",
        "addmm ×3, gelu ×3",
        "linear+gelu ×2 (1 switched off)",
        "4 values of weights",
        "from /a/model.py:12-30",
        "from /b/other.py:5",
        "1.25",
        "1 op run by the board itself: arithmetic on sizes",
    ):
        assert told in text
    assert "region1" not in text
    assert "getitem" not in text
    assert text.count("sdpa fell back") == 1


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """``fuseboard explain`` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield lambda *arguments: CliRunner().invoke(app, ["explain", *map(str, arguments)])
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_command_explains_a_returned_call(command):
    """The example's ``attention`` returns a model and its arguments."""
    result = command(f"{EXAMPLE}:attention")
    assert result.exit_code == 0, result.output
    assert "Block.forward" in result.stdout
    assert "1 graph · 0 graph breaks" in result.stdout


def test_the_command_explains_what_a_function_compiles_itself(command):
    """The example's ``training`` returns nothing; two steps compile once."""
    result = command(f"{EXAMPLE}:training", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [graph["kind"] for graph in told["graphs"]] == ["joint", "forward", "backward"]


def test_what_the_code_prints_stays_out_of_the_report(command):
    """``--json`` is JSON, although the example's ``broken`` prints."""
    result = command(f"{EXAMPLE}:broken", "--json")
    assert len(json.loads(result.stdout)["breaks"]) == 2
    assert "Dynamo can't trace this print" in result.stderr


def test_the_command_takes_a_dotted_module(command, tmp_path):
    """A package in the current directory, keyword arguments, and no ``__main__`` block."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "nets.py").write_text(
        "import torch\n"
        "def net():\n"
        "    return torch.clamp, (torch.randn(3),), {'min': 0.0}\n"
        "if __name__ == '__main__':\n"
        "    raise SystemExit(9)\n"
    )
    result = command("pack.nets:net")
    assert result.exit_code == 0, result.output
    assert "clamp" in result.stdout


SCRIPT = """
import torch
limit = 3
def train(): return None
def pair(): return torch.sin, torch.ones(3)
def needs(x, y=1): return None
import torch
net = torch.nn.Linear(2, 2)
def bad_import(): import nonsuch
"""


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("script.py", "SCRIPT_OR_MODULE:FUNCTION"),
        ("script.py", "such as script.py:"),
        ("scrip.py:train", "Did you mean 'script.py'?"),
        ("script.py:trian", "Did you mean 'train'?"),
        ("script.py:limit", "is an int, not a function"),
        ("script.py:needs", "has the parameters x,"),
        ("script.py:net", "has the parameters input, and is called without any"),
        ("script.py:train", "returned None and compiled nothing"),
        ("script.py:pair", "returned (a builtin_function_or_method, a Tensor)"),
        ("nonsuch.module:f", "no module 'nonsuch.module'"),
    ],
)
def test_a_wrong_target_is_one_clear_error(command, tmp_path, target, told):
    """What was given, what is near, what is allowed; no traceback."""
    (tmp_path / "script.py").write_text(SCRIPT)
    result = command(target)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_a_narrow_terminal_folds_lines_and_not_columns():
    """Below 72 columns tables would lose the names of candidates."""
    explanation = fuseboard.Explanation([a_graph()])
    shown = io.StringIO()
    show(explanation, Console(file=shown, width=40))
    assert shown.getvalue() == as_text(explanation, 72) + "\n"


@pytest.mark.thorough
def test_an_error_of_the_code_is_pythons_own_traceback(tmp_path):
    """It passes through, with nothing drawn around it."""
    (tmp_path / "script.py").write_text("def f():\n    raise ValueError('mine')\n")
    run = "from fuseboard.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", run, "explain", "script.py:f"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("    raise ValueError('mine')\nValueError: mine\n")


def test_installed_files_are_short_below_the_working_directory_too(tmp_path, monkeypatch):
    """A virtual environment in the project doesn't run into the names of its files."""
    monkeypatch.chdir(tmp_path)
    installed = f"{tmp_path}/.venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:3"
    told = f"forward ({installed}), {tmp_path}/src/model.py:7"
    assert words.shorten(told) == "forward (modules/linear.py:3), src/model.py:7"


def test_an_import_that_fails_inside_the_module_is_the_users(command, tmp_path):
    """The module is there: its own ModuleNotFoundError isn't mistaken for ours."""
    (tmp_path / "halfway.py").write_text("import nonsuch_dependency\n")
    result = command("halfway:f")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "nonsuch_dependency"

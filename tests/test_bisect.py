"""Who makes a script fail: the search by itself, then scripts."""

from __future__ import annotations

import json
import math
import runpy
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import fuseboard
from fuseboard.bisection.reproduction import function_of, script_of
from fuseboard.bisection.run import Fusion, Outcome, Placed, Step, Trace, run_script
from fuseboard.bisection.search import Search
from fuseboard.cli.main import app

aten = torch.ops.aten
BACKENDS = ("mkldnn", "onnxruntime", "inductor")
PLUGINS = {
    "mkldnn": ("partition", "fuse", "lower"),
    "onnxruntime": ("partition", "lower"),
    "inductor": ("fuse", "lower"),
    "eager": ("lower",),
    "attention": ("fuse",),
    "simplify": ("fuse",),
    "planner": ("partition",),
    "defaults": ("partition",),
}
OPS = [f"aten.op{number}.default" for number in range(500)]
REWRITES = 40


@dataclass(frozen=True)
class Planted:
    """A fault, and what a script does that has it.

    :ivar backend: without it no op of its is wrong; a rewrite is made for it alone.
    :ivar ops: the numbers of the ops that have to be there, all of them.
    :ivar rewrite: its number.
    :ivar plugin: whose other hooks do it.
    :ivar where: "dynamo", "aot", "script", "cache" or "choice".
    """

    backend: str = ""
    ops: tuple[int, ...] = ()
    rewrite: int | None = None
    plugin: str = ""
    where: str = ""

    def fails(self, step: Step) -> bool:
        settings = step.settings
        if self.where == "script":
            return True
        if not step.compiles:
            return False
        if self.where == "dynamo" or (self.where == "aot" and step.compiler != "eager"):
            return True
        if step.compiler:
            return False
        if self.where == "cache":
            return settings.get("cache", True) and "backends" not in settings
        if self.where == "choice":
            return settings.get("policy") != "priority"
        if self.plugin:
            return self.plugin not in settings.get("block", ())
        if self.backend and self.backend not in settings.get("backends", BACKENDS):
            return False
        if self.rewrite is not None:
            limit = settings.get("fuse_limit")
            skipped = self.rewrite in settings.get("fuse_skip", ())
            return not skipped and (limit is None or self.rewrite < limit)
        excluded = settings.get("exclude", {}).get(self.backend, [])
        there = range(*step.nodes) if step.nodes else range(len(OPS))
        return all(n in there and OPS[n] not in excluded for n in self.ops)

    def run(self, step: Step) -> Outcome:
        backend = step.settings.get("backends", BACKENDS)[0]
        limit = step.settings.get("fuse_limit")
        trace = Trace(
            PLUGINS,
            BACKENDS,
            [Placed(f"op{n}", op, backend, "g0", "g0.r0", f"m.py:{n}") for n, op in enumerate(OPS)],
            [
                Fusion(n, "simplify" if n % 2 else "attention", f"rule{n}", (f"op{n}",), "g0", "")
                for n in range(REWRITES if limit is None else limit)
            ],
            (),
            [(f"op{n}", op) for n, op in enumerate(OPS)],
        )
        return (
            Outcome("AssertionError", "AssertionError: wrong", 1.0, trace)
            if self.fails(step)
            else Outcome(trace=trace)
        )


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (Planted("mkldnn", (0,)), ("mkldnn", "lower", None, (OPS[0],))),
        (Planted("mkldnn", (499,)), ("mkldnn", "lower", None, (OPS[499],))),
        (Planted("onnxruntime", (137,)), ("onnxruntime", "lower", None, (OPS[137],))),
        (Planted("inductor", (250,)), ("inductor", "lower", None, (OPS[250],))),
        (Planted("mkldnn", (7, 8)), ("mkldnn", "lower", None, (OPS[7], OPS[8]))),
        (Planted(rewrite=0), ("attention", "fuse", 0, ())),
        (Planted(rewrite=39), ("simplify", "fuse", 39, ())),
        (Planted("mkldnn", rewrite=20), ("attention", "fuse", 20, ())),
        (Planted("inductor", rewrite=33), ("simplify", "fuse", 33, ())),
        (Planted(plugin="planner"), ("planner", "", None, ())),
        (Planted(plugin="simplify"), ("simplify", "", None, ())),
        (Planted(where="dynamo"), ("", "torch", None, ())),
        (Planted(where="aot"), ("", "torch", None, ())),
        (Planted(where="script"), ("", "script", None, ())),
        (Planted(where="cache"), ("", "lower", None, ())),
        (Planted(where="choice"), ("", "profile", None, ())),
    ],
)
def test_each_planted_fault_is_found_in_twenty_runs(planted, expected):
    """The plugin, the stage, the number of the rewrite, the ops: the right ones, and no others."""
    runs = []

    def run(step):
        runs.append(step)
        return planted.run(step)

    found = Search(run, 20).find()
    assert (found.plugin, found.stage, found.number, found.ops) == expected, found
    assert len(runs) <= 20
    if found.ops:
        assert found.source == f"m.py:{planted.ops[-1]}"
        assert found.is_confirmed
        assert not planted.fails(Step("", found.workaround))
    if found.number is not None:
        assert f"rule{found.number}" in found.rewrites[0]


def test_ops_that_only_fail_together_and_far_apart():
    """Where runs don't do for all of it, what is known is told: the last op of them."""
    planted = Planted("mkldnn", (3, 480))
    found = Search(planted.run, 20).find()
    assert (found.plugin, found.stage, found.ops) == ("mkldnn", "lower", (OPS[480],))
    found = Search(planted.run, 40).find()
    assert (found.ops[0], found.ops[-1]) == (OPS[3], OPS[480])


def test_what_passes():
    """One run tells that there is nothing to find."""
    assert "It passes" in Search(lambda step: Outcome(), 20).find().summary


def test_another_failure_is_none_of_this_one():
    """A run that ends otherwise than the first shows nothing: here a backend that is missing."""
    planted = Planted("onnxruntime", (3,))

    def run(step):
        if step.settings.get("backends") == ["mkldnn", "eager"]:
            return Outcome("SettingsError", "SettingsError: 'mkldnn' isn't available")
        return planted.run(step)

    assert Search(run, 20).find().plugin == "onnxruntime"


def test_a_reproduction_computes_what_the_ops_do(tmp_path):
    """Inputs with their dtypes and strides, items of what has several results, constants."""

    def f(x, y, n):
        x = x.sin()
        mean, var = torch.var_mean((x.roll(1) * y).clamp_min(-math.inf), 0)
        return mean + n.bool().all(), var.to(device="cpu", dtype=torch.float64)

    inputs = [torch.randn(4, 4), torch.randn(4, 4).t(), torch.ones(3, dtype=torch.int64)]
    graph = make_fx(f, tracing_mode="fake")(*inputs)
    calls = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    others = {node.name for node in graph.graph.nodes if node.op == "call_function"}
    function = function_of(graph, others - {node.name for node in calls})
    text = script_of(function, "wrong", {"backends": ["eager"]})
    assert "aten.sin" not in text
    path = tmp_path / "repro.py"
    path.write_text(text)
    found = runpy.run_path(str(path))
    assert [(i.dtype, i.shape, i.stride()) for i in found["inputs"]] == [
        (i.dtype, i.shape, i.stride()) for i in inputs
    ]
    sin, y, n = found["inputs"]
    wanted = torch.var_mean(sin.roll(1) * y, 0)
    got = found["f"](sin, y, n)
    torch.testing.assert_close(got[0], wanted[0] + n.bool().all())
    torch.testing.assert_close(got[1], wanted[1].double())


def test_what_cant_be_written_is_no_reproduction():
    """A size that differs from call to call isn't known to a script."""
    graph = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.randn(3, 4))
    assert function_of(graph, {"sin"}) is None


# --- runs of scripts ------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "failure", "message"),
    [
        ("", "", ""),
        ("import sys; sys.exit(0)", "", ""),
        ("import sys; sys.exit(3)", "exit status 3", "exit status 3"),
        ("raise ValueError('a\\n  b')", "ValueError", "ValueError: a"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", "killed by SIGSEGV"),
        ("import sys; assert sys.argv[1:] == ['-x', 'y'] and __name__ == '__main__'", "", ""),
    ],
)
def test_how_a_run_ends(script, text, failure, message):
    """By what the script would end with."""
    outcome = run_script(Step("as it is"), script(text), ["-x", "y"], 100.0, trips=False)
    assert (outcome.failure, outcome.message) == (failure, message)
    assert (outcome.trace is None) == (failure == "SIGSEGV")


def test_a_run_that_takes_too_long_is_ended(script):
    """With all that it started."""
    text = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"
    slow = script(text.replace("'input()'], stdin=0", "'import time; time.sleep(600)']"))
    outcome = run_script(Step("as it is"), slow, [], 2.0, trips=False)
    assert (outcome.failure, outcome.trace) == ("too long", None)


LIAR = '''
import sys, types
import torch
import fuseboard

class Liar:
    """Adds to what exp computes; or writes sin as cos."""
    @fuseboard.hookimpl
    def fuseboard_backend(self):
        return fuseboard.BackendInfo(name="liar", compiles_quickly=True)
    @fuseboard.hookimpl
    def fuseboard_claim(self, graph):
        return fuseboard.claim_nodes(graph, lambda node: None)
    @fuseboard.hookimpl
    def fuseboard_lower(self, region, inputs):
        lowered = fuseboard.lower_eagerly(region)
        wrong = region.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
        def call(args):
            return tuple(value + bool(wrong) for value in lowered.call(args))
        return fuseboard.LoweredRegion(call=call)

class Rewriter:
    @fuseboard.hookimpl
    def fuseboard_fuse(self, graph, kind, region):
        found = []
        if region is None:
            sin = torch.ops.aten.sin.default
            for node in graph.graph.find_nodes(op="call_function", target=sin):
                def rewrite(node=node):
                    node.target = torch.ops.aten.cos.default
                found.append(fuseboard.Fusion("sin_is_cos", (node.name,), rewrite))
        return found

if sys.argv[1] == "op":
    fuseboard.register(Liar(), "liar")
else:
    fuseboard.register(Rewriter(), "rewriter")

def f(x):
    return (x.sin() * 2).exp().roll(1) + 1

options = {"backends": ["liar", "eager"] if sys.argv[1] == "op" else ["eager"], "verify": "off"}
options |= {"policy": "priority", "min_region_us": 0.0}
x = torch.randn(8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(f, backend="fuseboard", options=options)(x), f(x))
'''


@pytest.mark.slow
def test_a_wrong_op(script, tmp_path):
    """By the command, with each run told, the way around it tried, and a script written."""
    path, repro = script(LIAR), tmp_path / "repro.py"
    options = ["--json", "--repro", str(repro)]
    done = CliRunner().invoke(app, ["bisect", str(path), *options, "--", "op"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["plugin"], found["stage"]) == ("liar", "lower")
    assert found["ops"] == ["aten.exp.default"]
    assert found["region"].startswith("inference0")
    assert "script.py:" in found["source"]
    assert found["workaround"] == {"exclude": {"liar": ["aten.exp.default"]}}
    assert found["is_confirmed"]
    assert len(found["runs"]) <= 20
    written = repro.read_text()
    assert found["reproduction"] == written
    assert "exp = torch.ops.aten.exp.default(" in written
    assert "aten.sin" not in written
    assert found["runs"][-1]["run"].endswith("the reproduction")


@pytest.mark.slow
def test_a_wrong_rewrite(script):
    """From Python."""
    path = script(LIAR)
    found = fuseboard.bisect(path, ["rewrite"])
    assert (found.plugin, found.stage, found.is_confirmed) == ("rewriter", "fuse", True)
    assert "sin_is_cos" in found.rewrites[0]


def test_a_script_that_is_not_there():
    """A mistake of the user's."""
    done = CliRunner().invoke(app, ["bisect", "nowhere.py"])
    assert done.exit_code == 2
    assert "nowhere.py" in done.stderr
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        fuseboard.bisect("nowhere.py")
    assert "fuseboard.bisection.child" not in sys.modules

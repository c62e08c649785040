"""Ops that modules or the program's script define; other processes import or run these."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import fx

import fuseboard
from fuseboard.errors import LoweringError
from fuseboard.lower.cache_keys import call_parts
from fuseboard.report.data import ledger
from fuseboard.torch_api.custom_ops import defining_modules, main_file
from fuseboard.torch_api.op_definitions import define, definitions
from tests.support.beside import loaded, mlp, pinned

#: An op with a gradient; imported in this process it counts as no op of the program's.
OP = """
import torch

@torch.library.custom_op("fuseboard_custom_ops::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

scaled.register_autograd(lambda ctx, grad: grad * {factor})
"""


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """The op, from a module of its own."""
    (tmp_path / "defines_scaled.py").write_text(OP.format(factor=3))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("defines_scaled").scaled
    del sys.modules["defines_scaled"]


def check_until_settled(run, eager, x, training):
    """Results, and gradients in training, are eager's in the first call and once it has settled."""
    with torch.set_grad_enabled(training):
        for _ in range(3):
            given, expected = (x.clone().requires_grad_(training) for _ in range(2))
            results = run(given), eager(expected)
            torch.testing.assert_close(*results)
            if training:
                grads = [
                    torch.autograd.grad(result.square().sum(), t)
                    for result, t in zip(results, (given, expected), strict=True)
                ]
                torch.testing.assert_close(*grads)
            assert fuseboard.wait(120)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.thorough
def test_an_op_of_a_module_is_tried_beside_calls(scaled, training):
    """The workshop imports the module; what is chosen there has the right values and gradients."""
    model, x = mlp(), torch.randn(8, 64)
    run = pinned(lambda x: model(scaled(x)), "onnxruntime" if training else "mkldnn")
    check_until_settled(run, lambda x: model(x * 3), x, training)
    assert loaded()
    assert not any("within calls" in note for report in ledger.graphs() for note in report.notes)


#: An op as ``torch.library.Library`` defines it, then a program that compiles a use of it.
PROGRAM = """
import torch
import fuseboard

library = torch.library.Library("fuseboard_library_ops", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", lambda x: x * 3, "CPU")
library.impl("scaled", torch.empty_like, "Meta")

def twice(x):
    return torch.ops.fuseboard_library_ops.scaled(x).relu() * 2

if __name__ == "__main__":
    run, x = torch.compile(twice, backend="fuseboard"), torch.randn(30, 30)
    run(x)
    assert fuseboard.wait(120)
    torch.testing.assert_close(run(x), twice(x))
    (report,) = fuseboard.last_report().graphs
    print(report.decided, report.notes)
"""


@pytest.mark.thorough
def test_an_op_of_the_program_s_script_is_tried_beside_calls(tmp_path, monkeypatch):
    """The workshop runs the script, which begins under its own name alone."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FUSEBOARD_POLICY", "FUSEBOARD_SETTLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert "within calls" not in ended.stdout
    assert "of the user's" in ended.stdout  # the trial's note


def test_the_module_of_a_library_s_op_is_found(tmp_path, monkeypatch):
    """The dispatcher knows the file that made the library."""
    definitions = PROGRAM.partition("def twice")[0].replace("library_ops", "found_ops")
    (tmp_path / "defines_found.py").write_text(definitions)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("defines_found")
    graph = graph_with(torch.ops.fuseboard_found_ops.scaled.default)
    assert defining_modules(graph) == ("defines_found",)
    monkeypatch.setitem(sys.modules, "defines_found", module)
    del sys.modules["defines_found"]
    assert defining_modules(graph) == ()  # nobody could import it by that name


@pytest.mark.parametrize(
    ("code", "may_run"),
    [
        (PROGRAM, True),
        ("import torch\nprint(1)\n", False),
        ("if __name__ == '__mp_main__':\n    pass\n", False),
        ("def unfinished(", False),
    ],
)
def test_a_script_runs_elsewhere_if_it_begins_under_its_name_alone(
    tmp_path, monkeypatch, code, may_run
):
    """As for ``multiprocessing``; others would begin there, too."""
    file = tmp_path / "program.py"
    file.write_text(code)
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(file), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert main_file() == (str(file) if may_run else None)


#: Ops as a notebook has them: no module that another process can import.
TYPED = """
import math
import threading

import torch

factor, lock = 3.0, threading.Lock()

def times(x):
    return x * factor

def make(offset):
    @torch.library.custom_op("fuseboard_typed_ops::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([times(row)[None] for row in x]) + math.floor(offset)

    return scaled

scaled = make(0.5)

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

@scaled.register_kernel("cpu")
def _(x):
    return times(x)

scaled.register_autograd(lambda ctx, grad: times(grad))

@torch.library.custom_op("fuseboard_typed_ops::locked", mutates_args=())
def locked(x: torch.Tensor) -> torch.Tensor:
    with lock:
        return x * 2
"""


@pytest.fixture
def typed(monkeypatch):
    """A module that only this process has, as what is typed into a session."""
    module = types.ModuleType("typed_in_this_process")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(TYPED, module.__dict__)
    return module


@pytest.mark.usefixtures("as_users_run_it", "chosen")
@pytest.mark.parametrize("training", [False, True])
def test_an_op_that_no_other_process_can_import_is_tried_beside_calls(typed, training):
    """Its code goes there: the first call is eager's, and the values and gradients stay right."""
    model, x = mlp(), torch.randn(8, 64)
    run = pinned(lambda x: model(typed.scaled(x)), "onnxruntime" if training else "mkldnn")
    check_until_settled(run, lambda x: model(x * 3), x, training)
    assert loaded()
    assert not any("within calls" in note for report in ledger.graphs() for note in report.notes)


def test_an_op_s_code_is_sent_with_what_it_names(typed):
    """As it is when it is sent: the same bytes, until something that it names is another one."""
    graph, x = graph_with(torch.ops.fuseboard_typed_ops.scaled.default), torch.randn(3, 5)
    sent = definitions(graph)
    assert sent == definitions(graph)
    typed.factor = 4.0
    assert sent != definitions(graph)
    assert torch.equal(typed.scaled(x), x * 4)
    define(sent)
    assert torch.equal(torch.ops.fuseboard_typed_ops.scaled(x), x * 3)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(torch.ops.fuseboard_typed_ops.scaled(x).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3))


def test_an_op_of_no_module_is_sent():
    """What was executed in a plain dictionary is in no module; it may call itself and other ops."""
    code = """
import torch
@torch.library.custom_op("fuseboard_no_module::inner", mutates_args=())
def inner(x: torch.Tensor) -> torch.Tensor:
    return x * 2
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)
@torch.library.custom_op("fuseboard_no_module::outer", mutates_args=("y",))
def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def zero(n):
        return 0 if n == 0 else zero(n - 1)
    y.add_(factorial(3) + zero(2))
    return inner(x)
"""
    exec(code, {})
    graph = graph_with(torch.ops.fuseboard_no_module.outer.default)
    assert defining_modules(graph) == ()
    define(definitions(graph))
    x, y = torch.ones(3), torch.zeros(3)
    assert torch.equal(torch.ops.fuseboard_no_module.outer(x, y), x * 2)
    assert torch.equal(y, torch.full((3,), 6.0))


def test_an_op_that_names_what_cant_be_sent_says_so(typed):
    """A lock is a thing of one process."""
    with pytest.raises(LoweringError, match=r"can't be sent: .*lock"):
        definitions(graph_with(torch.ops.fuseboard_typed_ops.locked.default))


def graph_with(op):
    graph = fx.Graph()
    graph.output(graph.call_function(op, (graph.placeholder("x"),)))
    return fx.GraphModule({}, graph)


def test_a_key_holds_the_code_of_the_module(scaled, tmp_path):
    """The gradient of an op is in what is captured: another one is another key."""
    graph = graph_with(torch.ops.fuseboard_custom_ops.scaled.default)
    before = call_parts(graph, [torch.ones(2)], [], None)
    file = tmp_path / "defines_scaled.py"
    file.write_text(OP.format(factor=4))
    os.utime(file, ns=(1, 1))
    after = call_parts(graph, [torch.ones(2)], [], None)
    assert [name for name in before if before[name] != after[name]] == ["custom ops"]


@pytest.mark.parametrize("as_packet", [False, True])
def test_the_module_of_an_op_is_found(scaled, as_packet):
    """Whether the graph has the op or its overload; not while the module is being imported."""
    op = torch.ops.fuseboard_custom_ops.scaled
    graph = graph_with(op if as_packet else op.default)
    assert defining_modules(graph) == ("defines_scaled",)
    spec = sys.modules["defines_scaled"].__spec__
    spec._initializing = True
    try:
        assert defining_modules(graph) == ()
    finally:
        spec._initializing = False


def test_torchs_own_ops_need_no_module():
    """Every process that has torch has them."""
    assert defining_modules(graph_with(torch.ops.prims.abs.default)) == ()
    assert defining_modules(graph_with(torch.relu)) == ()

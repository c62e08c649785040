"""Graphs of higher-order ops go through the stages, on backends that can't have the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard.report.data import RegionReport, ledger
from tests.support.backends import all_trips, claim_ops, compiled, last_graph, plugged
from tests.support.beside import pinned
from tests.support.values import rnd

LINEAR = nn.Linear(33, 33)
Program = Callable[[torch.Tensor], Any]


def conditional(x):
    def otherwise(a):
        return torch.cond(a.mean() < -5, lambda b: LINEAR(b.cos()) - 1, lambda b: b.sin() * 2, (a,))

    return torch.cond(x.sum() > 0, lambda a: LINEAR(a).relu(), otherwise, (x,)) + 1


def loop(x):
    start = (torch.tensor(0), x)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, LINEAR(y).relu()), start)[1]


def scanned(x):
    last, each = scan(lambda c, a: (c * 0.5 + LINEAR(a).relu(), c * 2), torch.zeros(33), x, dim=0)
    return each + last


@torch.compiler.nested_compile_region
def layer(x):
    return nn.functional.gelu(LINEAR(x)).sin()


def nested(x):
    return layer(layer(x)) + 1


def checkpointed(x):
    return checkpoint(lambda a: LINEAR(a).relu().sin(), x, use_reentrant=False) * 2


PROGRAMS = [conditional, loop, scanned, nested]
INPUTS = (rnd(7, 33), rnd(7, 33) - 9, rnd(7, 33) - 1)  # each branch of the conditional


def options(**further: Any) -> dict[str, Any]:
    return {"min_region_us": 0.0, **further}


def compare(program: Program, run: Program, grad: bool = False) -> None:
    """Values, and gradients of the input and of the weights, on inputs for each branch."""
    for x in INPUTS:
        results = []
        for function in (program, run):
            own = x.clone().requires_grad_(grad)
            LINEAR.zero_grad()
            torch.manual_seed(3)
            with torch.set_grad_enabled(grad):
                y = function(own)
            if grad:
                y.square().mean().backward()
            results.append((y, own.grad, *(p.grad for p in LINEAR.parameters())))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def region_of(op: str) -> RegionReport:
    """The region of the newest graph that has a higher-order op."""
    return next(one for one in last_graph().regions if any(op in name for name in one.ops))


@pytest.mark.parametrize("backend", ["mkldnn", "onnxruntime", "tvm"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_backend_runs_what_is_in_them(program, backend):
    """The op's node is on the backend, whose ops the region's notes name; values are eager's."""
    run = compiled(program, backend, **options())
    compare(program, run)
    assert not all_trips()
    op = {conditional: "cond", loop: "while_loop", scanned: "scan", nested: "invoke_subgraph"}
    region = region_of(op[program])
    assert region.backend == backend
    assert any(f"{backend} runs " in note and "addmm" in note for note in region.notes)


@pytest.mark.parametrize("backend", ["onnxruntime", "tvm"])
@pytest.mark.parametrize("program", [conditional, scanned, nested], ids=lambda f: f.__name__)
def test_training_has_eagers_gradients(program, backend):
    """Forward and backward are graphs of their own, and hold the op each."""
    compare(program, compiled(program, backend, **options()), grad=True)
    assert not all_trips()
    graphs = [g for g in ledger.graphs() if g.kind in ("forward", "backward")]
    homes = {n.backend for g in graphs for n in g.nodes if "higher_order" in n.op}
    assert homes == {backend}


def test_a_checkpoint_is_no_higher_order_op_any_more():
    """AOTAutograd inlines it: in training its ops are ordinary ones, computed again behind."""
    compare(checkpointed, compiled(checkpointed, "tvm", **options()), grad=True)
    graphs = [g for g in ledger.graphs() if g.kind in ("forward", "backward")][-2:]
    assert not any("higher_order" in n.op for g in graphs for n in g.nodes)
    assert all(any("addmm" in n.op and n.backend == "tvm" for n in g.nodes) for g in graphs)


def test_weights_are_prepared_outside_of_them():
    """What both branches read is packed once, and again when it changes."""
    module = nn.Linear(33, 33).requires_grad_(False)

    def branches(x):
        return torch.cond(x.sum() > 0, lambda a: module(a).relu(), lambda a: module(a.cos()), (x,))

    run = compiled(branches, "mkldnn", **options())
    for x in INPUTS[:2]:
        torch.testing.assert_close(run(x), branches(x))
    assert region_of("cond").hoisted == 2
    module.weight.mul_(2)
    for x in INPUTS[:2]:
        torch.testing.assert_close(run(x), branches(x))


def test_random_numbers_are_eagers():
    """Draws in a branch stay in eager, in order, between regions of a backend."""

    def branches(x):
        def dropping(a):
            return nn.functional.dropout(LINEAR(nn.functional.dropout(a)).relu())

        return torch.cond(x.sum() > 0, dropping, lambda a: LINEAR(a.cos()), (x,))

    claim = claim_ops("addmm", "t", "relu", "cos", "mul")
    with plugged("careful", claim=claim), torch.no_grad():
        compare(branches, compiled(branches, "careful", **options()))
    assert not all_trips()
    assert region_of("cond").backend == "careful"


@pytest.mark.parametrize("backend", ["mkldnn", "onnxruntime"])
@pytest.mark.parametrize("program", [conditional, loop, scanned], ids=lambda f: f.__name__)
@pytest.mark.thorough
def test_symbolic_sizes(program, backend):
    """Sizes that differ from call to call, without a further compile."""
    run = compiled(program, backend, dynamic=True, **options())
    with torch.no_grad():
        for rows in (7, 5, 12):
            torch.testing.assert_close(run(INPUTS[0][:rows]), program(INPUTS[0][:rows]))
            torch.testing.assert_close(run(INPUTS[1][:rows]), program(INPUTS[1][:rows]))
    assert not all_trips()
    assert "addmm" in "".join(note for one in last_graph().regions for note in one.notes)


def test_wrong_values_in_a_branch_are_found():
    """They are the region's, which eager runs from then on, from the first call that takes it."""

    def wrong(eager_call, region):
        off = "relu" in str(region.graph.graph)
        return lambda args: [y + 0.5 if off else y for y in eager_call(args)]

    def branches(x):
        return torch.cond(x.sum() > 0, lambda a: a.relu() * 2, lambda a: a.cos(), (x,))

    with plugged("wrong", call=wrong, claim=claim_ops("relu", "mul", "cos")), torch.no_grad():
        run = compiled(branches, "wrong", **options(verify="always"))
        for x in (-INPUTS[0].abs(), INPUTS[0].abs()):
            torch.testing.assert_close(run(x), branches(x))
    assert any(trip.plugin == "wrong" for trip in all_trips())
    assert region_of("cond").backend == "eager"


def test_what_the_user_excludes_is_excluded_inside():
    """``exclude`` holds in branches as it does elsewhere."""
    exclude = {"mkldnn": ["aten.addmm", "aten.addmm.default"]}
    compare(conditional, compiled(conditional, "mkldnn", **options(exclude=exclude)))
    notes = region_of("cond").notes
    assert not any("mkldnn runs" in note and "addmm" in note for note in notes)


@pytest.mark.usefixtures("as_users_run_it", "chosen")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thorough
def test_they_are_compiled_beside_the_calls(dynamic):
    """The plans for inner graphs go to the user's process with the program."""
    run = pinned(conditional, dynamic=dynamic, min_region_us=0.0)
    with torch.no_grad():
        for _ in range(2):
            for x in INPUTS:
                torch.testing.assert_close(run(x), conditional(x))
            assert fuseboard.wait(200)
    (loaded,) = [graph for graph in fuseboard.last_report().graphs if "load" in graph.seconds]
    assert not loaded.trips
    assert {n.backend for n in loaded.nodes if "cond" in n.op} == {"mkldnn"}

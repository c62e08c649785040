"""Settings that speak of modules by name, followed by the workshop: ``pin`` and ``exclude``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fuseboard
from fuseboard.report.data import ledger
from tests.support.beside import compiled, life, lives, loaded, mlp

pytestmark = pytest.mark.usefixtures("as_users_run_it")


class Net(nn.Module):
    """Two blocks alike, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp() for _ in range(2)])
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def homes(kind="inference"):
    """Where the products of each of the model's modules run."""
    (report,) = [one for one in loaded() if one.kind == kind]
    return [node.backend for node in report.nodes if "mm" in node.op]


def test_what_is_pinned_to_a_backend_runs_there_whatever_is_faster():
    """Dynamo's own graph answers first. It takes no part in a trial: nothing is pinned in it."""
    model, x = Net(), torch.randn(8, 64)
    with torch.no_grad():
        run = compiled(model, pin={"layers.0": "mkldnn"}, exclude={"mkldnn": ["layers.1", "head"]})
        assert torch.equal(run(x), model(x))
        assert not life().settled
        assert fuseboard.wait(120)
        assert fuseboard.settled()
        torch.testing.assert_close(run(x), model(x))
    assert homes() == ["mkldnn", "mkldnn", "eager", "eager", "eager"]
    (report,) = loaded()
    assert not any("within calls" in note for note in report.notes)


def apply(block, x):
    """Dynamo compiles it apart, and names the block from here."""
    torch._dynamo.graph_break()
    return block(x)


class Holder(nn.Module):
    """Calls the last of its modules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        *_, block = self.children()
        return apply(block, x)


def test_what_was_kept_for_one_model_isnt_taken_for_another_that_holds_the_same_block():
    """Their graphs are the same, and a pattern matches one of them alone."""
    block, x = mlp(), torch.randn(8, 64)
    for modules, pinned in (
        ({"first": block}, ["mkldnn"] * 2),
        ({"first": nn.Identity(), "second": block}, []),  # eager has won
    ):
        torch._dynamo.reset()
        ledger.clear()
        run = compiled(Holder(**modules), pin={"first": "mkldnn"}, margin=1.0)
        with torch.no_grad():
            run(x)
            assert fuseboard.wait(120)
            torch.testing.assert_close(run(x), block(x))
        assert [one for report in loaded() for one in homes()] == pinned


def test_a_pattern_that_matches_nothing_is_an_error_before_the_first_call():
    """As within calls: nothing has been handed to the workshop."""
    with pytest.raises(
        BackendCompilerFailed, match=r"'layers\.\*\.mpl' matches no module and no op"
    ):
        compiled(Net(), pin={"layers.*.mpl": "mkldnn"})(torch.randn(8, 64))
    assert lives() == []


@pytest.mark.thorough
def test_in_training_both_directions_run_where_they_are_pinned():
    """And the steps are eager's."""
    model, x = Net(), torch.randn(8, 64)
    run = compiled(
        model, backends=["onnxruntime", "eager"], pin={"layers.0": "onnxruntime"}, margin=1.0
    )
    for _ in range(3):
        results = []
        for function in (run, model):
            function(x).square().sum().backward()
            results.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        torch.testing.assert_close(*results)
        assert fuseboard.wait(120)
    assert "onnxruntime" in homes("forward")
    assert "onnxruntime" in homes("backward")

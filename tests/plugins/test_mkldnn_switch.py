"""``torch.backends.mkldnn.flags``: what is compiled with oneDNN off doesn't use it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuseboard.report.data import ledger
from fuseboard_mkldnn import _pack
from tests.support.backends import compiled, forget_other_graphs, last_graph
from tests.support.values import assert_same, rnd

OFF = "oneDNN is switched off: torch.backends.mkldnn.enabled is False"


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch):
    forget_other_graphs(monkeypatch)
    monkeypatch.setattr(_pack, "_chosen", {})


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "linear":
        return nn.Sequential(nn.Linear(24, 33), nn.GELU()).eval(), rnd(5, 24)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()).eval(), rnd(2, 3, 9, 9)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_it_declines_with_the_reason(name):
    """Each op runs in eager, bit for bit, and says why; with oneDNN on again it is taken."""
    model, x = made(name)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        assert_same(compiled(model, "mkldnn", "eager", on_failure="raise")(x), model(x))
    nodes = last_graph().nodes
    assert {node.backend for node in nodes} <= {"eager", "board"}
    assert {node.declined.get("mkldnn") for node in nodes if node.backend == "eager"} == {OFF}
    torch.compiler.reset()
    with torch.no_grad():
        compiled(model, "mkldnn", "eager", on_failure="raise")(x)
    assert "mkldnn" in {node.backend for node in last_graph().nodes}


def test_a_decision_under_the_other_state_is_not_taken(tmp_path):
    """What was measured with oneDNN on is no candidate with it off, and the other way round."""
    model, x = made("linear")
    candidates = []
    for enabled in (True, False, True):
        torch.compiler.reset()
        ledger.clear()
        options = {"policy": "measured", "settle": "first_call", "cache_dir": str(tmp_path)}
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=enabled):
            fast = compiled(model, "mkldnn", "eager", measure_s=0.01, **options)
            torch.testing.assert_close(fast(x), model(x))
        candidates.append({one.name for one in last_graph().candidates})
    assert "mkldnn" in candidates[0]
    assert "mkldnn" not in candidates[1]
    assert "mkldnn" in candidates[2]


def test_a_choice_of_kernels_holds_for_one_precision():
    """A kernel that was the fastest at one precision is measured again at another."""
    asked = []

    def choose() -> None:
        calls = {"plain": lambda: None, "onednn": lambda: None}
        _pack.remembered("shape", lambda: asked.append(1) or calls, _pack.Budget(1.0))

    choose()
    choose()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        choose()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert len(asked) == 2

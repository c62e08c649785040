"""torch's switches that choose among kernels: parts of every key, carried to child processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.lower.isolation import make_request
from fuseboard.lower.machine import numerics
from fuseboard.torch_api import switches as torch_switches
from fuseboard.torch_api.switches import read_switches, set_switches

SETTABLE = [name for name, (_, put) in torch_switches.SWITCHES.items() if put is not None]


@pytest.fixture(autouse=True)
def _as_before():
    before = read_switches()
    yield
    set_switches(before)
    assert read_switches() == before


def another(name: str, value: Any) -> Any:
    """A value that a switch hasn't got now; None where this machine has no other."""
    if isinstance(value, bool):
        return not value
    if name == "backends.quantized.engine":
        others = [one for one in torch.backends.quantized.supported_engines if one != value]
        return others[0] if others else None
    if name.endswith(".fp32_precision"):
        return "ieee" if value == "tf32" else "tf32"
    return {
        "default_dtype": torch.float64,
        "deterministic": (True, True),
        "float32_matmul_precision": "high",
        "backends.opt_einsum.strategy": "optimal"
        if torch.backends.opt_einsum.is_available()
        else None,
    }[name]


@pytest.mark.parametrize("name", SETTABLE)
def test_a_switch_is_a_part_of_the_key(name):
    """Under another state the key is another; another process can be brought to either state."""
    before, key = read_switches(), numerics()
    value = another(name, before[name])
    if value is None:
        pytest.skip(f"needs a build of torch where {name} has more than one value")
    set_switches({name: value})
    changed, other_key = read_switches(), numerics()
    assert changed[name] == value
    assert other_key != key
    set_switches(pickle.loads(pickle.dumps(before)))
    assert (read_switches(), numerics()) == (before, key)
    set_switches(pickle.loads(pickle.dumps(changed)))
    assert (read_switches(), numerics()) == (changed, other_key)


def test_a_region_can_be_sent_under_a_librarys_own_precision():
    """torch raises when it is asked for the precision of all products then."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    x = torch.zeros(3)
    graph = make_fx(lambda x: (x.exp(),), tracing_mode="fake")(x)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    region = fuseboard.Region("region", "inductor", "inference", graph, "signature")
    request = make_request(region, inputs, board.session(resolve({"backends": ["inductor"]})))
    assert pickle.loads(pickle.dumps(request)).state["switches"] == read_switches()

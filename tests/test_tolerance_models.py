"""Whether models keep a budget of accuracy on inputs that the choice didn't see."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fuseboard
from fuseboard.fuse import narrow
from fuseboard.profile.judge.accuracy import Metric
from fuseboard.torch_api import formats
from tests.support import transformers_models as models
from tests.support.eager_loses import MEASURE

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("policy_measured")

#: Of each format.
TOLERANCES = {"bfloat16": 1e-2, "int8": 5e-2}
TOLERANCE = TOLERANCES["bfloat16"]
#: What errors on other inputs may be, in terms of the budget.
FACTOR = 1.5


def _others(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """Inputs of the same sizes; masks stay as they are."""
    generator = torch.Generator().manual_seed(100 + seed)
    found = dict(inputs)
    for name, value in inputs.items():
        if name == "input_ids":
            found[name] = torch.randint(3, 90, value.shape, generator=generator)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name] = torch.randn(value.shape, generator=generator)
    return found


def _floats(result: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(dict(result)) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _narrow_to(number_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer one format alone; what the processor hasn't is computed all the same."""
    wanted = torch.bfloat16 if number_format == "bfloat16" else None
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == wanted)
    if wanted is not None:
        monkeypatch.setattr(narrow, "narrowing_to_int8", lambda graph: None)


@pytest.mark.parametrize(("name", "number_format"), zip(models.MODELS, cycle(TOLERANCES)))
@pytest.mark.thorough
def test_a_budget_is_kept_on_inputs_that_were_not_seen(name, number_format, monkeypatch):
    """Five of them, held against float64; no call is looked at after the first one.

    Models that are much alike, such as BERT and RoBERTa, take turns with the formats.
    """
    _narrow_to(number_format, monkeypatch)
    tolerance = TOLERANCES[number_format]
    monkeypatch.setattr("fuseboard.pipeline.stages.FURTHER_CALLS", 0)
    model, inputs, _ = models.eager_model(name)
    model.eval()
    precise = copy.deepcopy(model).double()
    options = {"backends": ["eager"], "margin": 0.0, "stages": {"measure": MEASURE}}
    run = torch.compile(model, backend="fuseboard", options={**options, "tolerance": tolerance})
    with torch.no_grad():
        run(**inputs)
        rows = [row for graph in fuseboard.last_report().graphs for row in graph.candidates]
        lossy = [row for row in rows if row.tolerance]
        assert lossy
        assert all((row.error <= tolerance) == (row.state == "chosen") for row in lossy)
        for seed in range(5):
            own = _others(inputs, seed)
            wide = {
                key: value.double()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for key, value in own.items()
            }
            for got, want in zip(_floats(run(**own)), _floats(precise(**wide)), strict=True):
                assert got.dtype == torch.float32
                assert Metric("norm").distance(got, want) <= FACTOR * tolerance


def test_an_outlying_channel_is_not_narrowed_away(monkeypatch):
    """A channel a thousand times as large as the others, whose results are held to the budget."""
    _narrow_to("bfloat16", monkeypatch)
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(*layers).eval()
    with torch.no_grad():
        model[0].weight[3] *= 1000
        x = torch.randn(32, 64)
        want = copy.deepcopy(model).double()(x.double())
        options = {"backends": ["eager"], "margin": 0.0, "stages": {"measure": MEASURE}}
        run = torch.compile(model, backend="fuseboard", options={**options, "tolerance": TOLERANCE})
        assert Metric("norm").distance(run(x), want) <= TOLERANCE

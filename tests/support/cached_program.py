"""A program whose backend stores artifacts; run by tests in processes of its own.

``python -m tests.support.cached_program CACHE_DIR [JSON]`` prints what happened as JSON. The second
argument holds changes to :data:`DEFAULTS`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch
from pydantic import BaseModel

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import plugged

DEFAULTS: dict[str, Any] = {
    "fingerprint": "1",
    "option": 1,
    "size": 5,
    "factor": 2.0,
    "weight": 1.0,
    "bakes": False,
    "artifact": True,
    "load": "loads",
    "dynamic": None,
    "threads": 1,
    "precision": "highest",
    "sleep_s": 0.0,
    "settings": {},
}


class Options(BaseModel):
    option: int = 1


class Scaled(torch.nn.Module):
    """``relu(x @ weight) * factor``: a weight, and a constant of the graph."""

    def __init__(self, weight: float, factor: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 3), weight))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) * self.factor


def run(cache_dir: str, **changes: Any) -> dict[str, Any]:
    """Compile the program with a backend called ``fake``, and call it."""
    how = {**DEFAULTS, **changes}
    counts = {"lowered": 0, "load_calls": 0}

    def lower(region: Any) -> fuseboard.LoweredRegion:
        counts["lowered"] += 1
        time.sleep(how["sleep_s"])
        call = fuseboard.lower_eagerly(region).call
        artifact = b"the artifact" if how["artifact"] else None
        return fuseboard.LoweredRegion(call=call, notes=("lowered",), artifact=artifact)

    def load(artifact: bytes, region: Any) -> fuseboard.LoweredRegion | None:
        counts["load_calls"] += 1
        assert artifact == b"the artifact"
        if how["load"] == "raises":
            raise RuntimeError("no such format")
        if how["load"] == "declines":
            return None
        return fuseboard.LoweredRegion(call=fuseboard.lower_eagerly(region).call)

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fuseboard").addHandler(handler)
    model = Scaled(how["weight"], how["factor"])
    x = torch.linspace(-1, 1, 3 * how["size"]).reshape(how["size"], 3)
    info = {
        "fingerprint": how["fingerprint"],
        "options": Options,
        "bakes_constants": how["bakes"],
    }
    torch.set_num_threads(how["threads"])
    torch.set_float32_matmul_precision(how["precision"])
    torch._dynamo.reset()
    ledger.clear()
    try:
        with plugged("fake", lower=lower, load=load, info=info), torch.no_grad():
            options = {
                "backends": ["fake"],
                "cache_dir": cache_dir,
                "plugins.fake.option": how["option"],
                **how["settings"],
            }
            compiled = torch.compile(
                model, backend="fuseboard", dynamic=how["dynamic"], options=options
            )
            result = compiled(x)
            expected = model(x)
    finally:
        logging.getLogger("fuseboard").removeHandler(handler)
        torch.set_float32_matmul_precision("highest")
    graphs = ledger.graphs()
    return {
        **counts,
        "right": torch.equal(result, expected),
        "loaded": [region.loaded for graph in graphs for region in graph.regions],
        "notes": [note for graph in graphs for region in graph.regions for note in region.notes],
        "trips": [f"{t.plugin} {t.error}; {t.instead}" for g in graphs for t in g.trips],
        "warnings": told,
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    print(json.dumps(run(sys.argv[1], **given)))

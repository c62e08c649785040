"""Traces of a GPU: kernels belong to the regions that launched them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import profile

from fuseboard.profile.observe.trace import read_trace
from fuseboard.profile.observe.trace_summary import summarise
from fuseboard.report.data import ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("backend", ["eager", "inductor", "triton"])
def test_kernels_are_inside_of_their_regions(backend, tmp_path):
    """Each kernel of a call is some region's, and the region is on the GPU's time line, too."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).cuda()
    options = {"backends": [backend, "eager"] if backend != "eager" else [backend]}
    fn = torch.compile(net, backend="fuseboard", options={"policy": "priority", **options})
    x = torch.randn(32, 64, device="cuda")
    path = tmp_path / "trace.json"
    with torch.no_grad(), ledger.collect() as graphs:
        for _ in range(3):
            fn(x)
        torch.cuda.synchronize()
        with profile() as recorder:
            for _ in range(3):
                fn(x)
            torch.cuda.synchronize()
        recorder.export_chrome_trace(str(path))
    trace = read_trace(path)
    summary = summarise(trace)
    assert summary.calls == 3
    assert backend in {row.backend for row in summary.regions}
    (device,) = summary.devices
    assert device.kernels >= 3
    assert sum(row.device_us for row in summary.regions) == pytest.approx(
        sum(work.end_us - work.start_us for work in trace.work)
    )
    assert all(row.device_us > 0 for row in summary.regions)
    (graph,) = graphs
    shown = {e["name"] for e in trace.events if e.get("cat") == "gpu_user_annotation"}
    assert any(name.startswith(f"fuseboard::{graph.name}.region") for name in shown)

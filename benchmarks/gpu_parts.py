"""The parts of the GPU check that measure: whole models, and single kernels."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_models import make

#: Arm → what ``torch.compile`` is given; None is eager. The riskiest come last: a crash takes the
#: process with it.
ARMS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "inductor reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    "fuseboard": {"backend": "fuseboard"},
    "fuseboard reduce-overhead": {"backend": "fuseboard", "mode": "reduce-overhead"},
    "triton": {"backend": "fuseboard", "options": {"backends": ["triton", "eager"]}},
    "triton reduce-overhead": {
        "backend": "fuseboard",
        "options": {"backends": ["triton", "eager"], "mode": "reduce-overhead"},
    },
}
#: What stands for an arm where there is no GPU, for want of a C++ compiler and of patience.
DRY = {
    "inductor": {"backend": "aot_eager"},
    "fuseboard": {"backend": "fuseboard", "options": {"backends": ["eager"]}},
}


def run_part(part: str, dry: bool, out: Path, limit_s: float) -> None:
    """Measure one part and write what was found."""
    clock = Clock(dry, time.monotonic() + limit_s)
    machine = describe(dry)
    rows: list[dict[str, Any]] = []
    for row in _kernels(clock) if part == "kernels" else _model(part, clock):
        rows.append(row)
        _ratios(rows)
        # After each row: what comes next may take the process with it.
        out.write_text(json.dumps({"machine": machine, "rows": rows, "text": _table(rows)}))


def describe(dry: bool) -> dict[str, Any]:
    """The machine and versions that the numbers belong to."""
    import triton

    import fuseboard

    gpu = {} if dry else {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {
        **gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fuseboard": str(Path(fuseboard.__file__).parent),
    }


class Clock:
    """Times calls on the device.

    :ivar deadline: on the monotonic clock; what doesn't fit is left out and named.
    """

    def __init__(self, dry: bool, deadline: float) -> None:
        self.dry = dry
        self.deadline = deadline
        self.device = "cpu" if dry else "cuda"

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def median_us(self, call: Callable[[], Any], rounds: int = 30) -> float:
        """The median of single calls, the device's caches and clocks warm."""
        for _ in range(1 if self.dry else 10):
            call()
        if self.dry:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        torch.cuda.synchronize()
        found = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        return median(found)


# --- models ---------------------------------------------------------------------------------------


def _model(part: str, clock: Clock) -> Iterator[dict[str, Any]]:
    training = part.endswith("-training")
    model, inputs = make(part.removesuffix("-training"), clock.dry, clock.device)
    expected = None
    for arm, how in ARMS.items():
        if clock.late:
            yield {"arm": arm, "left out": "no time left"}
            continue
        torch._dynamo.reset()
        row: dict[str, Any] = {"arm": arm}
        try:
            call = _arm(model, inputs, _how(arm, how, clock.dry), training)
            started = time.monotonic()
            results = [x.detach().float().clone() for x in call()]
            row["first call s"] = round(time.monotonic() - started, 2)
            expected = results if how is None else expected
            row["off"] = _distance(results, expected)
            row["us"] = round(clock.median_us(call), 1)
            row |= _report(how)
        except Exception as error:  # one arm that fails leaves the others; it is in the table
            row["failed"] = f"{type(error).__name__}: {error}"[:500]
        yield row


def _how(arm: str, how: dict[str, Any] | None, dry: bool) -> dict[str, Any] | None:
    return DRY.get(arm.split()[0], how) if dry else how


def _arm(
    model: nn.Module, inputs: tuple[Tensor, ...], how: dict[str, Any] | None, training: bool
) -> Callable[[], list[Tensor]]:
    run = model if how is None else torch.compile(model, **how)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [run(*inputs)]

    def step() -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        result = run(*inputs)
        result.float().square().mean().backward()
        return [result, *(p.grad for p in model.parameters() if p.grad is not None)]

    return step if training else forward


def _distance(results: list[Tensor], expected: list[Tensor] | None) -> float:
    """The worst distance from eager, as a share of each tensor's root mean square."""
    if expected is None:
        return 0.0
    worst = 0.0
    for got, want in zip(results, expected, strict=True):
        scale = float(want.square().mean().sqrt()) or 1.0
        worst = max(worst, float((got - want).abs().max()) / scale)
    return round(worst, 5)


def _report(how: dict[str, Any] | None) -> dict[str, Any]:
    """What fuseboard made of it: regions by backend, trips."""
    if how is None or how.get("backend") != "fuseboard":
        return {}
    import fuseboard

    graphs = fuseboard.last_report().graphs
    regions: dict[str, int] = {}
    for graph in graphs:
        for region in graph.regions:
            regions[region.backend] = regions.get(region.backend, 0) + 1
    trips = [f"{trip.plugin}: {trip.error}"[:200] for graph in graphs for trip in graph.trips]
    found: dict[str, Any] = {"regions": regions}
    return found | ({"trips": trips} if trips else {})


def _ratios(rows: list[dict[str, Any]]) -> None:
    base = next((row.get("us") for row in rows if row.get("arm") == "eager"), None)
    for row in rows:
        if base and row.get("us"):
            row["over eager"] = round(base / row["us"], 2)


# --- kernels --------------------------------------------------------------------------------------


def _kernels(clock: Clock) -> Iterator[dict[str, Any]]:
    """Each written kernel, the generated one and Inductor's, in GB/s and as shares of a copy."""
    copied = _copy(clock)
    yield copied
    copy_gbs = copied["written GB/s"]
    for name, moved, written, reference in _cases(clock):
        row: dict[str, Any] = {"kernel": name}
        arms = {
            "written": written,
            "generated": _compiled(reference, clock, generated=True),
            "inductor": _compiled(reference, clock, generated=False),
        }
        for arm, call in arms.items():
            if clock.late:
                row[f"{arm} left out"] = "no time left"
                continue
            torch._dynamo.reset()
            try:
                row[f"{arm} GB/s"] = round(moved / clock.median_us(call) / 1e3, 1)
            except Exception as error:  # the others are measured all the same
                row[f"{arm} failed"] = f"{type(error).__name__}: {error}"[:300]
        row["written / copy"] = round(row.get("written GB/s", 0.0) / copy_gbs, 2)
        yield row


def _copy(clock: Clock) -> dict[str, Any]:
    x = torch.empty(64 if clock.dry else 2**28, dtype=torch.bfloat16, device=clock.device)
    y = torch.empty_like(x)
    gbs = 2 * x.numel() * 2 / clock.median_us(lambda: y.copy_(x)) / 1e3
    return {"kernel": "copy", "written GB/s": round(gbs, 3) or 1e-3}


def _compiled(reference: Callable[[], Any], clock: Clock, generated: bool) -> Callable[[], Any]:
    options = {"backends": ["triton", "eager"], "plugins": {"triton": {"written_kernels": False}}}
    if generated:
        return torch.compile(reference, backend="fuseboard", options=options)
    return torch.compile(reference, backend="aot_eager" if clock.dry else "inductor")


def _cases(clock: Clock) -> list[tuple[str, float, Callable[[], Any], Callable[[], Any]]]:
    """Name, bytes that have to move, the kernel, and the same in plain torch."""
    from fuseboard_triton.kernels import (
        cross_entropy,
        norms,
        rotary,
    )

    m, n, v = (4, 8, 16) if clock.dry else (8192, 4096, 32000)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=clock.device)

    x, y, grad, w, b = new(m, n), new(m, n), new(m, n), new(n), new(n)
    logits, target = new(m // 2, v), torch.arange(m // 2, device=clock.device) % v
    heads, cos, sin = new(1, 4, m // 4, n // 4), new(m // 4, n // 4), new(m // 4, n // 4)
    with torch.no_grad():
        # ATen's statistics are float32 on a GPU, and of the input's dtype on the CPU.
        stats = x.dtype if clock.dry else torch.float32
        _, mean, rstd = norms.layer_norm(x, w, b, 1e-5, stats)
        _, root = norms.rms_norm(x, w, 1e-5)
    size = float(x.numel() * 2)

    def named(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return lambda: function(*args)

    def add_rms() -> tuple[Tensor, Tensor]:
        total = x + y
        return F.rms_norm(total, (n,), w, 1e-5), total

    return [
        (
            *("rms norm", 2 * size, named(norms.rms_norm, x, w, 1e-5)),
            lambda: F.rms_norm(x, (n,), w, 1e-5),
        ),
        ("add + rms norm", 4 * size, named(norms.add_rms_norm, x, y, w, 1e-5), add_rms),
        (
            *("rms norm backward", 3 * size),
            named(norms.rms_norm_backward, grad, x, w, root),
            named(norms.rms_norm_backward_reference, grad, x, w, root),
        ),
        (
            *("layer norm", 2 * size, named(norms.layer_norm, x, w, b, 1e-5)),
            lambda: F.layer_norm(x, (n,), w, b, 1e-5),
        ),
        (
            *("layer norm backward", 3 * size),
            named(norms.layer_norm_backward, grad, x, w, mean, rstd),
            lambda: torch.ops.aten.native_layer_norm_backward(
                grad, x, [n], mean, rstd, w, b, [True, True, True]
            ),
        ),
        (
            *("rotary", 2 * heads.numel() * 2.0 + 4 * cos.numel()),
            named(rotary.rotary, heads, cos, sin),
            named(rotary.reference, heads, cos, sin),
        ),
        (
            *("cross entropy", logits.numel() * 2.0),
            named(cross_entropy.cross_entropy, logits, target, -100, True, False),
            lambda: F.cross_entropy(logits, target),
        ),
    ]


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows under their keys, in the order of first use."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([str(row.get(key, "")) for key in keys] for row in rows)]
    cells = [[cell[:60] for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )

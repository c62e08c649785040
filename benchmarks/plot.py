"""A bar for each model and arm: speed over eager with its interval. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import BASELINE
from benchmarks.suite import Record


def plot_speedups(records: Sequence[Record], path: Path) -> None:
    """Draws one panel for each thread count and writes an image; the suffix says which kind.

    A failed or wrong arm has no bar but a cross at 1.0, which is what it counts as.
    :raises ImportError: matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [r for r in records if r.arm != BASELINE and r.counted is not None]
    models = list(dict.fromkeys(r.model for r in drawn))
    arms = list(dict.fromkeys(r.arm for r in drawn))
    counts = sorted({r.threads for r in drawn})
    width, height = max(6.0, 2.0 + 0.28 * len(models) * len(arms)), 4.2 * len(counts)
    figure, axes = pyplot.subplots(
        len(counts), 1, squeeze=False, figsize=(width, height), layout="constrained"
    )
    for axis, threads in zip(axes[:, 0], counts, strict=True):
        for position, arm in enumerate(arms):
            own = {r.model: r for r in drawn if (r.arm, r.threads) == (arm, threads)}
            _draw_arm(axis, models, own, arm, position, len(arms))
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(models)), models, rotation=30, ha="right")
        axis.set_ylabel(f"speed over eager, {threads} thread{'s' if threads > 1 else ''}")
        axis.legend(fontsize="small", ncols=4)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_arm(
    axis: Any, models: list[str], own: dict[str, Record], arm: str, position: int, arms: int
) -> None:
    """One arm's bars, each beside those of the other ``arms`` arms of its model."""
    width = 0.8 / arms
    offset = (position - (arms - 1) / 2) * width
    placed = [(index + offset, own[model]) for index, model in enumerate(models) if model in own]
    bars = [(x, r.speedup) for x, r in placed if r.speedup and r.status in ("ok", "fell back")]
    crosses = [x for x, r in placed if r.status in ("failed", "wrong")]
    # A median lies within its interval, but for rounding.
    below = [max(0.0, e.value - e.low) for _, e in bars]
    above = [max(0.0, e.high - e.value) for _, e in bars]
    axis.bar(
        [x for x, _ in bars],
        [e.value for _, e in bars],
        width,
        yerr=(below, above),
        error_kw={"elinewidth": 0.8},
        label=arm,
        color=f"C{position}",
    )
    axis.plot(crosses, [1.0] * len(crosses), "x", color=f"C{position}")

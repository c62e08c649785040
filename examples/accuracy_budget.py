"""How much faster may a model be, if its results may be one percent off? Measured here::

python examples/accuracy_budget.py
python examples/accuracy_budget.py --tolerance 1e-3
python examples/accuracy_budget.py --page budget.html
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

import fuseboard

#: Pairs of calls that are timed in turn.
PAIRS = 20


class Layer(nn.Module):
    """What follows attention in a transformer.

    :param outlier: how much larger one channel is than the others, as in large language models.
        Numbers with few digits have none left for the others then.
    """

    def __init__(self, width: int, outlier: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        with torch.no_grad():
            self.norm.weight[0] *= outlier
            self.up.weight[:, 0] /= outlier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile a model twice, exactly and within a tolerance, and tell what was gained."""
    parser = argparse.ArgumentParser(description="Measure what a budget of accuracy gains.")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--page", type=Path, help="write the explanation here")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    outliers = [1e3 if layer == 2 else 1.0 for layer in range(chosen.layers)]
    model = nn.Sequential(*(Layer(chosen.width, outlier) for outlier in outliers)).eval()
    draw = torch.Generator().manual_seed(1)

    def inputs() -> torch.Tensor:
        return torch.randn(128, chosen.width, generator=draw)

    with torch.no_grad():
        exact, _ = compiled(model, inputs, 0.0)
        within, explanation = compiled(model, inputs, chosen.tolerance)
        exact_s, within_s = times(exact, within, inputs())
        x = inputs()  # neither compiled program has seen it
        want = copy.deepcopy(model).double()(x.double())
        error = float((within(x).double() - want).norm() / want.norm())
    print(f"exact            {1e3 * exact_s:8.2f} ms a call")
    print(f"within {chosen.tolerance:<9g} {1e3 * within_s:8.2f} ms a call")
    print(f"{exact_s / within_s:.2f} times as fast, with an error of {error:.2g} on other inputs")
    for graph in explanation.graphs:
        winner = next(one for one in graph.candidates if one.state == "chosen")
        module = {place.name: place.module for part in graph.parts for place in part.places}
        kept = f", exact in {', '.join(module[name] for name in winner.exact)}"
        print(f"what runs: {winner.name}{kept if winner.exact else ''}")
    if chosen.page is not None:
        chosen.page.write_text(explanation.to_html(), "utf-8")


def compiled(
    model: nn.Module, inputs: Callable[[], torch.Tensor], tolerance: float
) -> tuple[Callable[..., torch.Tensor], fuseboard.Explanation]:
    """A compiled model once it is decided what runs, and the decision."""
    run = torch.compile(model, backend="fuseboard", options={"tolerance": tolerance})
    run(inputs())
    fuseboard.wait()
    for _ in range(4):  # what may have an error is compared on some calls more
        run(inputs())
    fuseboard.wait()
    return run, fuseboard.last_report()


def times(
    one: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor], x: torch.Tensor
) -> tuple[float, float]:
    """Medians of what calls take, in seconds; the two are called in turn."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS):
        for run, own in zip((one, other), samples, strict=True):
            start = time.perf_counter()
            run(x)
            own.append(time.perf_counter() - start)
    return median(samples[0]), median(samples[1])


if __name__ == "__main__":
    main()

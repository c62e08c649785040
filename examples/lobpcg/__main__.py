"""Find some eigenpairs by an iteration whose update is compiled.

Try::

    python -m examples.lobpcg
    python -m examples.lobpcg --method basic --dense --generalized --largest -k 3 -n 5
    python -m examples.lobpcg --matrix-free --side 400     # where compiling pays
    python -m examples.lobpcg --profile out/     # needs: pip install 'fuseboard[pyspy]'
"""

from __future__ import annotations

import argparse
import functools
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fuseboard
from examples.lobpcg.problems import Chebyshev, laplacian, mass, rough_ground
from examples.lobpcg.solver import Eigenpairs, Iteration, solve

#: Iterations of a run, and runs of each program, whose times are compared.
COMPARED, ROUNDS = 10, 5


class TableTracker:
    """Collects iterations, and shows them as a table."""

    def __init__(self, title: str, k: int) -> None:
        self.title = title
        self.k = k
        self.iterations: list[Iteration] = []

    def __call__(self, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def table(self, shown: int = 12) -> Table:
        """The first, the last, and as many between as fit."""
        table = Table(title=self.title, title_justify="left")
        for name in ("iteration", "ms", "residual", "converged", "eigenvalue"):
            table.add_column(name, justify="right")
        count = len(self.iterations)
        picked = sorted({round(i * (count - 1) / (shown - 1)) for i in range(shown)})
        for told in (self.iterations[i] for i in picked):
            table.add_row(
                str(told.number),
                f"{1e3 * told.seconds:.2f}",
                f"{float(told.residuals[: self.k].max()):.1e}",
                f"{told.converged} of {self.k}",
                f"{float(told.values[0]):.10g}",
            )
        return table


def references(a: Tensor, k: int, b: Tensor | None, largest: bool) -> dict[str, Tensor]:
    """The same eigenvalues by torch.lobpcg and, if it is installed, by SciPy."""
    n = max(2 * k, k + 4)
    found, _ = torch.lobpcg(a, k, b, n=n, niter=2000, tol=1e-9, largest=largest)
    values = {"torch.lobpcg": found}
    try:
        import scipy.linalg
    except ImportError:
        return values
    dense = [None if t is None else t.to_dense().numpy() for t in (a, b)]
    m = a.shape[0]
    window = [m - k, m - 1] if largest else [0, k - 1]
    exact = torch.from_numpy(scipy.linalg.eigh(*dense, eigvals_only=True, subset_by_index=window))
    values["scipy.linalg.eigh"] = exact.flip(0) if largest else exact
    return values


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    console = Console()

    @functools.cache  # so that all runs of a method share what was compiled
    def compiled(update: Any) -> Any:
        chosen = {"backends": options.backends.split(",")} if options.backends else {}
        return torch.compile(update, backend="fuseboard", options=chosen)

    if options.matrix_free:
        return _compare_with_eager(options, console, compiled)
    a = laplacian(options.side)
    b = mass(a.shape[0]) if options.generalized else None
    if options.dense:
        a, b = a.to_dense(), None if b is None else b.to_dense()
    worst = 0.0
    expected = references(a, options.k, b, options.largest)
    for method in ("basic", "ortho") if options.method == "both" else (options.method,):
        tracker = TableTracker(f"{method} update of {options.n} vectors of {a.shape[0]}", options.k)
        profiler = _profiler(options, method)
        run = functools.partial(
            solve,
            *(a, options.k),
            b=b,
            guesses=options.n,
            largest=options.largest,
            method=method,
            tolerance=options.tolerance,
            compile=compiled,
        )
        if profiler.enabled:  # the first step and the second one compile; that isn't the iteration
            run(max_iterations=2)
        result = profiler.profile(run, tracker=tracker)
        console.print(tracker.table())
        for name, values in expected.items():
            error = float(((result.values - values) / values).abs().max())
            worst = max(worst, error)
            console.print(f"  largest relative difference from {name}: {error:.1e}")
        if not result.converged:
            worst = float("inf")
        _print_profile(options, console, profiler)
    return 0 if worst < 1e-6 else 1


def _compare_with_eager(options: argparse.Namespace, console: Console, compiled: Any) -> int:
    """Diffusion on rough ground, preconditioned: its products are in the compiled update."""
    a = rough_ground(options.side)
    generator = torch.Generator().manual_seed(0)
    guesses = torch.randn(a.c.numel(), options.n, dtype=a.c.dtype, generator=generator)
    method = "ortho" if options.method == "both" else options.method
    profiler = _profiler(options, method)

    def run(compile: Any, iterations: int = COMPARED) -> Eigenpairs:
        return solve(
            *(a, options.k),
            guesses=guesses,
            largest=False,
            method=method,
            tolerance=options.tolerance,
            max_iterations=iterations,
            precondition=Chebyshev(a, a.bound / 30, a.bound),
            compile=compile,
        )

    programs = {"eager": lambda function: function, "compiled": compiled}
    while True:  # calls go on until it is decided what answers them
        run(compiled)
        if fuseboard.settled():
            break
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    values: dict[str, Tensor] = {}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            result = run(program)
            seconds[name] += [one.seconds for one in result.history[1:]]
            values[name] = result.values
    profiler.profile(run, compiled)
    medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    difference = float(((values["compiled"] - values["eager"]) / values["eager"]).abs().max())
    console.print(
        f"{method} update of {options.n} vectors of {len(guesses)}, products and preconditioner in "
        f"it: {medians['compiled']:.1f} ms an iteration as compiled, {medians['eager']:.1f} ms in "
        f"eager ({medians['eager'] / medians['compiled']:.2f} times as fast); largest relative "
        f"difference of eigenvalues after {COMPARED} iterations: {difference:.1e}",
        soft_wrap=True,
    )
    _print_profile(options, console, profiler)
    return 0 if difference < 1e-6 else 1


def _profiler(options: argparse.Namespace, method: str) -> fuseboard.SamplingProfiler:
    return fuseboard.SamplingProfiler(
        sample_tags=[f"lobpcg {method}"],
        output=options.profile,
        enabled=options.profile is not None,
    )


def _print_profile(
    options: argparse.Namespace, console: Console, profiler: fuseboard.SamplingProfiler
) -> None:
    if profiler.result is None:
        return
    for row in profiler.result.region_shares():
        console.print(f"  {row.share:6.1%}  {row.region} {row.backend}")
    console.print(f"  profile: {options.profile / profiler.result.run_id}.html")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.lobpcg", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--side", type=int, default=24, help="of the grid: SIDE x (SIDE + 3)")
    parser.add_argument("-k", type=int, default=4, help="eigenpairs that are wanted")
    parser.add_argument("-n", type=int, default=8, help="vectors that are iterated")
    parser.add_argument("--largest", action="store_true", help="instead of the smallest")
    parser.add_argument("--dense", action="store_true", help="matrices as dense tensors")
    parser.add_argument("--generalized", action="store_true", help="with a matrix B")
    parser.add_argument("--matrix-free", action="store_true", help="A as a function, beside eager")
    parser.add_argument("--method", choices=("basic", "ortho", "both"), default="both")
    parser.add_argument("--tolerance", type=float, default=1e-9)
    parser.add_argument("--backends", help="of fuseboard, such as eager or inductor,eager")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write sampled profiles there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

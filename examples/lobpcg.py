"""Some eigenpairs of a large symmetric matrix, by an iteration whose update is compiled.

LOBPCG (Knyazev 2001) looks for the best approximations in the span of the current vectors ``X``,
their residuals ``W`` and the previous step's directions ``P``. Products with the matrices ``A`` and
``B`` may be sparse and stay outside; the update, all the rest, is one compiled function of dense
tensors. There are two: *basic* factors the Gram matrix of ``[X W P]``; *ortho* makes ``[P W]``
orthonormal first (Duersch et al. 2018), which keeps going where that matrix is nearly singular.

One file past 400 lines, so that it can be copied.

Try::

    python examples/lobpcg.py
    python examples/lobpcg.py --method basic --dense --generalized --largest -k 3 -n 5
    python examples/lobpcg.py --profile out/      # needs: pip install 'fuseboard[pyspy]'
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fuseboard

#: So many roundings away from 0, an eigenvalue of a Gram matrix counts as 0.
ROUNDINGS = 100


class Vectors(NamedTuple):
    """Columns ``v`` (m, c) with ``A @ v`` and ``B @ v``; None for the latter where B is 1."""

    v: Tensor
    a: Tensor
    b: Tensor | None

    @property
    def dual(self) -> Tensor:
        return self.v if self.b is None else self.b


class Step(NamedTuple):
    """What an update computes.

    :ivar values: (n,) approximate eigenvalues, the wanted end of the spectrum first.
    :ivar x: their vectors, B-orthonormal.
    :ivar p: the directions of this step.
    :ivar residual: (m, n) ``A x - B x value``.
    :ivar failed: 0-d, not 0 where the basis was too nearly dependent for this update.
    """

    values: Tensor
    x: Vectors
    p: Vectors
    residual: Tensor
    failed: Tensor


Update = Callable[[Vectors, Vectors, Vectors | None, bool], Step]


# --- the two updates: pure functions of dense tensors, compiled ----------------------------------


def update_basic(x: Vectors, w: Vectors, p: Vectors | None, largest: bool) -> Step:
    """Rayleigh-Ritz in ``[x w p]`` with the Cholesky factor of its Gram matrix."""
    s = _normalised(_side_by_side(x, w, p))
    lower, failed = torch.linalg.cholesky_ex(_symmetric(s.v.mT @ s.dual))
    half = torch.linalg.solve_triangular(lower, s.v.mT @ s.a, upper=False)
    small = torch.linalg.solve_triangular(lower.mT, half, upper=True, left=False)
    values, z = _extreme_first(*torch.linalg.eigh(_symmetric(small)), largest)
    z = torch.linalg.solve_triangular(lower.mT, z, upper=True)
    return _step(s, values, z, x.v.shape[1], failed)


def update_ortho(x: Vectors, w: Vectors, p: Vectors | None, largest: bool) -> Step:
    """Rayleigh-Ritz in ``[x u]``, where ``u`` is ``[p w]`` made orthonormal, and to ``x``."""
    u, missing = _orthonormal(w if p is None else _side_by_side(p, w), against=x)
    s = _side_by_side(x, u)
    small = _symmetric(s.v.mT @ s.a)
    # A direction that depends on others is a column of zeros now, with a Ritz value of 0: it is put
    # at the unwanted end.
    missing = torch.cat([missing.new_zeros(x.v.shape[1]), missing])
    beyond = small.abs().sum() + 1
    small = small + torch.diag(missing * (-beyond if largest else beyond))
    values, z = _extreme_first(*torch.linalg.eigh(small), largest)
    return _step(s, values, z, x.v.shape[1], torch.zeros((), dtype=torch.int32))


def first_step(x: Vectors, largest: bool) -> Step:
    """Rayleigh-Ritz in the guesses themselves."""
    x, missing = _orthonormal(x)
    values, z = _extreme_first(*torch.linalg.eigh(_symmetric(x.v.mT @ x.a)), largest)
    return _step(x, values, z, x.v.shape[1], missing.sum())


def _step(s: Vectors, values: Tensor, z: Tensor, n: int, failed: Tensor) -> Step:
    """The new vectors, and the part of them that isn't the old ones."""
    z = z[:, :n]
    x = _combined(s, z)
    p = _combined(s, torch.cat([torch.zeros_like(z[:n]), z[n:]]))
    return Step(values[:n], x, p, x.a - x.dual * values[:n], failed)


def _orthonormal(u: Vectors, against: Vectors | None = None) -> tuple[Vectors, Tensor]:
    """``u`` made B-orthonormal; and per column 1 where it is zero now, since it was dependent.

    By eigenvectors of the Gram matrix (SVQB), which keeps the shape; twice, which is enough for
    what one pass leaves over.
    """
    missing = u.v.new_zeros(u.v.shape[1])
    for _ in range(2):
        if against is not None:
            inside = against.dual.mT @ u.v
            u = Vectors(
                *(None if t is None else t - o @ inside for t, o in zip(u, against, strict=True))
            )
        u = _normalised(u)
        e, z = torch.linalg.eigh(_symmetric(u.v.mT @ u.dual))
        kept = e > ROUNDINGS * torch.finfo(e.dtype).eps * e.shape[0]
        u = _combined(u, z * torch.where(kept, e.clamp(min=torch.finfo(e.dtype).tiny).rsqrt(), 0))
        missing = (~kept).to(e.dtype)
    return u, missing


def _normalised(u: Vectors) -> Vectors:
    """Each column by its B-norm; zeros stay zeros."""
    norm = (u.v * u.dual).sum(0).clamp(min=0).sqrt()
    scale = torch.where(norm > 0, 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0)
    return Vectors(*(None if t is None else t * scale for t in u))


def _combined(u: Vectors, z: Tensor) -> Vectors:
    return Vectors(*(None if t is None else t @ z for t in u))


def _side_by_side(*parts: Vectors | None) -> Vectors:
    given = [part for part in parts if part is not None]
    columns = zip(*given, strict=True)
    return Vectors(*(None if ts[0] is None else torch.cat(ts, dim=1) for ts in columns))


def _symmetric(g: Tensor) -> Tensor:
    return (g + g.mT) / 2


def _extreme_first(values: Tensor, z: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    return (values.flip(0), z.flip(1)) if largest else (values, z)


UPDATES: dict[str, Update] = {"basic": update_basic, "ortho": update_ortho}


# --- the iteration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """What a tracker is told after each step.

    :ivar residuals: (n,) relative to the size of the matrices.
    :ivar converged: how many of the k wanted pairs have converged, counted from the first on.
    """

    number: int
    seconds: float
    values: Tensor
    residuals: Tensor
    converged: int


@dataclass
class Eigenpairs:
    """:ivar values: (k,); :ivar vectors: (m, k), B-orthonormal."""

    values: Tensor
    vectors: Tensor
    iterations: int
    converged: bool
    history: list[Iteration] = field(default_factory=list)


@torch.no_grad()
def solve(
    a: Tensor,
    k: int = 1,
    *,
    b: Tensor | None = None,
    guesses: Tensor | int | None = None,
    largest: bool = True,
    method: str = "ortho",
    tolerance: float | None = None,
    max_iterations: int = 500,
    precondition: Callable[[Tensor], Tensor] | None = None,
    tracker: Callable[[Iteration], None] | None = None,
    compile: Callable[[Update], Update] = lambda update: update,
) -> Eigenpairs:
    """The ``k`` largest or smallest eigenpairs of ``a x = value b x``.

    :param a: (m, m) symmetric, sparse or dense. :param b: likewise, positive definite; None for 1.
    :param guesses: (m, n) to start from, or n of them at random; n >= k, and 3 n <= m.
    :param tolerance: of residuals relative to the size of the matrices.
    :param precondition: an approximate inverse of ``a``, applied to residuals.
    :param compile: what the update goes through, such as ``torch.compile``.
    """
    x = _first_guesses(a, k, guesses)
    tolerance = tolerance or torch.finfo(a.dtype).eps ** 0.5
    sizes = (_norm(a), 1.0 if b is None else _norm(b))
    update = compile(UPDATES[method])
    repair = update if method == "ortho" else compile(update_ortho)

    def with_products(v: Tensor) -> Vectors:
        return Vectors(v, a @ v, None if b is None else b @ v)

    step = first_step(with_products(x), largest)
    if int(step.failed):
        raise ValueError("the guesses depend on each other: some are sums of others")
    history: list[Iteration] = []
    p: Vectors | None = None
    fresh = True  # products with A and B were computed, not combined from earlier ones
    while True:
        began = time.perf_counter()
        residuals = _relative(step, *sizes)
        converged = int((residuals[:k] < tolerance).cumprod(0).sum())
        if (converged == k and fresh) or len(history) == max_iterations:
            return Eigenpairs(
                step.values[:k], step.x.v[:, :k], len(history), converged == k, history
            )
        if converged == k:  # rounding adds up in combined products: look again
            step = first_step(with_products(step.x.v), largest)
            fresh, p = True, None
            continue
        w = step.residual if precondition is None else precondition(step.residual)
        w_ = with_products(w)
        following = update(step.x, w_, p, largest)
        if int(following.failed):
            following = repair(step.x, w_, p, largest)
        step, p, fresh = following, following.p, False
        residuals = _relative(step, *sizes)
        told = Iteration(
            len(history) + 1,
            time.perf_counter() - began,
            step.values.clone(),
            residuals,
            int((residuals[:k] < tolerance).cumprod(0).sum()),
        )
        history.append(told)
        if tracker is not None:
            tracker(told)


def _first_guesses(a: Tensor, k: int, guesses: Tensor | int | None) -> Tensor:
    m = a.shape[0]
    n = guesses.shape[1] if isinstance(guesses, Tensor) else (guesses or k)
    if a.shape != (m, m) or not 1 <= k <= n or 3 * n > m:
        raise ValueError(
            f"A of shape {tuple(a.shape)}, k = {k} and n = {n}: A is square, and 1 <= k <= n <= m/3"
        )
    if isinstance(guesses, Tensor):
        return guesses
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, n, dtype=a.dtype, generator=generator).to(a.device)


def _norm(a: Tensor) -> float:
    """The 2-norm of a symmetric matrix, from below, by what it makes of random vectors."""
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(a.shape[0], 4, dtype=a.dtype, generator=generator).to(a.device)
    return float((torch.linalg.norm(a @ v, dim=0) / torch.linalg.norm(v, dim=0)).max())


def _relative(step: Step, size_a: float, size_b: float) -> Tensor:
    size = (size_a + step.values.abs() * size_b) * torch.linalg.norm(step.x.v, dim=0)
    return torch.linalg.norm(step.residual, dim=0) / size


# --- problems to try it on ------------------------------------------------------------------------


def laplacian(side: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The five-point Laplacian of a ``side`` by ``side + 3`` grid, as a sparse CSR matrix.

    Not a square grid: its eigenvalues are simple.
    """
    rows, columns = side, side + 3
    index = torch.arange(rows * columns).view(rows, columns)
    pairs = [(index[:-1], index[1:]), (index[:, :-1], index[:, 1:])]
    i = torch.cat([one.flatten() for one, _ in pairs])
    j = torch.cat([other.flatten() for _, other in pairs])
    at = torch.cat([torch.stack([i, j]), torch.stack([j, i]), index.flatten().expand(2, -1)], dim=1)
    values = torch.cat([-torch.ones(2 * len(i)), 4 * torch.ones(index.numel())]).to(dtype)
    size = (index.numel(), index.numel())
    return torch.sparse_coo_tensor(at, values, size, check_invariants=True).to_sparse_csr()


def mass(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A positive definite tridiagonal matrix, as a sparse CSR matrix."""
    i = torch.arange(size)
    at = torch.stack([torch.cat([i, i[:-1], i[1:]]), torch.cat([i, i[1:], i[:-1]])])
    values = torch.cat([4 + i.to(dtype) / size, torch.ones(2 * (size - 1), dtype=dtype)]) / 6
    return torch.sparse_coo_tensor(at, values, (size, size), check_invariants=True).to_sparse_csr()


# --- the program ----------------------------------------------------------------------------------


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
        picked = sorted(
            {round(i * (count - 1) / (shown - 1)) for i in range(shown)} if count else ()
        )
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
    a = laplacian(options.side)
    b = mass(a.shape[0]) if options.generalized else None
    if options.dense:
        a, b = a.to_dense(), None if b is None else b.to_dense()
    console = Console()

    @functools.cache  # so that both runs of a method below share what was compiled
    def compiled(update: Update) -> Any:
        chosen = {"backends": options.backends.split(",")} if options.backends else {}
        return torch.compile(update, backend="fuseboard", options=chosen)

    worst = 0.0
    expected = references(a, options.k, b, options.largest)
    for method in ("basic", "ortho") if options.method == "both" else (options.method,):
        tracker = TableTracker(f"{method} update of {options.n} vectors of {a.shape[0]}", options.k)
        profiler = fuseboard.SamplingProfiler(
            sample_tags=[f"lobpcg {method}"],
            output=options.profile,
            enabled=options.profile is not None,
        )
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
        if profiler.result is not None:
            for row in profiler.result.region_shares():
                console.print(f"  {row.share:6.1%}  {row.region} {row.backend}")
            console.print(f"  profile: {options.profile / profiler.result.run_id}.html")
    return 0 if worst < 1e-6 else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=24, help="of the grid: SIDE x (SIDE + 3)")
    parser.add_argument("-k", type=int, default=4, help="eigenpairs that are wanted")
    parser.add_argument("-n", type=int, default=8, help="vectors that are iterated")
    parser.add_argument("--largest", action="store_true", help="instead of the smallest")
    parser.add_argument("--dense", action="store_true", help="matrices as dense tensors")
    parser.add_argument("--generalized", action="store_true", help="with a matrix B")
    parser.add_argument("--method", choices=("basic", "ortho", "both"), default="both")
    parser.add_argument("--tolerance", type=float, default=1e-9)
    parser.add_argument("--backends", help="of fuseboard, such as eager or inductor,eager")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write sampled profiles there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

"""Some eigenpairs of large symmetric matrices, by an iteration that is compiled.

LOBPCG (Knyazev 2001) looks for the best approximations in the span of the current vectors ``X``,
their residuals ``W`` and the previous step's directions ``P``. The update is one function of dense
tensors. There are two: *basic* factors the Gram matrix of ``[X W P]``; *ortho* makes ``[P W]``
orthonormal first (Duersch et al. 2018), which keeps going where that matrix is nearly singular.

What multiplies by the matrix ``A`` is a tensor or a function. Products with a tensor, which may be
sparse, stay outside of what is compiled. A function of a few slices, say, is compiled with the
update, and so is a preconditioner beside it: that is where compiling pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.lobpcg.gradient import WithGradient, check_gradient

#: So many roundings away from 0, an eigenvalue of a Gram matrix counts as 0.
ROUNDINGS = 100

#: (*, m, c) → (*, m, c): products with a symmetric matrix that nobody holds.
Operator = Callable[[Tensor], Tensor]


class Vectors(NamedTuple):
    """Columns ``v`` (*, m, c) with ``A @ v`` and ``B @ v``; None for the latter where B is 1."""

    v: Tensor
    a: Tensor
    b: Tensor | None

    @property
    def dual(self) -> Tensor:
        return self.v if self.b is None else self.b


class Step(NamedTuple):
    """What an update computes.

    :ivar values: (*, n) approximate eigenvalues, the wanted end of the spectrum first.
    :ivar x: their vectors, B-orthonormal.
    :ivar p: the directions of this step.
    :ivar residual: (*, m, n) ``A x - B x value``.
    :ivar norms: (*, n) of the residuals, and of the vectors.
    :ivar failed: (*), not 0 where the basis was too nearly dependent for this update.
    """

    values: Tensor
    x: Vectors
    p: Vectors
    residual: Tensor
    norms: tuple[Tensor, Tensor]
    failed: Tensor


Update = Callable[[Vectors, Vectors, Vectors | None, bool], Step]


# --- the two updates: pure functions of dense tensors ---------------------------------------------


def update_basic(x: Vectors, w: Vectors, p: Vectors | None, largest: bool) -> Step:
    """Rayleigh-Ritz in ``[x w p]`` with the Cholesky factor of its Gram matrix."""
    s = _normalised(_side_by_side(x, w, p))
    lower, failed = torch.linalg.cholesky_ex(_symmetric(s.v.mT @ s.dual))
    half = torch.linalg.solve_triangular(lower, s.v.mT @ s.a, upper=False)
    small = torch.linalg.solve_triangular(lower.mT, half, upper=True, left=False)
    values, z = _extreme_first(*torch.linalg.eigh(_symmetric(small)), largest)
    z = torch.linalg.solve_triangular(lower.mT, z, upper=True)
    return _step(s, values, z, x.v.shape[-1], failed)


def update_ortho(x: Vectors, w: Vectors, p: Vectors | None, largest: bool) -> Step:
    """Rayleigh-Ritz in ``[x u]``, where ``u`` is ``[p w]`` made orthonormal, and to ``x``."""
    u, missing = _orthonormal(w if p is None else _side_by_side(p, w), against=x)
    s = _side_by_side(x, u)
    small = _symmetric(s.v.mT @ s.a)
    # A direction that depends on others is a column of zeros now, with a Ritz value of 0: it is put
    # at the unwanted end.
    missing = torch.cat([torch.zeros_like(x.v[..., 0, :]), missing], dim=-1)
    beyond = small.abs().sum((-2, -1)).unsqueeze(-1) + 1
    small = small + torch.diag_embed(missing * (-beyond if largest else beyond))
    values, z = _extreme_first(*torch.linalg.eigh(small), largest)
    return _step(s, values, z, x.v.shape[-1], torch.zeros_like(values[..., 0], dtype=torch.int32))


def first_step(x: Vectors, largest: bool) -> Step:
    """Rayleigh-Ritz in the guesses themselves."""
    x, missing = _orthonormal(x)
    values, z = _extreme_first(*torch.linalg.eigh(_symmetric(x.v.mT @ x.a)), largest)
    return _step(x, values, z, x.v.shape[-1], missing.sum(-1))


def _step(s: Vectors, values: Tensor, z: Tensor, n: int, failed: Tensor) -> Step:
    """The new vectors, and the part of them that isn't the old ones."""
    z, values = z[..., :n], values[..., :n]
    x = _combined(s, z)
    p = _combined(s, torch.cat([torch.zeros_like(z[..., :n, :]), z[..., n:, :]], dim=-2))
    residual = x.a - x.dual * values.unsqueeze(-2)
    norms = torch.linalg.norm(residual, dim=-2), torch.linalg.norm(x.v, dim=-2)
    return Step(values, x, p, residual, norms, failed)


def _orthonormal(u: Vectors, against: Vectors | None = None) -> tuple[Vectors, Tensor]:
    """``u`` made B-orthonormal; and per column 1 where it is zero now, since it was dependent.

    By eigenvectors of the Gram matrix (SVQB), which keeps the shape; twice, which is enough for
    what one pass leaves over.
    """
    missing = torch.zeros_like(u.v[..., 0, :])
    for _ in range(2):
        if against is not None:
            inside = against.dual.mT @ u.v
            u = Vectors(
                *(None if t is None else t - o @ inside for t, o in zip(u, against, strict=True))
            )
        u = _normalised(u)
        e, z = torch.linalg.eigh(_symmetric(u.v.mT @ u.dual))
        kept = e > ROUNDINGS * torch.finfo(e.dtype).eps * e.shape[-1]
        scale = torch.where(kept, e.clamp(min=torch.finfo(e.dtype).tiny).rsqrt(), 0)
        u = _combined(u, z * scale.unsqueeze(-2))
        missing = (~kept).to(e.dtype)
    return u, missing


def _normalised(u: Vectors) -> Vectors:
    """Each column by its B-norm; zeros stay zeros."""
    norm = (u.v * u.dual).sum(-2, keepdim=True).clamp(min=0).sqrt()
    scale = torch.where(norm > 0, 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0)
    return Vectors(*(None if t is None else t * scale for t in u))


def _combined(u: Vectors, z: Tensor) -> Vectors:
    return Vectors(*(None if t is None else t @ z for t in u))


def _side_by_side(*parts: Vectors | None) -> Vectors:
    given = [part for part in parts if part is not None]
    columns = zip(*given, strict=True)
    return Vectors(*(None if ts[0] is None else torch.cat(ts, dim=-1) for ts in columns))


def _symmetric(g: Tensor) -> Tensor:
    return (g + g.mT) / 2


def _extreme_first(values: Tensor, z: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    return (values.flip(-1), z.flip(-1)) if largest else (values, z)


def advance(
    update: Update,
    operators: tuple[Operator, Operator | None, Operator | None],
    x: Vectors,
    residual: Tensor,
    p: Vectors | None,
    largest: bool,
) -> Step:
    """An update with all that comes before it: the preconditioner, and products by functions.

    :param operators: what multiplies by A, by B, and the preconditioner.
    """
    a, b, precondition = operators
    w = _preconditioned(precondition, residual)
    return update(x, _with_products(a, b, w), p, largest)


def _preconditioned(precondition: Operator | None, residual: Tensor) -> Tensor:
    return residual if precondition is None else precondition(residual)


def _with_products(a: Tensor | Operator, b: Tensor | Operator | None, v: Tensor) -> Vectors:
    return Vectors(v, _product(a, v), None if b is None else _product(b, v))


def _product(matrix: Tensor | Operator, v: Tensor) -> Tensor:
    return matrix @ v if isinstance(matrix, Tensor) else matrix(v)


UPDATES: dict[str, Update] = {"basic": update_basic, "ortho": update_ortho}


# --- the iteration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """What a tracker is told: of the guesses (number 0), then of each step.

    :ivar values: (*, n), the wanted end of the spectrum first.
    :ivar residuals: (*, n) relative to the size of the matrices.
    :ivar converged: how many of the k wanted pairs have converged, counted from the first on; of a
        batch, in the matrix that has the fewest.
    """

    number: int
    seconds: float
    values: Tensor
    residuals: Tensor
    converged: int


@dataclass
class Eigenpairs:
    """What was found.

    :ivar values: (*, k). :ivar vectors: (*, m, k), B-orthonormal.
    :ivar iterations: how many steps were made.
    :ivar converged: whether all pairs have; False, too, where a tracker ended it before.
    :ivar history: what a tracker is told.
    """

    values: Tensor
    vectors: Tensor
    iterations: int
    converged: bool
    history: list[Iteration] = field(default_factory=list)


def solve(
    a: Tensor | Operator,
    k: int = 1,
    *,
    b: Tensor | Operator | None = None,
    guesses: Tensor | int | None = None,
    largest: bool = True,
    method: str = "ortho",
    tolerance: float | None = None,
    max_iterations: int = 500,
    precondition: Operator | None = None,
    tracker: Callable[[Iteration], object] | None = None,
    compile: Callable[[Any], Any] = lambda function: function,
) -> Eigenpairs:
    """The ``k`` largest or smallest eigenpairs of ``a x = value b x``.

    Differentiable, once, with regard to a dense ``a`` where there is no ``b``: its gradient is
    symmetric. It is infinite where one of the k eigenvalues isn't simple, as that of
    :func:`torch.linalg.eigh`.

    :param a: symmetric: (m, m), sparse or dense; (*, m, m) dense, each of which is iterated until
        all have converged; or a function of (*, m, n) that multiplies by it.
    :param b: likewise, positive definite; None for 1.
    :param guesses: (*, m, n) to start from, or n of them at random; n >= k, and 3 n <= m. A tensor
        where ``a`` is a function.
    :param tolerance: of residuals relative to the size of the matrices; by default the root of the
        dtype's rounding.
    :param precondition: an approximate inverse of ``a``, applied to residuals.
    :param tracker: is told each :class:`Iteration`; what it returns ends the iteration if it is
        true.
    :param compile: what the update goes through, such as ``torch.compile``; it is given the same
        function each time, whatever the matrix.
    :raises ValueError: sizes don't fit, guesses depend on each other, or a gradient is asked for
        that isn't known.
    """
    check_gradient(a, b)
    with torch.no_grad():
        x = _first_guesses(a, k, guesses)
        iterate = _Iterate(a, b, method, largest, precondition, compile)
        tolerance = tolerance or torch.finfo(x.dtype).eps ** 0.5
        found = _iterate(iterate, x, k, tolerance, max_iterations, tracker)
    if torch.is_grad_enabled() and isinstance(a, Tensor) and a.requires_grad:
        found.values, found.vectors = WithGradient.apply(a, found.values, found.vectors)
    return found


class _Iterate:
    """The step from some vectors to better ones, compiled as far as it can be."""

    def __init__(
        self,
        a: Tensor | Operator,
        b: Tensor | Operator | None,
        method: str,
        largest: bool,
        precondition: Operator | None,
        compile: Callable[[Any], Any],
    ) -> None:
        self._a, self._b = a, b
        self._largest = largest
        self._precondition = precondition
        self._update = UPDATES[method]
        self._is_whole = not isinstance(a, Tensor) and not isinstance(b, Tensor)
        parts = {advance} if self._is_whole else {self._update, update_ortho}
        self._compiled = {part: compile(part) for part in parts}

    def first(self, v: Tensor) -> Step:
        return first_step(_with_products(self._a, self._b, v), self._largest)

    def following(self, step: Step, p: Vectors | None) -> Step:
        following = self._by(self._update, step, p)
        if self._update is not update_ortho and bool(following.failed.any()):
            return self._by(update_ortho, step, p)
        return following

    def _by(self, update: Update, step: Step, p: Vectors | None) -> Step:
        if self._is_whole:
            operators = self._a, self._b, self._precondition
            run = self._compiled[advance]
            return run(update, operators, step.x, step.residual, p, self._largest)  # type: ignore[no-any-return]
        w = _preconditioned(self._precondition, step.residual)
        w = _with_products(self._a, self._b, w)
        return self._compiled[update](step.x, w, p, self._largest)  # type: ignore[no-any-return]

    def sizes(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The 2-norms of A and B, from below, by what they make of random vectors."""
        generator = torch.Generator().manual_seed(1)
        v = torch.randn(*x.shape[:-1], 4, dtype=x.dtype, generator=generator).to(x.device)
        lengths = torch.linalg.norm(v, dim=-2)

        def size(matrix: Tensor | Operator) -> Tensor:
            longest = torch.linalg.norm(_product(matrix, v), dim=-2) / lengths
            return longest.amax(-1, keepdim=True)

        return size(self._a), 1.0 if self._b is None else size(self._b)


def _iterate(
    iterate: _Iterate,
    x: Tensor,
    k: int,
    tolerance: float,
    max_iterations: int,
    tracker: Callable[[Iteration], object] | None,
) -> Eigenpairs:
    size_a, size_b = iterate.sizes(x)
    history: list[Iteration] = []

    def tell(step: Step, number: int, began: float) -> tuple[int, bool]:
        """How many have converged, and whether it is to end."""
        residual_norms, lengths = step.norms
        residuals = residual_norms / ((size_a + step.values.abs() * size_b) * lengths)
        converged = int((residuals[..., :k] < tolerance).cumprod(-1).sum(-1).min())
        seconds = time.perf_counter() - began
        if number <= len(history) - 1:  # the same step, with products computed anew
            return converged, False
        told = Iteration(number, seconds, step.values.clone(), residuals, converged)
        history.append(told)
        return converged, tracker is not None and bool(tracker(told))

    began = time.perf_counter()
    step = iterate.first(x)
    if bool(step.failed.any()):
        raise ValueError("the guesses depend on each other: some are sums of others")
    number, p = 0, None
    is_fresh = True  # products with A and B were computed, not combined from earlier ones
    while True:
        converged, is_ended = tell(step, number, began)
        is_done = converged == k and is_fresh
        if is_done or is_ended or number == max_iterations:
            values, vectors = step.values[..., :k], step.x.v[..., :k]
            return Eigenpairs(values, vectors, number, is_done, history)
        began = time.perf_counter()
        if converged == k:  # rounding adds up in combined products: look again
            step = iterate.first(step.x.v)
            is_fresh, p = True, None
            continue
        step = iterate.following(step, p)
        p, is_fresh, number = step.p, False, number + 1


def _first_guesses(a: Tensor | Operator, k: int, guesses: Tensor | int | None) -> Tensor:
    if isinstance(guesses, Tensor):
        shape, n = guesses.shape[:-1], guesses.shape[-1]
    elif isinstance(a, Tensor):
        shape, n = a.shape[:-1], guesses or k
    else:
        raise ValueError("guesses: a tensor is needed where A is a function, which has no size")
    m = shape[-1]
    if (isinstance(a, Tensor) and a.shape != (*shape, m)) or not 1 <= k <= n or 3 * n > m:
        known = f"A of shape {tuple(a.shape)}" if isinstance(a, Tensor) else f"m = {m}"
        raise ValueError(f"{known}, k = {k} and n = {n}: A is square, and 1 <= k <= n <= m/3")
    if isinstance(guesses, Tensor):
        return guesses.detach()
    assert isinstance(a, Tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, n, dtype=a.dtype, generator=generator).to(a.device).expand(*shape, n)

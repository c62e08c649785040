"""Matrices to try the solver on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Diffusion:
    """Minus the divergence of ``c`` times a gradient on a grid that nobody holds as a matrix.

    What flows between two neighbours is as much as the mean of theirs lets through; outside of the
    grid everything is 0.

    :ivar c: (rows, columns), positive.
    """

    c: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """(rows * columns, n) → the same."""
        u = v.view(*self.c.shape, -1)
        around = torch.nn.functional.pad(u, (0, 0, 1, 1, 1, 1))
        c = torch.nn.functional.pad(self.c, (1, 1, 1, 1), value=1.0).unsqueeze(-1)
        middle = c[1:-1, 1:-1]
        flow = torch.zeros_like(u)
        for rows in (slice(None, -2), slice(2, None)):
            flow = flow + (c[rows, 1:-1] + middle) / 2 * (u - around[rows, 1:-1])
        for columns in (slice(None, -2), slice(2, None)):
            flow = flow + (c[1:-1, columns] + middle) / 2 * (u - around[1:-1, columns])
        return flow.reshape(v.shape)

    @property
    def bound(self) -> float:
        """No eigenvalue is larger (Gershgorin)."""
        return 8.0 * max(float(self.c.max()), 1.0)


@dataclass(frozen=True)
class Chebyshev:
    """An approximate inverse: so many steps of the Chebyshev iteration from 0 (Saad 2003, 12.1).

    :ivar a: what multiplies by the matrix.
    :ivar low: from there on the spectrum counts. :ivar high: where it ends.
    """

    a: Diffusion
    low: float
    high: float
    steps: int = 4

    def __call__(self, residual: Tensor) -> Tensor:
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        sigma = middle / half
        rho = 1 / sigma
        r, d = residual, residual / middle
        x = d
        for _ in range(self.steps - 1):
            r = r - self.a(d)
            following = 1 / (2 * sigma - rho)
            d = following * rho * d + 2 * following / half * r
            x, rho = x + d, following
        return x


def rough_ground(side: int, dtype: torch.dtype = torch.float64) -> Diffusion:
    """On a ``side`` by ``side + 3`` grid, whose cells let 1 to 2 through."""
    generator = torch.Generator().manual_seed(2)
    return Diffusion(1 + torch.rand(side, side + 3, dtype=dtype, generator=generator))

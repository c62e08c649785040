"""The gradient of eigenpairs that were found, with regard to a dense symmetric matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def check_gradient(a: object, b: object) -> None:
    """
    :raises ValueError: a gradient is asked for that isn't known.
    """
    wanted = any(isinstance(one, Tensor) and one.requires_grad for one in (a, b))
    if not wanted or not torch.is_grad_enabled():
        return
    if b is not None:
        raise ValueError("there is no gradient where B is given: detach both")
    if isinstance(a, Tensor) and a.layout != torch.strided:
        raise ValueError(f"there is no gradient for A of layout {a.layout}: detach it")


class WithGradient(torch.autograd.Function):
    """Eigenpairs that were found, as functions of the matrix.

    Where ``a`` changes by ``d``, an eigenvector ``x`` with eigenvalue ``v`` changes by
    ``-pinv(a - v) d x``, and ``v`` by ``x' d x``. In the span of the vectors that were found the
    inverse is known; in the rest ``a - v`` is definite, as all that is at the end was found.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, values, vectors)
        ctx.set_materialize_grads(True)
        return values.clone(), vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, grad_vectors: Tensor) -> tuple[Tensor, None, None]:
        a, values, u = ctx.saved_tensors
        inside = u.mT @ grad_vectors
        gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
        gaps.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        along = u @ (torch.diag_embed(grad_values) + inside / gaps)
        outside = grad_vectors - u @ inside
        # (*, k, m, m): each shifted matrix, with what was found moved away from 0.
        shifted = a.unsqueeze(-3) - torch.einsum("...k,mn->...kmn", values, _identity_like(a))
        away = 3 * torch.linalg.norm(a, dim=(-2, -1))[..., None, None]
        shifted = shifted + (away * u @ u.mT).unsqueeze(-3)
        solved = torch.linalg.solve(shifted, outside.mT.unsqueeze(-1)).squeeze(-1).mT
        gradient = (along - solved) @ u.mT
        return (gradient + gradient.mT) / 2, None, None


def _identity_like(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)

"""Tensors laid out again: with the sizes, strides and lazy bits of others, on other storages."""

from __future__ import annotations

import torch


def view_like(
    like: torch.Tensor, storage: torch.UntypedStorage, offset: int | torch.SymInt
) -> torch.Tensor:
    """A tensor laid out like another, on some storage."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    made.set_(storage, offset, like.shape, like.stride())
    made = torch._neg_view(made) if like.is_neg() else made
    return made.conj() if like.is_conj() else made


class Relaid:
    """Tensors again on other storages, views of each other as they were.

    AOTAutograd's code takes the base of views that share memory from the views.
    """

    def __init__(self) -> None:
        self._bases: dict[int, torch.Tensor] = {}

    def on(self, value: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """One of them.

        :param storage: a copy of its own, or that of another of them which shares it.
        """
        base = base_of(value)
        root = value if base is None else base
        if (laid := self._bases.get(id(root))) is None:
            laid = self._bases[id(root)] = view_like(root, storage, root.storage_offset())
        if base is None:
            return laid
        return laid.as_strided(value.shape, value.stride(), value.storage_offset())


def base_of(value: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of, if ``as_strided`` makes it of that; no gradient goes through.

    Of bases that don't begin with their storage AOTAutograd's fake values have too little memory.
    """
    if value.is_inference() or value.requires_grad:
        return None
    base = value._base
    if base is None or base.requires_grad or base.dtype != value.dtype:
        return None
    if base.storage_offset() != 0:
        return None
    odd = any(one.is_conj() or one.is_neg() for one in (value, base))
    return None if odd else base

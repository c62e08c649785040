"""The one module of this plugin that reaches torch's private APIs.

Read against torch 2.13: ``torch/_prims_common/__init__.py`` (promotion of dtypes),
``torch/_decomp/__init__.py``, ``torch/_subclasses/fake_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from fuseboard import real_tensors

__all__ = ["decompositions", "is_fake", "promoted", "real_tensors"]


def promoted(operands: Sequence[Any], kind: str) -> torch.dtype:
    """The dtype in which ATen computes element by element.

    :param operands: tensors and numbers.
    :param kind: a name of ``ELEMENTWISE_TYPE_PROMOTION_KIND``.
    """
    rule = getattr(ELEMENTWISE_TYPE_PROMOTION_KIND, kind)
    computed, _ = elementwise_dtypes(*operands, type_promotion_kind=rule)
    return computed


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of some ops."""
    return dict(get_decompositions(ops))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"

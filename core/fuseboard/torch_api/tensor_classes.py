"""Which tensors differ from ``torch.Tensor`` in name alone, for ops and for torch's compilers."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_plain(value: Any) -> bool:
    """Whether ops and AOTAutograd take a tensor for what it holds, whatever its class is called.

    Libraries derive classes from ``torch.nn.Parameter`` to keep attributes beside a weight. Ops on
    one give plain tensors, since ``Parameter`` has no ``__torch_function__``, and AOTAutograd looks
    at its ``.data`` (``_AnalyzeCustomOpInputOutputMode`` in
    ``torch/_functorch/_aot_autograd/runtime_wrappers.py``, torch 2.13). It does so for no other
    subclass.
    """
    kind = type(value)
    return kind in _PLAIN or (
        issubclass(kind, torch.nn.Parameter)
        and kind.__torch_function__ is torch.nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not hasattr(kind, "__tensor_flatten__")
    )


def is_fake(value: Any) -> bool:
    """Whether it is a tensor without values, while something is traced or compiled."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)

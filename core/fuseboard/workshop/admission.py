"""Which graphs are compiled beside their calls, and why others aren't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuseboard.board import Session
from fuseboard.profile.choose.ranks import several_ranks


def why_in_calls(session: Session, inputs: Sequence[Any]) -> str:
    """Why a graph is compiled within its calls rather than beside them; "" if it needn't be."""
    settings = session.settings
    if settings.policy != "measured" or settings.settle != "background":
        return f"policy = {settings.policy!r}, settle = {settings.settle!r}"
    if session.eager_is_fallback_only:
        return (
            "what the setting backends names runs from the first call on, as eager isn't among it"
        )
    if settings.on_failure == "raise" or session.decides_on_failure:
        return "failures may be raised, which needs a call to raise in"
    if settings.pin or settings.exclude:
        return "pin and exclude look at the modules of the call"
    if not settings.cache:
        return "cache = false, and the cache is how other processes give back what they compiled"
    if several_ranks():
        return "a job of several ranks"
    if any(session.module_name(name) is None for name in session.plugins):
        return "a plugin is an object of this process"
    if path := session.override_of_this_process():
        return f"{path}, which decides a stage, can't be imported by another process"
    for value in inputs:
        if why := why_not_kept(value):
            return why
    return ""


def why_not_kept(value: Any) -> str:
    """Why an input can't be kept for work on it later; "" if it can."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"an input is of type {type(value).__name__}"
    if value.device.type != "cpu":
        return f"an input is on {value.device}"
    if value.layout != torch.strided or value.is_quantized:
        return "an input isn't strided"
    if value.requires_grad and not value.is_leaf and value.is_inference():
        return "an input was made in inference mode"
    return ""

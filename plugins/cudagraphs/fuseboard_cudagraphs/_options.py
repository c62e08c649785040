"""The options of ``[tool.fuseboard.plugins.cudagraphs]``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Options(BaseModel):
    """What a user may set.

    :ivar enabled: record CUDA graphs; ``mode="reduce-overhead"`` turns it on.
    :ivar inner: whose regions are recorded, such as ``"inductor"``; None means every backend's.
    :ivar max_graphs: how many graphs one region keeps: one for each combination of sizes, CPU
        scalars and weights. Beyond it the least recently used one goes.
    :ivar min_nodes: a region with fewer ops that compute (not views) is left as it is.
    :ivar max_cuts: at how many places a region may be cut around ops that can't be recorded; with 0
        it is recorded as a whole or not at all.
    :ivar warmup: calls of a combination that run as they are before one is recorded.
    :ivar namespaces: namespaces of custom ops that may be recorded. They must neither wait for the
        GPU nor decide anything on the host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = False
    inner: tuple[str, ...] | None = None
    max_graphs: int = Field(default=32, ge=1)
    min_nodes: int = Field(default=8, ge=1)
    max_cuts: int = Field(default=8, ge=0)
    warmup: int = Field(default=1, ge=1)
    namespaces: tuple[str, ...] = ()

    @field_validator("inner", "namespaces", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

"""The options of ``[tool.fuseboard.plugins.triton]``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """What a user may set.

    :ivar autotune: time block sizes and numbers of warps in the first call of each kernel; without
        it each kernel runs with the first of its configurations.
    :ivar written_kernels: use the kernels written by hand where their patterns match; without it
        everything is generated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    autotune: bool = True
    written_kernels: bool = True

"""The table ``[tool.fuseboard.plugins.perf]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    call_graph: Literal["fp", "dwarf", "lbr"] = Field(
        "fp",
        description="How stacks are found: 'fp' by frame pointers, which much of torch is built "
        "without; 'dwarf' by copying 8 kB of each stack, slow to read; 'lbr' by the processor.",
    )

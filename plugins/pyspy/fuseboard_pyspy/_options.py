"""The table ``[tool.fuseboard.plugins.pyspy]``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    native: bool = Field(
        False,
        description="Ask for the frames of C and C++ code as well, where that is possible. Each "
        "sample then stops the process for some milliseconds instead of a fraction of one.",
    )
    blocking: bool = Field(
        False,
        description="Stop the process while its stacks are read. A sample then costs more; without "
        "it one shows now and then a stack that never was.",
    )

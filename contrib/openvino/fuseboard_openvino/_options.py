"""``[tool.fuseboard.plugins.openvino]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What users may set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Literal["f32", "bf16"] = Field(
        "f32",
        description="What the CPU computes in. 'bf16' is what OpenVINO itself chooses where the "
        "processor has it; its results differ from eager's by some thousandths.",
    )
    threads: int | None = Field(
        None, ge=1, description="Threads of a call. Not set: as many as torch uses."
    )

"""What ``[tool.fuseboard.plugins.tvm]`` may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """Options of the backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tune_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a region's compile may take to tune matrix products and "
        "convolutions; 0: not at all.",
    )

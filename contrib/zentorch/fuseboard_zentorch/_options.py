"""``[tool.fuseboard.plugins.zentorch]``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What users may set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_macs: int = Field(
        5_000_000,
        ge=0,
        description="Multiply-adds below which a product or an attention stays with ATen, whose "
        "calls cost less: about 10 us less each.",
    )

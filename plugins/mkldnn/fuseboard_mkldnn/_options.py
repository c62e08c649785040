"""The options of ``[tool.fuseboard.plugins.mkldnn]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a user may set.

    :ivar packing: how linear layers run: ``measured`` tries plain, oneDNN's and MKL's packing
        for each shape and takes the fastest; the others force one wherever it is possible. LSTM
        layers are measured but for ``onednn`` and ``none``.
    :ivar max_error: how many times as far from float64 as eager's product a measured kernel's may
        be (root mean square). At K = 3072 on an AVX2 machine oneDNN's float32 was
        twice as far off.
    :ivar channels_last: ``auto`` packs convolutions that feed each other and measures the
        others; ``always`` packs all; ``never`` packs none.
    :ivar measure_budget_s: seconds that choosing may take for one graph.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    packing: Literal["measured", "onednn", "mkl", "none"] = "measured"
    max_error: float = Field(default=1.5, ge=1.0)
    channels_last: Literal["auto", "always", "never"] = "auto"
    measure_budget_s: float = Field(default=2.0, ge=0.0)

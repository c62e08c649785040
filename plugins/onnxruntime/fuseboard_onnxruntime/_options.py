"""What ``[tool.fuseboard.plugins.onnxruntime]`` may hold."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Options(BaseModel):
    """Options of the backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimization: Literal["none", "basic", "extended", "all"] = Field(
        "all", description="ONNX Runtime's graph optimisation level."
    )
    threads: int = Field(
        0, ge=0, description="Threads within an op; 0: as many as torch has when it compiles."
    )
    providers: tuple[str, ...] = Field(
        ("CPUExecutionProvider",),
        description="Execution providers in order, by ONNX Runtime's names.",
    )
    allow_spinning: bool = Field(
        True, description="Whether threads wait busily for work within a call."
    )

    @field_validator("providers")
    @classmethod
    def _are_there(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        import importlib.util

        if importlib.util.find_spec("onnxruntime") is None:
            return names
        import onnxruntime

        there = onnxruntime.get_available_providers()
        missing = [name for name in names if name not in there]
        if missing or not names:
            raise ValueError(
                f"providers = {list(names)!r}: this onnxruntime has {', '.join(sorted(there))}. "
                "Others come with other distributions of it, such as onnxruntime-gpu"
            )
        return names

    @field_validator("providers", mode="before")
    @classmethod
    def _several(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

"""torch's own compiler, Inductor: whole graphs and regions, inference and training.

It fuses pointwise work and reductions into C++ or Triton kernels, so it needs a C++ compiler on
CPU. Options: ``[tool.fuseboard.plugins.inductor]``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch.fx import GraphModule

import fuseboard
from fuseboard import BackendInfo, Claim, Decline, LoweredRegion, Region

#: Settings of Inductor's that can't be given, and why.
TAKEN = {
    "cpp_wrapper": "use the option cpp_wrapper",
    "fallback_random": "use fuseboard's setting random",
    "freezing": "use the backend inductor-freezing",
    "keep_output_stride": "other regions rely on the strides",
    "max_autotune": "use the option max_autotune",
    "triton.cudagraphs": "use the plugin cudagraphs",
}


class Configured(BaseModel):
    """Options that both of the plugin's backends have.

    :cvar taken: settings of Inductor's that can't be given, and why.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    taken: ClassVar[Mapping[str, str]] = TAKEN

    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Further settings of torch._inductor.config, by their names there.",
    )

    @field_validator("config")
    @classmethod
    def _inductors_own(cls, config: dict[str, Any]) -> dict[str, Any]:
        from fuseboard_inductor import _settings

        for name in sorted(config.keys() & cls.taken.keys()):
            raise ValueError(f"{name}: {cls.taken[name]}")
        return _settings.checked(config)


class Options(Configured):
    """What ``[tool.fuseboard.plugins.inductor]`` may hold."""

    max_autotune: bool = Field(False, description="Try more kernels for matrix products.")
    cpp_wrapper: bool = Field(
        False, description="Call kernels from C++ instead of Python; on CPU only."
    )


@fuseboard.hookimpl
def fuseboard_backend() -> BackendInfo:
    """Ready where there is a C++ compiler (CPU) or Triton (GPU)."""
    compiler = _cpp_compiler()
    gpu = torch.cuda.is_available()
    return BackendInfo(
        name="inductor",
        device_types=frozenset({"cpu", "cuda"} if compiler else {"cuda"}),
        training=True,
        dynamic_shapes=True,
        fixes_sizes=True,
        available=bool(compiler) or gpu,
        reason="" if compiler or gpu else why_no_compiler(),
        fingerprint=f"{torch.__version__} {compiler} {sys.platform}",
        options=Options,
    )


def _cpp_compiler() -> str | None:
    """The compiler that Inductor would use; a look at the path, nothing is run.

    It tries no other one: ``cpp.cxx`` in ``torch/_inductor/config.py`` of torch 2.13.
    """
    return shutil.which(os.environ.get("CXX") or _DEFAULT_COMPILER)


_DEFAULT_COMPILER = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def why_no_compiler() -> str:
    """What is missing, and what to do."""
    if named := os.environ.get("CXX"):
        return f"no C++ compiler found: the environment variable CXX names {named!r}"
    return (
        f"no C++ compiler found: install {_DEFAULT_COMPILER}, or set the environment variable CXX"
    )


@fuseboard.hookimpl
def fuseboard_decompositions(random: str) -> dict[Any, Callable[..., Any]]:
    """Inductor's own table."""
    from fuseboard_inductor._compile import decomposition_table

    return decomposition_table(random)


@fuseboard.hookimpl
def fuseboard_fuse(
    graph: GraphModule, kind: str, region: Region | None, random: str
) -> list[fuseboard.Fusion] | None:
    """Inductor's joint-graph passes, on joint graphs."""
    from fuseboard_inductor._compile import joint_passes

    return joint_passes(graph, random) if kind == "joint" and region is None else None


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule, kind: str) -> list[Claim | Decline]:
    """Every op but those that it is known to get wrong."""
    from fuseboard_inductor._known_wrong import why_not

    return fuseboard.claim_nodes(graph, why_not)


@fuseboard.hookimpl
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """Compile the region as a graph of its own."""
    from fuseboard_inductor._compile import lower_region

    return lower_region(region, inputs)


@fuseboard.hookimpl
def fuseboard_load(artifact: bytes, region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """Take a compiled region from the board's cache."""
    from fuseboard_inductor._compile import load_region

    return load_region(artifact, region, inputs)


@fuseboard.hookimpl
def fuseboard_export(
    graph: GraphModule, inputs: Sequence[Any], weights: Sequence[int], path: Path, options: Any
) -> tuple[Any, ...] | None:
    """An archive of compiled code for this kind of machine, where the path ends in ``.pt2``."""
    if path.suffix != ".pt2":
        return None
    from fuseboard_inductor._export import export

    return export(graph, inputs, weights, path, options)

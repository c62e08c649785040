"""One ``torch.compile`` backend into which all the others plug.

``torch.compile(model, backend="fuseboard")`` needs no import of this package. Importing it is
cheap: each name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseboard.ahead.loading import load
    from fuseboard.ahead.making import package
    from fuseboard.ahead.program import PackagedModel
    from fuseboard.bisection.script import bisect
    from fuseboard.bisection.search import Culprit
    from fuseboard.board import register, unregister
    from fuseboard.config import settings
    from fuseboard.contracts import (
        BackendInfo,
        Claim,
        Composite,
        Decline,
        Event,
        Fusion,
        LoweredRegion,
        Measurement,
        Narrowing,
        Plan,
        Region,
        Sampler,
        SamplerStatus,
        SamplingOptions,
        StackFrame,
        StackSample,
        Trip,
        Verdict,
    )
    from fuseboard.engines import Engine, why_unavailable
    from fuseboard.errors import (
        ContractError,
        CostsError,
        FuseboardError,
        HookTimeout,
        LoweringError,
        PackageError,
        PatternError,
        PluginError,
        RankError,
        RegionError,
        RegistrationError,
        SamplingError,
        SettingsError,
        WrongValues,
    )
    from fuseboard.explanations.explanation import Explanation, explain, last_report
    from fuseboard.forks import fork_safe_lock
    from fuseboard.fuse.composites.finding import (
        claim_composites,
        find_composites,
        replace_composite,
    )
    from fuseboard.fuse.constants import widens
    from fuseboard.fuse.patterns.claims import claim_patterns
    from fuseboard.fuse.patterns.pattern import Pattern, PatternMatch
    from fuseboard.fuse.patterns.rewriting import Patterns
    from fuseboard.hookspecs import hookimpl, pass_order
    from fuseboard.lower.background import settled, wait
    from fuseboard.lower.decompose import decompose
    from fuseboard.ops import OWN_OPS
    from fuseboard.partition.claims import claim_nodes
    from fuseboard.partition.marks import memory_budget, prefer
    from fuseboard.process_status import Status, status
    from fuseboard.profile.choose.measure import measure
    from fuseboard.profile.judge.reference import Reference
    from fuseboard.profile.observe.memory import MemoryPoint, measure_memory
    from fuseboard.profile.observe.sampling import SamplingProfiler
    from fuseboard.profile.observe.sampling_compile import CompileProfile, CompileProfiler
    from fuseboard.profile.observe.sampling_process import SamplerProcess
    from fuseboard.profile.observe.sampling_result import RegionShare, SampledProfile
    from fuseboard.report.data import GraphReport
    from fuseboard.report.settled import on_settled
    from fuseboard.run.eager import lower_eagerly
    from fuseboard.run.weights import refresh
    from fuseboard.torch_api.formats import cuts_off_int8_sums
    from fuseboard.torch_api.internals import real_tensors

_HOMES = {
    "fuseboard.bisection.script": ("bisect",),
    "fuseboard.bisection.search": ("Culprit",),
    "fuseboard.ahead.loading": ("load",),
    "fuseboard.ahead.making": ("package",),
    "fuseboard.ahead.program": ("PackagedModel",),
    "fuseboard.board": ("register", "unregister"),
    "fuseboard.config": ("settings",),
    "fuseboard.contracts": (
        "BackendInfo",
        "Claim",
        "Composite",
        "Decline",
        "Event",
        "Fusion",
        "LoweredRegion",
        "Measurement",
        "Narrowing",
        "Plan",
        "Region",
        "Sampler",
        "SamplerStatus",
        "SamplingOptions",
        "StackFrame",
        "StackSample",
        "Trip",
        "Verdict",
    ),
    "fuseboard.engines": ("Engine", "why_unavailable"),
    "fuseboard.errors": (
        "ContractError",
        "CostsError",
        "FuseboardError",
        "HookTimeout",
        "LoweringError",
        "PackageError",
        "PatternError",
        "PluginError",
        "RankError",
        "RegionError",
        "RegistrationError",
        "SamplingError",
        "SettingsError",
        "WrongValues",
    ),
    "fuseboard.hookspecs": ("hookimpl", "pass_order"),
    "fuseboard.lower.decompose": ("decompose",),
    "fuseboard.ops": ("OWN_OPS",),
    "fuseboard.run.eager": ("lower_eagerly",),
    "fuseboard.run.weights": ("refresh",),
    "fuseboard.partition.claims": ("claim_nodes",),
    "fuseboard.partition.marks": ("memory_budget", "prefer"),
    "fuseboard.fuse.composites.finding": (
        "claim_composites",
        "find_composites",
        "replace_composite",
    ),
    "fuseboard.fuse.constants": ("widens",),
    "fuseboard.fuse.patterns.claims": ("claim_patterns",),
    "fuseboard.fuse.patterns.pattern": ("Pattern", "PatternMatch"),
    "fuseboard.fuse.patterns.rewriting": ("Patterns",),
    "fuseboard.lower.background": ("settled", "wait"),
    "fuseboard.profile.choose.measure": ("measure",),
    "fuseboard.profile.observe.memory": ("MemoryPoint", "measure_memory"),
    "fuseboard.profile.judge.reference": ("Reference",),
    "fuseboard.profile.observe.sampling": ("SamplingProfiler",),
    "fuseboard.profile.observe.sampling_compile": ("CompileProfile", "CompileProfiler"),
    "fuseboard.profile.observe.sampling_process": ("SamplerProcess",),
    "fuseboard.profile.observe.sampling_result": ("RegionShare", "SampledProfile"),
    "fuseboard.report.data": ("GraphReport",),
    "fuseboard.report.settled": ("on_settled",),
    "fuseboard.explanations.explanation": ("Explanation", "explain", "last_report"),
    "fuseboard.forks": ("fork_safe_lock",),
    "fuseboard.process_status": ("Status", "status"),
    "fuseboard.torch_api.formats": ("cuts_off_int8_sums",),
    "fuseboard.torch_api.internals": ("real_tensors",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "OWN_OPS",
    "BackendInfo",
    "Claim",
    "CompileProfile",
    "CompileProfiler",
    "Composite",
    "ContractError",
    "CostsError",
    "Culprit",
    "Decline",
    "Engine",
    "Event",
    "Explanation",
    "FuseboardError",
    "Fusion",
    "GraphReport",
    "HookTimeout",
    "LoweredRegion",
    "LoweringError",
    "Measurement",
    "MemoryPoint",
    "Narrowing",
    "PackageError",
    "PackagedModel",
    "Pattern",
    "PatternError",
    "PatternMatch",
    "Patterns",
    "Plan",
    "PluginError",
    "RankError",
    "Reference",
    "Region",
    "RegionError",
    "RegionShare",
    "RegistrationError",
    "SampledProfile",
    "Sampler",
    "SamplerProcess",
    "SamplerStatus",
    "SamplingError",
    "SamplingOptions",
    "SamplingProfiler",
    "SettingsError",
    "StackFrame",
    "StackSample",
    "Status",
    "Trip",
    "Verdict",
    "WrongValues",
    "bisect",
    "claim_composites",
    "claim_nodes",
    "claim_patterns",
    "cuts_off_int8_sums",
    "decompose",
    "explain",
    "find_composites",
    "fork_safe_lock",
    "hookimpl",
    "last_report",
    "load",
    "lower_eagerly",
    "measure",
    "measure_memory",
    "memory_budget",
    "on_settled",
    "package",
    "pass_order",
    "prefer",
    "real_tensors",
    "refresh",
    "register",
    "replace_composite",
    "settings",
    "settled",
    "status",
    "unregister",
    "wait",
    "why_unavailable",
    "widens",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'fuseboard' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The settings model: each setting with its type, its default and what it is for.

The model is checked by :mod:`fuseboard.config.layers`; what only the installed plugins can tell
(do they exist, are their options right) is checked by :meth:`fuseboard.board.Board.session`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
)

from fuseboard.config.sources import TABLES, nearest
from fuseboard.errors import SettingsError

#: The stages that ``stages`` may override: the hooks of which the first answer counts, those that
#: rewrite and lower, and the sampler of profiling sessions.
STAGES = ("fuse", "lower", "measure", "on_failure", "partition_joint", "plan", "sampler", "verify")

#: What ``mode`` selects: an overlay just below the source that chose it.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"plugins": {"cudagraphs": {"enabled": True}}},
    "max-autotune": {
        "settle": "first_call",
        "plugins": {"inductor": {"max_autotune": True}, "cudagraphs": {"enabled": True}},
    },
    "max-autotune-no-cudagraphs": {
        "settle": "first_call",
        "plugins": {"inductor": {"max_autotune": True}},
    },
}

#: A relative error; from 1 on zeros would do.
_Error = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Tolerance = Annotated[
    Annotated[_Error, Tag("number")] | Annotated[dict[str, _Error], Tag("table")],
    Discriminator(lambda value: "table" if isinstance(value, dict) else "number"),
]


def _setting(default: Any, allowed: str, description: str, **constraints: Any) -> Any:
    """A field; ``allowed`` completes the sentence "Allowed: ..." in an error."""
    extra: dict[str, Any] = {"allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class Settings(BaseModel):
    """A snapshot of every setting. :meth:`origin` says where a value was set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backends: tuple[str, ...] | None = _setting(
        None,
        "a list of at least one plugin name, such as ['mkldnn', 'eager'], each named once",
        "Which backends, in order of priority. Unset: every available one that doesn't wait to be "
        "named, those that compile quickly first, eager last.",
        min_length=1,
    )
    block: tuple[str, ...] = _setting(
        (),
        "a list of plugin names, such as ['tvm'], each named once",
        "Plugins that take no part; they are not even imported.",
    )
    policy: Literal["measured", "priority"] = _setting(
        "measured",
        "'measured', 'priority'",
        "How a node's backend is chosen: 'measured' times what backends made of a graph in its own "
        "calls and takes the fastest that is right; 'priority' takes the first that gains by it.",
    )
    settle: Literal["background", "in_calls", "first_call"] = _setting(
        "background",
        "'background', 'in_calls', 'first_call'",
        "When a graph's candidates are tried: beside its calls, which Dynamo's own graph answers "
        "meanwhile; within its calls, what takes long to compile between them; or all of them "
        "before the first call is answered.",
    )
    measure_s: float = _setting(
        1.0,
        "a finite number of seconds from 0",
        "How long the candidates for a graph are timed at one go.",
        ge=0,
        allow_inf_nan=False,
    )
    ranks: Literal["agree", "priority"] = _setting(
        "agree",
        "'agree', 'priority'",
        "What a job of several ranks does under the policy 'measured': let one rank measure each "
        "graph and all that have it follow, rank 0 where it has it; or plan by priority, each "
        "rank by itself.",
    )
    rank_limit_s: float = _setting(
        40.0,
        "a finite number of seconds above 0",
        "How long a rank of a job may give no sign of life while ranks agree on what to run, "
        "before the others raise.",
        gt=0,
        allow_inf_nan=False,
    )
    margin: float = _setting(
        0.03,
        "a number from 0 to 1",
        "By which share of the fastest one's time a candidate has to win to be chosen before one "
        "that is simpler or comes earlier.",
        ge=0,
        le=1,
    )
    on_failure: Literal["raise", "next", "eager"] = _setting(
        "next",
        "'raise', 'next', 'eager'",
        "What follows a plugin's failure: raise it, try the next backend, or run eager.",
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        _setting(
            "default",
            ", ".join(map(repr, PRESETS)),
            "A preset of other settings, as in torch.compile(mode=...).",
        )
    )
    random: Literal["eager", "fast"] = _setting(
        "eager",
        "'eager', 'fast'",
        "Random numbers: those that eager draws from the same seed, or whichever are fastest.",
    )
    tolerance: _Tolerance = _setting(
        0.0,
        "a number from 0 to below 1, or a table of such numbers by patterns of module paths, such "
        "as {'layers.*' = 1e-2}",
        "The error against float64 that each result of a call may have, relative to its size, for "
        "the sake of speed. 0 is exact: nothing that loses accuracy is tried. In a table, what no "
        "pattern matches is exact.",
    )
    tolerance_metric: str = _setting(
        "norm",
        "'norm', 'max', 'cosine' or a path package.module:function",
        "How that error is measured: by the norm of the difference, by its largest element, by the "
        "cosine of the angle, or by a function of a result and its float64 value.",
        pattern=r"^(norm|max|cosine|[^:]+:[^:]+)$",
    )
    tolerance_training: bool = _setting(
        False,
        "true or false",
        "Let tolerance hold for training as well, gradients included.",
    )
    memory_budget: float = _setting(
        1.0,
        "a number from 0 to 1",
        "What training may save for the backward: 0 recomputes all, 1 saves all that min-cut "
        "would.",
        ge=0,
        le=1,
    )
    joint_policy: Literal["min_cut", "default", "recompute_all"] = _setting(
        "min_cut",
        "'min_cut', 'default', 'recompute_all'",
        "How a joint graph is split: min-cut within memory_budget, save whatever the backward "
        "reads ('default'), or compute it all again. stages.partition_joint goes further.",
    )
    knapsack: Literal["dp", "greedy", "ilp"] = _setting(
        "dp",
        "'dp', 'greedy', 'ilp'",
        "How min-cut chooses what to compute again within a memory_budget below 1.",
    )
    pin: dict[str, str] = _setting(
        {},
        "a table from module paths or ops to backends, such as {'layers.*.mlp' = 'mkldnn'}",
        "Which backend runs what: a pattern of module paths (layers.*.mlp) or ops (aten.mm) each.",
    )
    exclude: dict[str, list[str]] = _setting(
        {},
        "a table from backends to lists of patterns, such as {inductor = ['aten.sort']}",
        "What a backend may not run: patterns of module paths or ops, as in pin.",
    )
    min_region_us: float = _setting(
        50.0,
        "a finite number of microseconds from 0",
        "The least estimated work for which a backend after the first gets a region of its own.",
        ge=0,
        allow_inf_nan=False,
    )
    repeats: Literal["auto", "always", "never"] = _setting(
        "auto",
        "'auto', 'always', 'never'",
        "Lower a model's repeated blocks once and call the code for each: where it is estimated "
        "to cost nothing in a call, wherever there are any, or never.",
    )
    hoist: bool = _setting(
        True,
        "true or false",
        "Compute what depends on weights alone once, and again when a weight changes.",
    )
    max_weight_sets: int = _setting(
        64,
        "a whole number from 1",
        "How many sets of weights one compiled graph keeps prepared values for.",
        ge=1,
    )
    prepare_memory: float = _setting(
        0.5,
        "a number from 0 to 1",
        "The share of the free memory that may be taken by what a backend prepares from weights. "
        "One that needs more is left out, and the report says so.",
        ge=0,
        le=1,
    )
    verify: str = _setting(
        "choice",
        "'choice', 'always', 'always:N' with N from 1, 'off'",
        "When a region's outputs are held against its contract and a float64 run: on the first "
        "call, on every N-th call as well (its inputs too, for debugging), or never.",
        pattern=r"^(choice|off|always(:[1-9][0-9]*)?)$",
    )
    hook_limit_s: float = _setting(
        900.0,
        "a finite number of seconds above 0",
        "How long one call of a plugin's hook may take.",
        gt=0,
        allow_inf_nan=False,
    )
    cache: bool = _setting(
        True,
        "true or false",
        "Keep what backends compiled on disk, for later processes.",
    )
    cache_dir: str | None = _setting(
        None,
        "a path",
        "Where: a directory that nobody else may write to. Unset: the user's cache directory.",
        min_length=1,
    )
    cache_size_mb: int = _setting(
        4096,
        "a whole number from 1",
        "How many megabytes are kept there; the least recently used go first.",
        ge=1,
    )
    cache_remote: str | None = _setting(
        None,
        "an address that fsspec knows",
        "A cache that several machines share: a directory, s3://BUCKET/..., https://HOST/...",
        min_length=1,
    )
    cache_remote_write: bool = _setting(
        False,
        "true or false",
        "Put there what is compiled and decided here; else it is only read.",
    )
    cache_remote_trust: bool = _setting(
        False,
        "true or false",
        "Whoever can write there is trusted, and so is the way there. What is in a cache is code.",
    )
    cache_remote_size_mb: int = _setting(
        16384,
        "a whole number from 1",
        "How many megabytes are kept there by those who write; what was written first goes first.",
        ge=1,
    )
    isolate: bool = _setting(
        False,
        "true or false",
        "Try in a child process first what might end the process: backends that say so of "
        "themselves.",
    )
    fuse_limit: int | None = _setting(
        None,
        "a whole number from 0",
        "Apply only the first so many fusions of each graph: halve it to find a bad one.",
        ge=0,
    )
    fuse_skip: tuple[int, ...] = _setting(
        (),
        "a list of whole numbers, such as [3, 7]",
        "Numbers of fusions to leave out, as the report numbers them.",
    )
    fuse_order: tuple[str, ...] = _setting(
        (),
        "a list of plugin names, such as ['mine', 'simplify'], each named once",
        "Plugins in the order in which they are asked for rewrites of whole graphs, those that it "
        "doesn't name as before.",
    )
    stages: dict[str, str] = _setting(
        {},
        "for each stage a plugin's name or a path package.module:function",
        "Who decides a stage, before the plugins are asked: " + ", ".join(STAGES) + ".",
    )
    plugins: dict[str, dict[str, Any]] = _setting(
        {},
        "a table of options for each plugin, such as plugins.inductor.max_autotune = true",
        "Each plugin's own options.",
    )

    @property
    def verify_every(self) -> int | None:
        """Each how many calls are checked; None where the first calls alone are, or none."""
        word, _, number = self.verify.partition(":")
        return int(number or 1) if word == "always" else None

    @field_validator("backends", "block", "fuse_order")
    @classmethod
    def _named_once(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and len(set(names)) < len(names):
            raise ValueError("a plugin is named twice")
        return names

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, key: str) -> str:
        """Where the value of a dotted key was set, such as ``plugins.inductor.max_autotune``.

        :raises SettingsError: there is no such setting.
        """
        if key in self._origins:
            return self._origins[key]
        head = key.partition(".")[0]
        if head not in type(self).model_fields or (key != head and head not in TABLES):
            raise SettingsError(unknown_key(key))
        inside = {where for k, where in self._origins.items() if k.startswith(f"{key}.")}
        return ", ".join(sorted(inside)) or "default"


def unknown_key(key: str) -> str:
    names = list(Settings.model_fields)
    return (
        f"there is no setting {key!r}.{nearest(key.partition('.')[0], names)} Settings are "
        f"{', '.join(sorted(names))}; a plugin's option is written plugins.NAME.OPTION."
    )

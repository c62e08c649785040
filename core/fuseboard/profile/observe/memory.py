"""What a training step takes in memory and time under several memory budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuseboard.backend import compile_now, fuseboard
from fuseboard.config import settings
from fuseboard.errors import FuseboardError, SettingsError
from fuseboard.profile.choose.measure import measure_calls
from fuseboard.report.data import ledger
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.apart import compiled_apart, compiled_from, state_kept, with_code

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
_BACKWARD = "fuseboard.backward"


class MemoryTargetError(FuseboardError):
    """What is to be measured isn't a training step: nothing in it requires grad."""


@dataclass(frozen=True)
class MemoryPoint:
    """One training step, forward and backward, measured. Bytes are counted from the step's start.

    :ivar budget: the ``memory_budget``; None for eager.
    :ivar saved_bytes: allocated between forward and backward: saved values and the outputs.
    :ivar peak_bytes: the most that was allocated at once, the gradients included.
    :ivar latency_us: the median step.
    :ivar low_us: the first quartile.
    :ivar high_us: the third quartile.
    :ivar pareto: no other point is as good in both peak and time, and better in one.
    :ivar trips: failures that the board contained while it compiled this.
    :ivar activation_bytes: the most that was allocated at once apart from the gradients that the
        step returns, which no budget reaches; None on CUDA, where it isn't told.
    """

    budget: float | None
    saved_bytes: int
    peak_bytes: int
    latency_us: float
    low_us: float
    high_us: float
    calls: int
    pareto: bool = False
    trips: int = 0
    activation_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_memory(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    budgets: Sequence[float] = BUDGETS,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seconds: float = 2.0,
) -> list[MemoryPoint]:
    """Measure a training step of ``model(*inputs, **kwargs)`` in eager and under each budget.

    Each budget is compiled under the settings that hold now. No ``.grad`` is touched, and buffers
    and random generators are as before afterwards.

    :param model: a module or function, or what ``torch.compile`` made of one.
    :param budgets: each from 0 to 1.
    :param loss: from what the model returns to a scalar. Without it the backward starts at the
        result's ``loss`` if it has one, else at all outputs that require grad, with ones.
    :param seconds: how long each point's steps are timed. Those of a budget take turns with
        eager's, and are told in terms of eager's first ones, so that all can be compared.
    :returns: eager first, then the budgets in the order given.
    :raises SettingsError: a budget is out of range.
    :raises MemoryTargetError: nothing requires grad, or the outputs don't.
    """
    points = memory_points(model, inputs, budgets, kwargs=kwargs, loss=loss, seconds=seconds)
    return with_pareto(list(points))


def memory_points(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    budgets: Sequence[float] = BUDGETS,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seconds: float = 2.0,
) -> Iterator[MemoryPoint]:
    """As :func:`measure_memory`, point by point as they are measured, without ``pareto``."""
    _check_budgets(budgets)
    given = compiled_from(model)
    original = model if given is None else given.original
    options = given.options if given is not None and given.backend is fuseboard else {}
    how = {} if given is None else given.how
    step = _Step(original, tuple(inputs), dict(kwargs or {}), loss)

    def backend(graph: Any, example_inputs: Any) -> Any:
        return compile_now(graph, example_inputs, **options)

    with torch.enable_grad():
        with state_kept(original):
            yield step.measure(original, None, seconds)
        for budget in budgets:
            with ExitStack() as stack:
                stack.enter_context(state_kept(original))
                stack.enter_context(settings(memory_budget=float(budget)))
                graphs = stack.enter_context(ledger.collect())
                compiled = stack.enter_context(compiled_apart(with_code(original), backend, how))
                point = step.measure(compiled, float(budget), seconds)
                yield replace(point, trips=sum(len(graph.trips) for graph in graphs))


def with_pareto(points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """The same points, with those marked that no other one beats."""

    def beaten(point: MemoryPoint) -> bool:
        mine = (point.peak_bytes, point.latency_us)
        others = ((other.peak_bytes, other.latency_us) for other in points)
        return any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in others)

    return [replace(point, pareto=not beaten(point)) for point in points]


def _check_budgets(budgets: Sequence[float]) -> None:
    for budget in budgets:
        number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if not number or not 0 <= budget <= 1:
            raise SettingsError(
                f"budgets = {list(budgets)!r}: {budget!r} isn't a number from 0 to 1."
            )
    if not budgets:
        raise SettingsError("budgets = []: name at least one number from 0 to 1.")


class _Step:
    """A training step that can be run with the original or with compiled code."""

    def __init__(
        self,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self.args, self.kwargs, self.loss = args, kwargs, loss
        owner = original if isinstance(original, torch.nn.Module) else None
        owner = owner or getattr(original, "__self__", None)
        weights = list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        self.leaves = [t for t in (*weights, *given) if t.requires_grad]
        if not self.leaves:
            name = getattr(original, "__name__", type(original).__name__)
            raise MemoryTargetError(
                f"{name}: none of its parameters and inputs requires grad, so there is no training "
                "step to measure. Did a requires_grad_(False) reach all of it? A function that "
                "closes over a module is given as the module or as a method of it."
            )
        self.device = self.leaves[0].device
        self._original = original
        self._eager_us = 0.0

    def run(self, call: Callable[..., Any]) -> Sequence[torch.Tensor | None]:
        """Forward and backward: the gradients of the leaves."""
        starts = self._starts(call(*self.args, **self.kwargs))
        with torch.profiler.record_function(_BACKWARD):
            self._between()
        return torch.autograd.grad(
            starts, self.leaves, [torch.ones_like(s) for s in starts], allow_unused=True
        )

    def _starts(self, result: Any) -> list[torch.Tensor]:
        """The outputs from which the backward starts."""
        if self.loss is not None:
            result = self.loss(result)
        elif isinstance(getattr(result, "loss", None), torch.Tensor):
            result = result.loss
        elif isinstance(result, Mapping) and isinstance(result.get("loss"), torch.Tensor):
            result = result["loss"]
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        starts = [leaf for leaf in leaves if leaf.requires_grad]
        if not starts:
            plural = "" if len(leaves) == 1 else "s"
            what = f"{len(leaves)} tensor{plural}" if leaves else f"a {type(result).__name__}"
            raise MemoryTargetError(
                f"there is nothing to run a backward from: the result is {what}, and none requires "
                "grad. Return the loss, or pass loss=, a function from the result to a scalar."
            )
        return starts

    def measure(
        self, call: Callable[..., Any], budget: float | None, seconds: float
    ) -> MemoryPoint:
        for _ in range(2):  # compiles; and the first call runs code that checks itself
            self.run(call)
        on_cuda = self.device.type == "cuda"
        saved, peak, activations = self._cuda_bytes(call) if on_cuda else self._cpu_bytes(call)

        def timed(call: Callable[..., Any]) -> None:
            self.run(call)
            if on_cuda:
                torch.cuda.synchronize(self.device)

        calls = [call] if budget is None else [call, self._original]
        time, *eagers = measure_calls([partial(timed, one) for one in calls], seconds)
        scale = self._eager_us / eagers[0].latency_us if eagers else 1.0
        if budget is None:
            self._eager_us = time.latency_us
        return MemoryPoint(
            budget,
            saved,
            peak,
            scale * time.latency_us,
            scale * time.low_us,
            scale * time.high_us,
            time.calls,
            activation_bytes=activations,
        )

    def _between(self) -> None:
        """What is to happen between forward and backward."""
        if self.device.type == "cuda":
            self._saved = torch.cuda.memory_allocated(self.device)

    def _cuda_bytes(self, call: Callable[..., Any]) -> tuple[int, int, None]:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(call)
        peak = torch.cuda.max_memory_allocated(self.device)
        return self._saved - before, peak - before, None

    def _cpu_bytes(self, call: Callable[..., Any]) -> tuple[int, int, int]:
        """From the allocator's own events, which compiled kernels cause as eager's ops do."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            gradients = self.run(call)
        changes, backward_ns = torch_internals.allocations(profile, _BACKWARD)
        saved = sum(change for when_ns, change, _ in changes if when_ns <= backward_ns)
        # What lies at a gradient's address last is the gradient.
        last = {address: n for n, (_, change, address) in enumerate(changes) if change > 0}
        lasting = {
            last.get(gradient.untyped_storage().data_ptr())
            for gradient in gradients
            if gradient is not None
        }
        everything = [change for _, change, _ in changes]
        rest = [change for n, change in enumerate(everything) if n not in lasting]
        return saved, _peak(everything), _peak(rest)


def _peak(changes: Sequence[int]) -> int:
    return max(itertools.accumulate(changes, initial=0))

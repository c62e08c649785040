"""What a package holds beside its weights, and the model that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from fuseboard.ahead.signature import Fit, Signature
from fuseboard.beside import beside
from fuseboard.config.model import Settings
from fuseboard.contracts import Boxed
from fuseboard.forks import fork_safe_lock
from fuseboard.lower.caching import Token
from fuseboard.lower.isolated import LoweringResult
from fuseboard.torch_api import modes as torch_modes
from fuseboard.workshop.carried import CarriedGraph
from fuseboard.workshop.sizes import SizeCondition


@dataclass(frozen=True)
class OutputForm:
    """One leaf of the results: one of three things.

    :ivar result: a result of the graph, by number.
    :ivar target: the very tensor that the call has written to: an input's leaf, by number, or a
        buffer, by name.
    :ivar constant: what is returned if it is neither.
    """

    result: int | None = None
    target: int | str | None = None
    constant: Any = None


@dataclass(frozen=True)
class Interface:
    """How a graph becomes the model.

    :ivar symbols: names of the graph's first inputs.
    :ivar weights: names of those after them; the tensors of the arguments are the last.
    :ivar writes: (result, an input's leaf or a buffer that it is written to).
    """

    signature: Signature
    symbols: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[OutputForm, ...]
    structure: TreeSpec
    writes: tuple[tuple[int, int | str], ...]


@dataclass(frozen=True)
class PackedProgram:
    """What was chosen, for another process.

    :ivar settings: under which its regions are made again.
    :ivar artifacts: of its regions.
    :ivar condition: on the sizes of the graph's inputs, beside their ranges.
    :ivar op_modules: those that define ops of the graph.
    """

    graph: CarriedGraph
    settings: Settings
    artifacts: dict[Token, LoweringResult]
    condition: SizeCondition | None
    op_modules: tuple[str, ...]


class PackagedModel:
    """A model out of a package: call it as the model itself. For inference alone.

    Calls may come from several threads. Where a call writes to buffers or inputs, one waits for the
    other. Buffers are the package's own, as they were when the model was packaged.

    :ivar manifest: what the package says of itself.
    :ivar weights: name → parameter, buffer or constant.
    """

    def __init__(
        self,
        interface: Interface,
        run: Boxed,
        weights: dict[str, torch.Tensor],
        condition: SizeCondition | None,
        manifest: dict[str, Any],
    ) -> None:
        self.manifest = manifest
        self.interface = interface
        self.fit = Fit(interface.signature, interface.symbols)
        self._run = run
        self.weights = weights
        self._weights = tuple(weights.values())
        self._condition = condition
        self._holds = None if condition is None else condition.holds()
        self._lock = fork_safe_lock()
        self._one: int | None = None
        outputs = interface.outputs
        if interface.structure.is_leaf() and outputs[0].result is not None:
            self._one = outputs[0].result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results.

        :raises TypeError: these aren't the arguments that it was packaged for.
        :raises ValueError: they, or what surrounds the call, aren't as it was packaged for.
        """
        leaves = self.fit.leaves(args, kwargs)
        sizes, tensors = self.fit.inputs(leaves)
        _refuse_surroundings()
        inputs = [*sizes, *self._weights, *tensors]
        if self._holds is not None and not self._holds(inputs):
            assert self._condition is not None
            raise ValueError(f"the package is for calls where {self._condition.described()}")
        if not self.interface.writes:
            results = self._computed(inputs)
            return results[self._one] if self._one is not None else self._returned(results, leaves)
        self._refuse_overlaps(leaves)
        with self._lock:
            results = self._computed(inputs)
            with torch.no_grad():
                for number, target in self.interface.writes:
                    self._target(target, leaves).copy_(results[number])
            return self._returned(results, leaves)

    def __repr__(self) -> str:
        given = ", ".join(
            f"{leaf.name}: {leaf.described()}" for leaf in self.interface.signature.leaves
        )
        return f"<fuseboard package of {self.manifest['model']}({given})>"

    def _computed(self, inputs: list[Any]) -> Sequence[Any]:
        if self._holds is not None:
            with torch.no_grad(), beside():  # sizes that are new to it aren't judged in the call
                return self._run(inputs)
        if not torch.is_grad_enabled():
            return self._run(inputs)
        with torch.no_grad():
            return self._run(inputs)

    def _target(self, target: int | str, leaves: Sequence[Any]) -> torch.Tensor:
        return self.weights[target] if isinstance(target, str) else leaves[target]

    def _returned(self, results: Sequence[Any], leaves: Sequence[Any]) -> Any:
        values = [
            results[one.result]
            if one.result is not None
            else one.constant
            if one.target is None
            else self._target(one.target, leaves)
            for one in self.interface.outputs
        ]
        return self.interface.structure.unflatten(values)

    def _refuse_overlaps(self, leaves: Sequence[Any]) -> None:
        """
        :raises ValueError: what a call writes to may be another input as well.
        """
        written = {t for _, t in self.interface.writes if isinstance(t, int)}
        if not written:
            return
        addresses: dict[int, int] = {
            weight.untyped_storage().data_ptr(): -1 for weight in self.weights.values()
        }
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            other = addresses.setdefault(leaf.untyped_storage().data_ptr(), number)
            if other != number and (other in written or number in written or other < 0):
                names = [self.interface.signature.leaves[number].name]
                names.append(
                    "a weight" if other < 0 else self.interface.signature.leaves[other].name
                )
                raise ValueError(
                    f"{' and '.join(names)} share memory, and a call writes to one of them: the "
                    "package was made for inputs that don't"
                )


def _refuse_surroundings() -> None:
    """
    :raises ValueError: a call's surroundings would change what the ops compute, or see them.
    """
    if torch_modes.autocast_is_on():
        raise ValueError(
            "autocast is on, and the package's dtypes are fixed: call it outside of autocast, or "
            "package a model that enters autocast in its forward"
        )
    if torch_modes.is_transformed():
        raise ValueError(
            "torch.func transforms (vmap, grad, jvp) can't see into a package: use the model itself"
        )


class CompiledPackage:
    """A model out of a package that is compiled anew, since its program can't run here.

    :ivar manifest: what the package says of itself.
    """

    def __init__(
        self, signature: Signature, model: Callable[..., Any], manifest: dict[str, Any]
    ) -> None:
        self.manifest = manifest
        self._signature = signature
        self._fit = Fit(signature, ())
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results.

        :raises TypeError: these aren't the arguments that it was packaged for.
        :raises ValueError: they, or what surrounds the call, aren't as it was packaged for.
        """
        self._fit.inputs(self._fit.leaves(args, kwargs))
        args, kwargs = self._signature.arguments.of_call(args, kwargs)
        with torch.no_grad():
            return self._model(*args, **kwargs)

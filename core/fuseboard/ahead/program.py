"""What a package holds beside its weights, and the model that it becomes."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from fuseboard.ahead.signature import Fit, Signature
from fuseboard.contracts import Boxed
from fuseboard.errors import containable, error_text
from fuseboard.forks import fork_safe_lock
from fuseboard.run.portable import PortableProgram

log = logging.getLogger("fuseboard")

version_of = operator.attrgetter("_version")


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

    :ivar holds: whether it is for the sizes of the graph's inputs, beside their ranges; None: it is
        for all.
    :ivar condition: the same for people.
    """

    code: PortableProgram
    holds: Callable[[Sequence[Any]], bool] | None = None
    condition: str = ""


class PackagedModel:
    """A model out of a package: call it as the model itself. For inference alone.

    Calls may come from several threads. Where a call writes to buffers or inputs, one waits for the
    other. Buffers are the package's own, as they were when the model was packaged. Where code fails
    in a call, the graph runs op by op from then on, and a warning says so.

    :ivar manifest: what the package says of itself.
    :ivar weights: name → parameter, buffer or constant.
    :ivar trip: how code failed in a call; "" while none did.
    """

    def __init__(
        self,
        interface: Interface,
        program: PackedProgram,
        weights: dict[str, torch.Tensor],
        manifest: dict[str, Any],
        eager: Callable[[], Boxed],
    ) -> None:
        self.manifest = manifest
        self.interface = interface
        self.weights = weights
        self.trip = ""
        held = tuple(weights.values())
        self.fit = Fit(interface.signature, interface.symbols, held)
        self._program = program
        self._read_eager = eager
        self._run = program.code.run
        self._lock = fork_safe_lock()
        first = len(interface.symbols)
        prepare = program.code.prepare
        used = {place for _, places in prepare.functions for place in places}
        #: Weights that values were prepared from, the versions that they had, and the values.
        self._prepared_from = tuple(held[place - first] for place in sorted(used))
        self._prepare_all()
        outputs = interface.outputs
        is_leaf = interface.structure.is_leaf() and outputs[0].result is not None
        self._one = outputs[0].result if is_leaf else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results.

        :raises TypeError: these aren't the arguments that it was packaged for.
        :raises ValueError: they, or what surrounds the call, aren't as it was packaged for.
        """
        leaves = self.fit.leaves(args, kwargs)
        inputs = self.fit.inputs(leaves)
        if self._program.holds is not None and not self._program.holds(inputs):
            raise ValueError(f"the package is for calls where {self._program.condition}")
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
        if tuple(map(version_of, self._prepared_from)) != self._versions:
            self._prepare_all()
        try:
            return self._run([*inputs, self._values])
        except containable() as error:
            return self._eagerly(inputs, error)

    def _prepare_all(self) -> None:
        self._versions = tuple(map(version_of, self._prepared_from))
        symbols = [None] * len(self.interface.symbols)
        with torch.no_grad():
            self._values = self._program.code.prepare([*symbols, *self.weights.values()])

    def _eagerly(self, inputs: list[Any], error: BaseException) -> Sequence[Any]:
        """The graph op by op, in this call and in later ones; what it raises is the user's own."""
        boxed = self._read_eager()

        def run(args: list[Any]) -> Sequence[Any]:
            args.pop()  # prepared values
            return boxed(args)

        results = run([*inputs, ()])
        self.trip = error_text(error)
        self._run = run
        log.warning("fuseboard: %r failed and runs in eager from now on: %s", self, self.trip)
        return results

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


class CompiledPackage:
    """A model out of a package that is compiled anew, since its program can't run here.

    :ivar manifest: what the package says of itself.
    """

    def __init__(
        self, signature: Signature, model: Callable[..., Any], manifest: dict[str, Any]
    ) -> None:
        self.manifest = manifest
        self._signature = signature
        self._fit = Fit(signature, (), ())
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

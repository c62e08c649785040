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


def storage_of(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor is in."""
    return tensor.untyped_storage().data_ptr()


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
        self.trip = ""
        self.fit = Fit(interface.signature, interface.symbols)
        self._program = program
        self._read_eager = eager
        self._run = program.code.run
        self._lock = fork_safe_lock()
        self._weights = weights
        self._are_shown = False
        first, held = len(interface.symbols), tuple(weights.values())
        used = {place for _, places in program.code.prepare.functions for place in places}
        # Names of one weight share memory, but each has a version of its own.
        memory = {storage_of(held[place - first]) for place in used}
        self._prepared_from = tuple(weight for weight in held if storage_of(weight) in memory)
        self._prepare()
        outputs = interface.outputs
        is_leaf = interface.structure.is_leaf() and outputs[0].result is not None
        self._one = outputs[0].result if is_leaf else None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Name → parameter, buffer or constant. What is written to them holds in later calls."""
        self._are_shown = True
        return self._weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results.

        :raises TypeError, ValueError: the arguments aren't of the kind that it was packaged for.
        """
        leaves = self.fit.leaves(args, kwargs)
        given = self.fit.inputs(leaves)
        program = self._program
        if program.holds is not None and not program.holds(self._all_inputs(given)):
            raise ValueError(f"the package is for calls where {program.condition}")
        if not self.interface.writes:
            results = self._computed(given)
            return results[self._one] if self._one is not None else self._returned(results, leaves)
        self._refuse_overlaps(leaves)
        with self._lock:
            results = self._computed(given)
            with torch.no_grad():
                for number, target in self.interface.writes:
                    self._target(target, leaves).copy_(results[number])
            return self._returned(results, leaves)

    def __repr__(self) -> str:
        given = ", ".join(
            f"{leaf.name}: {leaf.described()}" for leaf in self.interface.signature.leaves
        )
        return f"<fuseboard package of {self.manifest['model']}({given})>"

    def _computed(self, given: list[Any]) -> Sequence[Any]:
        # Nobody else can write to weights that nobody else has been given.
        if self._are_shown and self._versions != self._versions_now():
            self._prepare()
        try:
            return self._run([*given, *self._held])
        except containable() as error:
            return self._eagerly(given, error)

    def _all_inputs(self, given: list[Any]) -> list[Any]:
        first = len(self.interface.symbols)
        return [*given[:first], *self._weights.values(), *given[first:]]

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(version_of, self._prepared_from))

    def _prepare(self) -> None:
        """Make what a call takes beside its arguments: weights, and what is prepared from them."""
        code, versions = self._program.code, self._versions_now()
        inputs = [*self.interface.symbols, *self._weights.values()]
        with torch.no_grad():
            values = code.prepare(inputs)
        self._held = (*(inputs[number] for number in code.takes[1]), values)
        self._versions = versions  # at last: another thread may call meanwhile

    def _eagerly(self, given: list[Any], error: BaseException) -> Sequence[Any]:
        """The graph op by op, in this call and in later ones; what it raises is the user's own."""
        boxed = self._read_eager()
        count = len(self._held)

        def run(args: list[Any]) -> Sequence[Any]:
            return boxed(self._all_inputs(args[:-count]))

        results = run([*given, *self._held])
        self.trip = error_text(error)
        self._run = run
        log.warning("fuseboard: %r failed and runs in eager from now on: %s", self, self.trip)
        return results

    def take_trip(self) -> str:
        """How code failed in a call, "" if none did; later calls go through the code again."""
        problem, self.trip, self._run = self.trip, "", self._program.code.run
        return problem

    def _target(self, target: int | str, leaves: Sequence[Any]) -> torch.Tensor:
        return self._weights[target] if isinstance(target, str) else leaves[target]

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
        addresses = dict.fromkeys(map(storage_of, self._weights.values()), -1)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            other = addresses.setdefault(storage_of(leaf), number)
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

"""What was packaged, held against the model in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_map

from fuseboard.ahead.program import Interface, OutputForm, PackagedModel
from fuseboard.errors import containable
from fuseboard.profile.judge.accuracy import Budget
from fuseboard.profile.judge.interpret import Disturbed
from fuseboard.profile.judge.reference import run_eager, run_undisturbed
from fuseboard.profile.judge.same_results import Disturbances, difference
from fuseboard.run.failure import describe
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.exports import Exported
from fuseboard.torch_api.relaid import view_like

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Call:
    """What a call left: the leaves of its arguments and of its results, and its weights.

    :ivar written: what the weights that it wrote to held at its end, by the address of their
        storage: they were put back since.
    """

    leaves: list[Any]
    outputs: list[Any]
    structure: Any
    weights: dict[str, torch.Tensor]
    written: dict[int | None, torch.UntypedStorage]

    def target(self, target: int | str) -> Any:
        return self.weights[target] if isinstance(target, str) else self.leaves[target]

    def value(self, found: Any) -> Any:
        """What one of its results or targets held at the end of the call."""
        storage = self.written.get(_storage(found))
        return found if storage is None else view_like(found, storage, found.storage_offset())


class Judge:
    """Compares a package with the model that it was made of.

    :param given: the example arguments.
    :param captured: the exported graph; how much its results may be off is told by its roundings.
    :param real: the inputs of ``captured`` that the example arguments give.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: Given,
        exported: Exported,
        captured: GraphModule,
        real: Sequence[Any],
    ) -> None:
        self._model = model
        self._given = given
        self._exported = exported
        self._captured = captured
        self._real = real

    def with_targets(self, interface: Interface) -> Interface:
        """The interface, with what a call of the model in eager tells of its results.

        It then returns an input or a buffer itself where eager does, and knows the inputs whose
        memory results share.
        """
        call = self._eager(self._given)
        targets = [target for _, target in interface.writes]
        outputs = [
            next(
                (
                    OutputForm(target=target)
                    for target in targets
                    if _are_one(output, call.target(target))
                ),
                form,
            )
            for output, form in zip(call.outputs, interface.outputs, strict=True)
        ]
        shared = {_storage(output) for output in call.outputs} - {None}
        leaves = tuple(
            replace(form, returned=_storage(leaf) in shared)
            for form, leaf in zip(interface.signature.leaves, call.leaves, strict=True)
        )
        signature = replace(interface.signature, leaves=leaves)
        return replace(interface, outputs=tuple(outputs), signature=signature)

    def difference(self, made: PackagedModel, budget: Budget | None) -> str:
        """How a package's results differ from eager's on the examples; "" if they don't."""
        return self._difference(made, budget, self._given, self._real)

    def ranges(
        self, made: PackagedModel, interface: Interface, budget: Budget | None
    ) -> dict[str, tuple[int, int | None]]:
        """For which sizes the package gives what eager does, as far as the user wants them.

        Sizes of 0 and 1 are unlike all others: ops broadcast, and the exported graph was made for
        others. A size of 1 is allowed where it was tried and is right.

        :raises Unequal: another size gives other results.
        """
        found = {}
        for symbol, (low, high) in interface.signature.ranges.items():
            hint = self._real[interface.symbols.index(symbol)] if symbol in interface.symbols else 0
            found[symbol] = max(low, 2), high
            for size in (max(2, hint - 1), 1):
                if (
                    size >= hint
                    or size < low
                    or (given := self._narrowed(interface, symbol, size)) is None
                ):
                    continue
                problem = self._difference_at(made, given, budget)
                if problem and size > 1:
                    raise Unequal(f"where {symbol} is {size}, {problem}")
                if size == 1 and problem == "":
                    found[symbol] = 1, high
        return found

    def _difference_at(
        self, made: PackagedModel, given: Given, budget: Budget | None
    ) -> str | None:
        """None where eager can't be called with these sizes."""
        leaves, _ = tree_flatten(given)
        try:
            inputs = made.fit.inputs(leaves)
            self._eager(given)
        except containable():
            return None
        first = len(self._exported.symbols)
        inputs[first:first] = self._exported.weights.values()
        return self._difference(made, budget, given, inputs)

    def _narrowed(self, interface: Interface, symbol: str, size: int) -> Given | None:
        """The examples with another size; None where sizes are computed from it."""
        leaves, structure = tree_flatten(self._given)
        made = []
        for leaf, form in zip(leaves, interface.signature.leaves, strict=True):
            for dimension, one in enumerate(form.sizes):
                if one == symbol:
                    leaf = leaf.narrow(dimension, 0, size)
                elif isinstance(one, str) and not one.isidentifier():
                    return None
            made.append(leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf)
        return structure.unflatten(made)  # type: ignore[no-any-return]

    # --- comparing --------------------------------------------------------------------------------

    def _difference(
        self, made: PackagedModel, budget: Budget | None, given: Given, real: Sequence[Any]
    ) -> str:
        want = self._eager(given)
        try:
            got = _called(made, given, made.weights, self._written())
        except containable() as error:
            return f"it raises {describe(error)}"
        if problem := made.take_trip():  # eager has answered that call
            return f"its code fails in a call: {problem}"
        if got.structure != want.structure:
            return f"its results have the structure {got.structure}, eager's {want.structure}"
        if (own := _sharing(got)) != (eagers := _sharing(want)):
            return (
                f"its results share memory with {_shown(own)}, eager's with {_shown(eagers)}: "
                "return a copy (.clone()) where a result is a view of an input or of a buffer"
            )
        own_results = dict(enumerate(run_eager(self._captured, real)))
        disturbed = Disturbances(
            partial(self._disturbed, real), {str(n): value for n, value in own_results.items()}
        )
        for what, number, value, eagers_value in self._pairs(got, want, made):
            if problem := _layout(value, eagers_value):
                return f"{what} {problem}"
            if number is None:
                continue
            spreads = partial(disturbed.spreads, str(number))
            problem = difference(own_results[number], eagers_value, spreads())
            if budget is None:
                problem = problem or difference(own_results[number], value, spreads())
            elif isinstance(value, torch.Tensor):
                problem = problem or budget.problem(value, eagers_value)
            if problem:
                return f"{what} {problem}"
        return ""

    def _disturbed(self, real: Sequence[Any], seed: int) -> dict[str, Any]:
        values = run_undisturbed(self._captured, real, Disturbed(set(), seed))
        return {str(number): value for number, value in enumerate(values)}

    def _pairs(
        self, got: _Call, want: _Call, made: PackagedModel
    ) -> Iterator[tuple[str, int | None, Any, Any]]:
        """What is to be compared: its name, the graph's result that it is, ours and eager's."""
        for number, form in enumerate(made.interface.outputs):
            values = got.value(got.outputs[number]), want.value(want.outputs[number])
            yield f"result {number}", form.result, *values
        for result, target in made.interface.writes:
            name = (
                made.interface.signature.leaves[target].name if isinstance(target, int) else target
            )
            values = got.value(got.target(target)), want.value(want.target(target))
            yield f"what is written to {name}", result, *values

    def _written(self) -> list[str]:
        return [target for _, target in self._exported.writes if isinstance(target, str)]

    def _eager(self, given: Given) -> _Call:
        """A call of the model itself, after which its buffers are as they were."""
        return _called(self._model, given, self._exported.weights, self._written())


class Unequal(Exception):
    """The package computes something else than the model."""


def _called(
    model: Callable[..., Any],
    given: Given,
    weights: dict[str, torch.Tensor],
    written: Sequence[str],
) -> _Call:
    """A call on copies of the arguments, with the random numbers that come next.

    :param written: names of the weights that it writes to; they are put back to what they were.
    """
    args, kwargs = copy.deepcopy(tree_map(_detached, given))
    leaves, _ = tree_flatten((args, kwargs))
    before = {name: weights[name].detach().clone() for name in written}
    with torch.random.fork_rng(devices=()), torch.no_grad():
        try:
            outputs, structure = tree_flatten(model(*args, **kwargs))
            after = {_storage(weights[n]): weights[n].untyped_storage().clone() for n in written}
        finally:
            for name, value in before.items():
                weights[name].copy_(value)
    return _Call(leaves, outputs, structure, weights, after)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    return torch_internals.storage_address(value)


def _are_one(output: Any, target: torch.Tensor) -> bool:
    return (
        isinstance(output, torch.Tensor)
        and _storage(output) is not None
        and _storage(output) == _storage(target)
        and (output.shape, output.stride(), output.storage_offset())
        == (target.shape, target.stride(), target.storage_offset())
    )


def _sharing(call: _Call) -> list[tuple[str, ...]]:
    """For each result what shares memory with it, of the arguments, weights and earlier results."""
    named = [(f"argument {i}", leaf) for i, leaf in enumerate(call.leaves)]
    named += [(name, weight) for name, weight in call.weights.items()]
    found = []
    for number, output in enumerate(call.outputs):
        own = _storage(output)
        found.append(tuple(name for name, one in named if own is not None and _storage(one) == own))
        named.append((f"result {number}", output))
    return found


def _shown(sharing: Sequence[Sequence[str]]) -> str:
    said = [f"{', '.join(names)} (result {i})" for i, names in enumerate(sharing) if names]
    return "; ".join(said) or "nothing"


def _layout(got: Any, want: Any) -> str:
    if type(got) is not type(want) and not isinstance(want, torch.Tensor):
        return f"is a {type(got).__name__}, eager's a {type(want).__name__}"
    if not isinstance(want, torch.Tensor):
        return "" if got == want else f"is {got!r}, eager's {want!r}"
    if not isinstance(got, torch.Tensor):
        return f"is a {type(got).__name__}, eager's a tensor"
    forms = [
        (
            one.dtype,
            tuple(one.shape),
            [s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1],
        )
        for one in (got, want)
    ]
    if want.numel() and forms[0] != forms[1]:
        return f"is {forms[0]} (dtype, shape, strides), eager's {forms[1]}"
    return ""

"""What a packaged model takes and returns, and whether a call fits it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from fuseboard.run.codegen import Source
from fuseboard.torch_api import modes as torch_modes

#: Arguments by name, in the order of the parameters.
Named = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """How a call's arguments are given, as far as it is fixed.

    :ivar parameters: names of the parameters that can be given by position, in order.
    :ivar names: those that were given. Each may be given by position or by name.
    :ivar defaults: of parameters that weren't given, or were given a number or text: an argument
        that equals one may be given or not.
    :ivar positional: how many came by position where parameters have no names (``*args``): then
        these do, and ``names`` are those that came by name.
    """

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    positional: int | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments:
        """
        :raises TypeError: the function doesn't take them.
        """
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if any(signature.parameters[name].kind not in named for name in bound.arguments):
            return cls((), tuple(kwargs), positional=len(args))
        parameters = tuple(
            name
            for name, one in signature.parameters.items()
            if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        defaults = {
            name: one.default
            for name, one in signature.parameters.items()
            if type(one.default) in (type(None), bool, int, float, str)
        }
        return cls(parameters, tuple(bound.arguments), defaults)

    def of_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Named]:
        """The arguments as the exported model takes them.

        :raises TypeError: there are more, less, or others.
        """
        if self.positional is not None:
            if len(args) != self.positional or kwargs.keys() != set(self.names):
                raise TypeError(
                    f"the package takes {self.positional} arguments by position and by name "
                    f"{self._shown()}; {len(args)} and {_names(kwargs)} were given"
                )
            return tuple(args), {name: kwargs[name] for name in self.names}
        if len(args) > len(self.parameters):
            raise TypeError(
                f"{len(args)} arguments were given by position, and the packaged model takes "
                f"{len(self.parameters)}: {', '.join(self.parameters)}"
            )
        values = dict(zip(self.parameters, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            raise TypeError(f"{_names(twice)} was given by position and by name")
        values.update(kwargs)
        if values.keys() != set(self.names):
            values = {
                n: v for n, v in values.items() if n in self.names or not self._is_default(n, v)
            }
            values = {**{n: v for n, v in self.defaults.items() if n in self.names}, **values}
        if values.keys() != set(self.names):
            missing = [name for name in self.names if name not in values]
            other = [name for name in values if name not in self.names]
            said = [f"{_names(missing)} is missing"] if missing else []
            said += [f"{_names(other)} wasn't given when it was packaged"] if other else []
            raise TypeError(
                f"the package takes {self._shown()}, as it was given when it was packaged: "
                f"{', and '.join(said)}. Package the model again for other arguments"
            )
        return (), {name: values[name] for name in self.names}

    def _is_default(self, name: str, value: Any) -> bool:
        known = self.defaults.get(name, ...)
        return type(known) is type(value) and known == value

    def _shown(self) -> str:
        return _names(self.names)


def _names(names: Any) -> str:
    return ", ".join(map(str, names)) or "nothing"


@dataclass(frozen=True)
class LeafForm:
    """What one leaf of the arguments has to be.

    :ivar name: for messages.
    :ivar dtype: of a tensor; "" for a constant.
    :ivar sizes: numbers, and expressions of symbols.
    :ivar order: of the dimensions in memory, from that with the largest stride. A tensor that lies
        otherwise is copied.
    :ivar constant: what was given in the place of a tensor.
    :ivar written: a call writes to it.
    :ivar returned: results share its memory.
    """

    name: str
    dtype: str = ""
    sizes: tuple[int | str, ...] = ()
    order: tuple[int, ...] = ()
    constant: Any = None
    written: bool = False
    returned: bool = False

    def described(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return f"{self.dtype}[{sizes}]" if self.dtype else repr(self.constant)


@dataclass(frozen=True)
class Signature:
    """What a packaged model takes.

    :ivar structure: of the arguments, as :meth:`Arguments.of_call` gives them.
    :ivar ranges: symbol → the least and the largest size; None: any.
    """

    arguments: Arguments
    structure: TreeSpec
    leaves: tuple[LeafForm, ...]
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """For people, and for JSON."""
        return {
            "inputs": {leaf.name: leaf.described() for leaf in self.leaves},
            "sizes": {name: list(range_) for name, range_ in self.ranges.items()},
        }


class Fit:
    """Makes a program's inputs of the arguments of calls, if they fit.

    :ivar symbols: the values of these come before the tensors.
    """

    def __init__(self, signature: Signature, symbols: Sequence[str]) -> None:
        self._signature = signature
        self._structure = signature.structure
        given = signature.arguments
        #: Each argument is a leaf and may be given by position: calls that do so are quick.
        self._flat = (
            given.positional is None
            and given.parameters[: len(given.names)] == given.names
            and all(one.is_leaf() for one in signature.structure.child(1).children())
        )
        self._symbols = tuple(symbols)
        self._quick = _quick_inputs(signature, self._symbols)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The leaves of a call's arguments.

        :raises TypeError: they have another structure.
        """
        if self._flat and not kwargs and len(args) == len(self._signature.leaves):
            return args  # what isn't a leaf isn't what a leaf has to be
        given = self._signature.arguments.of_call(args, kwargs)
        leaves, structure = tree_flatten(given)
        if structure != self._structure:
            raise TypeError(
                f"the arguments have the structure {structure}; the package takes {self._structure}"
            )
        return leaves

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's inputs, but for the weights.

        :raises TypeError: a leaf isn't what it has to be.
        :raises ValueError: a tensor has another size, or an unfit layout; or the call's
            surroundings would change what the ops compute, or see them.
        """
        return self._quick(*leaves) or self._checked_inputs(leaves)

    def _checked_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        known: dict[str, int] = {}
        tensors = []
        derived: list[tuple[LeafForm, str, int]] = []
        for leaf, form in zip(leaves, self._signature.leaves, strict=True):
            if not form.dtype:
                if type(leaf) is not type(form.constant) or leaf != form.constant:
                    raise ValueError(
                        f"{form.name} is {leaf!r}; it was {form.constant!r} when the model was "
                        "packaged, and is a part of the program. Package it again for other values"
                    )
                continue
            self._check(leaf, form)
            for number, size in zip(leaf.shape, form.sizes, strict=True):
                if number == size:
                    continue
                if isinstance(size, int):
                    raise self._other_size(leaf, form)
                if size.isidentifier():
                    if known.setdefault(size, number) != number:
                        raise self._other_size(leaf, form, known)
                else:
                    derived.append((form, size, number))
            tensors.append(_laid_out(leaf, form))
        for form, text, number in derived:
            if eval(text, {"__builtins__": {}}, known) != number:
                raise ValueError(f"a size of {form.name} is {number}, and has to be {text}")
        for symbol, number in known.items():
            low, high = self._signature.ranges.get(symbol, (0, None))
            if number < low or (high is not None and number > high):
                most = "any size" if high is None else f"{high}"
                raise ValueError(
                    f"the size {symbol} is {number}; the package was made for {low} to {most}"
                )
        _refuse_surroundings()
        return [*(known[symbol] for symbol in self._symbols), *tensors]

    def _check(self, leaf: Any, form: LeafForm) -> None:
        if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
            what = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise TypeError(f"{form.name} is a {what}; the package takes {form.described()}")
        if (
            leaf.dtype is not getattr(torch, form.dtype)
            or leaf.layout is not torch.strided
            or not leaf.is_cpu
        ):
            raise TypeError(
                f"{form.name} is {leaf.dtype} on {leaf.device}, {leaf.layout}; the package takes "
                f"{form.described()} on the CPU"
            )
        if leaf.dim() != len(form.sizes):
            raise self._other_size(leaf, form)
        if leaf.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{form.name} requires gradients, and a package has none: call it under "
                "torch.no_grad(), or train the model itself"
            )

    def _other_size(
        self, leaf: torch.Tensor, form: LeafForm, known: Mapping[str, int] | None = None
    ) -> ValueError:
        where = "".join(f", where {name} is {value}" for name, value in (known or {}).items())
        return ValueError(
            f"{form.name} has the shape {tuple(leaf.shape)}; the package takes {form.described()}"
            f"{where}. Sizes that change have to be named by dynamic_shapes when it is packaged"
        )


def _quick_inputs(signature: Signature, symbols: Sequence[str]) -> Callable[..., list[Any] | None]:
    """A function of a call's leaves: the program's inputs where nothing has to be done to them.

    None where something has, or where something doesn't fit, as :meth:`Fit.inputs` tells then.
    """
    source = Source()
    names = [source.unique(f"leaf{number}") for number in range(len(signature.leaves))]
    conditions = [
        f"not {source.bind(torch_modes.autocast_is_on, 'autocast_is_on')}()",
        f"not {source.bind(torch_modes.is_transformed, 'is_transformed')}()",
    ]
    sizes: dict[str, str] = {}
    tensors, derived = [], []
    for name, form in zip(names, signature.leaves, strict=True):
        if not form.dtype:
            constant = source.bind_apart(form.constant, "constant")
            conditions += [f"type({name}) is type({constant})", f"{name} == {constant}"]
            continue
        tensors.append(name)
        conditions += _tensor_conditions(source, name, form)
        for place, size in enumerate(form.sizes):
            here = f"{name}.shape[{place}]"
            if isinstance(size, int):
                conditions.append(f"{here} == {size}")
            elif not size.isidentifier():
                derived.append(f"{here} == ({size})")
            elif size in sizes:
                conditions.append(f"{here} == {size}")
            else:
                sizes[size] = source.unique(size)
                low, high = signature.ranges.get(size, (0, None))
                upper = "" if high is None else f" <= {high}"
                conditions.append(f"{low} <= ({size} := {here}){upper}")
    source.line(f"if {' and '.join([*conditions, *derived])}:")
    source.line(f"return [{', '.join([*symbols, *tensors])}]", 2)
    source.line("return None")
    return source.function("quick_inputs", ", ".join(names))


def _tensor_conditions(source: Source, name: str, form: LeafForm) -> list[str]:
    contiguous = f"{name}.is_contiguous()"
    if form.order != tuple(range(len(form.order))):
        contiguous = f"{name}.permute({form.order}).is_contiguous()"
    grads = source.bind(torch.is_grad_enabled, "is_grad_enabled")
    return [
        f"type({name}) is {source.bind(torch.Tensor, 'Tensor')}",
        f"{name}.dtype is {source.bind(getattr(torch, form.dtype), 'dtype')}",
        f"{name}.is_cpu",
        f"{name}.layout is {source.bind(torch.strided, 'strided')}",
        f"{name}.dim() == {len(form.sizes)}",
        contiguous,
        f"not {name}.is_conj()",
        f"not {name}.is_neg()",
        f"not ({name}.requires_grad and {grads}())",
    ]


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


def _laid_out(tensor: torch.Tensor, form: LeafForm) -> torch.Tensor:
    """A tensor as it lay in memory when the model was packaged."""
    order = form.order
    ordered = tensor.permute(order)
    if ordered.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if form.returned:
        raise ValueError(
            f"{form.name} lies otherwise in memory (strides {tensor.stride()}) than when the model "
            "was packaged, and results share its memory: give it a copy (.contiguous())"
        )
    ordered = ordered.resolve_conj().resolve_neg().contiguous()
    return ordered.permute([order.index(d) for d in range(len(order))])

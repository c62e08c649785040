"""Package a model: export it, choose what runs it by measurement, write it all to a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map

from fuseboard.ahead import file, origin, weights
from fuseboard.ahead.archiving import with_archives
from fuseboard.ahead.judging import Judge, Unequal
from fuseboard.ahead.loading import make_model
from fuseboard.ahead.program import Interface, OutputForm, PackedProgram
from fuseboard.ahead.signature import Arguments, LeafForm, Signature
from fuseboard.board import Session, board
from fuseboard.config import resolve
from fuseboard.errors import PackageError, containable
from fuseboard.files import replacing
from fuseboard.lower.guards import keeping_sizes
from fuseboard.ops.views import view_chain
from fuseboard.pipeline.graph_call import GraphCall
from fuseboard.pipeline.staged_graph import Record
from fuseboard.report.data import ledger
from fuseboard.run import portable
from fuseboard.run.failure import describe
from fuseboard.run.runner import Runner
from fuseboard.torch_api import exports
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.exports import Exported
from fuseboard.torch_api.graphs import graph_from_bytes, graph_to_bytes
from fuseboard.torch_api.state import StateGuard
from fuseboard.torch_api.symbols import GuardWatch, expression
from fuseboard.torch_api.views import eager_strides
from fuseboard.workshop.carried import op_modules
from fuseboard.workshop.sizes import NoCondition, SizeCondition

#: Calls after which what was chosen by then stays.
_CALLS = 8


def package(
    model: Callable[..., Any],
    example_inputs: Sequence[Any],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> None:
    """Write a model to a file that :func:`fuseboard.load` loads without compiling.

    The model is exported by ``torch.export``; the installed backends are judged and timed on the
    example inputs, under the settings that hold, and the fastest that is right is what the file
    holds, with the weights. What it computes is held against the model in eager before the file
    takes its place.

    :param model: a module, in the mode that it is to be used in, or a function of tensors.
    :param example_inputs: the arguments by position. They aren't written to.
    :param example_kwargs: the arguments by name.
    :param dynamic_shapes: which sizes may change, as ``torch.export.export`` takes it; without it
        all are those of the examples.
    :raises PackageError: the model can't be packaged; nothing was written.
    :raises SettingsError: a setting is wrong.
    """
    path = Path(path).absolute()
    if not path.parent.is_dir():
        raise PackageError("file", f"{str(path)!r} can't be written: there is no {path.parent}")
    if path.is_dir():
        raise PackageError("file", f"{str(path)!r} can't be written: it is a directory")
    maker = _Maker(model, tuple(example_inputs), dict(example_kwargs or {}), dynamic_shapes)
    with StateGuard(), torch.inference_mode(False), torch.no_grad():
        maker.make(path)


class _Maker:
    """Packages one model.

    :raises PackageError: the example inputs don't fit the model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
    ) -> None:
        self._model = model if isinstance(model, torch.nn.Module) else module_of(model)
        self._name = type(model).__name__ if model is self._model else _name_of(model)
        function = self._model.forward
        try:
            self._arguments = Arguments.of(function, args, kwargs)
        except TypeError as error:
            raise PackageError("model", f"the example inputs don't fit: {error}") from error
        args, kwargs = self._arguments.of_call(args, kwargs)
        self._given = tree_map(_dense, (args, kwargs))
        self._dynamic_shapes = self._by_name(dynamic_shapes)

    def _by_name(self, dynamic_shapes: Any) -> Any:
        """As torch.export takes it where all arguments have names."""
        if not isinstance(dynamic_shapes, tuple | list) or self._arguments.positional is not None:
            return dynamic_shapes
        named = dict.fromkeys(self._arguments.names)
        named.update(zip(self._arguments.parameters, dynamic_shapes, strict=False))
        return named

    def make(self, path: Path) -> None:
        """
        :raises PackageError: it can't be done.
        """
        self._refuse()
        exported = self._exported()
        session = self._session(exported)
        real = [*self._sizes(exported), *exported.weights.values(), *self._tensors(exported)]
        with ledger.collect(), eager_strides(), keeping_sizes():
            call, watch, condition = self._compiled(session, exported, real)
        assert call.pipeline.records is not None
        (record,) = call.pipeline.records
        program = self._program(exported, session, record, real, watch, condition)
        packed = _Packed(exported, program, record, session)
        interface = self._interface(exported)
        judge = Judge(self._model, self._given, exported, call.captured_graphs[0].graph, real)
        interface = judge.with_targets(interface)
        with replacing(path) as unfinished:
            self._write(unfinished, packed, interface)
            made = make_model(unfinished)
            if problem := judge.difference(made, record.runner.budget):
                raise PackageError("model", f"what was made isn't the model: {problem}")
            try:
                ranges = judge.ranges(made, interface, record.runner.budget)
            except Unequal as error:
                raise PackageError("model", f"what was made isn't the model: {error}") from error
            if ranges != interface.signature.ranges:
                signature = replace(interface.signature, ranges=ranges)
                interface = replace(interface, signature=signature)
                self._write(unfinished, packed, interface)

    def _refuse(self) -> None:
        if torch_modes.autocast_is_on():
            raise PackageError(
                "model",
                "autocast is on: enter it in the model's forward, and package outside of it",
            )
        for name, value in (*self._model.named_parameters(), *self._model.named_buffers()):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_cpu:
                what = f"{type(value).__name__} on {value.device}"
                raise PackageError("model", f"{name} is a {what}; weights are plain, on the CPU")

    def _exported(self) -> Exported:
        args, kwargs = self._given
        try:
            exported = exports.export(self._model, args, kwargs, self._dynamic_shapes)
        except exports.NotExported as error:
            raise PackageError("model", f"the model can't be packaged: it has {error}") from error
        except containable() as error:  # of the user's code, or torch's
            raise PackageError(
                "model", f"torch.export can't export the model: {describe(error)}"
            ) from error
        _write_copies(exported.graph, [number for number, _ in exported.writes])
        # A ShapeEnv that hears of guards; and what is compiled is what will be loaded.
        metadata = ("val", "nn_module_stack", "stack_trace")
        try:
            exported.graph = graph_from_bytes(graph_to_bytes(exported.graph, [], metadata))[0]
        except containable() as error:
            raise PackageError("model", describe(error)) from error
        return exported

    def _session(self, exported: Exported) -> Session:
        """A session under the settings that hold; a first call of its graphs tries everything."""
        options: dict[str, Any] = {"settle": "first_call"}
        session = board.session(resolve(options))
        if exported.symbols:  # others compile for each size that they meet
            able = [info.name for info in session.backends[:-1] if info.dynamic_shapes]
            options["backends"] = [*able, session.backends[-1].name]
            session = board.session(resolve(options))
        return session

    def _tensors(self, exported: Exported) -> list[torch.Tensor]:
        leaves, _ = tree_flatten(self._given)
        pairs = zip(leaves, exported.inputs, strict=True)
        return [leaf for leaf, one in pairs if one.node is not None]

    def _sizes(self, exported: Exported) -> list[int]:
        """The values of the symbols in the example."""
        first = len(exported.symbols) + len(exported.weights)
        known: dict[str, int] = {}
        for fake, tensor in zip(exported.fakes[first:], self._tensors(exported), strict=True):
            for size, number in zip(fake.shape, tensor.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    known[str(expression(size))] = number
        return [known[symbol] for symbol in exported.symbols]

    def _compiled(
        self, session: Session, exported: Exported, real: list[Any]
    ) -> tuple[GraphCall, GuardWatch, SizeCondition | None]:
        """The graph through all stages, and called until it is decided what runs."""
        fakes = exported.fakes
        watch = GuardWatch(torch_internals.fake_mode_of(fakes))
        condition = SizeCondition.on(fakes) if exported.symbols else None
        call = GraphCall(session, exported.graph, f"package of {self._name}")
        call.pipeline.records = []
        with exports.compiling_exported(exported), call.with_example_inputs(real):
            call.pipeline.dynamo_graph = None  # there is none
            call.compile(exported.graph, fakes, "inference")
        (captured,) = call.captured_graphs
        (runner,) = call.pipeline.runners
        run = captured.boxed()
        for _ in range(_CALLS):
            run([*real])
            if runner.chooser is None:
                break
        return call, watch, condition

    def _program(
        self,
        exported: Exported,
        session: Session,
        record: Record,
        real: Sequence[Any],
        watch: GuardWatch,
        condition: SizeCondition | None,
    ) -> PackedProgram:
        runner = record.runner
        sites = [one for site in runner.program.sites for one in site.with_inner()]
        if tripped := [site.tripped for site in sites if site.tripped]:
            raise PackageError("model", f"{tripped[0]} failed in a call; the report says how")
        program = with_archives(runner.program, session, real)
        first, count = len(exported.symbols), len(exported.weights)
        try:
            known = None if condition is None else condition.with_terms(watch)
        except NoCondition as error:
            raise PackageError("model", f"what was chosen can't be stored: {error}") from error
        return PackedProgram(
            program.portable(runner.cloned, range(first, first + count)),
            None if known is None else known.holds(),
            "" if known is None else known.described(),
        )

    def _interface(self, exported: Exported) -> Interface:
        pairs, structure = tree_flatten_with_path(self._given)
        fakes = iter(exported.fakes[len(exported.symbols) + len(exported.weights) :])
        written = {target for _, target in exported.writes}
        leaves = []
        for number, ((path, value), one) in enumerate(zip(pairs, exported.inputs, strict=True)):
            name = _leaf_name(path)
            if one.node is None:
                leaves.append(LeafForm(name, constant=value))
                continue
            sizes = tuple(
                str(expression(n)) if isinstance(n, torch.SymInt) else int(n)
                for n in next(fakes).shape
            )
            dtype = str(value.dtype).removeprefix("torch.")
            form = LeafForm(name, dtype, sizes, _order(value), written=number in written)
            leaves.append(form)
        return Interface(
            Signature(self._arguments, structure, tuple(leaves), exported.ranges),
            exported.symbols,
            tuple(exported.weights),
            tuple(OutputForm(one.result, None, one.constant) for one in exported.outputs),
            exported.program.call_spec.out_spec,
            tuple(exported.writes),
        )

    def _write(self, path: Path, packed: _Packed, interface: Interface) -> None:
        exported, runner, session = packed.exported, packed.runner, packed.session
        used = {region.backend for region in runner.report.regions} - {"eager"}
        manifest = {
            "model": self._name,
            "machine": origin.machine(),
            "plugins": origin.plugins_of(session, sorted(used)),
            "op_modules": list(op_modules([packed.record])),
            "signature": interface.signature.described(),
            "report": runner.report.as_dict(),
        }
        pickled = {
            "interface.pkl": _pickled(interface, "its signature"),
            "program.pkl": _pickled(packed.program, f"what {' and '.join(used)} compiled"),
            "eager.pkl": _pickled(runner.captured.eager, "its graph"),
        }
        members: dict[str, file.Write] = {
            name: lambda stream, content=content: stream.write(content)  # type: ignore[misc]
            for name, content in pickled.items()
        }
        try:
            exported_program = exports.to_bytes(exported.program)
            members["exported.pt2"] = lambda stream: stream.write(exported_program)
        except exports.NotExported as why:  # it is there for fallback="compile" alone
            manifest["no_fallback"] = str(why)
        members["weights.safetensors"] = lambda stream: weights.write(exported.weights, stream)
        file.write(path, manifest, members)


@dataclass(frozen=True)
class _Packed:
    """What goes into a file, the interface aside."""

    exported: Exported
    program: PackedProgram
    record: Record
    session: Session

    @property
    def runner(self) -> Runner:
        return self.record.runner


def _pickled(value: Any, what: str) -> bytes:
    try:
        return portable.to_bytes(value)
    except Exception as error:  # whatever the code of an object in it raises
        raise PackageError(
            "model", f"{what} means nothing in another process: {describe(error)}"
        ) from error


def _write_copies(graph: GraphModule, results: Sequence[int]) -> None:
    """Give each result that is written to something a memory of its own.

    Two inputs that a call swaps are results as they are: the first write would change the second.
    """
    end = graph.graph.output_node()
    values = list(end.args[0])  # type: ignore[arg-type]
    for number in results:
        value = values[number]
        if isinstance(value, Node) and list(view_chain(value))[-1].op == "placeholder":
            with graph.graph.inserting_before(end):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta["val"] = value.meta["val"].clone()
            values[number] = copy
    end.args = (tuple(values),)


def module_of(function: Callable[..., Any]) -> torch.nn.Module:
    """A function as a module, as torch.export takes it."""
    module = torch.nn.Module()
    try:
        inspect.signature(function)
        module.forward = function
    except ValueError:  # it is built in
        module.forward = lambda *args, **kwargs: function(*args, **kwargs)
    return module


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _leaf_name(path: Sequence[Any]) -> str:
    """``x``, ``states[0]['key']``."""
    _, *rest = path  # whether by position or by name
    first = rest[0]
    name = str(getattr(first, "key", f"argument {getattr(first, 'idx', '')}"))
    return name + "".join(map(str, rest[1:]))


def _dense(value: Any) -> Any:
    """An example input without gaps, apart from the user's."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_cpu:
        raise PackageError(
            "model", f"an example input is a {type(value).__name__} on {value.device}"
        )
    value = value.detach().resolve_conj().resolve_neg()
    if not value.permute(_order(value)).is_contiguous():
        return value.contiguous()
    return value


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions from that with the largest stride; in their order if it is contiguous."""
    dimensions = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dimensions)
    strides = tensor.stride()
    return tuple(sorted(dimensions, key=lambda dimension: -strides[dimension]))

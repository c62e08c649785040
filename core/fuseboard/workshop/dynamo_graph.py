"""A graph of Dynamo's, with all that work on it beside its calls has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.capture.original import forward_of
from fuseboard.partition.pins import Pins
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.torch_api.custom_ops import defining_modules
from fuseboard.torch_api.dynamo_graphs import static_positions
from fuseboard.torch_api.frames import frame_title
from fuseboard.torch_api.op_definitions import definitions
from fuseboard.workshop.kept_call import KeptCall

Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class DynamoGraph:
    """
    :ivar session: by whose settings and plugins it is compiled.
    :ivar graph: it isn't changed.
    :ivar sizes: what Dynamo knows of its inputs' sizes; None where these are plain.
    :ivar frame: names the user's function in reports.
    :ivar run: calls it.
    :ivar static: positions of the inputs that Dynamo knows to be parameters or buffers.
    :ivar weights: these, and those of other parameters.
    :ivar op_modules: define ops that are in it.
    :ivar op_definitions: other ops in it, for a process that can't import them.
    :ivar pins: what the user wants where.
    """

    session: Session
    graph: GraphModule
    sizes: CallSizes | None
    frame: str
    run: Run
    static: frozenset[int]
    weights: frozenset[int]
    op_modules: tuple[str, ...]
    op_definitions: bytes
    pins: Pins

    @classmethod
    def of_call(
        cls, session: Session, graph: GraphModule, inputs: Sequence[Any], sizes: CallSizes | None
    ) -> DynamoGraph:
        """As Dynamo gives it to its backend.

        :param inputs: real ones, of the call for which Dynamo compiles it.
        :raises LoweringError: no other process can have an op that is in it.
        :raises SettingsError: a pattern for this model alone matches nothing.
        """
        static = frozenset(static_positions(graph))
        weights = {i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)}
        return cls(
            session=session,
            graph=graph,
            sizes=sizes,
            frame=frame_title(),
            run=forward_of(graph),
            static=static,
            weights=static | weights,
            op_modules=defining_modules(graph),
            op_definitions=definitions(graph),
            pins=Pins(session, graph),
        )

    def keep(self, inputs: Sequence[Any]) -> KeptCall:
        """Keep a call of it for later.

        :raises CannotKeep: it would take too much memory.
        """
        return KeptCall(inputs, self.weights, "as_strided" in self.graph.code)

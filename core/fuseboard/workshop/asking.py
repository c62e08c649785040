"""What the workshop is asked: a graph as bytes, and a call's inputs in shared memory."""

from __future__ import annotations

from pathlib import Path

from fuseboard.errors import LoweringError
from fuseboard.lower.isolation import module_paths
from fuseboard.run.failure import describe
from fuseboard.torch_api import custom_ops, dynamo_graphs
from fuseboard.workshop.dynamo_graph import DynamoGraph
from fuseboard.workshop.kept_call import KeptCall
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.tensors import write_inputs


def make_request(graph: DynamoGraph, call: KeptCall, directory: Path) -> Request | Answer:
    """What to ask about a graph; or the answer that it can't be asked.

    :param call: whose inputs are written into ``directory``.
    """
    session, inputs = graph.session, call.inputs()
    if inputs is None:
        return Answer(problem="a weight is gone")
    if why := call.why_no_copies(session.settings.prepare_memory):
        return Answer(problem=why, only_here=True)
    try:
        sent = write_inputs(inputs, directory)
        data = dynamo_graphs.graph_to_bytes(graph.graph)
    except (OSError, LoweringError) as error:
        why = f"it can't be tried in another process: {describe(error)}"
        return Answer(problem=why, only_here=True)
    return Request(
        graph=data,
        inputs=sent,
        static=graph.static,
        settings=session.settings.model_copy(update={"settle": "first_call"}),
        modules=session.run_time_modules(),
        op_modules=graph.op_modules,
        op_definitions=graph.op_definitions,
        main_file=custom_ops.main_file() if custom_ops.MAIN in graph.op_modules else None,
        paths=module_paths(),
        frame=graph.frame,
        state=call.named_state(),
        modes=(call.grads, call.inference),
        sizes=graph.sizes,
        pins=graph.pins,
    )

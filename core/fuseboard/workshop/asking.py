"""What the workshop is asked: a graph as bytes, and a call's inputs in shared memory."""

from __future__ import annotations

from pathlib import Path

from torch.fx import GraphModule

from fuseboard.board import Session
from fuseboard.errors import LoweringError
from fuseboard.run.failure import describe
from fuseboard.torch_api import dynamo_graphs
from fuseboard.torch_api.call_sizes import CallSizes
from fuseboard.workshop.kept_call import KeptCall
from fuseboard.workshop.request import Answer, Request
from fuseboard.workshop.tensors import write_inputs


def make_request(
    session: Session,
    graph: GraphModule,
    call: KeptCall,
    sizes: CallSizes | None,
    frame: str,
    directory: Path,
) -> Request | Answer:
    """What to ask about a graph of Dynamo's; or the answer that it can't be asked.

    :param call: whose inputs are written into ``directory``.
    :param sizes: what Dynamo knows of the inputs' sizes.
    :param frame: names the user's function in reports.
    """
    inputs = call.inputs()
    if inputs is None:
        return Answer(problem="a weight is gone")
    if why := call.why_no_copies(session.settings.prepare_memory):
        return Answer(problem=why, only_here=True)
    try:
        sent = write_inputs(inputs, directory)
        data = dynamo_graphs.graph_to_bytes(graph)
    except (OSError, LoweringError) as error:
        why = f"it can't be tried in another process: {describe(error)}"
        return Answer(problem=why, only_here=True)
    return Request(
        graph=data,
        inputs=sent,
        static=dynamo_graphs.static_positions(graph),
        settings=session.settings.model_copy(update={"settle": "first_call"}),
        modules=session.run_time_modules(),
        frame=frame,
        state=call.named_state(),
        modes=(call.grads, call.inference),
        sizes=sizes,
    )

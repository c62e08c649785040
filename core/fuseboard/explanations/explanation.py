"""Explanations: what ran where and why, of one call or of the newest compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from fuseboard.backend import compile_now, fuseboard
from fuseboard.board import board
from fuseboard.config import resolve
from fuseboard.lower.background import wait
from fuseboard.report import choices
from fuseboard.report.data import Break, GraphReport, ledger
from fuseboard.report.dynamo import watch
from fuseboard.report.elsewhere import elsewhere
from fuseboard.torch_api.apart import compiled_apart, compiled_from, state_kept, with_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fuseboard.explanations.page import Profile


@dataclass
class Explanation:
    """What fuseboard made of a call. ``print`` it, or take :meth:`as_dict` for JSON.

    :meth:`to_html` draws it as a page.

    It holds strings and numbers only, and stays true while compiled code lives: a trip that
    happens in a later call shows up here.

    :ivar breaks: where Dynamo ended a graph or left a function to Python; None where nobody
        watched for that.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    breaks: list[Break] | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists: graphs with nodes and regions, breaks, notes."""
        return {
            "graphs": [
                {
                    **graph.as_dict(),
                    "why": choices.why(graph),
                    "untried": choices.untried(graph),
                    "elsewhere": [dataclasses.asdict(group) for group in elsewhere(graph)],
                }
                for graph in self.graphs
            ],
            "breaks": self.breaks and [dataclasses.asdict(found) for found in self.breaks],
            "notes": list(self.notes),
            "torch": torch.__version__,
        }

    def to_html(self, title: str = "", profile: Profile | None = None) -> str:
        """One page of HTML that draws the graphs. It needs no network; write it as UTF-8.

        :param title: of the page; without one, the explained functions are named.
        :param profile: what a ``SamplingProfiler`` sampled of the same code; the page then shows
            the share of each region.
        """
        from fuseboard.explanations.page import render_page

        return render_page(self, title, profile)

    def __rich__(self) -> RenderableType:
        from fuseboard.explanations.text import render

        return render(self)

    def __str__(self) -> str:
        from fuseboard.explanations.text import as_text

        return as_text(self)


# --- the newest compile -------------------------------------------------------------------------


def last_report() -> Explanation:
    """What is known of the newest compile: its graphs, the backward included if there is one.

    Where Dynamo broke the graph isn't known afterwards; :func:`explain` watches for that.
    """
    graphs = ledger.graphs()
    return Explanation([graph for graph in graphs if graph.call == graphs[-1].call])


@contextmanager
def explained() -> Iterator[Explanation]:
    """Explain what is compiled with fuseboard inside the context, by whatever thread.

    The explanation is complete once the context is closed.
    """
    explanation = Explanation()
    with ledger.collect() as graphs, watch() as seen:
        yield explanation
    explanation.graphs, explanation.breaks = graphs, seen.breaks


# --- one call -----------------------------------------------------------------------------------


#: A call lets what was compiled be compared; a second one, what only this process can compile.
_CALLS_TO_SETTLE = 3


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile ``fn`` with fuseboard, call it once with these arguments, and say what happened.

    The call is a real one, under the settings and the grad mode that hold now, but that it waits:
    candidates are compared within it, whatever ``settle`` says. If its results
    require grad, their backward runs too; no ``.grad`` is touched. Afterwards torch's random
    generators and the buffers of ``fn`` (a module, or a method of one) are as before, and Dynamo
    has forgotten what was compiled: later compiles of ``fn`` aren't changed. What else the call
    changes, such as arguments that it writes to, stays changed.

    :param fn: a module or function, or what ``torch.compile`` made of one. If that was with
        fuseboard, its ``options``, ``mode``, ``dynamic`` and ``fullgraph`` hold here too.
    :raises SettingsError: a setting is wrong; nothing has been compiled.

    What the call or Dynamo raises passes through.
    """
    return explain_call(fn, args, kwargs)


def explain_call(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    settled: bool = False,
) -> Explanation:
    """As :func:`explain`, on given arguments.

    :param settled: explain it once every candidate has been tried, which may take minutes. Where
        that needs further calls, they are made.
    """
    kwargs = dict(kwargs or {})
    given = compiled_from(fn)
    options: Mapping[str, Any] = {}
    how: Mapping[str, Any] = {}
    original = fn
    notes = []
    if given is not None:
        original, how = given.original, given.how
        if given.backend is fuseboard:
            options = given.options
        else:
            notes.append(
                "It was compiled with another backend; this is what fuseboard makes of it."
            )
    board.session(resolve(**options))  # a wrong setting raises here, unwrapped by Dynamo

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_now(graph, inputs, **options)

    with explained() as explanation, ExitStack() as stack:
        explanation.notes.extend(notes)
        stack.enter_context(state_kept(original))
        compiled = stack.enter_context(compiled_apart(with_code(original), backend, how))

        def run() -> None:
            _run_backward(compiled(*args, **kwargs), (args, kwargs))

        run()
        if settled:
            _settle(run)
    return explanation


def _settle(run: Callable[[], None]) -> None:
    """Wait until all is decided; what needs another call for that has one.

    Not more than a few: a call whose values are wrong in all of them never settles.
    """
    for _ in range(_CALLS_TO_SETTLE):
        if wait():
            return
        run()
    wait()


def _run_backward(result: Any, arguments: Any) -> None:
    """Run the backward of what requires grad, without touching any ``.grad``."""
    outputs = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    inputs = _differentiable(outputs, arguments)
    if not torch.is_grad_enabled() or not inputs:
        return
    try:
        torch.autograd.grad(
            outputs,
            inputs,
            [torch.ones_like(output) for output in outputs],
            retain_graph=True,  # it may lead on into a graph of the caller's
            allow_unused=True,
        )
    except RuntimeError as error:
        # A training step that returns its loss has run the backward itself, and it was seen then.
        if "a second time" not in str(error):
            raise


def _differentiable(outputs: Sequence[torch.Tensor], arguments: Any) -> list[torch.Tensor]:
    """What the outputs depend on: leaves, and arguments that the caller computed."""
    found: dict[int, torch.Tensor] = {}
    made = {
        leaf.grad_fn: leaf
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    }
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = made.get(node, getattr(node, "variable", None))  # AccumulateGrad has .variable
        if leaf is not None:
            found[id(leaf)] = leaf
        if node not in made:
            pending.extend(following for following, _ in node.next_functions)
    return list(found.values())

"""Which graphs may be run again beside the user's call, and what such runs leave as it was."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.beside import is_beside
from fuseboard.ops.effects import is_collective, only_raises
from fuseboard.torch_api.nodes import graphs_in

#: Ops without results that only raise where something doesn't hold.
_CHECKS = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::_functional_assert_async",
        "aten::_functional_assert_scalar",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
    }
)

#: Namespaces of ops that draw random numbers from torch's generators and nowhere else.
_TORCHS_OWN = frozenset(
    {
        *("aten", "prims", "prim", "mkldnn", "onednn", "quantized", "quantized_decomposed"),
        *("rngprims", "fuseboard"),
    }
)

#: Higher-order ops that stand for effects or writes.
_EFFECTS = frozenset(
    {"call_torchbind", "print", "triton_kernel_wrapper_mutation", "with_effects", "call_delegate"}
)

#: Batch norm that updates its running statistics though its schema doesn't say so: the position of
#: the mean, and of the flag that switches training on.
_BATCH_NORMS = {
    "aten::native_batch_norm": (3, 5),
    "aten::cudnn_batch_norm": (3, 5),
    "aten::miopen_batch_norm": (3, 5),
    "aten::_batch_norm_impl_index": (3, 5),
    "aten::batch_norm": (3, 5),
}

#: Python functions that graphs call on sizes.
_BUILTINS = frozenset({abs, bool, divmod, float, int, max, min, pow, round, sum})


def replayable(graph: GraphModule) -> str:
    """Why a graph must never be run a second time on the same inputs; "" where it may.

    Running it again must change nothing that anybody can see: no effects, no messages to other
    processes, no writes to inputs. Random numbers are no reason, since the generator's state is put
    back. An op of the user's that is declared free of effects is believed, unless it is tagged as
    random.
    """
    for node in graph.graph.nodes:
        reason = _why_not(node, graph)
        if reason:
            return reason
    return ""


def why_it_writes(graph: GraphModule) -> str:
    """Which op of a graph writes to tensors, as it says itself; "" where none does.

    Whether code of such a graph may write to its inputs, nobody can tell.
    """
    found = (_why_node_writes(node) for one in graphs_in(graph) for node in one.graph.nodes)
    return next(filter(None, found), "")


def _why_node_writes(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _why_it_writes(node, target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        effects = target.name() in _EFFECTS and not only_raises(node)
        return f"{target.name()} has effects beyond its results" if effects else ""
    known = node.op in ("placeholder", "get_attr", "call_function", "output")
    return "" if known else f"{node.name} is a {node.op}, which may do anything"


def only_torchs_ops(graph: GraphModule) -> bool:
    """Whether nothing but ops of torch's own runs, and none of them writes to tensors."""
    return all(map(_is_torchs_op, graph.graph.nodes))


def _is_torchs_op(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return target.namespace in _TORCHS_OWN and not _why_it_writes(node, target)


def _why_not(node: Node, owner: torch.nn.Module) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(owner)
        return replayable(held) if isinstance(held, GraphModule) else ""
    if node.op != "call_function":
        return f"{node.name} is a {node.op}, which may do anything"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _why_not_op(node, target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() in _EFFECTS and not only_raises(node):
            return f"{target.name()} has effects beyond its results"
        return ""
    module = getattr(target, "__module__", "") or ""
    plain = module in ("_operator", "math") or module.split(".")[0] == "torch"
    if plain or target in _BUILTINS:
        return ""
    return f"{node.name} calls Python code ({module}), which may do anything"


def _why_not_op(node: Node, target: Any) -> str:
    schema = target._schema
    if is_collective(target):
        return f"{target} is a collective: other processes would have to take part again"
    own = target.namespace in _TORCHS_OWN
    if not own and torch.Tag.nondeterministic_seeded in target.tags:
        return f"{target} is tagged as random and isn't torch's own: it may keep count of its calls"
    if reason := _why_it_writes(node, target):
        return reason
    if not schema.returns and schema.name not in _CHECKS:
        return f"{target} has no results, so it runs for its effects"
    return ""


def _why_it_writes(node: Node, target: Any) -> str:
    schema = target._schema
    if schema.is_mutable:
        return f"{target} writes to a tensor"
    position = _BATCH_NORMS.get(schema.name)
    if position is not None and _trains(node, *position):
        return f"{target} updates its running statistics"
    if any(str(argument.type).startswith("__torch__") for argument in schema.arguments):
        return f"{target} is given an object that it may change"
    return ""


def _trains(node: Node, mean: int, flag: int) -> bool:
    """Whether batch norm updates statistics: there are some, and it trains."""
    given = dict(enumerate(node.args))
    return given.get(mean) is not None and bool(given.get(flag, True))


def generators_put_back() -> AbstractContextManager[None]:
    """The states of the CPU's generator and of CUDA's as before, after the block.

    Beside the user's calls they are left alone: another thread may draw from them meanwhile.
    """
    if is_beside():
        return nullcontext()
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if started else [])


def generator_states() -> dict[str, torch.Tensor]:
    """The states of the generators that a run may have drawn from, by names for people.

    None beside the user's calls, whose threads may draw meanwhile.
    """
    if is_beside():
        return {}
    states = {"the state of the CPU's generator": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["the state of CUDA's generator"] = torch.cuda.get_rng_state()
    return states


def without_anomaly_mode() -> AbstractContextManager[Any]:
    """torch's anomaly mode off for the block: it would print the user's error for each trial.

    It is the whole process's, so beside the user's calls it is left alone.
    """
    if is_beside() or not torch.is_anomaly_enabled():
        return nullcontext()
    return torch.autograd.set_detect_anomaly(False)

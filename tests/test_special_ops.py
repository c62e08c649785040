"""Ops that are more than a function of tensors: control flow, custom ops, effects, collectives.

Each stays where it is correct, with a reason in the plan; values, order and gradients are eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard import BackendInfo, Claim, Decline
from fuseboard.partition.support import why_unsupported
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, plugged
from tests.support.values import rnd

LINEAR = nn.Linear(16, 16)
SAID: list[float] = []


# --- custom ops ----------------------------------------------------------------------------------


@torch.library.custom_op("fuseboard_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("fuseboard_tests::add_into", mutates_args=("into",))
def add_into(into: torch.Tensor, x: torch.Tensor) -> None:
    into.add_(x)


@torch.library.custom_op("fuseboard_tests::say", mutates_args=())
def say(x: torch.Tensor) -> torch.Tensor:
    SAID.append(round(float(x.sum()), 3))
    return x.clone()


say.register_fake(torch.empty_like)
_register_effectful_op(torch.ops.fuseboard_tests.say.default, _EffectType.ORDERED)


# --- the programs --------------------------------------------------------------------------------


def conditional(x):
    return torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos() - 1, (LINEAR(x),)) + 1


def loop(x):
    start = (torch.tensor(0), LINEAR(x))
    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.5 + 1), start)
    return y.relu()


def scanned(x):
    # The carry decays: a sum over all rows would add their rounding up, differently in each order.
    carry, each = scan(lambda c, a: (c * 0.5 + a.sin(), c * 2), torch.zeros(16), LINEAR(x), dim=0)
    return each + carry


def checkpointed(x):
    def block(a):
        return nn.functional.dropout(nn.functional.gelu(LINEAR(a)), 0.3)

    return checkpoint(block, x, use_reentrant=False).sin()


def attention(x):
    q = x.reshape(1, 1, -1, 16).sin()  # of a view alone Inductor's kernel makes nothing
    return flex_attention(q, q + 1, q - 1, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.01)


@torch.compiler.nested_compile_region
def region(x):
    return nn.functional.gelu(LINEAR(x)).sin()


def nested(x):
    return region(region(x)) + 1


def custom(x):
    return torch.ops.fuseboard_tests.double(LINEAR(x)).relu() + 1


def writing(x):
    y = LINEAR(x)
    torch.ops.fuseboard_tests.add_into(y, x.sin())
    twice = y * 2
    torch.ops.fuseboard_tests.add_into(y, twice)
    return y.relu(), twice


def writing_to_its_input(x):
    y = x.clone()
    torch.ops.fuseboard_tests.add_into(x, LINEAR(y).sin())
    return x * y


def effects(x):
    y = LINEAR(x)
    first = torch.ops.fuseboard_tests.say(y)
    torch.ops.fuseboard_tests.add_into(y, first)
    second = torch.ops.fuseboard_tests.say(y.relu() * 2)
    return first + second + torch.ops.fuseboard_tests.say(y - 5)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


def own_gradient(x):
    return Squared.apply(LINEAR(x)).sin()


INFERENCE = [
    conditional,
    loop,
    scanned,
    checkpointed,
    attention,
    nested,
    custom,
    writing,
    writing_to_its_input,
    effects,
]
TRAINING = [conditional, scanned, checkpointed, nested, custom, own_gradient]
ORDERS: dict[str, list[str] | None] = {
    "eager": ["eager"],
    "mkldnn": ["mkldnn", "eager"],
    "inductor": ["inductor", "eager"],
    "default": None,
}
#: Each program on each order, but not on Inductor alone, which compiles for seconds, where it has
#: the whole program in training.
RUNS = [
    pytest.param(program, order, id=f"{program.__name__}-{order}")
    for program in INFERENCE
    for order in ORDERS
    if order != "inductor" or program not in TRAINING
]


def compare(program: Callable[..., Any], grad: bool = False, **options: Any) -> None:
    """Two calls each on two inputs, as in eager: values, gradients, inputs, what was said."""
    ledger.clear()
    fn = torch.compile(program, backend="fuseboard", fullgraph=True, options=options)
    for x in (rnd(128, 16), -rnd(128, 16)):
        for _ in range(2):
            results = []
            for function in (program, fn):
                own = x.clone().requires_grad_(grad)
                LINEAR.zero_grad()
                SAID.clear()
                torch.manual_seed(3)
                with torch.set_grad_enabled(grad):
                    y = function(own)
                if grad:
                    y.square().mean().backward()
                grads = [own.grad, *(p.grad for p in LINEAR.parameters())]
                results.append((y, own.detach(), grads, torch.tensor(SAID)))
            torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def reasons() -> list[str]:
    """The reason of each node of every graph since the ledger was cleared."""
    return [n.reason for g in ledger.graphs() if g.kind != "joint" for n in g.nodes]


@pytest.mark.parametrize(("program", "order"), RUNS)
@pytest.mark.thorough
def test_inference_is_as_in_eager(program, order):
    """On orders of backends, without a trip, with a reason for each op."""
    backends = ORDERS[order]
    compare(program, **({} if backends is None else {"backends": backends}))
    assert not all_trips()
    assert all(reasons())


@pytest.mark.parametrize("order", ["eager", "default"])
@pytest.mark.parametrize("program", TRAINING, ids=lambda f: f.__name__)
def test_training_is_as_in_eager(program, order):
    """Gradients of the input and of the weights, too. By default Inductor has it whole."""
    backends = ORDERS[order]
    compare(program, grad=True, **({} if backends is None else {"backends": backends}))
    assert not all_trips()
    assert all(reasons())


@pytest.mark.parametrize("plan", ["alternate", "shuffled"])
@pytest.mark.parametrize("program", INFERENCE, ids=lambda f: f.__name__)
def test_cut_at_every_node_they_are_as_in_eager(program, plan):
    """A second backend that runs eager's ops gets every other node."""
    with plugged("other"):
        stages = {"plan": f"tests.support.plans:{plan}"}
        compare(program, backends=["other", "eager"], stages=stages)
    assert not all_trips()


# --- where they are ------------------------------------------------------------------------------


def declined(op: str, backend: str) -> str:
    """The reason of a backend for declining an op of the newest inference graph."""
    return next(n.declined[backend] for n in last_graph().nodes if op in n.op)


@pytest.mark.parametrize(
    ("program", "op", "reason"),
    [
        (conditional, "cond", "higher-order op cond"),
        (loop, "while_loop", "higher-order op while_loop"),
        (writing, "auto_functionalized", "higher-order op auto_functionalized_v2"),
        (custom, "double", "fuseboard_tests::double isn't an ATen op"),
        (effects, "with_effects", "it has effects beyond its results, and runs once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mkldnn_leaves_them_to_others_and_says_why(program, op, reason):
    """And takes the linear layer before them."""
    compare(program, backends=["mkldnn", "eager"])
    assert reason in declined(op, "mkldnn")
    homes = {n.op: n.backend for n in last_graph().nodes}
    assert homes["aten.addmm.default" if "aten.addmm.default" in homes else "aten.linear.default"]
    assert "mkldnn" in homes.values()


def test_ops_with_effects_run_in_eager_whoever_claims_them():
    """What is run again after a failure would have its effect twice."""
    with plugged("greedy"):
        compare(effects, backends=["greedy", "eager"])
    report = last_graph()
    homes = {n.backend for n in report.nodes if "with_effects" in n.op}
    assert homes == {"eager"}
    assert declined("with_effects", "greedy").startswith("it has effects beyond its results")
    assert {n.backend for n in report.nodes if n.op == "aten.relu.default"} == {"greedy"}


def test_effects_are_not_repeated_after_a_later_failure():
    """That call fails, since eager would have the effects again; the next one runs in eager."""
    failing = [True]

    def call(eager_call, region):
        def run(args):
            if failing and "sin" in str(region.graph.graph):
                raise RuntimeError("out of luck")
            return eager_call(args)

        return run

    def program(x):
        return torch.ops.fuseboard_tests.say(x * 2).sin()

    x = rnd(4, 16)
    with plugged("fragile", call=call), torch.no_grad():
        fn = compiled(program, "fragile")
        SAID.clear()
        with pytest.raises(fuseboard.RegionError, match="effects of this call can't be repeated"):
            fn(x)
        assert len(SAID) == 1
        torch.testing.assert_close(fn(x), (x * 2).sin())
        assert len(SAID) == 2


def test_what_a_backend_declines_stays_in_eager_inside_of_control_flow():
    """``claim_nodes`` asks about the branches, too; what is left of them the backend runs."""

    def claim(graph):
        return fuseboard.claim_nodes(
            graph, lambda n: "no sines" if "sin" in str(n.target) else None
        )

    with plugged("picky", claim=claim):
        compare(conditional, backends=["picky", "eager"])
    assert runs_inside("picky") == {"aten.cos.default", "aten.sub.Tensor"}
    assert "aten.sin.default" in runs_inside("eager")


def runs_inside(backend: str) -> set[str]:
    """The ops in graphs of higher-order ops that a backend runs, of the newest inference graph."""
    notes = [note for region in last_graph().regions for note in region.notes]
    found = [note.split(f" {backend} runs ")[1] for note in notes if f" {backend} runs " in note]
    return {op for text in found for op in text.split(", ")}


def test_dtypes_and_devices_count_inside_of_control_flow():
    """What the board declines on a backend's behalf."""

    def branches(x):
        return torch.cond(x.sum() > 0, lambda a: a.double().sin().float(), lambda a: a.cos(), (x,))

    with plugged("single", info={"dtypes": frozenset({torch.float32})}):
        compare(branches, backends=["single", "eager"])
    assert runs_inside("single") == {"aten.cos.default"}
    assert "aten.sin.default" in runs_inside("eager")


# --- collectives ---------------------------------------------------------------------------------


@pytest.fixture
def one_process():
    """A group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def functional_collectives(x):
    import torch.distributed._functional_collectives as collectives

    y = collectives.all_reduce(LINEAR(x), "sum", dist.group.WORLD)
    return collectives.all_gather_tensor(y.relu(), 0, dist.group.WORLD) * 2 + y


def collectives_in_place(x):
    y = LINEAR(x)
    dist.all_reduce(y)
    return y * 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", [functional_collectives, collectives_in_place])
def test_collectives_are_as_in_eager(program, order, one_process):
    """With their waits, in order, with a reason."""
    backends = ORDERS[order]
    compare(program, **({} if backends is None else {"backends": backends}))
    assert not all_trips()
    nodes = [n for n in last_graph().nodes if "_c10d_functional" in n.op or "c10d" in n.op]
    assert len(nodes) >= 2
    assert all(n.reason for n in nodes)
    if order == "mkldnn":
        assert {n.backend for n in nodes} == {"eager"}
        assert "it is a collective" in nodes[0].declined["mkldnn"]


# --- triton kernels of the user's ----------------------------------------------------------------


def test_zeros_without_memory_are_given_some():
    """Compiled code reads its inputs' memory; forward-mode derivatives have zeros without any."""
    addresses = []

    def claim(graph):
        zeros = torch.ops.aten._efficientzerotensor.default
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        mine = frozenset(node.name for node in nodes if node.target is not zeros)
        return [Claim(nodes=mine, native=mine)]

    def look(eager_call, region):
        def run(args):
            addresses.extend(arg.data_ptr() for arg in args)
            return eager_call(args)

        return run

    linear = nn.Linear(2, 4)

    def curvature(x):
        return torch.func.vmap(torch.func.hessian(lambda z: linear(z).tanh().sum()))(x)[:, 0, 0]

    x = rnd(5, 2)
    (wanted,) = torch.autograd.grad(curvature(x).sum(), linear.weight)
    with plugged("other", call=look, claim=claim):
        fn = compiled(curvature, "other", "eager", min_region_us=0)
        (found,) = torch.autograd.grad(fn(x).sum(), linear.weight)
    torch.testing.assert_close(found, wanted)
    assert addresses
    assert all(addresses)


def test_a_triton_kernel_goes_to_a_backend_of_its_device():
    """Its wrapper has tensors in keyword arguments that are a dict; needs no GPU."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    wrapper = torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_functional
    node = graph.call_function(
        wrapper,
        (),
        {
            "kernel_idx": 0,
            "constant_args_idx": 0,
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x": x},
            "tensors_to_clone": ["x"],
        },
    )
    node.meta["val"] = {"x": torch.empty(4, device="meta")}
    graph.output((node,))
    gpu = BackendInfo("gpu", device_types=frozenset({"meta"}))
    cpu = BackendInfo("cpu", device_types=frozenset({"cpu"}))
    assert why_unsupported(gpu, node) is None
    assert why_unsupported(cpu, node) == "device meta; cpu runs on cpu"
    from fuseboard_mkldnn._claim import why_not

    assert why_not(node) == "on device meta; oneDNN runs on the CPU"
    module = torch.fx.GraphModule(nn.Module(), graph)
    (answer,) = fuseboard.claim_nodes(module, lambda n: why_unsupported(cpu, n))
    assert isinstance(answer, Decline)
    (answer,) = fuseboard.claim_nodes(module, lambda n: why_unsupported(gpu, n))
    assert isinstance(answer, Claim)

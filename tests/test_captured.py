"""Graphs that AOTAutograd captures as something else than Dynamo's: the latter run."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fuseboard
from fuseboard.capture.comparison import CaptureCheck
from fuseboard.profile.judge import rewrites
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged
from tests.support.values import rnd

SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._softmax_backward_data.default)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def whats_wrong() -> str:
    """What was told of the one graph that wasn't Dynamo's."""
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == (
        "AOTAutograd",
        "capture",
        "Dynamo's own graph",
    )
    return trip.error


def larger(x):
    return F.interpolate(x, scale_factor=1.3, mode="nearest")


PIXELS = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)


# --- what AOTAutograd of torch 2.13 gets wrong ----------------------------------------------------


def test_a_write_through_windows_with_gaps_leaves_the_gaps():
    """pytorch#198102: it puts zeros where no window is."""

    def double(x):
        x.unfold(0, 1, 2).mul_(2)
        return x + 0

    fn = compiled(double)
    for x in (torch.arange(5.0), torch.arange(5.0)):
        assert fn(x).tolist() == x.tolist() == [0, 1, 4, 3, 8]
    assert (
        "output 0 is 0.0 at [1], Dynamo's graph gives 1.0 (2 of 5 elements differ)" in whats_wrong()
    )


def test_gradients_are_eagers():
    def double(x):
        y = x + 1
        y.unfold(0, 2, 3).mul_(2)
        return y.sum()

    x = torch.arange(6.0, requires_grad=True)
    result = compiled(double)(x)
    result.backward()
    assert result.item() == 2 + 4 + 3 + 8 + 10 + 6
    assert x.grad.tolist() == [2, 2, 1, 2, 2, 1]
    assert "output 0" in whats_wrong()


def test_strides_that_an_op_reads_are_those_that_a_write_left():
    """pytorch#133512: it takes the written tensor for a dense one."""

    def read(x):
        x.add_(1)
        return torch.as_strided_copy(x, (3,), (2,))

    assert compiled(read)(torch.arange(10)[::2]).tolist() == [1, 3, 5]
    assert whats_wrong()


def test_a_result_is_in_the_memory_that_eagers_is_in():
    """Dropout at a rate of 0 returns what it is given, and AOTAutograd's a copy of that."""

    def undropped(x):
        y = x * 2
        return y, F.dropout(y, 0.0)

    fn = compiled(undropped)
    y, same = fn(rnd(3).requires_grad_())
    assert same.data_ptr() == y.data_ptr()
    assert "the memory of output 1 is its own, eager's output 0's" in whats_wrong()


def test_strides_are_eagers_where_no_memory_is_initialised():
    """``rrelu`` notes slopes in memory that it doesn't fill, so values can't be compared."""

    def run(x):
        return F.rrelu(x.transpose(1, 2), training=False)

    x = rnd(2, 3, 4).requires_grad_()
    result = compiled(run)(x)
    assert result.stride() == (12, 3, 1)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    slope = (1 / 8 + 1 / 3) / 2
    torch.testing.assert_close(gradient, torch.where(x > 0, 1.0, slope))


def test_draws_that_reach_no_result_move_those_of_later_calls():
    """Eager draws the mask of a dropout of everything, and AOTAutograd makes zeros."""

    def run(x):
        return F.dropout(x, 1.0)

    fn, x = compiled(run), rnd(3, 4)
    torch.manual_seed(0)
    run(x)
    want = torch.rand(3)
    for _ in range(3):
        torch.manual_seed(0)
        assert fn(x).tolist() == torch.zeros(3, 4).tolist()
        assert torch.rand(3).tolist() == want.tolist()


def test_resizing_by_a_factor_takes_the_pixels_that_eager_takes():
    """pytorch#175154: it counts the positions in another way."""

    assert compiled(larger)(PIXELS).tolist() == [[[[1, 2]]]]
    assert whats_wrong()


TRANSPOSED = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "softmax": lambda x: x.softmax(-1),
    # whose fake kernels lay results out as what they are taken apart into, and theirs don't
    "log sigmoid": F.logsigmoid,
    "power of a number": lambda x: 2**x,
}
aten = torch.ops.aten
APART = get_decompositions(
    [
        *(aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit),
        *(aten.native_layer_norm, aten._softmax),
        *(aten.log_sigmoid_forward, aten.pow),
    ]
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_what_ops_are_taken_apart_into_lies_as_they_do(name, dynamic):
    """Results have the kernel's strides, those of symbolic sizes as well."""

    def run(x):
        return TRANSPOSED[name](x.transpose(1, 2))

    x, weights = rnd(3, 5, 4).requires_grad_(), rnd(3, 4, 5, seed=1)
    with plugged("apart", decompositions=lambda: APART) as backend:
        result = compiled(run, backend, dynamic=dynamic)(x)
        (gradient,) = torch.autograd.grad((result * weights).sum(), x)
    exact = x.detach().double().requires_grad_()
    want = run(exact)
    assert result.stride() == run(x).stride()
    torch.testing.assert_close(result, want.float())
    (exact_gradient,) = torch.autograd.grad((want * weights).sum(), exact)
    torch.testing.assert_close(gradient, exact_gradient.float())
    assert not all_trips()


def test_bytes_that_are_resized_are_rounded_as_eager_rounds_them():
    """Ties go another way in what AOTAutograd captures, which disturbed roundings don't excuse."""

    def resized(x):
        return torch.nn.functional.interpolate(x, (9, 3), mode="bilinear")

    own = compiled(resized)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 256, (1, 3, 7, 8), dtype=torch.uint8, generator=generator)
        assert torch.equal(own(x), resized(x))


@pytest.mark.parametrize("trains", [False, True])
def test_a_loss_is_eagers(trains):
    """AOTAutograd takes multilabel_margin_loss apart, and reads past the end of the labels."""
    x = torch.tensor([[0.1, 0.2, 0.4, 0.8]], requires_grad=trains)
    labels = torch.tensor([[3, -1, 0, 1]])
    result = compiled(F.multilabel_margin_loss)(x, labels)
    # The margins to label 3 that the others miss, over 4 classes.
    assert result.item() == pytest.approx((0.3 + 0.4 + 0.6) / 4)
    if trains:
        result.backward()
        torch.testing.assert_close(x.grad, torch.tensor([[0.25, 0.25, 0.25, -0.75]]))


def test_what_eager_refuses_is_refused_and_later_calls_work():
    """AOTAutograd's graph reads a copy of what it writes to, so it never overlaps."""

    def shift(x, n):
        x[n:].add_(x[:-n])
        return x * 1

    fn = compiled(shift)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="some elements of the input tensor"):
            fn(torch.arange(5.0), 1)
    assert fn(torch.arange(4.0), 2).tolist() == [0, 1, 2, 4]


def test_nothing_is_printed_when_eager_refuses(capfd):
    def shift(x):
        x[1:].add_(x[:-1])
        return x * 1

    with pytest.raises(RuntimeError):
        compiled(shift)(torch.arange(5.0))
    assert capfd.readouterr().err == ""


def test_the_policy_may_be_to_raise():
    message = "plugin 'AOTAutograd' failed in stage 'capture'"
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(larger, on_failure="raise")(PIXELS)


def test_wait_does_not_wait_for_what_will_not_run():
    with plugged("slow", info={"compiles_quickly": False}):
        fn = compiled(larger, "slow", "eager", policy="measured")
        fn(PIXELS)
        assert fuseboard.wait(60)
        assert fn(PIXELS).tolist() == [[[[1, 2]]]]


@pytest.mark.parametrize("policy", ["priority", "measured"])
def test_the_report_says_what_runs(policy):
    with plugged("brisk", info={"compiles_quickly": True}):
        fn = compiled(larger, "brisk", "eager", policy=policy)
        assert fn(PIXELS).tolist() == [[[[1, 2]]]]
    report = last_graph()
    assert report.settled
    assert {node.backend for node in report.nodes} == {"eager"}
    assert {node.reason for node in report.nodes} == {"Dynamo's own graph runs"}
    if policy == "measured":
        assert {one.name: one.state for one in report.candidates} == {
            "brisk": "failed",
            "eager": "chosen",
        }


@pytest.mark.parametrize("right", [True, False])
def test_what_was_found_out_is_kept_with_the_decisions(right, monkeypatch, tmp_path):
    """Another process runs neither graph, and says the same."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    compared = []
    compare = CaptureCheck.difference
    monkeypatch.setattr(
        CaptureCheck, "difference", lambda *args: compared.append(1) or compare(*args)
    )
    target, wanted = ((lambda x: x + 1), [[[[2, 3]]]]) if right else (larger, [[[[1, 2]]]])
    for _ in range(2):
        ledger.clear()
        torch._dynamo.reset()
        with plugged("brisk", info={"compiles_quickly": True}):
            fn = compiled(target, "brisk", "eager", policy="measured")
            assert fn(PIXELS).tolist() == wanted
        assert len(all_trips()) == (0 if right else 1)
    assert len(compared) == 1


def test_under_another_graph_of_dynamos_it_is_found_out_again(monkeypatch, tmp_path):
    """AOTAutograd may capture the same graph, rightly for one of them and wrongly for the other."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    compared = []
    compare = CaptureCheck.difference
    monkeypatch.setattr(
        CaptureCheck, "difference", lambda *args: compared.append(1) or compare(*args)
    )
    for target in (lambda x: x.add(1), lambda x: torch.add(x, 1)):
        torch._dynamo.reset()
        with plugged("brisk", info={"compiles_quickly": True}):
            compiled(target, "brisk", "eager", policy="measured")(PIXELS)
    assert len(compared) == 2


# --- what isn't compared --------------------------------------------------------------------------


def test_what_cannot_be_compared_is_told():
    """A checkpoint's code would run twice in eager, on other random numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    fn = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    fn(rnd(2, 3)).sum().backward()
    (note,) = last_graph("forward").notes
    assert note == (
        "not held against Dynamo's own graph: it has checkpoints, whose code eager runs twice"
    )


def test_nothing_is_run_where_nothing_is_verified(monkeypatch):
    monkeypatch.setattr(CaptureCheck, "difference", lambda *_: pytest.fail("compared"))
    assert compiled(lambda x: x + 1, verify="off")(torch.ones(1)).item() == 2


def test_it_is_left_out_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(rewrites, "free_bytes", lambda device: 100)
    assert compiled(lambda x: x + 1)(torch.ones(20)).tolist() == [2] * 20
    (note,) = last_graph().notes
    assert "running both would take 0 MiB of the 0 MiB that are free" in note


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_short_is_no_difference(error, monkeypatch):
    """It is the results of the first run that the second has too little memory beside."""
    run, ran = fuseboard.capture.comparison.results_of, []

    def short(*args):
        ran.append(1)
        if len(ran) == 2:
            raise error
        return run(*args)

    monkeypatch.setattr(fuseboard.capture.comparison, "results_of", short)
    assert compiled(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(ran) == 2
    assert not all_trips()
    (note,) = last_graph().notes
    assert note.startswith("not held against Dynamo's own graph: memory ran short")


def test_memory_for_copies_of_what_is_written_to_is_counted(monkeypatch):
    """All the memory that a written view is of is copied."""
    monkeypatch.setattr(rewrites, "free_bytes", lambda device: 1e6)
    cache = torch.zeros(10**6)
    assert compiled(lambda x: x.add_(1) * 2)(cache[:2]).tolist() == [2, 2]
    (note,) = last_graph().notes
    assert "running both would take" in note


def test_weights_are_not_copied(monkeypatch):
    """Nothing writes to them, and a model's may fill the memory."""
    copied = []
    keep = fuseboard.capture.side_runs.strided_copy
    monkeypatch.setattr(
        fuseboard.capture.side_runs,
        "strided_copy",
        lambda value: copied.append(value.shape) or keep(value),
    )
    model = torch.nn.Linear(3, 2)
    compiled(model)(rnd(4, 3)).sum().backward()
    assert copied
    assert set(copied) == {(4, 2)}


def test_what_is_never_the_same_twice_is_no_difference():
    """What an op of the user's reads beside its inputs, nobody knows: it is as with roundings."""
    count = itertools.count()

    @torch.library.custom_op("fuseboard_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x + next(count)

    counted.register_fake(torch.empty_like)
    compiled(lambda x: counted(x) * 2)(torch.ones(2))
    assert not all_trips()


@pytest.mark.parametrize("order", [("whole", "fused"), ("fused", "whole")])
def test_which_backend_comes_first_changes_nothing_of_a_joint_graph(order):
    """Each that trains has its decompositions in it."""
    seen = []

    def look(graph, kind):
        if kind == "joint":
            seen.append({node.target for node in graph.graph.nodes})

    trains = {"training": True}
    with (
        plugged("whole", info=trains),
        plugged("fused", info=trains, decompositions=lambda kind: get_decompositions(SOFTMAX)),
        observing(fuse=look),
    ):
        x = rnd(4, 5).requires_grad_()
        compiled(lambda x: F.gelu(x).softmax(-1), *order)(x).square().sum().backward()
    (targets,) = seen
    assert torch.ops.aten.gelu.default in targets
    assert targets.isdisjoint(SOFTMAX)


def test_roundings_are_no_difference():
    """What is added to all of a row cancels out: its gradient is nothing but roundings."""
    table = get_decompositions(SOFTMAX)
    scores, bias = rnd(64, 50).requires_grad_(), rnd(64, 1).requires_grad_()
    with plugged("fused", info={"training": True}, decompositions=lambda kind: table):
        compiled(lambda s, b: (s + b).softmax(-1), "fused")(scores, bias).square().sum().backward()
    assert bias.grad.abs().max() < 1e-6
    assert not all_trips()
    assert not last_graph("forward").notes


def test_decompositions_that_are_wrong_are_found():
    """Torch takes attention apart without the sums that its backward reads."""
    q, k, v = (rnd(1, 2, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    table = {ATTENTION: core_aten_decompositions()[ATTENTION]}
    with plugged("fused", info={"training": True}, decompositions=lambda kind: table):
        compiled(F.scaled_dot_product_attention, "fused")(q, k, v).sum().backward()
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close((q.grad, k.grad, v.grad), wanted)
    assert "gradient" in whats_wrong()


# --- what the first call leaves alone -------------------------------------------------------------


class Net(torch.nn.Module):
    """Weights, statistics, dropout, a buffer that is counted up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.dropout(self.norm(self.linear(x)), 0.5), torch.rand(3)


def test_statistics_gradients_and_random_numbers_are_those_of_one_call():
    model = Net()
    twin = copy.deepcopy(model)
    results = []
    for module, fn in ((model, compiled(model)), (twin, twin)):
        torch.manual_seed(0)
        fired: list[int] = []
        module.linear.weight.register_post_accumulate_grad_hook(lambda p, to=fired: to.append(1))
        y, drawn = fn(rnd(6, 4))
        y.square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        results.append([y, drawn, grads, dict(module.state_dict()), fired, torch.rand(2)])
    torch.testing.assert_close(*results)
    assert model.calls.item() == 1
    assert not all_trips()


def test_inputs_that_share_memory_are_written_to_once():
    def both(a, b):
        a.mul_(3)
        b.add_(1)
        return a.sum() + b.sum()

    base = torch.arange(6.0)
    assert compiled(both)(base, base[2:4]).item() == 45 + 2 + 17
    assert base.tolist() == [0, 3, 7, 10, 12, 15]
    assert not all_trips()


@pytest.mark.thorough
def test_gradients_that_a_compiled_backward_adds_to_are_added_to_once():
    """Compiled autograd's graph has a list of tensors as input, writes to some and empties it."""
    model = torch.nn.Linear(4, 3)
    x = rnd(5, 4)
    wanted = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    fn = compiled(model)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="fuseboard")):
        for calls in (1, 2, 3):
            fn(x).square().sum().backward()
            grads = [parameter.grad / calls for parameter in model.parameters()]
            torch.testing.assert_close(grads, list(wanted))
    assert not all_trips()

"""Code that writes to what it is given: eager's answer, inputs untouched, a trip that names it."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.profile.judge.copies import Checksums, Copies, KeptCopies, memory_of
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    forget_other_graphs,
    last_graph,
    pack_linears,
    plugged,
)
from tests.support.contained import check, f, on_region, train
from tests.support.values import assert_same, rnd

QUICK = {"compiles_quickly": True}


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    forget_other_graphs(monkeypatch)


def by_pointer(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 7, 1)


WAYS = {
    "op": lambda t: t.add_(1),
    "view": lambda t: t.view(-1)[:1].zero_(),
    "same values": lambda t: t.mul_(1),  # on other values it may write others
    "data": lambda t: t.data.add_(1),
    "numpy": lambda t: t.detach().numpy().fill(3),
    "pointer": by_pointer,
    "transposed": lambda t: t.t_(),
    "other memory": lambda t: t.set_(torch.zeros(4, 4)),
}


def writing(way, calls=(0,), which=0, kind=""):
    """Right results, and a write to an input in the calls of these numbers."""
    count = [0]

    def call(eager_call, region):
        def run(args):
            inputs = list(args)
            results = eager_call(args)
            if region.kind.startswith(kind):
                if count[0] in calls:
                    way(inputs[which])
                count[0] += 1
            return results

        return run

    return call


def g(x, y):
    return torch.relu(x @ y) * 2


@pytest.mark.parametrize(
    ("way", "backends"),
    [*((way, ("bad", "eager")) for way in WAYS), ("op", ("bad",)), ("pointer", ("bad",))],
)
def test_a_region_that_writes_to_an_input(way, backends):
    """In its first call, by whatever means; measured, and alone."""
    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    before, versions = (x.clone(), y.clone()), (x._version, y._version)
    with plugged("bad", call=writing(WAYS[way]), info=QUICK):
        check(compiled(g, *backends, measure_s=0.02), x, y, reference=g)
    assert_same((x, y), before)
    assert (x._version, y._version) == versions
    (trip,) = all_trips()
    assert trip.plugin == "bad"
    assert "wrote to its inputs [0]" in trip.error


@pytest.mark.parametrize("call_number", [1, 4])
def test_a_region_that_writes_while_it_is_timed(call_number):
    """Not in the first call, but in one of those that are timed: undone, and told."""
    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    before, version = x.clone(), x._version
    calls = range(call_number, 9999)
    with (
        plugged("bad", call=writing(WAYS["op"], calls), info=QUICK),
        plugged("good", info=QUICK),
    ):
        check(compiled(g, "bad", "good", measure_s=0.02), x, y, reference=g)
    assert_same(x, before)
    assert x._version == version
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("bad", "profile")
    states = {told.name: told.state for told in last_graph().candidates}
    assert states == {"bad": "failed", "good": "chosen"}


def test_a_region_that_wrote_once_while_it_was_timed():
    """Nobody knows which of two it was: neither runs."""
    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    before = x.clone()
    with (
        plugged("bad", call=writing(by_pointer, (3,)), info=QUICK),
        plugged("good", info=QUICK),
    ):
        fn = compiled(g, "bad", "good", "eager", measure_s=0.02)
        check(fn, x, y, reference=g)
    assert_same(x, before)
    assert {trip.plugin for trip in all_trips()} == {"bad", "good"}
    assert all("wrote to inputs [" in trip.error for trip in all_trips())
    assert [region.backend for region in last_graph().regions] == ["eager"]


def test_no_candidate_is_left_after_timing():
    """What was installed for the case of an interrupt doesn't run on."""
    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    before = x.clone()
    with (
        plugged("bad", call=writing(WAYS["op"], range(2, 9999)), info=QUICK),
        plugged("worse", call=writing(WAYS["data"], range(2, 9999)), info=QUICK),
    ):
        check(compiled(g, "bad", "worse", measure_s=0.02), x, y, reference=g)
    assert_same(x, before)
    assert {trip.plugin for trip in all_trips()} == {"bad", "worse"}
    assert {told.state for told in last_graph().candidates} == {"failed"}


@pytest.mark.parametrize("backends", [("bad",), ("bad", "eager")], ids=["alone", "measured"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_training_region_that_writes_to_what_it_is_given(backends, kind):
    """Saved tensors and tangents are inputs, too."""
    with plugged("bad", call=writing(WAYS["data"], range(99), kind=kind), info=QUICK):
        fn = compiled(f, *backends, measure_s=0.02)
        for seed in range(3):
            train(fn, f, rnd(3, 5, seed=seed))
    (trip,) = all_trips()
    assert trip.plugin == "bad"
    assert trip.region.startswith(kind)


@pytest.mark.parametrize("backends", [("bad",), ("bad", "eager")], ids=["alone", "measured"])
def test_what_prepares_weights_writes_to_them(backends):
    """A rewrite's own function that packs a weight and spoils it."""

    def spoiling_pack(weight):
        packed = weight.t().contiguous()
        weight.data.zero_()
        return packed

    def fuse(graph, region):
        if region is None:
            return None
        aten = torch.ops.aten
        fusions = []
        for node in graph.graph.find_nodes(op="call_function", target=aten.t.default):

            def apply(node=node):
                with graph.graph.inserting_before(node):
                    packed = graph.graph.call_function(spoiling_pack, node.args)
                packed.meta["val"] = node.meta["val"].contiguous()
                node.replace_all_uses_with(packed)
                graph.graph.erase_node(node)

            fusions.append(fuseboard.Fusion("packed", (node.name,), apply))
        return fusions

    model = nn.Linear(5, 6)
    before = model.weight.detach().clone()
    with plugged("bad", fuse=fuse, info=QUICK):
        check(compiled(model, *backends, measure_s=0.02), rnd(4, 5), reference=model)
    assert_same(model.weight.detach(), before)
    (trip,) = all_trips()
    assert trip.plugin == "bad"
    assert "prepares weights wrote to those at [0]" in trip.error


def test_a_region_that_writes_to_weights():
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5))
    before = [p.detach().clone() for p in model.parameters()]
    with plugged("bad", call=writing(WAYS["numpy"]), info=QUICK):
        check(compiled(model, "bad", "eager", measure_s=0.02), rnd(4, 5), reference=model)
    assert_same([p.detach() for p in model.parameters()], before)
    assert [trip.plugin for trip in all_trips()] == ["bad"]


def test_a_region_that_writes_to_another_regions_result():
    """Values between regions are compared, too."""
    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    with (
        plugged("good", claim=claim_ops("mm")),
        plugged("bad", claim=claim_ops("relu", "mul"), call=writing(WAYS["op"])),
    ):
        fn = compiled(g, "good", "bad", policy="priority", min_region_us=0.0)
        check(fn, x, y, reference=g)
    (trip,) = all_trips()
    assert (trip.plugin, trip.instead) == ("bad", "eager")


def test_parts_of_a_wrong_region_run_on_copies():
    """The search for the first wrong op runs the same backend's code again."""

    def call(eager_call, region):
        def run(args):
            inputs = list(args)
            results = [result + 1 for result in eager_call(args)]
            if region.name.endswith("part"):
                inputs[0].data.zero_()
            return results

        return run

    x, y = rnd(4, 4), rnd(4, 4, seed=1)
    before = x.clone()
    with plugged("bad", call=call):
        check(compiled(g, "bad"), x, y, reference=g)
    assert_same(x, before)
    assert len(all_trips()) == 1


# --- inputs of every kind -------------------------------------------------------------------------


def overlapping_windows() -> torch.Tensor:
    return rnd(6).as_strided((4, 3), (1, 1))


def unaligned() -> torch.Tensor:
    """Its storage begins at an odd place, as numpy's and those of mapped files do."""
    memory = rnd(21).untyped_storage()[4:]
    return torch.empty(0).set_(memory, 1, (3, 5), (5, 1))


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return rnd(3, 4)


KINDS = {
    "expanded": lambda: rnd(1, 5).expand(4, 5),
    "one element expanded": lambda: rnd(3, 2, dtype=torch.bfloat16)[2:, 1].expand(1),
    "overlapping windows": overlapping_windows,
    "gaps": lambda: rnd(6, 8)[::2, 1::3],
    "offset": lambda: rnd(40)[7:19].view(3, 4),
    "transposed": lambda: rnd(2, 3, 4).transpose(0, 2),
    "unaligned": unaligned,
    "no element": lambda: rnd(0, 3),
    "one element": lambda: torch.tensor(3.0),
    "conjugate": lambda: torch.complex(rnd(3), rnd(3)).conj(),
    "negative": lambda: torch.complex(rnd(3), rnd(3)).conj().imag,
    "complex": lambda: rnd(3).to(torch.complex128),
    "special": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "booleans": lambda: rnd(11) > 0,
    "bytes": lambda: torch.tensor([1, 2], dtype=torch.uint8),
    "half": lambda: rnd(3, dtype=torch.float16),
    "inference": inference_tensor,
    "parameter": lambda: nn.Parameter(rnd(3)),
    "a number": lambda: 3.5,
}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_as_their_originals(kind):
    """Values, layout, place in memory and class; what is written to one leaves the other alone."""
    value = KINDS[kind]()
    copies = Copies([value])
    (copy,) = copies.values
    assert copies.written() == [] == copies.bare
    if not isinstance(value, torch.Tensor) or not value.numel():
        assert copy is value
        return
    assert_same(copy.detach(), value.detach())
    assert (copy.dtype, copy.stride()) == (value.dtype, value.stride())
    assert (copy.storage_offset(), copy.data_ptr() % 64) == (
        value.storage_offset(),
        value.data_ptr() % 64,
    )
    assert (copy.is_conj(), copy.is_neg()) == (value.is_conj(), value.is_neg())
    assert copy.requires_grad == value.requires_grad
    memory = memory_of(value).clone()
    memory_of(copy)[-1] ^= 1  # no version tells
    assert torch.equal(memory_of(value), memory)
    assert copies.written() == [0]


def test_inputs_of_every_kind_are_right_under_judgement():
    """Eager's answers, and nobody is blamed."""

    def h(*args):
        return [arg * 2 for arg in args], [arg * 1 for arg in args]

    with plugged("good", info=QUICK):
        inputs = [make() for make in KINDS.values()]
        check(compiled(h, "good", "eager", measure_s=0.01), *inputs, calls=2, reference=h)
    assert not all_trips()


@pytest.mark.parametrize("kind", ["expanded", "gaps", "conjugate"])
def test_a_write_to_inputs_of_every_kind(kind):
    """None of it reaches the user's tensor, nor what lies between its elements."""

    def h(x):
        return x * 2

    def whole(tensor):
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    x = KINDS[kind]()
    before = whole(x).clone()

    def way(tensor):
        memory_of(tensor).fill_(1)

    with plugged("bad", call=writing(way), info=QUICK):
        check(compiled(h, "bad", "eager", measure_s=0.01), x, calls=2, reference=h)
    assert torch.equal(whole(x), before)
    assert len(all_trips()) == 1


def test_code_that_reaches_beyond_a_view():
    """``as_strided`` goes by a tensor's storage, of which its copy has all."""

    def h(x):
        return x.as_strided((4,), (2,), 0) * 2

    with plugged("good", info=QUICK):
        for options in ({"verify": "always"}, {}):
            fn = compiled(h, "good", "eager", measure_s=0.01, **options)
            check(fn, rnd(40)[7:19].view(3, 4), reference=h)
    assert not all_trips()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_sparse_and_quantised_tensors():
    """What no copy can be made of is given as it is; nobody is blamed for it."""
    sparse = rnd(3, 3).relu().to_sparse()
    quantised = torch.quantize_per_tensor(rnd(3, 4), 0.1, 2, torch.quint8)
    scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    channels = torch.quantize_per_channel(rnd(2, 4), scales, zeros, 0, torch.qint8)
    floats = torch.quantize_per_channel(rnd(2, 4), scales, zeros.float(), 0, torch.qint8)
    copies = Copies([sparse, quantised, channels, floats])
    assert copies.bare == [0, 3]
    assert copies.values[0] is sparse
    for copy, value in zip(copies.values[1:3], (quantised, channels), strict=True):
        assert torch.equal(copy.dequantize(), value.dequantize())
    memory_of(copies.values[1])[0] ^= 1
    assert copies.written() == [1]


# --- copies ---------------------------------------------------------------------------------------


def test_results_that_are_views_of_copies():
    """They become views of the originals."""
    value, other = rnd(5, 8)[1:, ::2], rnd(3)
    copies = Copies([value, other])
    copy = copies.values[0]
    results = copies.back([copy, copy[1:].t(), other, copy + 1, copy.view(torch.int32), None, 3])
    assert results[0] is value
    assert results[2] is other
    assert results[3].untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    for result, want in ((results[1], value[1:].t()), (results[4], value.view(torch.int32))):
        assert result.data_ptr() == want.data_ptr()
        assert (result.dtype, result.shape, result.stride()) == (
            want.dtype,
            want.shape,
            want.stride(),
        )
    assert results[5:] == [None, 3]


def test_a_region_that_returns_a_view_of_a_copy_is_cloned_all_the_same():
    """The outputs that share the user's memory are found, though the region ran on copies."""

    def h(x):
        return x + 0, x * 1

    with plugged("bad", call=on_region(lambda r, i: [i[0], i[0].view(-1)[:20].view(4, 5)])):
        fn = compiled(h, "bad")
        for _ in range(3):
            x = rnd(4, 5)
            with torch.no_grad():
                first, second = fn(x)
            first.add_(1)
            assert_same((x, second), (rnd(4, 5), rnd(4, 5)))
    assert "outputs [0, 1] are cloned" in last_graph().notes[-1]


def test_copies_that_are_kept():
    """One is used again and again, unless something was written to it."""
    inputs = [rnd(3), rnd(4)]
    kept = KeptCopies(inputs)
    first, second = Copies(inputs, kept=kept), Copies([inputs[1], rnd(2)], kept=kept)
    assert second.values[0] is first.values[1]
    second.values[0][0] = 3
    assert second.written() == [0]
    assert Copies(inputs, kept=kept).values[1] is not second.values[0]
    assert Copies(inputs, kept=kept).values[0] is first.values[0]


def test_writes_that_are_undone():
    """Bits, versions and layouts are as they were."""
    values = [rnd(3, 4), rnd(5), nn.Parameter(rnd(2)), rnd(2, 3)]
    before = [value.detach().clone() for value in values]
    versions, addresses = [v._version for v in values], [v.data_ptr() for v in values]
    watch = KeptCopies(values).watch()
    assert watch.undo() == []
    values[0].t_()
    values[1].add_(1)
    values[2].data[0] = 7
    assert watch.undo() == [0, 1, 2]
    assert_same([value.detach() for value in values], before)
    assert [v._version for v in values] == versions
    assert [v.data_ptr() for v in values] == addresses


@pytest.mark.parametrize("size", [1, 8, 13, 8192, 8200, 20001])
def test_a_seal_is_broken_by_any_byte(size):
    memory = torch.zeros(size, dtype=torch.uint8)
    seal = Checksums(memory)
    assert not seal.is_broken()
    for place in (0, size // 2, size - 1):
        memory[place] = 1
        assert seal.is_broken()
        memory[place] = 0


def test_a_region_that_writes_to_what_was_prepared_for_it():
    """The board's own tensors: seen in the first call."""
    model = nn.Linear(5, 6)

    def call(eager_call, region):
        return writing(WAYS["data"], which=-1)(eager_call, region)

    with plugged("bad", call=call, fuse=pack_linears, info=QUICK):
        check(compiled(model, "bad", "eager", measure_s=0.02), rnd(4, 5), reference=model)
    (trip,) = all_trips()
    assert "wrote to its inputs [" in trip.error


# --- memory ---------------------------------------------------------------------------------------


def test_copies_lie_in_files_where_memory_is_short(monkeypatch):
    """They go with the call, and what is kept for several calls isn't."""
    monkeypatch.setattr("fuseboard.profile.judge.copies.FEW_BYTES", 100)
    monkeypatch.setattr("fuseboard.profile.judge.copies.free_bytes", lambda device: 1000)
    used = []
    make = torch.UntypedStorage.from_file
    monkeypatch.setattr(
        torch.UntypedStorage,
        "from_file",
        staticmethod(lambda *args: used.append(args) or make(*args)),
    )
    values = [rnd(400), rnd(3)]
    copies = Copies(values, kept=KeptCopies(values))
    assert len(used) == 2
    assert_same(copies.values, values)
    assert not any(os.path.exists(name) for name, *_ in used)
    copies.values[0][3] = 2
    assert copies.written() == [0]
    model = nn.Linear(30, 30)
    with plugged("bad", call=writing(WAYS["data"]), info=QUICK):
        check(compiled(model, "bad", "eager", measure_s=0.01), rnd(4, 30), reference=model)
    assert len(all_trips()) == 1


def test_no_room_for_copies(monkeypatch):
    """What can't be judged doesn't run, and the report says why."""
    monkeypatch.setattr("fuseboard.profile.judge.copies.FEW_BYTES", 100)
    monkeypatch.setattr("fuseboard.profile.judge.copies.free_bytes", lambda device: 1000)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("fuseboard.profile.judge.copies.shutil.disk_usage", lambda path: usage)
    model = nn.Linear(30, 30)
    with plugged("good", info=QUICK):
        check(compiled(model, "good", "eager", measure_s=0.01), rnd(4, 30), reference=model)
        (told,) = [c for c in last_graph().candidates if c.name == "good"]
        assert told.state == "untried"
        assert "copies of its inputs take" in told.problem
        torch._dynamo.reset()
        fn = compiled(model, "good", policy="priority")
        check(fn, rnd(4, 30), reference=model)
    (trip,) = all_trips()
    assert "copies of its inputs take" in trip.error


# --- rewrites of whole graphs ---------------------------------------------------------------------


def test_a_rewrite_that_lets_a_graph_write_to_its_input():
    """Graphs are functional: the rewrite is dropped."""

    def fuse(graph, kind, region):
        if region is not None:
            return None
        aten = torch.ops.aten
        (node,) = graph.graph.find_nodes(op="call_function", target=aten.relu.default)

        def apply():
            node.target = aten.relu_.default

        return [fuseboard.Fusion("in place", (node.name,), apply)]

    def h(x):
        return torch.relu(x) + 1

    x = rnd(3)
    with plugged("bad", fuse=fuse, info=QUICK):
        check(compiled(h, "bad", "eager", measure_s=0.01), x, reference=h)
    assert_same(x, rnd(3))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("bad", "fuse")
    assert "aten.relu_.default writes to a tensor" in trip.error

"""Recording and replaying, with a device that records on the CPU (``tests/support``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._region import Inputs
from fuseboard_cudagraphs._replay import MAX_MOVES, Replayed
from fuseboard_cudagraphs._wrap import wrap_region
from tests.support.graph_capture import FakeDevice
from tests.support.values import assert_same, rnd


class Recorded:
    """A function as a recorded region, and what happened to it."""

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        *examples: torch.Tensor,
        static: tuple[int, ...] = (),
        symbolic: bool = False,
        device: FakeDevice | None = None,
        **options: Any,
    ) -> None:
        self.function = function
        self.device = device or FakeDevice()
        self.told: list[str | BaseException] = []
        mode = "symbolic" if symbolic else "fake"
        graph = make_fx(function, tracing_mode=mode)(*examples)
        region = fuseboard.Region("r", "eager", "inference", graph, "s", static)
        chosen = Options(enabled=True, **{"min_nodes": 1, **options})
        lowered = fuseboard.lower_eagerly(region)
        tell, whole = self.told.append, self._lower_part
        self.call = wrap_region(lowered, region, chosen, tell, whole, self.device, "cpu").call

    def _lower_part(self, graph: Any, static: Sequence[int]) -> Any:
        raise AssertionError("these regions are recorded as a whole")

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.call(list(args))

    def check(self, *args: torch.Tensor) -> None:
        """Eager's results, bit for bit."""
        assert_same(list(self(*args)), list(self.function(*args)))

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether the newest recording reads this tensor where it lies."""
        return tensor.data_ptr() in self.device.graphs[-1].reads

    def count(self, what: str) -> int:
        return self.device.count(what)


def linear(x, w):
    return (torch.relu(x @ w) + 1,)


# --- values -------------------------------------------------------------------------------------


def test_calls_run_once_each():
    """The first as it is, the second recorded and replayed, the others replayed."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    for seed in range(5):
        recorded.check(rnd(3, 5, seed=seed), rnd(5, 7, seed=seed + 10))
    assert recorded.device.log == ["warm up", "record", *["replay"] * 4]


def test_a_first_call_on_copies():
    """What stays where it is from the second call on is read in place from the third on."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    w = rnd(5, 7)
    recorded.check(rnd(3, 5), w.clone())
    for seed in range(4):
        recorded.check(rnd(3, 5, seed=seed), w)
    assert recorded.reads(w)
    assert recorded.device.log == ["warm up", "record", "replay", "record", *["replay"] * 3]


def test_warmup_is_an_option():
    """So many calls run as they are first."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7), warmup=3)
    for seed in range(5):
        recorded.check(rnd(3, 5, seed=seed), rnd(5, 7))
    assert recorded.device.log == [*["warm up"] * 3, "record", *["replay"] * 2]


def test_results_are_safe_from_later_replays():
    """Of the same recording and of another one in the pool: both overwrite the memory."""
    device = FakeDevice()
    first = Recorded(linear, rnd(3, 5), rnd(5, 7), device=device)
    second = Recorded(lambda x: (x * 3,), rnd(4), device=device)
    w = rnd(5, 7)
    kept = []
    for seed in range(6):
        x, y = rnd(3, 5, seed=seed), rnd(4, seed=seed)
        kept.append((first(x, w)[0], linear(x, w)[0]))
        kept.append((second(y)[0], y * 3))
    for got, expected in kept:
        assert_same(got, expected)
    assert device.count("replay") == 10


def test_random_numbers_are_those_of_eager():
    """Neither the warm-up nor the recording draws more than the call itself."""

    def dropout(x):
        return torch.ops.aten.native_dropout(x, 0.5, True)

    recorded = Recorded(dropout, rnd(64))
    x = rnd(64)
    torch.manual_seed(3)
    expected = [dropout(x) for _ in range(4)]
    torch.manual_seed(3)
    for results in expected:
        assert_same(list(recorded(x)), list(results))
    assert recorded.count("replay") == 3


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (37, 5)])
def test_odd_sizes(shape):
    """None, one, and many elements."""
    recorded = Recorded(lambda x: (x * 2, x.t() + 1), rnd(*shape))
    for seed in range(3):
        recorded.check(rnd(*shape, seed=seed))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: rnd(3, 5, seed=seed),
        lambda seed: rnd(5, 3, seed=seed).t(),
        lambda seed: rnd(3, 9, seed=seed)[:, :5],
        lambda seed: rnd(6, 5, seed=seed)[::2],
        lambda seed: rnd(3, 1, seed=seed).expand(3, 5),
    ],
    ids=["dense", "transposed", "gaps in rows", "gaps between rows", "expanded"],
)
def test_layouts_are_kept(make):
    """Of an input that is copied, and of outputs of all kinds."""

    def function(x):
        y = x * 2
        wide = torch.cat([y, y], 1)
        return y.t(), wide[:, :3], y[:1].expand(4, 5), y.t() * x.t()

    recorded = Recorded(function, make(0))
    for seed in range(4):
        recorded.check(make(seed))
    assert recorded.count("record") == 1


def test_inference_mode_may_differ_between_calls():
    """A recording that was made inside serves calls outside, and the other way round."""
    for inside in ([True, True, False], [False, False, True]):
        recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
        for seed, mode in enumerate(inside):
            with torch.inference_mode(mode):
                recorded.check(rnd(3, 5, seed=seed), rnd(5, 7))
        assert recorded.count("record") == 1


# --- outputs that are inputs --------------------------------------------------------------------


def test_views_of_inputs_are_views_of_this_calls_inputs():
    """Whether the recording reads the input in place or from a buffer."""

    def function(x, w):
        return x.view(-1), w.t(), x[1:, ::2], x @ w

    w = rnd(5, 7)
    recorded = Recorded(function, rnd(3, 5), w, static=(1,))
    for seed in range(4):
        x = rnd(3, 5, seed=seed)
        flat, turned, part, product = recorded(x, w)
        assert_same([flat, turned, part, product], list(function(x, w)))
        for view, base in ((flat, x), (turned, w), (part, x)):
            assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert product.untyped_storage().data_ptr() not in (
            x.untyped_storage().data_ptr(),
            w.untyped_storage().data_ptr(),
        )


def test_results_that_share_memory_are_copied_apart():
    """Two outputs on one storage, and one output twice."""

    def function(x):
        y = x * 2
        return y, y.view(-1), y

    recorded = Recorded(function, rnd(3, 4))
    for seed in range(3):
        recorded.check(rnd(3, 4, seed=seed))


# --- inputs that stay and inputs that move ------------------------------------------------------


def test_static_inputs_are_read_in_place():
    """And others from buffers."""
    w = rnd(5, 7)
    recorded = Recorded(linear, rnd(3, 5), w, static=(1,))
    kept = []
    for seed in range(3):
        kept.append(rnd(3, 5, seed=seed))
        recorded.check(kept[-1], w)
    assert recorded.reads(w)
    assert not any(recorded.reads(x) for x in kept)


def test_weights_updated_in_place_are_seen():
    """By the next replay, without a new recording."""
    w = rnd(5, 7)
    recorded = Recorded(linear, rnd(3, 5), w, static=(1,))
    for seed in range(5):
        recorded.check(rnd(3, 5, seed=seed), w)
        w.mul_(1.5)
        w.data[0, 0] = seed
    assert recorded.count("record") == 1


def test_inputs_that_stayed_are_read_in_place():
    """A weight that nobody declared, as in the graphs of training."""
    w = rnd(5, 7)
    recorded = Recorded(linear, rnd(3, 5), w)
    for seed in range(4):
        recorded.check(rnd(3, 5, seed=seed), w)
        w.add_(1)
    assert recorded.reads(w)
    assert recorded.count("record") == 1


def test_an_address_that_came_back_is_no_sign_of_staying():
    """Memory that was freed in between belongs to another tensor."""
    memory = bytearray(3 * 5 * 4)

    def at_the_same_address(seed: int) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float32).view(3, 5).copy_(rnd(3, 5, seed=seed))

    recorded = Recorded(lambda x: (x * 2,), rnd(3, 5))
    recorded.check(at_the_same_address(0))
    x = at_the_same_address(1)
    recorded.check(x)
    assert recorded.count("record") == 1
    assert not recorded.reads(x)


def test_an_undeclared_input_that_moves_is_copied_from_then_on():
    """The second recording is the last."""
    w = rnd(5, 7)
    recorded = Recorded(linear, rnd(3, 5), w)
    for seed in range(3):
        recorded.check(rnd(3, 5, seed=seed), w)
    others = [rnd(5, 7, seed=seed) for seed in range(4)]
    for other in others:
        recorded.check(rnd(3, 5), other)
    assert recorded.count("record") == 2
    assert not any(recorded.reads(other) for other in others)


def test_undeclared_inputs_may_move_one_after_the_other():
    """Each move is one more recording, and what still stays is still read in place."""
    weights = [rnd(5, 7, seed=seed) for seed in range(3)]
    recorded = Recorded(lambda x, a, b, c: ((x @ a) * (x @ b) + x @ c,), rnd(3, 5), *weights)
    earlier = list(weights)  # alive, so that nothing is forgotten because it was freed
    for moved in (None, 0, 2):
        if moved is not None:
            weights[moved] = rnd(5, 7, seed=10 + moved)
        for seed in range(3):
            recorded.check(rnd(3, 5, seed=seed), *weights)
    assert recorded.count("record") == 3
    assert [recorded.reads(w) for w in weights] == [False, True, False]
    assert not any(recorded.reads(w) for w in (earlier[0], earlier[2]))


def test_each_set_of_weights_has_a_recording():
    """Two instances of a module, or two layers that share code: none is recorded twice."""
    sets = [rnd(5, 7, seed=seed) for seed in range(3)]
    recorded = Recorded(linear, rnd(3, 5), sets[0], static=(1,))
    for seed in range(4):
        for w in sets:
            recorded.check(rnd(3, 5, seed=seed), w)
    assert recorded.count("record") == 3


def test_static_inputs_that_keep_moving_are_copied():
    """Values that are prepared anew in each step: a bounded number of recordings."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7), static=(1,))
    kept = rnd(5, 7)
    for seed in range(30):
        w = rnd(5, 7, seed=seed)  # made while the one before lives, so that it lies elsewhere
        assert w.data_ptr() != kept.data_ptr()
        kept = w
        recorded.check(rnd(3, 5, seed=seed), w)
    assert recorded.count("record") <= MAX_MOVES + 2
    assert recorded.count("replay") == 29
    assert not recorded.reads(kept)


# --- keys ---------------------------------------------------------------------------------------


def test_each_size_has_a_recording():
    """Symbolic sizes, 0 and 1 among them; results have this call's sizes."""

    def function(x):
        return (x * x.shape[0]).sum(1), x.shape[0] * 2

    recorded = Recorded(function, rnd(6, 5), symbolic=True)
    for seed in range(3):
        for size in (6, 2, 17):
            recorded.check(rnd(size, 5, seed=seed))
    assert recorded.count("record") == 3
    assert recorded.count("warm up") == 3


def test_layouts_of_symbolic_inputs_are_compared():
    """Equal sizes with other strides are another combination."""
    recorded = Recorded(lambda x: (x * 2,), rnd(6, 5), symbolic=True)
    for seed in range(3):
        recorded.check(rnd(5, 6, seed=seed))
        recorded.check(rnd(6, 5, seed=seed).t())
    assert recorded.count("record") == 2


def test_numbers_on_the_host_are_part_of_the_key():
    """A kernel is passed them by value: another value needs another recording. NaN equals itself,
    and -0.0 isn't 0.0."""
    device = FakeDevice()
    device.scalars_by_value = True
    known = Inputs((0,), frozenset(), (1,), (), (), torch.device("cpu"))

    def call(args: list[Any]) -> Sequence[Any]:
        x, scale = args
        args.clear()
        return (x * scale,)

    region = Replayed(call, known, Options(), device, print)
    for _ in range(3):
        for number in (0.5, float("nan"), 0.0, -0.0, 2.0):
            x, scale = rnd(4), torch.tensor(number)
            (result,) = region([x, scale])
            assert_same(result, x * scale)
            assert torch.equal(result.signbit(), (x * scale).signbit())
    assert device.count("record") == 5
    assert device.count("replay") == 10


def test_the_least_recently_used_recording_goes():
    """With two kept, the third size takes the place of the one that was used longest ago."""
    recorded = Recorded(lambda x: (x * 2,), rnd(6, 5), symbolic=True, max_graphs=2)

    def run(*sizes: int) -> int:
        before = recorded.count("record")
        for size in sizes:
            recorded.check(rnd(size, 5))
        return recorded.count("record") - before

    assert run(4, 4, 4, 7, 7, 7) == 2
    assert run(4) == 0
    assert run(9, 9, 9) == 1  # 7 goes
    assert run(4, 9) == 0
    assert run(7) == 1
    assert recorded.told == []


def test_recording_ends_where_sizes_come_in_turn():
    """It would cost more than it saves; the report says so once, and results stay right."""
    recorded = Recorded(lambda x: (x * 2,), rnd(6, 5), symbolic=True, max_graphs=3)
    for seed in range(6):
        for size in range(2, 12):
            recorded.check(rnd(size, 5, seed=seed))
    assert recorded.count("record") <= 3 + 3
    assert len(recorded.told) == 1
    assert "max_graphs = 3" in recorded.told[0]


def test_what_is_remembered_is_bounded():
    """A size that is seen once only is forgotten in the end."""
    recorded = Recorded(lambda x: (x * 2,), rnd(6, 5), symbolic=True, max_graphs=1)
    for size in range(2, 60):
        recorded.check(rnd(size, 2))
    assert len(recorded.call._combinations) == 8
    assert recorded.count("record") == 0


# --- when something is wrong --------------------------------------------------------------------


def test_a_recording_that_fails_is_told_and_not_tried_again():
    """Every call has its result, the one that failed included."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    recorded.device.broken = RuntimeError("operation not permitted when stream is capturing")
    for seed in range(5):
        recorded.check(rnd(3, 5, seed=seed), rnd(5, 7))
    assert recorded.told == [recorded.device.broken]
    assert recorded.device.log == ["warm up", "record"]


def test_a_device_that_cant_be_set_up_is_told():
    """The region runs without, in every call."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    recorded.device.absent = RuntimeError("the driver is too old")
    for seed in range(3):
        recorded.check(rnd(3, 5, seed=seed), rnd(5, 7))
    assert recorded.told == [recorded.device.absent]
    assert recorded.device.log == []


def test_a_failure_of_the_region_itself_is_not_contained_here():
    """In a warm-up it is the region that failed: the board's business."""
    known = Inputs((0,), frozenset(), (), (), (), torch.device("cpu"))
    told: list[Any] = []

    def call(args: list[Any]) -> Sequence[Any]:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        Replayed(call, known, Options(), FakeDevice(), told.append)([rnd(3)])
    assert told == []


def test_somebody_elses_recording_gets_the_region_itself():
    """Nothing is recorded or replayed inside of it."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    for seed in range(3):
        recorded.check(rnd(3, 5, seed=seed), rnd(5, 7))
    before = list(recorded.device.log)
    recorded.device.inside = True
    recorded.check(rnd(3, 5), rnd(5, 7))
    assert recorded.device.log == before


def test_an_input_on_another_device_than_planned_is_not_recorded():
    """The call runs as it is, and the report has a note."""
    recorded = Recorded(lambda x: (x * 2,), rnd(3))
    recorded(rnd(3))
    (result,) = recorded(rnd(3).to("meta"))
    assert result.device.type == "meta"
    assert recorded.told == ["CUDA graphs skipped in a call: inputs [0] weren't on the device"]
    recorded.check(rnd(3))
    assert recorded.count("record") == 1


def test_threads_share_a_recording():
    """One at a time replays; each gets its own results."""
    recorded = Recorded(linear, rnd(3, 5), rnd(5, 7))
    w = rnd(5, 7)
    wrong: list[int] = []

    def work(number: int) -> None:
        for seed in range(20):
            x = rnd(3, 5, seed=100 * number + seed)
            (result,) = recorded(x, w)
            if not torch.equal(result, linear(x, w)[0]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert recorded.count("warm up") + recorded.count("replay") == 80

"""The option ``tune_seconds`` of the plugin ``tvm``: what is tuned, records, budget, values."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fuseboard
from tests.support.backends import compiled, last_graph

tvm_plugin = pytest.importorskip("fuseboard_tvm")
pytest.importorskip("tvm", reason="needs the extra tvm")

from fuseboard_tvm import _engine, _search, _tune  # noqa: E402 - after the look for TVM

#: Enough on any machine: a search ends early when it gains nothing.
SECONDS = 100.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Few trials suffice for values, and here a tuned kernel runs though torch's be faster."""
    monkeypatch.setattr(_search, "PATIENCE", 1)
    monkeypatch.setattr(_tune, "MARGIN", 0.0)
    torch.compiler.reset()


class Records(dict):
    """In memory."""

    def put(self, key, value):
        self[key] = value


def lowered(call, inputs, records=None, seconds=SECONDS):
    graph = make_fx(lambda *args: (call(*args),), tracing_mode="fake")(*inputs)
    options = tvm_plugin.Options(tune_seconds=seconds)
    region = fuseboard.Region(
        "test.region0", "tvm", "inference", graph, "test", options=options, records=records
    )
    return tvm_plugin.fuseboard_lower(region, inputs)


def normal(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source, dtype=dtype)


def transposed_product(a, b):
    return a @ b.t()


CASES = {
    "mm": (torch.mm, (64, 128), (128, 80)),
    "mm, odd": (torch.mm, (61, 199), (199, 67)),
    "mm, transposed": (transposed_product, (64, 130), (75, 130)),
    "mm, left transposed": (lambda a, b: a.t() @ b, (130, 64), (130, 96)),
    "mm, many terms": (torch.mm, (8, 4096), (4096, 48)),
    "mm, one row": (torch.mm, (1, 4096), (4096, 160)),
    "mm with itself": (lambda a: a @ a.t(), (96, 96)),
    "bmm": (torch.bmm, (3, 40, 72), (3, 72, 61)),
    "bmm, transposed": (lambda a, b: torch.bmm(a, b.transpose(1, 2)), (3, 40, 72), (3, 64, 72)),
    "linear": (F.linear, (2, 50, 64), (128, 64), (128,)),
    "addmm of a matrix": (torch.addmm, (64, 96), (64, 100), (100, 96)),
    "addmm of a column": (torch.addmm, (64, 1), (64, 100), (100, 96)),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), (2, 8, 19, 17), (24, 8, 3, 3)),
    "conv, bias": (lambda x, w, b: F.conv2d(x, w, b), (2, 7, 20, 20), (16, 7, 5, 3), (16,)),
    "conv, strides": (
        lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(3, 0)),
        (2, 5, 40, 33),
        (12, 5, 7, 4),
    ),
    "conv, 1 by 1": (F.conv2d, (2, 48, 16, 16), (32, 48, 1, 1)),
    "conv, 1 by 1, strides": (
        lambda x, w: F.conv2d(x, w, stride=2),
        (2, 96, 13, 13),
        (64, 96, 1, 1),
    ),
    "conv to one pixel": (F.conv2d, (8, 64, 5, 5), (64, 64, 5, 5)),
    "conv, channels last": (
        lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w, padding=1).relu(),
        (2, 8, 19, 17),
        (24, 8, 3, 3),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name, dtype):
    """A tuned kernel is as right as torch's, whatever the sizes and the order of axes."""
    call, *shapes = CASES[name]
    inputs = [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    records = Records()
    region = lowered(call, inputs, records)
    (record,) = map(json.loads, records.values())
    assert record["trace"], region.notes
    assert record["problem"] == ""
    (got,) = region.call(list(inputs))
    eager = call(*inputs)
    exact = call(*(one.double() for one in inputs))
    assert got.stride() == eager.stride()
    if dtype == torch.float64:
        torch.testing.assert_close(got, eager)
    else:  # torch's default tolerance is for single ops; eager's sums of 4096 terms miss it as well
        wrong = (got.double() - exact).pow(2).mean().sqrt()
        assert wrong <= 2 * (eager.double() - exact).pow(2).mean().sqrt() + 1e-7


NOT_TUNED = {
    "small": (torch.mm, (8, 8), (8, 8)),
    "narrow": (torch.mm, (512, 512), (512, 3)),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=2), (96,), (64, 100), (100, 96)),
    "part of a tensor": (lambda a, b: a[:, 1:] @ b, (64, 129), (128, 96)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 8, 40, 40), (24, 4, 3, 3)),
    "dilation": (lambda x, w: F.conv2d(x, w, dilation=2), (2, 8, 40, 40), (24, 8, 3, 3)),
    "transposed": (F.conv_transpose2d, (2, 8, 40, 40), (8, 24, 3, 3)),
    "one axis": (F.conv1d, (2, 8, 800), (64, 8, 9)),
}


@pytest.mark.parametrize("name", NOT_TUNED)
def test_torch_runs_the_others(name):
    """What the workloads don't cover, or what is too little work, is as without the option."""
    call, *shapes = NOT_TUNED[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    region = lowered(call, inputs, seconds=60)
    assert region.notes == ()
    torch.testing.assert_close(region.call(list(inputs))[0], call(*inputs))


def two_products(a, b, c):
    return (a @ b).relu() @ c


PRODUCTS = [normal(64, 96, seed=1), normal(96, 112, seed=2), normal(112, 80, seed=3)]


def test_a_later_compile_takes_the_records(monkeypatch):
    """Without a search, and with the same result."""
    records = Records()
    first = lowered(two_products, PRODUCTS, records)
    assert len(records) == 2
    monkeypatch.setattr(_search, "search", None)  # a search would raise
    again = lowered(two_products, PRODUCTS, records)
    assert all("from an earlier search" in note for note in again.notes)
    (one,), (other,) = first.call(list(PRODUCTS)), again.call(list(PRODUCTS))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[]",
        b'{"trace": null, "tuned_us": "x", "torch_us": 2, "trials": 3, "seconds": 4}',
        b"\xff",
        b'{"trace": [[["Nonsense", [], [], []]], []], "tuned_us": 1, "torch_us": 2, '
        b'"trials": 3, "seconds": 4}',
    ],
)
@pytest.mark.thorough
def test_damaged_records(damage):
    """They are searched for again, or told of; the result is right in any case."""
    records = Records()
    lowered(torch.mm, PRODUCTS[:2], records)
    records.update(dict.fromkeys(records, damage))
    region = lowered(torch.mm, PRODUCTS[:2], records)
    assert "can't be applied" in "".join(region.notes) or damage not in records.values()
    torch.testing.assert_close(region.call(PRODUCTS[:2])[0], torch.mm(*PRODUCTS[:2]))


def test_torchs_kernel_stays_where_it_is_faster(monkeypatch):
    """The record says so, and a later compile neither searches nor compares."""
    monkeypatch.setattr(_tune, "MARGIN", float("inf"))
    records = Records()
    region = lowered(torch.mm, PRODUCTS[:2], records)
    (record,) = map(json.loads, records.values())
    assert record["trace"] is None
    assert "torch's stays" in region.notes[0]
    monkeypatch.setattr(_search, "search", None)
    assert "torch's stays" in lowered(torch.mm, PRODUCTS[:2], records).notes[0]


def test_wrong_values_are_not_used(monkeypatch):
    """A kernel whose result isn't what rounding allows is told of, and never runs."""
    search = _search.search

    def wrong(*args):
        found = search(*args)

        def call(*handles):
            found.call(*handles)
            torch.from_dlpack(handles[-1])[3, 5] += 0.01

        return _search.Found(found.trace, call, found.trials, found.seconds)

    monkeypatch.setattr(_search, "search", wrong)
    region = lowered(torch.mm, PRODUCTS[:2])
    assert "its values are wrong" in region.notes[0]


@pytest.mark.thorough
def test_the_budget(monkeypatch):
    """Two ops share it evenly, and each search exceeds its share by one trial at most."""
    clock = [0.0]
    now = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter)
    attempt = _search._try

    def a_second(*args):
        clock[0] += 1
        return attempt(*args)

    monkeypatch.setattr(_search, "PATIENCE", 10**6)
    monkeypatch.setattr(_search, "_try", a_second)
    monkeypatch.setattr(_search, "time", now)
    monkeypatch.setattr(_tune, "time", now)
    records = Records()
    lowered(two_products, PRODUCTS, records, seconds=7)
    spent = [json.loads(value)["seconds"] for value in records.values()]
    assert spent == [4, 4]  # of 3.5 seconds, then of the 3 that are left


def test_without_time_left_torch_runs(monkeypatch):
    """What the budget doesn't reach has no record, so that a later compile may tune it."""
    records = Records()
    region = lowered(two_products, PRODUCTS, records, seconds=1e-9)
    assert records == {}
    assert "didn't reach it" in region.notes[0]
    torch.testing.assert_close(region.call(list(PRODUCTS))[0], two_products(*PRODUCTS))


def test_an_interrupt_ends_the_search(monkeypatch):
    """Ctrl-C isn't swallowed; what was found before is kept."""
    attempt = _search._try
    records = Records()

    def interrupted(*args):
        if records:
            raise KeyboardInterrupt
        return attempt(*args)

    monkeypatch.setattr(_search, "_try", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lowered(two_products, PRODUCTS, records)
    assert len(records) == 1


def test_random_numbers_are_left_alone():
    """Tuning draws its values from a generator of its own."""
    state = torch.get_rng_state()
    lowered(torch.mm, PRODUCTS[:2])
    assert torch.equal(state, torch.get_rng_state())


def test_no_intrinsics_are_imported():
    """Importing those of GPUs takes up to a minute."""
    lowered(torch.mm, PRODUCTS[:2])
    assert _search.INTRINSICS not in sys.modules


def test_with_another_ffi_nothing_is_searched_for(monkeypatch):
    """It would end the process: torch's product runs, the report says why, and records are used."""
    records = Records()
    lowered(torch.mm, PRODUCTS[:2], records)
    monkeypatch.setattr(_engine, "FFI", SimpleNamespace(version="0.1.15.post2", problem=""))
    monkeypatch.setattr(_search, "search", None)
    region = lowered(torch.mm, PRODUCTS[:2])
    torch.testing.assert_close(region.call(list(PRODUCTS[:2]))[0], torch.mm(*PRODUCTS[:2]))
    assert "with apache-tvm-ffi 0.1.15.post2 a search would end the process" in region.notes[0]
    assert region.notes[0].endswith("pip install 'apache-tvm-ffi==0.1.14.post1'")
    assert "from an earlier search" in lowered(torch.mm, PRODUCTS[:2], records).notes[0]


@pytest.mark.thorough
def test_through_the_board(tmp_path, monkeypatch):
    """The records are in the cost database; a compile with other options finds them there."""
    options = {"cache_dir": str(tmp_path), "on_failure": "raise"}
    with torch.no_grad():
        function = compiled(two_products, "tvm", **options, **{"plugins.tvm.tune_seconds": SECONDS})
        torch.testing.assert_close(function(*PRODUCTS), two_products(*PRODUCTS))
        monkeypatch.setattr(_search, "search", None)
        torch.compiler.reset()
        function = compiled(two_products, "tvm", **options, **{"plugins.tvm.tune_seconds": 2})
        torch.testing.assert_close(function(*PRODUCTS), two_products(*PRODUCTS))
    notes = "".join(note for region in last_graph().regions for note in region.notes)
    assert notes.count("from an earlier search") == 2


def test_off_by_default():
    """Nothing is searched for, and products aren't TVM's own."""
    assert tvm_plugin.Options().tune_seconds == 0
    graph = make_fx(lambda a, b: (a @ b,), tracing_mode="fake")(*PRODUCTS[:2])
    (off,) = tvm_plugin.fuseboard_claim(graph, tvm_plugin.Options())
    (on,) = tvm_plugin.fuseboard_claim(graph, tvm_plugin.Options(tune_seconds=1))
    assert (len(off.native), len(on.native)) == (0, 1)

"""What a finished session keeps: regions' shares, speedscope, folded stacks, flame graph page."""

from __future__ import annotations

import json
import linecache
import re
import sys
import traceback
from html import unescape

import pytest
import torch

import fuseboard
from fuseboard import RegionShare, SampledProfile, SamplingProfiler, StackFrame, StackSample
from fuseboard.profile.observe.sampling_regions import RegionFrame, locate_regions
from fuseboard.report.data import GraphReport, RegionReport, ledger
from tests.support.backends import claim_ops, compiled, plugged
from tests.support.browser import Page, chromium
from tests.support.samplers import FakeSampler, sampling_with

MAIN = StackFrame("main", "/a/app.py", 3)
RUNNER = "<fuseboard:inference0:0>"
FIRST, BETWEEN, SECOND = (StackFrame("inference0", RUNNER, line) for line in (5, 7, 9))
KERNEL = StackFrame("mm; <b>", "/lib/site-packages/torch/mm.py", 40)
PLACES = {
    (RUNNER, 5): RegionFrame("inference0.region0", "mkldnn"),
    (RUNNER, 7): RegionFrame("inference0", "board"),
    (RUNNER, 9): RegionFrame("inference0.region1", "eager"),
}


def profile(*samples: StackSample, **fields) -> SampledProfile:
    given = {
        "run_id": "1234",
        "sampler": "pyspy",
        "duration_s": 2.0,
        "sample_each": 0.01,
        "tags": ("nightly",),
        "samples": samples,
        "regions": PLACES,
    }
    return SampledProfile(**{**given, **fields})


def sample(*stack: StackFrame, thread: str = "T", count: int = 1) -> StackSample:
    return StackSample(stack, thread, count)


SAMPLES = (
    sample(MAIN, FIRST, KERNEL, count=5),
    sample(MAIN, SECOND),
    sample(MAIN, SECOND, KERNEL, count=2),
    sample(MAIN, BETWEEN),
    sample(MAIN),
    sample(StackFrame("helper"), thread="U"),
)


# --- shares ---------------------------------------------------------------------------------------


def test_shares_of_regions_add_up_to_one():
    """Largest first, the board's own work by the graph's name, what is outside last."""
    assert profile(*SAMPLES).region_shares() == [
        RegionShare("inference0.region0", "mkldnn", 5, 5 / 11),
        RegionShare("inference0.region1", "eager", 3, 3 / 11),
        RegionShare("inference0", "board", 1, 1 / 11),
        RegionShare("outside of compiled code", "", 2, 2 / 11),
    ]


def test_an_empty_profile_has_no_shares():
    """Not a division by zero."""
    assert profile().region_shares() == []
    assert profile().total == 0


def test_a_sample_in_a_graph_within_a_graph_belongs_to_the_inner_one():
    """Such as a backward that is compiled while a forward runs."""
    inner = StackFrame("backward1", "<fuseboard:backward1:3>", 4)
    nested = profile(
        sample(MAIN, FIRST, inner),
        regions={**PLACES, (inner.file, 4): RegionFrame("backward1.region0", "inductor")},
    )
    assert [row.region for row in nested.region_shares()] == ["backward1.region0"]


class Stacks:
    """A sampler whose samples are the stacks that were noted while the work ran."""

    def __init__(self) -> None:
        self.samples: list[StackSample] = []

    def note(self) -> None:
        calls = traceback.walk_stack(sys._getframe(1))
        stack = [StackFrame(f.f_code.co_name, f.f_code.co_filename, line) for f, line in calls]
        self.samples.append(StackSample(tuple(reversed(stack)), "T"))


def test_regions_of_a_compiled_graph_are_told_by_its_stacks():
    """Each region that calls noted its stack once a call; the plain code and the checked one."""
    stacks = Stacks()

    def noting(eager_call, region):
        def call(args):
            stacks.note()
            return eager_call(args)

        return call

    ledger.clear()
    with (
        plugged("noting", call=noting, claim=claim_ops("mm", "sort")),
        plugged("other", call=noting, claim=claim_ops("cos")),
        sampling_with(FakeSampler(stacks.samples)) as name,
    ):
        model = compiled(
            lambda x: ((x @ x).cos().sin() @ x).cos() @ x,
            *("noting", "other", "eager"),
            min_region_us=0,
        )
        with torch.no_grad(), SamplingProfiler(sampler=name, stop_at_error=True) as profiler:
            for _ in range(3):
                model(torch.randn(5, 5))
    regions = fuseboard.last_report().graphs[-1].regions
    seen = {row.region: (row.backend, row.samples) for row in profiler.result.region_shares()}
    # The first of three calls is checked, for which code that regions share is called twice more.
    first = {region.signature: region.name for region in reversed(regions)}
    counts = {name: 3 + 2 * (name in first.values()) for name in seen}
    expected = {r.name: (r.backend, counts[r.name]) for r in regions if r.backend != "eager"}
    assert len(expected) == 5
    assert seen == expected


def test_a_graph_of_one_region_is_that_region():
    """Its runner only passes its inputs on, and has no lines that say where it is."""
    stacks = Stacks()

    def noting(eager_call, region):
        def call(args):
            stacks.note()
            return eager_call(args)

        return call

    with (
        plugged("noting", call=noting),
        sampling_with(FakeSampler(stacks.samples)) as name,
    ):
        model = compiled(lambda x: x.cos().sin(), "noting", "eager")
        with torch.no_grad(), SamplingProfiler(sampler=name, stop_at_error=True) as profiler:
            for _ in range(3):
                model(torch.randn(5))
    (region,) = fuseboard.last_report().graphs[-1].regions
    assert profiler.result.region_shares() == [RegionShare(region.name, "noting", 5, 1.0)]


def test_frames_that_are_no_runner_have_no_place():
    """Other generated functions, such as a region of eager's, lie inside of a runner's call."""
    frames = [
        StackFrame("inference0_region1", "<fuseboard:inference0_region1:4>", 3),
        StackFrame("prepare", "<fuseboard:inference0_prepare:4>", 3),
        StackFrame("f", "<string>", 1),
        MAIN,
    ]
    assert locate_regions(frames) == {}


def test_a_graph_that_nobody_remembers_has_a_name_but_no_backend():
    """Reports are bounded; the shares are told all the same."""
    ledger.clear()
    file = generated("inference987", "try:", "return _region0(args)")
    assert places(file, 3) == {3: RegionFrame("inference987.region0", "unknown")}


def generated(name: str, *lines: str) -> str:
    """The file name of a function of these lines, the first of which is its line 2."""
    file = f"<fuseboard:{name}:9999>"
    text = [f"def {name}(args):\n", *(f"    {line}\n" for line in lines)]
    linecache.cache[file] = (len("".join(text)), None, text, file)
    return file


def places(file: str, *lines: int) -> dict[int, RegionFrame]:
    found = locate_regions(StackFrame("f", file, line) for line in lines)
    return {line: place for (_, line), place in found.items()}


def test_each_line_of_a_runner_is_a_region_s_or_the_board_s():
    """By the callee and the site; equal regions may share a callee, and names may be taken."""
    file = generated(
        "forward986",
        "site_1 = -1",
        "if weights() != entry.versions:",
        "site_1 = 0",
        "x, = _region0_onnxruntime([a, b])",
        "site_1 = 1",
        "y, = _region0_onnxruntime([x, b])",
        "del x",
        "site_1 = 2",
        "z, = _region2_mkldnn_1([y])",
        "site_1 = 3",
        "v = _aten_view(z, [3])",
        "return (v,)",
    )
    assert places(file, 3, 5, 7, 8, 10, 12) == {
        3: RegionFrame("forward986", "board"),
        5: RegionFrame("forward986.region0", "onnxruntime"),
        7: RegionFrame("forward986.region1", "onnxruntime"),
        8: RegionFrame("forward986", "board"),
        10: RegionFrame("forward986.region2", "mkldnn"),
        12: RegionFrame("forward986", "board"),
    }


def test_trials_of_candidates_are_told_apart():
    """They run before a graph has settled, and are no part of what it costs then."""
    file = generated("inference985_trial", "x, = _region0_mkldnn([a])")
    assert places(file, 2) == {2: RegionFrame("inference985", "trials")}


def test_without_lines_a_region_is_known_where_there_is_one():
    """Stacks of perf have none."""
    ledger.clear()
    two = GraphReport("inference984", "inference")
    two.regions += [RegionReport(f"inference984.region{i}", "mkldnn", {}) for i in range(2)]
    one = GraphReport("inference983", "inference")
    one.regions.append(RegionReport("inference983.region0", "inductor", {}))
    ledger.add(one)
    ledger.add(two)
    assert places("<fuseboard:inference984:1>", 0) == {0: RegionFrame("inference984", "any")}
    assert places("<fuseboard:inference983:1>", 0) == {
        0: RegionFrame("inference983.region0", "inductor")
    }


# --- files ----------------------------------------------------------------------------------------


def test_speedscope_has_a_profile_for_each_thread(tmp_path):
    """Frames once, samples in order by their numbers, weights in seconds."""
    path = tmp_path / "p.json"
    profile(*SAMPLES).save_speedscope(path)
    document = json.loads(path.read_text())
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert document["name"] == "pyspy 1234 [nightly]"
    assert document["shared"]["frames"] == [
        {"name": "main", "file": "/a/app.py", "line": 3},
        {"name": "inference0.region0 [mkldnn]", "file": RUNNER, "line": 5},
        {"name": "mm; <b>", "file": "/lib/site-packages/torch/mm.py", "line": 40},
        {"name": "inference0.region1 [eager]", "file": RUNNER, "line": 9},
        {"name": "inference0 [board]", "file": RUNNER, "line": 7},
        {"name": "helper"},
    ]
    main, helper = document["profiles"]
    assert (main["name"], main["type"], main["unit"]) == ("T", "sampled", "seconds")
    assert main["samples"] == [[0, 1, 2], [0, 3], [0, 3, 2], [0, 4], [0]]
    assert main["weights"] == pytest.approx([0.05, 0.01, 0.02, 0.01, 0.01])
    assert main["endValue"] == pytest.approx(0.1)
    assert (helper["name"], helper["samples"]) == ("U", [[5]])


def test_folded_stacks_are_one_line_each_with_a_count(tmp_path):
    """Most frequent first; a semicolon in a name would be a call of its own."""
    path = tmp_path / "p.txt"
    profile(*SAMPLES).save_folded(path)
    lines = path.read_text().splitlines()
    main, mm = "T;main (a/app.py:3)", "mm, <b> (torch/mm.py:40)"
    assert lines[:2] == [
        f"{main};inference0.region0 [mkldnn];{mm} 5",
        f"{main};inference0.region1 [eager];{mm} 2",
    ]
    assert sorted(lines[2:]) == [
        f"{main} 1",
        f"{main};inference0 [board] 1",
        f"{main};inference0.region1 [eager] 1",
        "U;helper 1",
    ]


@pytest.mark.parametrize("form", ["save_speedscope", "save_folded", "save_flame_graph"])
def test_names_that_are_no_text_are_written_all_the_same(form, tmp_path):
    """A file's name may hold bytes that are no UTF-8; Python has them as lone surrogates."""
    odd = StackFrame("f\udcff", "/a/\udcff.py", 1)
    getattr(profile(sample(odd)), form)(tmp_path / "out")
    assert "udcff" in (tmp_path / "out").read_text()


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def page_file(tmp_path):
    path = tmp_path / "flame.html"
    profile(*SAMPLES, notes=("without native frames",)).save_flame_graph(path)
    return path


def words(html: str) -> str:
    """The text that is there without scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_the_page_says_it_in_tables_without_scripts(page_file):
    """What was sampled, the notes, the regions' shares, the functions."""
    text = words(page_file.read_text())
    for told in (
        "sampled profile nightly Regions",
        "Run 1234",
        "11 samples in 2.00 s, one each 10 ms, by pyspy.",
        "without native frames",
        "inference0.region0 mkldnn 45.5% 5",
        "outside of compiled code 18.2% 2",
        "mm; <b> (torch/mm.py) 63.6% 63.6%",
        "main (a/app.py) 9.1% 90.9%",
    ):
        assert told in text, told


def test_the_page_s_data_is_escaped_and_deep_stacks_fit(tmp_path):
    """A function's name can't end the script; a thousand calls deep is nothing special."""
    deep = [StackFrame(f"</script>{i}", "/a.py", 1) for i in range(1500)]
    path = tmp_path / "deep.html"
    profile(sample(*deep)).save_flame_graph(path)
    html = path.read_text()
    (data,) = re.findall(r'id="data">(.*?)</script>', html, re.S)
    assert "</script" not in data
    nodes = json.loads(data)["nodes"]
    assert len(nodes) == 1502  # the whole, the thread, the calls
    assert nodes[-1] == [1501, 1501, 1]


@pytest.mark.thorough
def test_an_empty_profile_has_a_page(tmp_path, browser):
    """It says that there is nothing."""
    path = tmp_path / "empty.html"
    profile().save_flame_graph(path)
    assert "Nothing was sampled" in words(path.read_text())
    page = Page(browser, path)
    assert page.problems == []
    assert not page.page.locator("#flame .drawing").is_visible()


def told(page: Page) -> str:
    return page.page.locator(".told").inner_text()


@pytest.mark.thorough
def test_the_flame_graph_is_used_by_keys(page_file, browser):
    """One stop of Tab; Down follows the widest call, Enter zooms, Esc goes back; no requests."""
    page = Page(browser, page_file)
    page.page.locator(".flames").focus()
    assert told(page).startswith("all: 100.0% of all, 11 samples")
    page.press("ArrowDown", "ArrowDown", "ArrowDown")
    assert told(page) == "inference0.region0 [mkldnn]: 45.5% of all, 5 samples, 0 in itself"
    page.press("ArrowRight")
    assert told(page) == "inference0.region1 [eager]: 27.3% of all, 3 samples, 1 in itself"
    width = page.page.locator(".call.current").bounding_box()["width"]
    page.press("Enter")
    zoomed = page.page.locator(".call.current").bounding_box()["width"]
    assert zoomed == pytest.approx(width * 11 / 3, rel=0.02)
    page.press("Escape", "Home")
    assert told(page).startswith("all:")
    assert page.page.locator(".call.current").bounding_box()["width"] > 3 * width
    active = page.page.locator(".flames").get_attribute("aria-activedescendant")
    assert page.page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    page.press("/")
    page.page.keyboard.type("mm torch")
    assert page.page.locator(".finder output").inner_text() == "in 63.6%"
    assert page.page.locator(".call.hit").count() == 2
    assert page.problems == []
    assert page.requests == []


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_a_screen_of(width, page_file, browser):
    """Nothing makes the page itself scroll sideways; a tap selects, a second one zooms."""
    page = Page(browser, page_file, viewport={"width": width, "height": 800}, has_touch=True)
    wide = page.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    call = page.page.locator(".call", has_text="inference0.region0").first
    call.tap()
    assert told(page).startswith("inference0.region0 [mkldnn]: 45.5%")
    before = call.bounding_box()["width"]
    page.page.locator(".call.current").tap()
    assert page.page.locator(".call.current").bounding_box()["width"] > 1.9 * before
    assert page.problems == []


@pytest.mark.thorough
def test_the_page_is_accessible(page_file, browser):
    """No rule of axe is broken: names, roles, contrast, order; in light and in dark."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for scheme in ("light", "dark"):
        page = Page(browser, page_file, color_scheme=scheme)
        found = axe.Axe().run(page.page)
        assert found.violations_count == 0, found.generate_report()

"""The page's charts: candidates with their intervals, and the shares of a profile."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

from fuseboard import Explanation
from fuseboard.explanations import scatter
from fuseboard.explanations.bars import chart
from fuseboard.profile.observe.sampling_result import RegionShare
from fuseboard.report.data import CandidateReport
from tests.support.browser import Page, chromium
from tests.support.explanations import chosen

ATTACK = "<img src=x onerror=pwned=1>\"'><script>pwned=1</script>"


def compared(*more: CandidateReport) -> Explanation:
    """Eager, a winner four times as fast, a wide interval, and others without times."""
    return chosen(
        [
            CandidateReport("eager", "slower", 4000.0, 3800.0, 4200.0, 1, 0.01),
            CandidateReport("mkldnn+eager", "chosen", 1000.0, 900.0, 1200.0, 1, 0.5, 2 * 10**9),
            CandidateReport("onnxruntime", "slower", 2000.0, 1000.0, 50_000.0, 1, 2.0),
            CandidateReport("inductor by blocks", "waiting", compile_s=30.0),
            CandidateReport("liar", "failed", problem="values differ at linear, model.py:3"),
            *more,
        ],
        settled=False,
        decided="measured in a call",
        backends=("mkldnn", "onnxruntime", "inductor", "liar", "eager"),
        left_out={"tvm": "it runs only where the setting backends names it"},
    )


def inexact() -> Explanation:
    """Candidates with errors: two exact ones, one within the budget, one beyond it."""
    told = {"low_us": 1.0, "high_us": 5000.0, "comparison": 1}
    return chosen(
        [
            CandidateReport("eager", "slower", 4000.0, error=1e-7, **told),
            CandidateReport("mkldnn", "slower", 3000.0, error=0.0, **told),
            CandidateReport("mkldnn in int8", "chosen", 1000.0, error=1e-2, tolerance=0.1, **told),
            CandidateReport("eager in half", "inexact", error=0.5, tolerance=0.1, problem="large"),
            CandidateReport("inductor", "waiting"),
        ],
        tolerance="0.1 (norm)",
        decided="measured in a call",
    )


@dataclass(frozen=True)
class Profile:
    """A stand-in for a sampled profile."""

    duration_s = 2.5
    total = 400

    def region_shares(self) -> list[RegionShare]:
        return [
            RegionShare("inference0.region0", "mkldnn", 300, 0.75),
            RegionShare("outside of compiled code", "", 100, 0.25),
        ]


def words(html: str) -> str:
    """The text that is there without scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


# --- in words, and where bars are -----------------------------------------------------------------


def test_the_choice_is_told_in_words():
    """What the chart shows can be read."""
    text = words(compared().to_html())
    for told in (
        "Choice measured in a call",
        "mkldnn+eager is the fastest: 1.00 ms a call, 50 % less than onnxruntime and 4.00 times",
        "not settled yet: inductor by blocks waits to be tried",
        "mkldnn+eager chosen 1.00 ms (0.90-1.20 ms) 4.00 × eager compiled in 500 ms",
        "compiled in 500 ms , allocates 2.00 GB",
        "inductor by blocks waiting not timed compiled in 30.0 s",
        "liar failed not timed values differ at linear, model.py:3",
        "1 backend not tried tvm it runs only where the setting backends names it",
        "The code of 0 of 1 region came from the cache.",
        "No profile was given.",
    ):
        assert told in text, told


def test_what_came_from_the_cache_is_told_with_what_differed():
    explanation = compared()
    region = explanation.graphs[0].regions[0]
    region.loaded = True
    assert "The code of 1 of 1 region came from the cache." in words(explanation.to_html())
    region.loaded = False
    region.notes = ["not in the cache, where an entry for the same graph differs in: torch"]
    assert "differs in: torch" in words(explanation.to_html())


def test_a_wide_interval_does_not_squeeze_the_bars():
    """The chart ends at one and a half times the slowest median; its whisker goes on."""
    eager, winner, wide, waiting, _ = chart(compared().graphs[0]).bars
    assert (eager.length, winner.length) == (
        pytest.approx(66.667, abs=1e-3),
        pytest.approx(16.667, abs=1e-3),
    )
    assert (wide.high, wide.cut, winner.cut) == (100.0, True, False)
    assert winner.low == pytest.approx(15.0)
    assert waiting.length is None


def test_bars_of_an_earlier_comparison_are_told_to_be_scaled():
    """Only where there is one."""
    several = compared(CandidateReport("late", "slower", 8000.0, 8000.0, 8000.0, 2))
    told = "the times of eager, mkldnn+eager, onnxruntime are of an earlier comparison, multiplied"
    assert told in words(several.to_html())
    assert "earlier comparison" not in words(compared().to_html())


def test_errors_are_drawn_against_times():
    """Half as high is as much more exact; what wasn't timed, or has no error, is no point."""
    picture = scatter.scatter(inexact().graphs[0])
    assert picture is not None
    eager, exact, int8 = picture.points
    width, height = scatter.RIGHT - scatter.LEFT, scatter.BOTTOM - scatter.TOP
    assert [point.number for point in picture.points] == [1, 2, 3]
    shares = [(point.x - scatter.LEFT) / width for point in picture.points]
    assert shares == pytest.approx([1.0, 0.75, 0.25], abs=1e-3)
    assert exact.y == scatter.BOTTOM  # zeros are at the foot
    assert [label.text for label in picture.errors] == ["1e-9", "1e-7", "1e-5", "1e-3", "1e-1"]
    decade = height / 9  # from 1e-9 to 1
    assert eager.y - int8.y == pytest.approx(5 * decade, abs=0.2)
    (budget,) = picture.budgets
    assert int8.y - budget.at == pytest.approx(decade, abs=0.2)
    assert [row.name for _, row in picture.rows] == [
        "eager",
        "mkldnn",
        "mkldnn in int8",
        "eager in half",
    ]


def test_the_picture_of_errors_can_be_read():
    """It has a title, a description, and a table with the same."""
    html = inexact().to_html()
    assert html.count('<g class="point') == 3
    labelled = 'role="img" aria-labelledby="inference0-errors inference0-errors-told"'
    assert labelled in html
    text = words(html)
    assert "Error against time of the candidates of inference0" in text
    assert "3 mkldnn in int8 chosen 1.00 ms 4.00 0.01" in text
    assert "4 eager in half inexact - - 0.5" in text


def test_without_a_budget_there_is_no_picture_of_errors():
    """Nor where there is nothing to compare."""
    assert "<figure" not in compared().to_html()
    alone = chosen([CandidateReport("eager", "chosen", 1.0, error=1e-7)], tolerance="0.1 (norm)")
    assert "<figure" not in alone.to_html()


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page; it must have been quiet and offline. A picture is left beside it."""
    pages = []

    def open_page(explanation: Explanation, profile=None, **context) -> Page:
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(explanation.to_html(profile=profile), "utf-8")
        pages.append((Page(browser, file, **context), file))
        return pages[-1][0]

    yield open_page
    for page, file in pages:
        page.page.screenshot(path=str(file.with_suffix(".png")), full_page=True)
        assert file.with_suffix(".png").stat().st_size > 5000
        assert page.problems == []
        assert page.requests == []
        page.context.close()


def widths(page: Page, selector: str) -> list[float]:
    return page.page.locator(selector).evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect().width)"
    )


@pytest.mark.thorough
def test_bars_are_as_long_as_calls_take(opened):
    """Four times as fast is a quarter as long; each bar has its whisker, each row the line."""
    page = opened(compared())
    eager, winner, wide = widths(page, "#inference0 .times rect")
    assert eager > 100
    assert winner == pytest.approx(eager / 4, rel=0.02)
    assert wide == pytest.approx(eager / 2, rel=0.02)
    whiskers = widths(page, "#inference0 .whisker")
    assert whiskers[1] == pytest.approx(winner * 0.3, rel=0.1)
    assert page.page.locator(".reference").count() == 5
    line = page.page.locator(".reference").first.bounding_box()
    bar = page.page.locator("#inference0 .times rect").first.bounding_box()
    assert line["x"] == pytest.approx(bar["x"] + bar["width"], abs=2)


def test_the_winner_is_marked_by_more_than_colour(opened):
    page = opened(compared())
    marked = page.page.locator(".chosen")
    assert marked.count() == 1
    mark = marked.locator(".state").evaluate("e => getComputedStyle(e, '::before').content")
    assert "✓" in mark
    fills = page.page.locator("#inference0 .times rect").evaluate_all(
        "all => all.map((e) => getComputedStyle(e).fill)"
    )
    assert fills[1] != fills[0] == fills[2]


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.thorough
def test_charts_fit_the_screen(opened, width):
    """Nothing scrolls sideways, and bars stay long enough to be compared."""
    page = opened(compared(), Profile(), viewport={"width": width, "height": 740})
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    charts = widths(page, ".times")
    assert min(charts) >= 200
    assert max(charts) <= width
    assert max(widths(page, ".times rect")) <= max(charts)
    for row in page.page.locator(".candidate").all():
        outer = row.bounding_box()
        for part in row.locator("p, svg").all():
            inner = part.bounding_box()
            assert inner["x"] >= outer["x"] - 1
            assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1


def test_a_profiles_shares_are_bars(opened):
    page = opened(compared(), Profile())
    most, rest = widths(page, ".shares .times rect")
    assert most == pytest.approx(3 * rest, rel=0.02)
    text = " ".join(page.page.locator("#profile").inner_text().split())
    assert "400 samples in 2.50 s" in text
    assert "inference0.region0 mkldnn 75.0 % 300 samples" in text


def test_what_was_not_tried_opens_by_the_keyboard(opened):
    page = opened(compared())
    summary = page.page.locator(".untried summary")
    assert not page.page.locator(".untried dd").is_visible()
    summary.focus()
    page.press("Enter")
    assert page.page.locator(".untried dd").is_visible()


@pytest.mark.parametrize(
    ("scheme", "forced"), [("light", "none"), ("dark", "none"), ("dark", "active")]
)
@pytest.mark.thorough
def test_charts_are_accessible(opened, scheme, forced):
    """No violation of axe's rules, contrast among them."""
    from axe_playwright_python.base import AXE_FILE_PATH

    shown = compared()
    shown.graphs.extend(dataclasses.replace(one, name="inference1") for one in inexact().graphs)
    page = opened(shown, Profile(), color_scheme=scheme, forced_colors=forced)
    page.page.locator("#inference0 .untried summary").click()
    page.page.evaluate(Path(AXE_FILE_PATH).read_text("utf-8"))
    found = page.page.evaluate("axe.run()")
    problems = [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in found["violations"]]
    assert problems == []


def test_an_attack_in_the_choice_stays_text(opened):
    """Names, problems and reasons come from plugins."""
    explanation = compared(CandidateReport(ATTACK, "failed", problem=ATTACK))
    explanation.graphs[0].left_out[ATTACK] = ATTACK
    explanation.graphs[0].decided = ATTACK
    page = opened(explanation)
    assert page.page.evaluate("typeof pwned") == "undefined"
    assert page.page.locator(".candidates .problem").last.inner_text() == ATTACK

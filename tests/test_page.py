"""The page that draws an explanation: what it says, what it asks of the network, how it is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from html import unescape
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fuseboard import Explanation
from fuseboard.cli.main import app
from fuseboard.explanations.page import SECTIONS
from fuseboard.report.data import GraphReport
from tests.support.browser import Page, chromium
from tests.support.explanations import LAYER, graph, layered, node, whole

EXAMPLE = Path(__file__).parents[1] / "examples" / "explain_me.py"
ASSETS = files("fuseboard.explanations") / "assets"
DAGRE_SHA256 = "54a503e346f93ca0bb10abe7999587e037262935687aca45eb4e4b0f64bbb578"
MODEL = "import torch\nx = table[tokens]  # <the user's line>\n"


def data(html: str) -> dict:
    """The JSON in the page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(found)


def words(html: str) -> str:
    """The text that is there without scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


# --- what it says, without scripts ----------------------------------------------------------------


def test_all_is_told_in_words():
    """Screen readers, paper and browsers without scripts get breaks, regions, reasons, trips."""
    text = words(layered(24).to_html())
    for told in (
        "1 graph · 1 graph break · 146 ops: 144 on fast, 2 on eager · 1 trip · 1.0 s",
        "Graph break: Call of print",
        "can't be traced",
        "remove it",
        "Inference graph inference0",
        "Net.forward (/a/model.py:10)",
        "partition 0.25 s",
        "lower 0.75 s",
        "Reads x float32[4, 8], 1 weight; returns 1 value.",
        "Tripped: clumsy in stage lower on inference0.region25",
        "ValueError: no such op Ran instead: eager",
        "whole-graph plan considered",
        "region1 ×24 fast 6 native_layer_norm, t, addmm, gelu, add lowered once for 24 places",
        "fused: linear+gelu",
        "3 values of weights computed outside the calls",
        "sdpa fell back",
        "Not on fast, which comes first",
        "1 op on eager issue 12: no embedding",
    ):
        assert told in text, told


def test_every_section_is_there_with_its_heading():
    """A section is a row of the list and a template."""
    html = layered(2).to_html()
    for anchor, title, _ in SECTIONS:
        assert f'<section id="{anchor}"' in html
        assert re.search(rf'<h2 id="{anchor}-title">{title}</h2>', html)


def test_the_title_names_the_functions_or_is_given():
    """In the tab and as the heading."""
    assert "<title>Net.forward · fuseboard</title>" in layered(1).to_html()
    assert "<h1>a &amp; b</h1>" in layered(1).to_html(title="a & b")
    resumed = [layered(1).graphs[0], layered(1).graphs[0]]
    resumed[1].frame = "1/0 Net.torch_dynamo_resume_in_forward_at_12 (/a/model.py:10)"
    assert "<h1>Net.forward</h1>" in Explanation(resumed).to_html()


def test_a_stage_has_one_colour_in_all_graphs():
    """A forward graph hasn't the stage that an inference graph begins with."""
    first, second = layered(1).graphs[0], layered(1).graphs[0]
    first.seconds = {"fuse": 0.5, "lower": 0.5}
    second.seconds = {"lower": 0.5}
    page = Explanation([first, second]).to_html()
    assert re.findall(r'class="key (stage\d)"', page) == ["stage0", "stage2", "stage2"]


def test_nothing_compiled_is_a_page_as_well():
    """A sentence, no drawing, and what wasn't watched isn't claimed."""
    text = words(Explanation().to_html())
    assert "Nothing was compiled with fuseboard" in text
    assert "Nobody watched where Dynamo breaks graphs" in text


def test_a_page_of_1500_nodes_is_small():
    """24 layers of 62 ops each: far below a megabyte, the drawing library included."""
    page = layered(24, ops=LAYER * 10 + ("mul", "sub")).to_html()
    assert len(page.encode()) < 400_000
    (drawn,) = data(page)["graphs"]
    assert len(drawn["nodes"]) == 24 * 62 + 2


def test_the_drawing_library_is_the_published_one():
    """dagre.min.js of @dagrejs/dagre 3.1.3 as npm has it; its licence goes into each page."""
    assert hashlib.sha256((ASSETS / "dagre.min.js").read_bytes()).hexdigest() == DAGRE_SHA256
    page = layered(1).to_html()
    assert "Copyright (c) 2012-2014 Chris Pettitt" in page
    assert "Permission is hereby granted, free of charge" in page
    assert "sourceMappingURL" not in page


def test_rewrites_are_marked_on_the_copies_nodes_too():
    """A region that shares the first one's code has its rewrites on its own nodes."""
    (drawn,) = data(layered(3).to_html())["graphs"]
    names = [drawn["nodes"][i][0] for _, nodes in drawn["regions"][3]["fusions"] for i in nodes]
    assert names == ["addmm_2", "gelu_2"]


def test_rewrites_of_nodes_that_arent_in_the_region_arent_marked():
    """A backend that decomposed its copy names nodes that the captured graph hasn't."""
    explanation = layered(3)
    first = explanation.graphs[0].regions[1]
    first.fusions = [dataclasses.replace(first.fusions[0], nodes=("addmm_0", "softmax"))]
    (drawn,) = data(explanation.to_html())["graphs"]
    assert drawn["regions"][1]["fusions"] == []


# --- bad input ------------------------------------------------------------------------------------

ATTACK = (
    "</script><script>pwned=1</script><img src=x onerror=pwned=1>\"'><svg onload=pwned=1>"
    "{{7*7}}{% raw %}\u2028<!--<script>\udcff${pwned=1}"
)


def poisoned() -> Explanation:
    """An attack in every text that comes from the user's code, paths, plugins or errors."""

    def poison(value):
        if isinstance(value, str):
            return value if value in ("inference", "") else f"{value} {ATTACK}"
        if isinstance(value, dict):
            return {poison(key): poison(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(poison(item) for item in value)
        if dataclasses.is_dataclass(value):
            fields = {f.name: poison(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return type(value)(**fields)
        return value

    return poison(layered(3))


def test_no_text_becomes_markup():
    """Every tag of the page comes from a template: as many as without the attack."""
    bad, good = poisoned().to_html(title=ATTACK), layered(3).to_html()
    for tag in ("<script", "</script", "<img", "<svg"):
        assert bad.count(tag) == good.count(tag), tag
    assert "{{7*7}}" in words(bad)


def test_a_path_that_is_no_text_can_be_written(tmp_path):
    """File names may hold any bytes; Python reads them as lone surrogates."""
    (tmp_path / "page.html").write_text(poisoned().to_html(), "utf-8")
    assert "\\udcff" in (tmp_path / "page.html").read_text("utf-8")


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def opened(browser, tmp_path):
    """Opens an explanation's page; afterwards it must have been quiet and offline."""
    pages = []

    def open_page(explanation: Explanation, **context) -> Page:
        file = tmp_path / "page.html"
        file.write_text(explanation.to_html(), "utf-8")
        pages.append(Page(browser, file, **context))
        return pages[-1]

    yield open_page
    for page in pages:
        assert page.problems == []
        assert page.requests == []
        page.context.close()


def test_an_attack_stays_text(opened):
    """Nothing of it runs, in the page or in the drawing, and it can be read."""
    page = opened(poisoned())
    page.page.locator(".box .head").first.click()
    page.page.locator(".box").first.press("End")
    assert page.page.evaluate("typeof pwned") == "undefined"
    assert "<img src=x onerror=pwned=1>" in page.details()


def test_the_policy_refuses_requests_and_foreign_scripts(browser, tmp_path):
    """Were there a hole all the same, the browser itself would stop what came through."""
    file = tmp_path / "page.html"
    file.write_text(layered(1).to_html(), "utf-8")
    page = Page(browser, file)
    page.page.evaluate(
        "() => { document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"pwned=1\">');"
        " const script = document.createElement('script'); script.textContent = 'pwned=2';"
        " document.body.append(script); fetch('https://localhost/').catch(() => {}) }"
    )
    page.page.wait_for_timeout(100)
    assert page.page.evaluate("typeof pwned") == "undefined"
    assert sum("Content Security Policy" in problem for problem in page.problems) >= 2


def test_layers_are_folded_and_unfold(opened):
    """24 regions of one code are "block ×24"; opened it shows them, the first one's ops with it."""
    page = opened(layered(24))
    folded = [
        "region0, on eager, 1 op, 0.25 s",
        "block times 24, on fast, 6 ops each, modules layers.0 to layers.23",
        "region25, on eager, 1 op, 0.25 s, tripped",
    ]
    assert page.boxes() == folded
    page.box("block").click()
    boxes = page.boxes()
    assert boxes[2] == "region1, on fast, 6 ops, 0.25 s, note"
    assert boxes[3] == "native_layer_norm, on fast, float32[4, 8]"
    assert boxes[6] == "addmm, fused: linear+gelu, on fast, float32[4, 8]"
    assert sum(box.startswith("region") for box in boxes) == 26
    assert "region2, on fast, 6 ops, code of region1" in boxes
    page.box("block").click()
    assert page.boxes() == folded


def test_a_whole_graph_in_one_region_has_its_layers_folded(opened):
    """Where one backend takes everything, the model's structure is still seen."""
    page = opened(whole(24))
    assert page.boxes()[2].startswith("block times 24, on fast, 6 ops each")
    page.box("block").click()
    assert page.boxes()[3].startswith("copy 1, on fast, 6 ops, module layers.0")


def test_pointing_at_an_op_tells_all_of_it(opened, tmp_path):
    """Reason, declines, source line, value, where values come from and go to; leaving ends it."""
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    page = opened(layered(2, source=model))
    before = page.details()
    page.box("embedding").hover()
    told = page.details()
    for part in (
        "aten.embedding.default runs on eager",
        "why eager comes first",
        "fast declined issue 12: no embedding",
        f"from {model}:2 x = table[tokens] # <the user's line>",
        "value float32[4, 8]",
        "reads w (weight), x",
        "read by native_layer_norm_0, add_0",
    ):
        assert part in told, part
    page.page.mouse.move(5, 5)
    assert page.details() == before


def test_pointing_at_a_region_tells_all_of_it(opened):
    """Its backend, ops, seconds, rewrites, hoisted values, notes; trips on another one."""
    page = opened(layered(2))
    page.box("block").click()
    page.box("region1").hover()
    assert page.details() == (
        "region1 backend fast ops native_layer_norm, t, addmm, gelu, add lowered in 0.25 s "
        "fused linear+gelu hoisted 3 values of weights computed outside the calls "
        "note sdpa fell back"
    )
    page.box("region2").hover()
    assert "code the same as region1's, which was lowered for both" in page.details()
    page.box("region3").hover()
    assert "tripped clumsy in stage lower: ValueError: no such op; eager ran" in page.details()


def test_the_keyboard_does_it_all(opened):
    """One stop of Tab for the drawing; arrows, Home, End and letters in it; focus tells too."""
    page = opened(layered(3))
    page.page.locator(".buttons button").last.focus()
    page.press("Tab", "Tab")  # the scrolling view takes a stop of its own only where it must
    if not page.focused().startswith("region0"):
        page.page.locator(".box[tabindex='0']").focus()
    assert page.focused().startswith("region0")
    page.press("ArrowDown")
    assert page.focused().startswith("embedding")
    assert "fast declined issue 12" in page.details()
    page.press("ArrowDown", "ArrowRight")
    assert page.focused().startswith("block times 3")
    assert page.page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.press("ArrowRight")
    assert page.focused().startswith("region1")
    page.press("g")
    assert page.focused().startswith("getitem")
    page.press("ArrowLeft")
    assert page.focused().startswith("region1")
    page.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert page.focused().startswith("block")
    assert page.page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.press("End")
    assert page.focused().startswith("softmax")
    page.press("Home")
    assert page.focused().startswith("region0")
    assert page.page.locator(".box[tabindex='0']").count() == 1


@pytest.mark.thorough
def test_what_is_folded_can_be_searched(opened):
    """/ goes to the search; a hit inside of what is folded is unfolded and shown."""
    page = opened(layered(24))
    page.box("region0").click()
    page.press("/")
    page.page.keyboard.type("aten.gelu layers.20")
    assert "1 found" in page.page.locator(".finder").inner_text()
    page.press("Enter")
    assert "1 of 1" in page.page.locator(".finder").inner_text()
    assert "name gelu_20" in page.details()
    assert page.page.locator(".box[aria-selected='true']").bounding_box() is not None
    page.page.locator(".panel button", has_text="add_20").click()
    assert "name add_20" in page.details()


@pytest.mark.thorough
def test_all_1500_nodes_unfold_while_the_page_answers(opened):
    """Nothing blocks for long, and folding all again leaves the outermost level."""
    page = opened(layered(24, ops=LAYER * 10 + ("mul", "sub")))
    page.page.get_by_role("button", name="Unfold all").click()
    page.page.locator("[aria-busy]").wait_for(state="detached")
    assert page.page.locator(".box.op").count() == 24 * 62 + 2
    page.page.get_by_role("button", name="Fold all", exact=True).click()
    assert [box.split(",")[0] for box in page.boxes()] == ["region0", "block times 24", "region25"]


def overlaps(page: Page) -> list:
    """Pairs of sibling boxes that cover each other, and children outside of their parents."""
    return page.page.evaluate(
        """() => {
        const wrong = [];
        const rect = (e) => e.getBoundingClientRect();
        for (const inside of [...document.querySelectorAll('.tree, .open > .inside')]) {
          const own = [...inside.children].filter((e) => e.matches('.box, .pill'));
          const outer = rect(inside);
          own.forEach((a, i) => {
            const r = rect(a);
            if (r.left < outer.left - 1 || r.right > outer.right + 1 || r.bottom > outer.bottom + 1)
              wrong.push([a.textContent.slice(0, 30), 'outside']);
            for (const b of own.slice(i + 1)) {
              const s = rect(b);
              if (r.left < s.right && s.left < r.right && r.top < s.bottom && s.top < r.bottom)
                wrong.push([a.textContent.slice(0, 30), b.textContent.slice(0, 30)]);
            }
          });
        }
        return wrong; }"""
    )


@pytest.mark.parametrize("scale", [1, 1.25])
def test_boxes_never_cover_each_other(opened, scale):
    """Folded, unfolded and zoomed."""
    page = opened(layered(5))
    assert overlaps(page) == []
    page.page.get_by_role("button", name="Unfold all").click()
    page.page.locator("[aria-busy]").wait_for(state="detached")
    if scale > 1:
        page.page.get_by_role("button", name="Zoom in").click()
    assert overlaps(page) == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_screen_scrolls_downwards_only(opened, width):
    """The drawing scrolls within itself; what is told of a box is in sight below it."""
    page = opened(layered(24), viewport={"width": width, "height": 640})
    page.box("block").click()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    panel = page.page.locator(".panel")
    panel.scroll_into_view_if_needed()
    assert "block ×24" in page.details()


@pytest.mark.parametrize(
    ("scheme", "forced"), [("light", "none"), ("dark", "none"), ("dark", "active")]
)
@pytest.mark.thorough
def test_it_is_accessible(opened, scheme, forced):
    """No violation of axe's rules, contrast among them, folded and unfolded."""
    from axe_playwright_python.base import AXE_FILE_PATH

    page = opened(layered(4), color_scheme=scheme, forced_colors=forced)
    page.box("block").click()
    page.page.evaluate(Path(AXE_FILE_PATH).read_text("utf-8"))
    found = page.page.evaluate("axe.run()")
    problems = [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in found["violations"]]
    assert problems == []


@pytest.mark.thorough
def test_light_and_dark_differ(opened):
    """The page follows the reader's choice."""
    colours = {
        opened(layered(1), color_scheme=scheme).page.evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
    }
    assert len(colours) == 2


@pytest.mark.thorough
def test_backends_differ_in_colour_and_pattern(opened):
    """Neither colour nor pattern is shared by the first eight, and each swatch has its name."""
    names = [f"backend-{i}" for i in range(8)]
    nodes = [
        node(f"mm_{i}", "x", region=f"inference0.region{i}", backend=name)
        for i, name in enumerate(names)
    ]
    made = graph(nodes)
    made.backends = (*names, "eager")
    page = opened(Explanation([made]))
    looks = page.page.locator(".legend .swatch").evaluate_all(
        "all => all.map(e => getComputedStyle(e)).map(s => [s.borderColor, s.backgroundImage])"
    )
    assert len({colour for colour, _ in looks}) == 8
    assert len({pattern for _, pattern in looks}) == 8
    assert page.page.locator(".legend .tag").all_inner_texts() == names


@pytest.mark.thorough
def test_it_prints(opened):
    """On paper: no controls; a drawing fits a sheet, for which what is innermost is folded."""
    page = opened(layered(24))
    page.box("block").click()
    before = page.boxes()
    page.page.emulate_media(media="print")
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not page.page.locator(".tools").is_visible()
    assert not page.page.locator(".panel").is_visible()
    size = page.page.locator(".sizer").bounding_box()
    assert size["width"] <= 680
    assert size["height"] <= 900
    assert [box.split(",")[0] for box in page.boxes()] == ["region0", "block times 24", "region25"]
    page.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.boxes() == before
    assert page.page.pdf().startswith(b"%PDF")


def test_without_scripts_the_words_are_there(opened):
    """And a sentence says what is missing."""
    page = opened(layered(2), java_script_enabled=False)
    assert page.page.locator("noscript").count() == 1
    assert "region1 ×2" in " ".join(page.page.locator("table").inner_text().split())


def test_several_graphs_have_a_drawing_each(opened):
    """A joint graph has none: it is only split."""
    first, second = layered(2).graphs[0], layered(3).graphs[0]
    second.name = "inference1"
    joint = GraphReport("joint0", "joint", seconds={"fuse": 0.5})
    page = opened(Explanation([joint, first, second], breaks=[]))
    assert page.page.locator(".drawing").count() == 2
    assert page.page.locator(".toc a").all_inner_texts() == ["joint0", "inference0", "inference1"]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """``fuseboard explain`` in an empty directory, without compilers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEBOARD_BACKENDS", "eager")
    return lambda *arguments: CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_where(command, tmp_path):
    """A real model's: values, edges, modules and the user's lines are in it."""
    result = command(f"{EXAMPLE}:attention", "--html", "out.html")
    assert result.exit_code == 0, result.output
    assert f"The page is in {tmp_path / 'out.html'}" in " ".join(result.stdout.split())
    drawn = data((tmp_path / "out.html").read_text("utf-8"))
    (found,) = drawn["graphs"]
    strings = drawn["strings"]
    nodes = {name: rest for name, *rest in found["nodes"]}
    op, _, value, backend, *_, module, _, inputs = nodes["addmm"]
    assert (strings[op], strings[backend]) == ("aten.addmm.default", "eager")
    assert (strings[value], strings[module]) == ("float32[128, 384]", "qkv")
    assert len(inputs) == 3
    assert "return x + self.mlp(self.norm2(x))" in drawn["code"].values()
    assert sum(not fixed for _, _, fixed in found["inputs"]) == 1


def test_with_json_the_place_goes_to_stderr(command):
    """stdout stays one JSON object."""
    result = command(f"{EXAMPLE}:attention", "--json", "--html", "out.html")
    assert json.loads(result.stdout)["graphs"]
    assert "out.html" in result.stderr


@pytest.mark.parametrize("path", ["nonsuch/out.html", ".", "script.py/out.html"])
def test_a_path_that_cant_be_written_is_an_error_before_anything_runs(command, tmp_path, path):
    """Not after minutes of compiling; and nothing is left behind."""
    (tmp_path / "script.py").write_text("def run():\n    raise SystemExit(9)\n")
    result = command("script.py:run", "--html", path)
    assert result.exit_code == 2
    assert "can't be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


def test_an_error_of_the_code_leaves_an_older_page_alone(command, tmp_path):
    """The check before the run doesn't write."""
    (tmp_path / "script.py").write_text("def run():\n    raise ZeroDivisionError\n")
    (tmp_path / "old.html").write_text("old")
    assert isinstance(command("script.py:run", "--html", "old.html").exception, ZeroDivisionError)
    command("script.py:run", "--html", "new.html")
    assert (tmp_path / "old.html").read_text() == "old"
    assert not (tmp_path / "new.html").exists()

"""The HTML page in a real browser: what a reader does with it, by pointer and by keyboard, and that it stays alone.

Few pages are loaded, each once; every test ends with no message on the console, no error and no request.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from headscope.config.declarations import measure_of
from headscope.engine.evidence.function_need import need_over_models
from headscope.report.page.numbers import words
from headscope.report.page.write import asset, write_page
from headscope.results.study import Study
from tests.makers.pages import (
    add_descriptions,
    add_faithfulness,
    add_function_need,
    add_importance,
    browser,
    edit_record,
    find_browser,
    hostile_run,
    make_examples,
    removal_run,
    sweep_run,
    training_run,
)
from tests.makers.runs import make_run

pytestmark = pytest.mark.slow

IMPORTANCES = ["ablation", "taylor"]
LAYOUT = {"encoder-self": [3, 2], "decoder-self": [3, 3], "cross": [2, 2]}
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Reader:
    """A page that is open, and everything that it said or asked for."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.heard = page, list[str]()
        page.on("console", lambda message: self.heard.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.heard.append(f"error: {error}"))
        page.on("request", lambda request: self.heard.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        assert self.heard == [f"request: {path.as_uri()}"]
        assert "[object" not in str(page.text_content("main"))
        self.heard.clear()

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def names(self) -> list[str]:
        """Heads in the table, in its order."""
        return [str(name) for name in self.page.locator("#heads-table tbody th").all_inner_texts()]

    def key(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self, script: str) -> Any:
        return self.page.evaluate(f"(() => {{ const e = document.activeElement; return {script}; }})()")


def names_of(table: pd.DataFrame) -> list[str]:
    return [".".join(map(str, place)) for place in zip(table["site"], table["layer"], table["head"], strict=True)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: make_run(folder / name, LAYOUT, seed=seed) for seed, name in enumerate(("first", "second"))}
    for seed, path in enumerate(paths.values(), start=1):
        add_importance(path, seed=seed)
    add_function_need(paths["first"])
    add_descriptions(paths["first"])
    add_faithfulness(paths["first"])
    heads = pd.read_csv(paths["first"] / "heads.csv", keep_default_na=False)
    heads["functions_unsupported"] = ["syntactic:obj> (12 instances, 20 are needed)", *[""] * (len(heads) - 1)]
    heads.to_csv(paths["first"] / "heads.csv", index=False)
    make_examples(paths["first"], LAYOUT, count=2, length=5)
    edit_record(paths["first"], left_out=[{"analysis": "syntactic", "why": "needs --parse"}], remarks=["a remark"])
    others = [sweep_run(folder / "sweep", LAYOUT), removal_run(folder / "small"), training_run(folder / "train")]
    write_page([*paths.values(), *others], folder / "page.html")
    write_page([hostile_run(folder / "hostile")], folder / "hostile.html")
    return {**paths, "page": folder / "page.html", "hostile": folder / "hostile.html"}


@pytest.fixture(scope="module")
def opened(chromium: Any, runs: dict[str, Path]) -> Iterator[Reader]:
    context = chromium.new_context(viewport=DESK, color_scheme="light", accept_downloads=True)
    yield Reader(context.new_page(), runs["page"])
    context.close()


@pytest.fixture
def reader(opened: Reader) -> Iterator[Reader]:
    opened.heard.clear()
    yield opened
    assert opened.heard == []


def test_sections_and_findings(reader: Reader) -> None:
    titles = reader.page.locator("main h2").all_inner_texts()
    assert titles == [
        "Findings", "Head maps", "All heads on one sentence", "Heads in words", "Table of heads", "Importance",
        "Faithfulness", "Runs compared", "Pruning", "Training", "Measures and runs",
    ]  # fmt: skip
    assert reader.page.locator("nav a").all_inner_texts() == titles
    reader.page.locator("#overview a.head").first.click()
    name = reader.text("#overview a.head >> nth=0")
    assert reader.text("#detail h3") == name


def test_importance_has_one_scale_and_is_not_clipped(chromium: Any, runs: dict[str, Path]) -> None:
    """At the width of a phone and of a desk; a heading that is jumped to is not hidden under the bar."""
    for viewport in (DESK, PHONE):
        context = chromium.new_context(viewport=viewport, reduced_motion="reduce")
        page = Reader(context.new_page(), runs["page"]).page
        wide = "e => [...e.querySelectorAll('.bars')].map(b => b.parentNode.scrollWidth - b.parentNode.clientWidth)"
        assert page.eval_on_selector("#importance", wide) == [0] * 4
        marks = (
            "e => [...e.querySelectorAll('.ticks')].map(t => [...t.children].map(m => m.textContent + m.style.left))"
        )
        most, least, *_ = page.eval_on_selector("#importance", marks)
        assert most == least and len(most) > 1
        page.evaluate("location.hash = '#faithfulness'")
        bottom = page.eval_on_selector(".topbar", "e => e.getBoundingClientRect().bottom")
        assert page.eval_on_selector("#faithfulness h2", "e => e.getBoundingClientRect().top") >= bottom
        context.close()


def test_all_heads_of_a_sentence_are_painted_and_lead_to_their_detail(reader: Reader) -> None:
    tiny = reader.page.locator("#glance .tiny")
    assert tiny.count() == 15
    drawn = """cells => cells.filter(cell => {
        const { width, height } = cell.firstChild;
        return cell.firstChild.getContext('2d').getImageData(0, 0, width, height).data.some(Boolean);
    }).length"""
    reader.page.wait_for_function(f"({drawn})([...document.querySelectorAll('#glance .tiny')]) === 15")
    tiny.nth(1).click()
    assert reader.text("#detail h3") == str(tiny.nth(1).get_attribute("aria-label")).split(",")[0]


def test_functions_without_evidence_are_hollow_where_asked_for(reader: Reader) -> None:
    hollow = reader.page.locator("#heads .cell .hollow")
    assert hollow.count() == 0
    reader.page.get_by_label("functions without enough evidence").check()
    assert hollow.all_inner_texts() == ["▲"]
    reader.page.get_by_label("functions without enough evidence").uncheck()


def test_a_head_has_a_card_and_all_are_in_words(reader: Reader) -> None:
    lines = reader.page.locator("#words .inwords > li")
    assert lines.count() == 15
    reader.page.get_by_label("Explained mostly by").select_option("only the sentence")
    assert lines.count() == 1
    lines.locator("button").click()
    assert reader.text(".card .said") == "does what head 1 does"
    shown = [float(width) for width in reader.page.eval_on_selector_all(".card > .shares rect", WIDTHS)]
    assert shown == pytest.approx([50, 5, 0, 20, 0, 25])  # what a group takes away is not drawn
    examples = reader.page.locator(".card .example")
    assert examples.first.get_attribute("aria-label") == "w3 looks at w5, weight 0.9, in line 7"
    assert examples.first.locator("text").all_text_contents() == [f"w{place}" for place in range(9)]
    ends = [f"w{place}" for place in (*range(6), *range(27, 34))]
    assert examples.nth(1).locator("text").all_text_contents() == [*ends[:6], "…", *ends[6:]]
    assert reader.page.locator(".card .chip").all_text_contents() == ["None → dog"] * 2
    assert "ablation" in reader.text(".card .needs")
    reader.page.get_by_label("Explained mostly by").select_option("")


def test_signatures_break_after_their_marks(reader: Reader) -> None:
    signature = reader.page.locator(".signature").first
    whole = signature.text_content()
    assert whole.startswith("m:") and signature.locator("wbr").count() > whole.count("|") > 0


def test_numbers_are_rounded_as_in_sentences(reader: Reader) -> None:
    values = (0.180502, 0.3125, 0.1805, 0.1815, 999.6, 1000.5, -0.00012345, 1.2345e-6, 5, -12345.6)
    core = asset("core.js")  # the page's own functions are out of reach
    functions = core[core.index("const GROUPS") : core.index("function interval")]
    shown = reader.page.evaluate(f"(() => {{ {functions}; return {list(values)}.map(value => number(value)); }})()")
    assert shown == [words(value) for value in values]


WIDTHS = "bars => bars.map(bar => bar.getAttribute('width'))"


def test_the_table_is_sorted_by_its_headers(reader: Reader, runs: dict[str, Path]) -> None:
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False)
    header = reader.page.locator("#heads-table th", has_text="confidence")
    for order, ascending in (("descending", False), ("ascending", True)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == order
        expected = table.sort_values("confidence", ascending=ascending, kind="stable")
        assert reader.names() == names_of(expected)
    assert reader.focused("e.dataset.key") == "confidence"  # the focus stays where it was
    reader.key("Enter")
    assert header.get_attribute("aria-sort") == "descending"


def test_the_table_is_filtered(reader: Reader, runs: dict[str, Path]) -> None:
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False)
    fields = reader.page.locator("#table .controls").first
    reader.page.fill("#filter", "cross.1")
    assert set(reader.names()) == {"cross.1.0", "cross.1.1"} and "2 of 15 heads" in reader.text("#table [role=status]")
    reader.page.fill("#filter", "")
    fields.get_by_label("Site", exact=True).select_option(label="decoder-self")
    assert len(reader.names()) == 6
    fields.get_by_label("Site", exact=True).select_option(label="all")
    fields.get_by_label("Number", exact=True).select_option("confidence")
    fields.get_by_label("at least").fill("0.3")
    assert len(reader.names()) == int((table["confidence"] >= 0.3).sum())
    fields.get_by_label("at least").fill("0,3")  # as some write it
    assert len(reader.names()) == int((table["confidence"] >= 0.3).sum())
    fields.get_by_label("at least").fill("")
    fields.get_by_label("Function", exact=True).select_option("none")
    assert len(reader.names()) == int((table["functions"] == "").sum())
    fields.get_by_label("Function", exact=True).select_option("")
    assert len(reader.names()) == 15


def test_a_run_without_the_site_that_was_filtered_by_shows_its_heads(
    chromium: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    other = make_run(tmp_path / "decoder", {"decoder-self": [0, 3]}, seed=1)
    write_page([runs["first"], other], tmp_path / "page.html")
    reader = Reader(chromium.new_page(), tmp_path / "page.html")
    fields, run = (reader.page.locator(f"#{part} .controls").first for part in ("table", "heads"))
    for site, label in (("cross", ""), ("decoder-self", "sink")):
        fields.get_by_label("Site", exact=True).select_option(label=site)
        fields.get_by_label("Function", exact=True).select_option(label)
        run.get_by_label("Run", exact=True).select_option("1")
        assert len(reader.names()) == 3
        run.get_by_label("Run", exact=True).select_option("0")
    assert reader.heard == []


def test_a_click_on_a_map_shows_the_head(reader: Reader, runs: dict[str, Path]) -> None:
    page = reader.page
    page.locator('#heads .map [aria-label^="cross.1.0:"]').click()
    assert reader.text("#detail h3") == "cross.1.0"
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False).set_index(["site", "layer", "head"])
    confidence = table["confidence"].to_numpy()[table.index.get_loc(("cross", 1, 0))]
    assert f"{confidence:.3g}" in reader.text("#detail .measures")
    for title in ("Offsets of the most", "Relations against", "Most similar heads"):
        assert title in reader.text("#detail")
    page.locator("#detail .lines").wait_for()
    assert page.locator("#detail .lines .query").count() == 5
    lines = page.locator("#detail .attends").count()
    page.locator("#detail .lines .query").nth(1).hover()
    assert "looks at" in reader.text("#detail .attention [role=status]")
    assert 0 < page.locator("#detail .attends").count() != lines
    select = page.locator("#heads").get_by_label("Measure", exact=True)
    select.select_option("ablation")
    assert "ablation" in str(page.locator("#heads .map").first.get_attribute("aria-label"))
    colors = "e => [...e.querySelectorAll('[data-row]')].map(c => getComputedStyle(c).backgroundColor)"
    ablation = page.locator("#heads .map").first.evaluate(colors)
    page.locator("#heads .thumb", has_text="functions").click()
    assert page.locator("#heads .map").first.evaluate(colors) != ablation
    select.select_option("confidence")


def test_everything_is_within_reach_of_the_keyboard(reader: Reader) -> None:
    page = reader.page
    page.locator('#heads .map [aria-label^="encoder-self.0.0:"]').click()
    reader.key("ArrowRight", "ArrowRight", "ArrowDown")  # the second layer has two heads only
    assert reader.focused("e.getAttribute('aria-label').split(':')[0]") == "encoder-self.1.1"
    assert reader.focused("getComputedStyle(e).outlineStyle") == "solid"
    reader.key("Enter")
    assert reader.text("#detail h3") == "encoder-self.1.1"
    assert page.locator("#heads .map").first.locator('[tabindex="0"]').count() == 1
    page.locator("#detail .lines .query").first.focus()
    reader.key("ArrowDown")
    assert "query 2" in reader.focused("e.getAttribute('aria-label')")
    page.locator('#heads-table [data-key="confidence"]').focus()
    assert page.locator("#tip").is_visible() and "Voita et al. 2019" in reader.text("#tip")
    reader.key("Escape")
    assert not page.locator("#tip").is_visible()
    seen = set()
    page.locator(".skip").focus()
    for _ in range(140):
        reader.key("Tab")
        seen.add(reader.focused("(e.closest('section, nav, #detail') || e).id"))
    assert {"nav", "overview", "heads", "detail", "table"} <= seen


def test_importance_faithfulness_comparison_and_the_others(reader: Reader, runs: dict[str, Path]) -> None:
    page = reader.page
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False)
    best = names_of(table)[int(table["ablation"].to_numpy().argmax())]
    assert page.locator("#importance tbody th").first.inner_text() == best
    need = pd.read_csv(runs["first"] / "importance_functions.csv").query("measure == 'ablation'")
    functions = page.get_by_label("Functions and ablation").locator("tbody tr")
    assert functions.locator("th").all_inner_texts() == need["name"].tolist()
    assert [int(row.locator("td").first.inner_text()) for row in functions.all()] == need["heads"].tolist()
    assert "heads that ablation needs most" in reader.text("#importance")
    assert (
        "Area between the curves" in reader.text("#faithfulness")
        and page.locator("#faithfulness .chart path").count() == 2
    )
    over = page.get_by_label("Functions and importances over runs")
    models = [(Study.open(runs[name]).heads, list(map(measure_of, IMPORTANCES))) for name in ("first", "second")]
    expected = need_over_models(models)
    assert over.locator("tbody th").all_inner_texts() == list(dict.fromkeys(expected["name"]))
    for row in expected.to_dict("records"):
        line = over.locator("tbody tr").nth(list(dict.fromkeys(expected["name"])).index(row["name"]))
        cell = line.locator("td").nth(IMPORTANCES.index(row["measure"]))
        assert float(cell.locator("span").first.inner_text()) == pytest.approx(row["needed"], abs=0.006)
        assert cell.locator("circle").count() == row["models"]
    rows = page.get_by_label("Heads whose functions differ").locator("tbody tr").count()
    changed = pd.read_csv(runs["second"] / "heads.csv", keep_default_na=False)["functions"] != table["functions"]
    assert rows == int(changed.sum()) > 0 and "Spearman" in reader.text("#comparison")
    assert page.locator("#pruning .chart path").count() == 2 and page.locator("#pruning .stays").count() == 3
    shown = reader.text("#pruning")
    assert "accuracy (40 sentences, held-out.txt)" in shown and "non-inferior within 1%" in shown
    headers = page.locator("#pruning th").all_inner_texts()
    assert not {"own", "searched", "cached"} & set(headers) and "kept_" not in shown
    assert "kept in encoder-self" in shown and "attention heads" in shown
    assert "parameters" in shown and page.locator("#training .chart").count() >= 3
    page.locator("#heads").get_by_label("Run", exact=True).select_option(label="second")
    assert "This run kept no example sentences" in reader.text("#detail")
    page.locator("#heads").get_by_label("Run", exact=True).select_option(label="first")


def test_tables_are_saved_from_memory(reader: Reader, runs: dict[str, Path]) -> None:
    with reader.page.expect_download() as waiting:
        reader.page.get_by_text("Save all columns as CSV").click()
    saved = Path(waiting.value.path())
    rows = list(csv.reader(saved.read_text(encoding="utf-8").splitlines()))
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False)
    assert set(rows[0]) == set(table.columns) - {"functions_unsupported"} and len(rows) == len(table) + 1
    assert [float(row[rows[0].index("confidence_low")]) for row in rows[1:]] == pytest.approx(
        table["confidence_low"].tolist(), rel=1e-4
    )
    assert reader.heard.pop().startswith("request: blob:") if reader.heard else True


def test_theme(reader: Reader) -> None:
    page, button = reader.page, reader.page.locator("#theme")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    button.click()
    assert button.inner_text() == "Theme: light"
    button.click()
    assert button.inner_text() == "Theme: dark" and page.evaluate(paper) == "rgb(20, 23, 27)"
    button.click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_axe(reader: Reader, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    reader.page.emulate_media(color_scheme=scheme)
    found = Axe().run(reader.page).response["violations"]
    serious = [
        (entry["id"], [node["html"][:120] for node in entry["nodes"][:3]])
        for entry in found
        if entry["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_narrow_screen_is_never_scrolled_sideways(reader: Reader) -> None:
    reader.page.set_viewport_size(PHONE)
    assert reader.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    reader.page.locator('#heads .map [aria-label^="cross.0.1:"]').click()
    assert reader.text("#detail h3") == "cross.0.1"
    assert reader.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    parts = "e => [...e.querySelectorAll('.scroll')].filter(part => part.scrollWidth > part.clientWidth).length"
    assert reader.page.eval_on_selector("#detail", parts) == 0
    note = reader.page.locator("#detail .over + tr td").first
    assert note.inner_text().startswith("n = ") and note.bounding_box()["width"] > 250
    reader.page.set_viewport_size(DESK)


def test_the_detail_of_a_head_is_reached_at_its_top(chromium: Any, runs: dict[str, Path]) -> None:
    """Also from below, where the detail is higher than the screen."""
    context = chromium.new_context(viewport=PHONE, reduced_motion="reduce")
    reader = Reader(context.new_page(), runs["page"])
    button = reader.page.locator("#words .inwords button").first
    button.scroll_into_view_if_needed()
    button.click()
    top = reader.page.eval_on_selector("#detail h3", "e => e.getBoundingClientRect().top")
    assert 0 <= top < PHONE["height"] / 4
    context.close()


def test_hostile_texts_do_nothing(chromium: Any, runs: dict[str, Path]) -> None:
    context = chromium.new_context(viewport=PHONE, color_scheme="dark")
    reader = Reader(context.new_page(), runs["hostile"])
    reader.page.locator("#detail .lines .query").first.hover()
    reader.page.locator("#heads-table button").first.focus()
    assert reader.page.evaluate("window.broken") is None and reader.page.locator("img").count() == 0
    assert "<img src=x onerror=" in reader.text("#about") and "<img" in reader.text("#detail")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert reader.heard == []
    context.close()


def test_a_page_without_an_analysis(chromium: Any, runs: dict[str, Path]) -> None:
    folder = runs["page"].parent
    path = write_page([folder / "sweep", folder / "train"], folder / "others.html")
    context = chromium.new_context(viewport=PHONE)
    reader = Reader(context.new_page(), path)
    assert reader.page.locator("main h2").all_inner_texts() == ["Findings", "Pruning", "Training"]
    assert "l0: 3 heads can go" in reader.text("#overview") and reader.heard == []
    context.close()


def test_a_browser_that_is_missing_is_a_failure_where_ci_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_browser({"HEADSCOPE_CHROMIUM": "/opt/own"}) == "/opt/own"
    with pytest.raises(pytest.skip.Exception, match="make browser"):
        find_browser({})
    with pytest.raises(pytest.fail.Exception, match="make browser"):
        find_browser({"CI": "1"})

"""The HTML page in a real browser: what a reader does with it, by pointer and by keyboard, and that it stays alone.

Few pages are loaded, each once; every test ends with no message on the console, no error and no request.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.report.page.write import write_page
from headscope.results.answer import number_text
from tests.makers.figures import make_faithfulness, make_sweep, make_training
from tests.makers.pages import (
    add_descriptions,
    add_function_need,
    add_importance,
    browser,
    edit_record,
    hostile_run,
    make_examples,
    removal_run,
)
from tests.makers.runs import make_run

pytestmark = pytest.mark.slow

LAYOUT = {"encoder-self": [3, 2], "decoder-self": [3, 3], "cross": [2, 2]}
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Reader:
    """An open page, and every message and request of it."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.events = page, list[str]()
        page.on("console", lambda message: self.events.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.events.append(f"error: {error}"))
        page.on("request", lambda request: self.events.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        assert self.events == [f"request: {path.as_uri()}"]
        assert "[object" not in str(page.text_content("main"))
        self.events.clear()

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def names(self) -> list[str]:
        """Heads in the table, in its order."""
        return [str(name) for name in self.page.locator("#rows tbody th").all_inner_texts()]

    def key(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def evaluate_focus(self, script: str) -> Any:
        return self.page.evaluate(f"(() => {{ const e = document.activeElement; return {script}; }})()")


def names_of(table: pd.DataFrame) -> list[str]:
    return [".".join(map(str, parts)) for parts in zip(table["site"], table["layer"], table["head"], strict=True)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as instance:
        yield instance


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: make_run(folder / name, LAYOUT, seed=seed) for seed, name in enumerate(("first", "second"))}
    for seed, path in enumerate(paths.values(), start=1):
        add_importance(path, seed=seed)
    add_function_need(paths["first"])
    add_descriptions(paths["first"])
    make_faithfulness(paths["first"], np.random.default_rng(5))
    heads = pd.read_csv(paths["first"] / "heads.csv", keep_default_na=False)
    heads["functions_unsupported"] = ["syntactic:obj> (12 instances, 20 are needed)", *[""] * (len(heads) - 1)]
    heads.to_csv(paths["first"] / "heads.csv", index=False)
    make_examples(paths["first"], LAYOUT, count=2, length=5)
    edit_record(paths["first"], left_out=[{"analysis": "syntactic", "why": "needs --parse"}], remarks=["a remark"])
    other_runs = [
        make_sweep(folder / "sweep", LAYOUT),
        removal_run(folder / "small"),
        make_training(folder / "train", LAYOUT, "mixing"),
    ]
    write_page([*paths.values(), *other_runs], folder / "page.html")
    write_page([hostile_run(folder / "hostile")], folder / "hostile.html")
    write_page([make_run(folder / "wide", {"decoder-self": [12] * 14})], folder / "wide.html")
    return {**paths, **{name: folder / f"{name}.html" for name in ("page", "hostile", "wide")}}


@pytest.fixture(scope="module")
def page_reader(chromium: Any, runs: dict[str, Path]) -> Iterator[Reader]:
    context = chromium.new_context(viewport=DESK, color_scheme="light", accept_downloads=True)
    yield Reader(context.new_page(), runs["page"])
    context.close()


@pytest.fixture
def reader(page_reader: Reader) -> Iterator[Reader]:
    page_reader.events.clear()
    yield page_reader
    assert page_reader.events == []


def test_sections_in_their_order_and_findings_lead_to_heads(reader: Reader) -> None:
    titles = reader.page.locator("main h2").all_inner_texts()
    assert titles == [
        "Heads and their functions", "Findings", "Comparison", "Figures", "Pruning", "Training", "Table of heads",
        "Definitions and runs",
    ]  # fmt: skip
    targets = "links => links.every(link => document.querySelector(link.getAttribute('href')))"
    assert reader.page.eval_on_selector_all("nav a, .skip", targets)
    first = reader.page.locator("#findings a.head").first
    first.click()
    assert reader.text("#card h3") == first.inner_text()
    assert reader.page.locator(".figure img").count() == 11
    is_loaded = "images => images.every(image => image.complete && image.naturalWidth > 100)"
    assert reader.page.eval_on_selector_all(".figure img", is_loaded)


def test_search_finds_a_head_by_its_name_before_longer_ones(chromium: Any, runs: dict[str, Path]) -> None:
    context = chromium.new_context(viewport=DESK)
    reader = Reader(context.new_page(), runs["wide"])
    reader.key("Control+k")
    reader.page.keyboard.type("3.1")
    options = reader.page.locator("#found [role=option]")
    assert [text.split()[0] for text in options.all_inner_texts()][:3] == ["3.1", "3.10", "3.11"]
    assert options.first.get_attribute("aria-selected") == "true"
    reader.key("ArrowDown", "ArrowUp", "Enter")
    assert reader.text("#card h3") == "3.1" and reader.evaluate_focus("e.id") == "card"
    assert not reader.page.locator("#found").is_visible()
    reader.key("Control+k")
    reader.page.keyboard.type("definitions")
    reader.key("Enter")
    assert reader.page.evaluate("location.hash") == "#about" and reader.events == []
    context.close()


def test_a_card_has_sentence_examples_importance_and_attention(reader: Reader, runs: dict[str, Path]) -> None:
    page = reader.page
    page.locator('.maps:visible [data-name="cross.1.0"]').click()
    assert reader.text("#card h3") == "cross.1.0"
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False).set_index(["site", "layer", "head"])
    row = table.index.get_loc(("cross", 1, 0))
    assert reader.text("#card .sentence") == f"does what head {row} does"
    assert number_text(table["ablation"].to_numpy()[row]) in page.get_by_label("Importance", exact=True).inner_text()
    assert page.locator("#card .example").first.inner_text().startswith("w0 w1 w2 w3 w4 w5 w6 → w2 w3")
    assert page.locator("#card .example b").first.inner_text() == "w3"
    assert page.locator("#card .example mark").first.inner_text() == "w5"
    widths = page.eval_on_selector_all("#card .bar rect", "bars => bars.map(bar => bar.getAttribute('width'))")
    assert [float(width) for width in widths] == pytest.approx([50, 5, 20])
    page.locator("#card .lines").wait_for()
    lines = page.locator("#card .attends").count()
    page.locator("#card .lines .query").nth(1).hover()
    assert "looks at" in reader.text("#card [role=status]") and " %)" in reader.text("#card [role=status]")
    assert 0 < page.locator("#card .attends").count() != lines


def test_the_table_is_sorted_and_filtered(reader: Reader, runs: dict[str, Path]) -> None:
    table = pd.read_csv(runs["first"] / "heads.csv", keep_default_na=False)
    header = reader.page.locator("#rows th", has_text="ablation")
    for order, ascending in (("ascending", False), ("descending", True)):  # from the first place, then from the last
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == order
        assert reader.names() == names_of(table.sort_values("ablation", ascending=ascending, kind="stable"))
    assert reader.evaluate_focus("e.dataset.key") == "ablation"  # the focus stays where it was
    reader.page.fill("#filter", "cross.1")
    assert set(reader.names()) == {"cross.1.0", "cross.1.1"} and reader.text("#shown") == "2 of 15 heads"
    reader.page.fill("#filter", "rarest")
    assert set(reader.names()) == set(names_of(table[table["functions"].str.contains("rare")]))
    reader.page.fill("#filter", "")
    columns = reader.page.locator("#rows th[scope=col]").count()
    reader.page.get_by_label("all columns").check()
    assert reader.page.locator("#rows th[scope=col]").count() > columns
    reader.page.get_by_label("all columns").uncheck()


def test_everything_is_within_reach_of_the_keyboard(reader: Reader) -> None:
    page = reader.page
    page.locator('.maps:visible [data-name="encoder-self.0.0"]').click()
    reader.key("ArrowRight", "ArrowRight", "ArrowDown")  # the second layer has two heads only
    assert reader.evaluate_focus("e.dataset.name") == "encoder-self.1.1"
    assert reader.evaluate_focus("getComputedStyle(e).outlineStyle") == "solid"
    reader.key("Enter")
    assert reader.text("#card h3") == "encoder-self.1.1"
    assert page.locator('.maps:visible [tabindex="0"].cell').count() == 1
    page.locator("#card .lines .query").first.focus()
    reader.key("ArrowDown")
    assert "query 2" in reader.evaluate_focus("e.getAttribute('aria-label')")
    page.get_by_role("button", name="Next head").focus()
    reader.key("Enter", "Enter")
    assert reader.text("#card h3") == "decoder-self.0.1" and reader.evaluate_focus("e.textContent") == "Next head"
    ids = set()
    page.locator(".skip").focus()
    for _ in range(120):
        reader.key("Tab")
        ids.add(reader.evaluate_focus("(e.closest('section, nav, #card, .search') || e).id"))
    assert {"heads", "card", "findings", "figures", "pruning", "table"} <= ids


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_axe(reader: Reader, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    reader.page.emulate_media(color_scheme=scheme)
    violations = Axe().run(reader.page).response["violations"]
    serious = [
        (entry["id"], [node["html"][:120] for node in entry["nodes"][:3]])
        for entry in violations
        if entry["impact"] in ("serious", "critical")
    ]
    assert serious == []


@pytest.mark.parametrize("name", ["page", "wide", "hostile"])
def test_a_narrow_screen_is_never_scrolled_sideways(chromium: Any, runs: dict[str, Path], name: str) -> None:
    """Also with hostile texts, which do nothing; nothing of a card is cut off."""
    context = chromium.new_context(viewport=PHONE, color_scheme="dark")
    reader = Reader(context.new_page(), runs[name])
    for part in reader.page.locator("details").all():
        part.evaluate("part => { part.open = true; }")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    overflow = (
        "e => [...e.querySelectorAll('.scroll')].slice(0, 1).filter(part => part.scrollWidth > part.clientWidth).length"
    )
    assert name == "hostile" or reader.page.eval_on_selector("#card", overflow) == 0
    assert (
        reader.page.evaluate("window.broken") is None
        and reader.page.locator("img:not([src^='data:image/svg+xml,'])").count() == 0
    )
    assert reader.events == [] and ("<img" in reader.text("#about")) == (name == "hostile")
    context.close()

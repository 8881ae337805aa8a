"""The HTML page as a text: its content, that it is one file with a strict policy, and that texts stay texts."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from headscope.errors import ConfigError, OutputError
from headscope.files.tables import Example
from headscope.report.page.heads import examples_data, window
from headscope.report.page.write import Report, gather, image_html, page_html, write_page
from headscope.results.answer import number_text
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.sweep import Sweep
from headscope.results.training import Training
from tests.makers.figures import draw_nothing, make_faithfulness, make_sweep, make_training
from tests.makers.pages import (
    HOSTILE,
    PAIRS,
    add_descriptions,
    add_importance,
    hostile_run,
    large_run,
    make_examples,
    removal_run,
)
from tests.makers.runs import make_run

LAYOUT = {"encoder-self": [3, 2], "cross": [2, 2]}


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of scripts, styles and data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, str] = {}
        self.open = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if self.open and tag in ("script", "style"):
            name = attributes.get("id") or tag
            self.contents[name] = self.contents.get(name, "") + data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with importance and examples; no figure is drawn."""
    draw_nothing(monkeypatch)
    path = make_run(tmp_path / "bert", LAYOUT)
    add_importance(path)
    make_examples(path, LAYOUT, count=2, length=5)
    return path


def read_page(*paths: Path) -> tuple[str, dict[str, Any], Elements]:
    html = page_html(gather(paths))
    elements = Elements(html)
    return html, json.loads(elements.contents["data"]), elements


@pytest.mark.slow
def test_a_page_is_one_file_that_may_do_nothing_but_run_its_own_script(run: Path) -> None:
    make_faithfulness(run, np.random.default_rng(5))
    html, _, elements = read_page(run)
    policy = next(entry["content"] for tag, entry in elements.tags if entry.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.contents[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    for tag, attributes in elements.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href", "action", "xlink:href"):
            assert (attributes.get(name) or "#")[:5].startswith(("#", "data:")), tag
    assert not re.search(
        r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", elements.contents["style"] + elements.contents["script"]
    )
    assert not re.search(
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|Function\\(", elements.contents["script"]
    )
    assert html.count("<script") == 2 and html.count("<style") == 1 and html.count("<img src") == 3
    ids = [attributes["id"] for _, attributes in elements.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_numbers_are_texts_with_intervals_and_places(run: Path) -> None:
    (data,) = read_page(run)[1]["runs"]
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    assert data["sites"] == list(LAYOUT) and len(data["heads"]) == len(table)
    measures = {measure["name"]: measure for measure in data["measures"]}
    assert measures["ablation"]["texts"] == [number_text(value) for value in table["ablation"]]
    ranks = table["ablation"].rank(ascending=False).astype(int)
    assert measures["ablation"]["places"] == list(ranks)
    assert measures["ablation"]["ranks"] == [f"{rank} of 9" for rank in ranks]
    head = data["heads"][0]
    ends = " to ".join(number_text(table[f"ablation_{end}"][0]) for end in ("low", "high"))
    assert measures["ablation"]["ends"][0] == ends
    order = sorted((entry["importance"], name) for name, entry in measures.items() if entry["importance"] is not None)
    assert [name for _, name in order] == ["ablation", "taylor"]
    tables = {title: [dict(zip(columns, row, strict=True)) for row in rows] for title, columns, rows in head["tables"]}
    best = pd.read_csv(run / "positional.csv").query("site == 'encoder-self' and layer == 0 and head == 0")
    shares = best["share"].nlargest(8)
    assert [row["share"] for row in tables["Positional"]] == [number_text(share) for share in shares]
    relations = pd.read_csv(run / "syntactic.csv").query("site == 'encoder-self' and layer == 0 and head == 0")
    clearest = relations.iloc[int(relations["margin"].to_numpy().argmax())]
    ends = " to ".join(number_text(clearest[f"accuracy_{end}"]) for end in ("low", "high"))
    assert tables["Syntactic"][0]["accuracy 95 %"] == ends


@pytest.mark.slow
def test_importance_and_joint_effects_of_roles_stand_on_cards(run: Path) -> None:
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    rows = table[["site", "layer", "head"]].assign(measure="ablation", p_adjusted=[0.2, 0.01, 0.06, *[0.04] * 6])
    rows = rows.assign(value=table["ablation"], value_low=table["ablation_low"], value_high=table["ablation_high"])
    rows.assign(rank=rows["value"].rank(ascending=False).astype(int)).to_csv(run / "importance.csv", index=False)
    table["functions"] = ["positional:-1", *[""] * 8]
    table.to_csv(run / "heads.csv", index=False)
    joint = {"role": "previous token", "value": 0.11, "random_low": 0.0, "random_high": 0.03, "sets": 9, "text": "text"}
    pd.DataFrame([joint]).to_csv(run / "roles.csv", index=False)
    report = gather([run])
    (data,) = report.runs
    assert data["heads"][0]["joint"] == ["damage if all heads of “previous token” are off: 0.11 (random 0 to 0.03)"]
    ranks = next(measure["ranks"] for measure in data["measures"] if measure["name"] == "ablation")
    assert ["not told from zero" in rank for rank in ranks] == [True, False, True, *[False] * 6]
    assert data["start"] == int(table["ablation"].to_numpy().argmax())
    name = data["heads"][data["start"]]["name"]
    findings = report.sections["Findings"][0].answers
    assert findings == Study.open(run).answers() and findings[1].heads[0] == name
    assert f'<a class="head" href="#head=0/{name}">{name}</a>' in page_html(report)


@pytest.mark.slow
def test_labels_without_evidence_are_said_to_have_none(run: Path) -> None:
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    unsupported = ["syntactic:amod> (4 instances, 20 are needed)", *[""] * (len(table) - 1)]
    table.assign(functions_unsupported=unsupported).to_csv(run / "heads.csv", index=False)
    row = {"site": "encoder-self", "layer": 0, "head": 0, "label": "syntactic:amod>", "given": False}
    row |= {"measure": "syntactic_margin", "value": 0.25, "value_low": -0.83, "instances": 4, "p_adjusted": np.nan}
    pd.DataFrame([{**row, "missing": "4 instances, 20 are needed"}]).to_csv(run / "labels.csv", index=False)
    data = read_page(run)[1]
    head = data["runs"][0]["heads"][0]
    assert head["weak"] == unsupported[:1] and data["labels"][unsupported[0]][3] == "head → dependent (amod)"
    title, columns, rows = head["tables"][0]
    assert (title, columns) == ("Labels", ["", ""]) and rows[0] == ["label", "syntactic:amod>"]
    assert ["given", "no"] in rows and ["value low", "−0.83"] in rows and "p adjusted" not in dict(rows)


@pytest.mark.slow
def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    html, data, elements = read_page(hostile_run(tmp_path / "r"))
    assert (
        html.count("<img") == html.count('<img src="data:image/svg+xml,')
        and "</script><" not in elements.contents["data"]
        and "<b>" not in html
    )
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert data["runs"][0]["examples"]["sentences"][0]["subwords"]["source"] == [HOSTILE] * 4
    compact = Study.open(tmp_path / "r")._repr_html_()
    assert "<img" not in compact and "<script" not in compact and "<b>" not in compact


def test_figures_are_images_of_well_formed_svg() -> None:
    figure = Figure()
    figure.suptitle("a < b \x1b 0.123456")
    figure.subplots().plot([0.123456, 1], [0, 1])
    html = str(image_html(figure, 'a "title"'))
    assert html.startswith('<img src="data:image/svg+xml,%3C') or html.startswith('<img src="data:image/svg+xml,&lt;')
    (_, attributes), *siblings = Elements(html).tags
    assert not siblings and attributes["alt"] == 'a "title"'
    svg = unquote(str(attributes["src"]).partition(",")[2])
    texts = [text for element in ElementTree.fromstring(svg).iter() if (text := (element.text or "").strip())]
    assert "a < b \ufffd 0.123456" in texts and not re.search(r' d="[^"]*\d\.\d{3}', svg)


@pytest.mark.slow
def test_two_runs_are_compared_first_and_head_by_head(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_run(tmp_path / "other", LAYOUT, seed=2)
    report = gather([run, other])
    first, second = (pd.read_csv(path / "heads.csv", keep_default_na=False) for path in (run, other))
    study = Study.open(run)
    comparison = study.compare(Study.open(other))
    assert report.blocks[0].answers == comparison.answers()[1:]
    verdict, largest, functions, orders = (answer for answer in report.blocks[0].answers if not answer.detail)
    unequal = [
        set(a.split(";")) != set(b.split(";")) for a, b in zip(first["functions"], second["functions"], strict=True)
    ]
    assert functions.sentence.startswith(f"{sum(unequal)} of 9 heads") and len(functions.heads) == sum(unequal) > 0
    gaps, table = (second["confidence"] - first["confidence"]).abs(), comparison.tables["heads"]
    assert largest.heads[0] == ".".join(map(str, first[["site", "layer", "head"]].iloc[int(gaps.to_numpy().argmax())]))
    widths = [heads["confidence_high"] - heads["confidence_low"] for heads in (first, second)]
    errors = (widths[0] ** 2 + widths[1] ** 2) ** 0.5 / (2 * 1.959964)
    p = [math.erfc(z / math.sqrt(2)) for z in gaps / errors]
    np.testing.assert_allclose(table["p"], p, rtol=1e-5)
    count = (table["p_adjusted"] <= 0.05).sum() or "none"
    assert verdict.question == "Do heads differ" and verdict.sentence.startswith(f"{count} of 9 heads, by ")
    measures = comparison.tables["measures"].set_index("measure")
    ranks = first["confidence"].rank().corr(second["confidence"].rank())
    np.testing.assert_allclose(measures.loc["confidence", "spearman"], ranks)
    assert orders.table is not None and orders.table.rows[0][0] == "confidence"
    assert orders.table.rows[0][1] == f"{ranks:.2f}".replace("-", "−")
    assert "ablation" not in measures.index  # the other run has none
    assert report.sections["Comparison"][0].figures and list(report.sections)[:2] == ["Findings", "Comparison"]
    monkeypatch.setattr("headscope.report.page.write.draw", lambda *_, **__: [])
    refusal, *_ = gather([run, make_run(tmp_path / "wide", {"encoder-self": [4]})]).blocks[0].answers
    assert refusal.caution and refusal.sentence == "heads of encoder-self, cross: the layouts differ"
    assert [data["name"] for data in gather([run, run]).runs] == ["bert (1)", "bert (2)"]


@pytest.mark.slow
def test_a_large_run_stays_small(tmp_path: Path) -> None:
    report = gather([large_run(tmp_path / "large", layers=10, heads=3, sentences=6)])
    (data,) = report.runs
    assert len(data["heads"]) == 90 and len(data["measures"]) > 40
    assert len(data["examples"]["sentences"]) == 6 and data["examples"]["left_out"] == 0
    assert len(page_html(report).encode()) < 1_000_000


@pytest.mark.parametrize("shape", ["sharp", "even"])
def test_weights_of_any_number_of_sentences_take_what_room_there_is(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(2)
    weights = (
        random.integers(0, 255, (7, 11, 13), dtype=np.uint8) if shape == "even" else np.zeros((7, 11, 13), np.uint8)
    )
    sides = {"target": ["t"] * 11, "source": ["s"] * 13}
    examples = [Example(number, {"source": "s"}, sides, {"cross": weights}) for number in range(5)]
    monkeypatch.setattr("headscope.report.page.heads.MAX_LETTERS", 1500)
    data = examples_data(examples)
    assert data is not None
    letters = [sentence["sites"]["cross"]["packed"] for sentence in data["sentences"]]
    assert sum(map(len, letters)) <= 1500
    assert data["left_out"] == 5 - len(letters) and (shape == "even") == (data["left_out"] > 0)


@pytest.mark.slow
def test_pruning_removal_and_training_have_their_parts(run: Path, tmp_path: Path) -> None:
    other_runs = (
        make_sweep(tmp_path / "sweep", LAYOUT),
        removal_run(tmp_path / "small"),
        make_training(tmp_path / "train", LAYOUT, "mixing"),
    )
    report = gather([*other_runs, run])
    removal, sweep = report.sections["Pruning"]
    assert removal.answers[0].caution and removal.answers[0].sentence.endswith("NOT SHOWN TO BE AS GOOD")
    html = page_html(report)
    assert '<td class="worse">worse by 0.05, perhaps 0.09</td>' in html
    assert sweep.answers == Sweep.open(other_runs[0]).answers() and len(sweep.figures) == 3
    sizes = next(answer.table for answer in sweep.answers if answer.table is not None)
    heads, change = sizes.columns.index("heads"), sizes.columns.index("change")
    assert [row[heads] for row in sizes.rows][:4] == ["9", "7", "4", "2"]
    assert [row[change] for row in sizes.rows][:2] == ["", "−0.4"]
    (training,) = report.sections["Training"]
    assert training.answers == Training.open(other_runs[2]).answers() and len(training.figures) == 1


def test_kinds_of_runs_and_what_is_none(run: Path, tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"directory.*nowhere.*analyze|no run\.json.*analyze"):
            gather([missing])
    other = tmp_path / "conversion"
    other.mkdir()
    (other / "run.json").write_text('{"kind": "demonstration"}', encoding="utf-8")
    with pytest.raises(RunError, match="demonstration"):
        gather([other])
    out = tmp_path / "page.png"
    with pytest.raises(ConfigError, match=r"page\.png.*\.html"):
        write_page([run], out)
    (tmp_path / "page.html").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="--force"):
        write_page([run], tmp_path / "page.html", force=False)
    assert "<title>nothing" in page_html(Report("nothing"))


@pytest.mark.slow
def test_cards_have_sentences_examples_and_pairs(run: Path) -> None:
    add_descriptions(run)
    html, data, _ = read_page(run)
    heads = data["runs"][0]["heads"]
    assert [head["sentence"] for head in heads[:2]] == [HOSTILE, "does what head 1 does"] and HOSTILE not in html
    assert [part[2:] for part in heads[0]["bar"]] == [  # what a group takes away is not drawn
        ["0.5", "0.0", "50.0"], ["0.05", "50.0", "5.0"], ["0.2", "55.0", "20.0"],
    ]  # fmt: skip
    near, far = heads[0]["examples"]
    words = [[f"w{position}", {3: "query", 5: "key"}.get(position, "")] for position in range(9)]
    assert near == {"line": 7, "weight": "0.9", "words": words}
    query, key = ([[f"w{position}", ""] for position in range(*ends)] for ends in ((27, 34), (6,)))
    query[3][1], key[2][1] = "query", "key"
    assert far["words"] == [*key, ["…", ""], *query]
    assert heads[-1]["examples"][1]["words"] == [*query, ["→", ""], *key]
    assert len(heads[0]["pairs"]) == len(PAIRS)
    assert heads[0]["pairs"][0][1:] == ["None → dog", "score 2.5, weight 0.7, count 6"]
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    table.loc[0, "explained"] = np.nan
    table["explained_token"] = np.nan  # nothing was found out about it
    table.to_csv(run / "heads.csv", index=False)
    assert [head["bar"] for head in gather([run]).runs[0]["heads"]][:2] == [
        [], [heads[1]["bar"][0], ["pairs of words", "g3", "0.2", "50.0", "20.0"]],
    ]  # fmt: skip


@pytest.mark.parametrize("text, at, expected", [
    ("a [b] c", 1, {0: "a", 1: "[b]", 2: "c"}),
    ("[[CLS]] a", 0, {0: "[[CLS]]", 1: "a"}),
    ("… " + " ".join(["x"] * 12) + " [y] …", 13, {**dict.fromkeys(range(1, 13), "x"), 13: "[y]"}),
    ("… x [y]", 13, {}),  # no window of that place
    ("a b [c]", 1, {}),
    ("", 0, {}),
])  # fmt: skip
def test_words_of_a_window(text: str, at: int, expected: dict[int, str]) -> None:
    assert window(text, at) == expected

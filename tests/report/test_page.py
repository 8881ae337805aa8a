"""The HTML page as a text: what it says, that it is one file with a strict policy, and that texts stay texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import headscope as hs
from headscope.config.declarations import measure_of
from headscope.engine.evidence.need import agreement_table
from headscope.engine.rank_correlation import ranked
from headscope.errors import ConfigError, OutputError
from headscope.files.tables import Example
from headscope.pruning.closed_form.calibration import share
from headscope.report.page.analysis import examples_data, pack
from headscope.report.page.cards import window
from headscope.report.page.numbers import rounded, spearman, words
from headscope.report.page.pruning import removal_data
from headscope.report.page.write import (
    SCRIPTS,
    asset,
    data_json,
    gather,
    page_html,
    report_of,
    write_page,
)
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from tests.makers.pages import (
    HOSTILE,
    PAIRS,
    add_descriptions,
    add_faithfulness,
    add_function_need,
    add_importance,
    edit_record,
    hostile_run,
    large_run,
    make_examples,
    removal_run,
    sweep_run,
    training_run,
)
from tests.makers.runs import make_run

LAYOUT = {"encoder-self": [3, 2], "cross": [2, 2]}
TEXTS = ("held_out", "check")


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of scripts, styles and data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self.open = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        tag, attributes = self.found[-1] if self.found else ("", {})
        if self.open and tag in ("script", "style"):
            name = attributes.get("id") or tag
            self.inside[name] = self.inside.get(name, "") + data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "bert", LAYOUT)
    add_importance(path)
    make_examples(path, LAYOUT, count=2, length=5)
    return path


def page_of(*paths: Path) -> tuple[str, dict[str, Any], Elements]:
    html = page_html(gather(paths))
    elements = Elements(html)
    return html, json.loads(elements.inside["data"]), elements


def test_a_page_is_one_file_that_may_do_nothing_but_run_its_own_script(run: Path) -> None:
    html, _, elements = page_of(run)
    policy = next(entry["content"] for tag, entry in elements.found if entry.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for name in ("script", "style"):
        hashed = base64.b64encode(hashlib.sha256(elements.inside[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{hashed}'" in policy
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#")[:5] in ("#over", "#head", "#", "data:")
    assert not re.search(
        r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", elements.inside["style"] + elements.inside["script"]
    )
    assert not re.search(
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|Function\\(", elements.inside["script"]
    )
    assert html.count("<script") == 2


def test_scripts_are_all_taken_and_short() -> None:
    folder = Path(__file__).resolve().parents[2] / "headscope" / "report" / "page" / "browser-files"
    assert {path.stem for path in folder.glob("*.js")} == set(SCRIPTS)
    assert all(asset(f"{name}.js").count("\n") <= 400 for name in SCRIPTS)


def test_what_the_page_holds_is_what_the_files_say(run: Path) -> None:
    _, report, _ = page_of(run)
    (data,) = report["analyses"]
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    assert data["layout"] == LAYOUT and len(data["site"]) == len(table)
    measures = {measure["name"]: measure for measure in data["measures"]}
    np.testing.assert_allclose(measures["confidence"]["values"], table["confidence"], rtol=1e-4)
    np.testing.assert_allclose(measures["confidence"]["bounds"][1], table["confidence_high"], rtol=1e-4)
    assert "Voita et al. 2019" in measures["confidence"]["about"] and measures["ablation"]["group"] == "importance"
    assert measures["ablation"]["scale"]["low"] == -measures["ablation"]["scale"]["high"]  # zero in the middle
    assert [";".join(labels) for labels in data["functions"]] == table["functions"].tolist()
    offsets = pd.read_csv(run / "positional.csv")
    number, (_, own) = next(
        (number, group)
        for number, group in enumerate(offsets.groupby(["site", "layer", "head"], sort=False))
        if group[1]["offset"].abs().max() > 15
    )
    near, shown = own["offset"].abs() < 15, data["offsets"][str(number)]
    assert [share for offset, share, *_ in shown if abs(offset) < 15] == pytest.approx(own["share"][near], abs=1e-4)
    beyond = [share for offset, share, *_ in shown if abs(offset) == 15]
    assert sum(beyond) == pytest.approx((own["count"] / own["count"].sum())[~near].sum(), abs=1e-3) and sum(beyond) > 0
    assert data["relations"]["labels"] and len(data["relations"]["rows"]["0"]) == 8
    assert data["similar"]["rows"]["cka"]["0"][0][0] in (1, 2)  # a head of the same layer, not itself
    assert data["importance"]["measures"] == ["ablation", "taylor"]


@pytest.mark.parametrize("count", [2, 9])
def test_importances_agree_as_the_run_says(run: Path, count: int) -> None:
    """The median of the same correlations as in `importance_agreement.csv`, also where two heads have both numbers."""
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    table.loc[count:, "taylor"] = np.nan
    table.to_csv(run / "heads.csv", index=False)
    pairs = agreement_table(table.astype({"taylor": float}), [measure_of("ablation"), measure_of("taylor")])
    (data,) = gather([run])["analyses"]
    assert data["importance"]["median"] == pytest.approx(pairs["spearman"].median(), abs=1e-4)
    assert data["importance"]["agreement"][0][1] == data["importance"]["agreement"][1][0] is not None


def test_findings_are_the_answers_of_the_study(run: Path) -> None:
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    names = [".".join(map(str, place)) for place in zip(table["site"], table["layer"], table["head"], strict=True)]
    rows = table[["site", "layer", "head"]].assign(measure="ablation", p_adjusted=[0.2, 0.01, 0.06, *[0.04] * 6])
    rows = rows.assign(value=table["ablation"], value_low=table["ablation_low"], value_high=table["ablation_high"])
    rows.assign(rank=rows["value"].rank(ascending=False).astype(int)).to_csv(run / "importance.csv", index=False)
    report = gather([run])
    (data,) = report["analyses"]
    assert data["findings"] == Study.open(run).answers()
    first, needed = data["findings"][:2]
    assert first.sentence.startswith("all-MiniLM-L6-v2 (bert): 9 heads (encoder-self 2 × 3/2; cross 2 × 2)")
    most = names[int(table["ablation"].to_numpy().argmax())]
    assert needed.heads[0] == most and needed.sentence.startswith("2 of 9 heads cannot be told from zero")
    assert f'<a class="head" href="#head=0/{most}">{most}</a>' in page_html(report)


def test_labels_without_evidence_are_said_to_have_none(run: Path) -> None:
    table = pd.read_csv(run / "heads.csv", keep_default_na=False)
    lacking = ["syntactic:amod> (4 instances, 20 are needed);syntactic:amod> (p 0.1 is 1)", *[""] * (len(table) - 1)]
    table.assign(functions_unsupported=lacking).to_csv(run / "heads.csv", index=False)
    row = {"site": "encoder-self", "layer": 0, "head": 0, "label": "syntactic:amod>", "given": False}
    row |= {"measure": "syntactic_margin", "value": 0.25, "value_low": -0.83, "instances": 4, "p_adjusted": np.nan}
    pd.DataFrame([{**row, "missing": "4 instances, 20 are needed"}]).to_csv(run / "labels.csv", index=False)
    _, report, _ = page_of(run)
    (data,) = report["analyses"]
    assert (
        data["unsupported"][0] == lacking[0].split(";")
        and data["unsupported"][1] == []
        and data["texts"][0]["name"] != "labels"
    )
    (answer,) = [answer for answer in Study.open(run).answers() if answer.question == "Not enough evidence"]
    assert answer.table is not None and answer.detail
    assert answer.table.rows[0] == ("encoder-self.0.0", "head → dependent (amod)", "4 instances, 20 are needed")
    assert data["evidence"]["columns"][:3] == ["label", "given", "measure"]
    assert data["evidence"]["rows"]["0"] == [
        ["syntactic:amod>", False, "syntactic_margin", 0.25, -0.83, 4, "", "4 instances, 20 are needed"]
    ]


def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    html, report, elements = page_of(hostile_run(tmp_path / "r"))
    assert "<img" not in html and "</script><" not in elements.inside["data"]
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert report["analyses"][0]["remarks"] == [HOSTILE] and HOSTILE in report["title"]
    assert report["analyses"][0]["examples"]["sentences"][0]["subwords"]["source"] == [HOSTILE] * 4
    compact = Study.open(tmp_path / "r")._repr_html_()
    assert "<img" not in compact and "<script" not in compact and "<b>" not in compact


def test_half_a_pair_of_surrogates_and_control_characters_do_no_harm(run: Path) -> None:
    edit_record(run, remarks=["\ud800 \x00 \x1b[31m"])
    written = write_page([run], run.parent / "p.html").read_bytes()
    assert b"\x00" not in written and json.loads(Elements(written.decode()).inside["data"])


def test_two_runs_are_compared_head_by_head(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", LAYOUT, seed=2)
    (comparison,) = gather([run, other])["comparisons"]
    first, second = (pd.read_csv(path / "heads.csv", keep_default_na=False) for path in (run, other))
    assert len(comparison["pairs"]) == 9 and comparison["sites"] == list(LAYOUT)
    differ = [
        set(a.split(";")) != set(b.split(";")) for a, b in zip(first["functions"], second["functions"], strict=True)
    ]
    assert len(comparison["changed"]) == sum(differ)
    known = {entry["name"]: entry["spearman"] for entry in comparison["correlations"]}
    expected = first["confidence"].corr(second["confidence"], method="pearson")
    ranks = first["confidence"].rank().corr(second["confidence"].rank())
    assert known["confidence"] == pytest.approx(ranks, abs=1e-4) != expected
    assert "ablation" not in known  # the other run has none
    assert f"{sum(differ)} head" in comparison["findings"][0]
    apart = gather([run, make_run(tmp_path / "wide", {"encoder-self": [4]})])["comparisons"][0]
    assert apart["pairs"] == [] and "no site with the same layout" in apart["findings"][0]
    assert apart["means"], "their means are compared"
    assert [data["name"] for data in gather([run, run])["analyses"]] == ["bert (1)", "bert (2)"]


@pytest.mark.slow
def test_a_large_run_with_fifty_sentences_stays_below_ten_megabytes(tmp_path: Path) -> None:
    report = gather([large_run(tmp_path / "large", sentences=50)])
    (data,) = report["analyses"]
    assert len(data["site"]) == 24 * 16 * 3 and len(data["measures"]) > 40
    assert len(data["examples"]["sentences"]) == 50 and data["examples"]["left_out"] == 0
    assert len(page_html(report).encode()) < 10_000_000


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
    monkeypatch.setattr("headscope.report.page.analysis.ROOM", 1500)
    data = examples_data(examples)
    assert data is not None
    packed = [sentence["sites"]["cross"]["packed"] for sentence in data["sentences"]]
    assert sum(map(len, packed)) <= 1500
    assert data["left_out"] == 5 - len(packed) and (shape == "even") == (data["left_out"] > 0)


def test_packed_weights_are_near_those_that_were_kept() -> None:
    weights = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    steps = np.frombuffer(zlib.decompress(base64.b64decode(pack(weights, 63))), dtype=np.uint8).reshape(1, 16, 16)
    np.testing.assert_allclose((steps / 63) ** 2, weights / 255, atol=0.017)


def test_pruning_removal_and_training_have_their_parts(run: Path, tmp_path: Path) -> None:
    add_faithfulness(run)
    others = (sweep_run(tmp_path / "sweep", LAYOUT), removal_run(tmp_path / "small"), training_run(tmp_path / "train"))
    report = gather([*others, run])
    (data,) = report["analyses"]
    (answer,) = [each for each in data["findings"] if each.question == "Which ranking removal bears out"]
    assert answer.table is not None and answer.table.rows[0][:2] == ("ablation", "0.5")
    assert list(data["faithfulness"]["curves"]["loss"]) == ["ablation", "taylor", "random:1", "random:2"]
    (sweep,) = report["pruning"]["runs"]
    assert sweep["cells"]["kept"] == [9, 3, 6, 3, 6] and sweep["survivors"]["l0-keep3-seed1"] == {
        "encoder-self": [[0, 1, 2]]
    }
    found = report["pruning"]["findings"]
    assert found[0] == "l0: 3 heads can go." and "1,000 parameters became 900 (10 % fewer)" in found[1]
    assert report["training"]["findings"] == [
        "train (mixing): 30 updates; best validation loss 1.67 at update 30, best BLEU 9 at update 30."
    ]
    (removal,) = report["pruning"]["removals"]
    assert [row[0] for row in removal["sizes"]] == ["parameters", "attention heads"]  # an encoder has no cache
    titles = [panel["title"] for panel in report["training"]["panels"]]
    assert titles[0].startswith("Loss") and "Alphas: nuclear norm over heads" in titles


@pytest.mark.parametrize("masked", [0.2, -0.2])
def test_harm_is_a_share_of_a_loss_never_of_a_gain(masked: float, tmp_path: Path) -> None:
    path = removal_run(tmp_path / "small")
    record = json.loads((path / "pruning.json").read_text(encoding="utf-8"))
    candidates = [
        {"name": name, "remark": "", **{text: {"value": 2 + loss, "damage": loss, "harm": harm} for text in TEXTS}}
        for name, loss, harm in (("none", masked, 1.0), ("mean", 0.1, share(0.1, masked)))
    ]
    choice = {"text": "varied", "sentences": 1, "objective": "top1", "taken": "mean", "candidates": candidates}
    compensation = {"choice": choice, "performance": {"intact": {"objective": "loss"}}}
    verified = record["verified"] | {"searched": 0, "searches": 0}
    record |= {"compensation": compensation, "verified": verified}
    (path / "pruning.json").write_text(json.dumps(record), encoding="utf-8")
    removal = removal_data(path)
    compared = removal["compared"]
    numbers = [2.1, 0.1, 0.5] if masked > 0 else [2.1, 0.1]
    assert compared["rows"][1] == ["mean (taken)", *numbers, *numbers]
    assert len(compared["columns"]) == len(compared["rows"][1]) and "(varied, 1 sentence)" in compared["text"]
    assert [name for name in compared["columns"] if "," in name] == ["loss, held out", "top1, other text"]
    assert "searches" not in [name for name, _ in removal["verified"]]


def test_kinds_of_runs_and_what_is_none(run: Path, tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"analyze.*prune.*train"):
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
    assert data_json({"a": "</script>&"}) == '{"a":"\\u003c/script\\u003e\\u0026"}'
    assert report_of([])["title"] == "nothing"


@pytest.mark.parametrize("content", [b"PK broken", None])
def test_broken_examples_end_in_one_line(run: Path, content: bytes | None) -> None:
    if content is None:
        np.savez_compressed(run / "examples.npz", index=np.frombuffer(b'[{"number": 1}]', dtype=np.uint8))
    else:
        (run / "examples.npz").write_bytes(content)
    with pytest.raises(RunError, match=r"bert.*examples\.npz") as caught:
        _ = Study.open(run).examples
    assert "\n" not in str(caught.value)


def test_numbers_and_ranks() -> None:
    assert [rounded(value) for value in (0.1234567891, 3.0, float("nan"), -1e-9)] == [0.123456789, 3, None, -1e-9]
    assert words(rounded(0.180502)) == words(0.180502) == "0.181"
    assert [words(value) for value in (-0.5, 12345.6, 0.00012, 2e-6)] == ["−0.5", "12,346", "0.00012", "2e−6"]
    assert ranked(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    correlation, count = spearman([1, 2, 3, np.nan], [2, 4, 9, 1])
    assert correlation == pytest.approx(1.0) and count == 3
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3])[0])


def test_analyze_writes_the_page_with_examples(
    tmp_path: Path, caption_files: tuple[Path, Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    source, target = caption_files
    out = tmp_path / "run"
    words = ("analyze", hs.assets.trained(), "--source", source, "--target", target, "--bootstrap", 10, "--out", out)
    status, said, _ = command(*words, "--only", "confidence,positional", "--no-figures", "--report", "--examples", 2)
    assert status == 0 and "report.html" in said
    data = json.loads(Elements((out / "report.html").read_text(encoding="utf-8")).inside["data"])["analyses"][0]
    assert data["name"] == "run" and len(data["examples"]["sentences"]) == 2
    sentence = data["examples"]["sentences"][0]
    (example, _) = Study.open(out).examples
    assert sentence["texts"]["source"] == source.read_text(encoding="utf-8").splitlines()[sentence["line"] - 1]
    for weights in example.weights.values():
        assert weights.shape[0] == 24
        np.testing.assert_allclose(weights.sum(axis=2), 255, atol=8)  # rows of attention, as bytes
    assert {site: entry["sides"] for site, entry in sentence["sites"].items()} == {
        "encoder-self": ["source", "source"],
        "decoder-self": ["target", "target"],
        "cross": ["target", "source"],
    }
    page = out / "report.html"
    assert command("plot", "report", out, "--out", page)[0] == 2  # exists
    assert command("plot", "report", out, "--out", page, "--force")[:2] == (0, f"wrote {page}\n")
    assert command(*words, "--only", "confidence", "--no-figures", "--force")[0] == 0  # the page is part of the run
    assert not page.exists() and not (out / "examples.npz").exists()


def test_the_study_has_a_page_and_a_compact_form(pair: hs.Model, tmp_path: Path) -> None:
    study = pair.analyze(["A dog runs on the grass.", "Two men sit."], only=["confidence"], bootstrap=10, report=True)
    compact = study._repr_html_()
    assert "The sharpest heads" in compact and "<script" not in compact
    page = study.report(tmp_path / "page.html")
    data = json.loads(Elements(page.read_text(encoding="utf-8")).inside["data"])["analyses"][0]
    assert len(data["examples"]["sentences"]) == 2


def test_functions_stand_beside_importances(run: Path) -> None:
    assert gather([run])["analyses"][0]["importance"]["functions"] == {}
    table = add_function_need(run)
    (data,) = gather([run])["analyses"]
    found = data["importance"]["functions"]
    assert list(found) == ["ablation", "taylor"]
    rows = table[table["measure"] == "taylor"]
    assert [row[:3] for row in found["taylor"]["rows"]] == rows[["kind", "name", "heads"]].values.tolist()
    assert found["ablation"]["said"]


def test_cards_have_sentences_examples_and_pairs(run: Path) -> None:
    assert gather([run])["analyses"][0]["cards"] is None
    add_descriptions(run)
    html, data, _ = page_of(run)
    cards = data["analyses"][0]["cards"]
    assert cards["sentences"][:2] == [HOSTILE, "does what head 1 does"] and HOSTILE not in html
    assert cards["shares"][0] == [0.5, 0.05, -0.02, 0.2, 0]
    assert cards["mostly"][:3] == ["position and sinks", "only the sentence", "position and sinks"]
    near, far = cards["examples"]["0"]
    assert near == {"line": 7, "weight": 0.9, "words": [[f"w{place}" for place in range(9)]], "ends": [[0, 3], [0, 5]]}
    assert [far["words"][line][place] for line, place in far["ends"]] == ["w30", "w2"] and None in far["words"][0]
    crossed = cards["examples"][str(len(cards["sentences"]) - 1)][1]
    assert [crossed["words"][line][place] for line, place in crossed["ends"]] == ["w30", "w2"]
    assert crossed["words"] == [[f"w{place}" for place in range(27, 34)], [f"w{place}" for place in range(6)]]
    heads = pd.read_csv(run / "heads.csv", keep_default_na=False)
    heads.loc[0, "explained"] = np.nan
    heads.to_csv(run / "heads.csv", index=False)
    assert gather([run])["analyses"][0]["cards"]["shares"][:2] == [[None] * 5, cards["shares"][1]]
    assert cards["pairs"]["0"] == [[kind, "None", "dog", 2.5, 0.7, 6] for kind in PAIRS]


@pytest.mark.parametrize("text, at, found", [
    ("a [b] c", 1, {0: "a", 1: "b", 2: "c"}),
    ("[[CLS]] a", 0, {0: "[CLS]", 1: "a"}),
    ("… " + " ".join(["x"] * 12) + " [y] …", 13, {**dict.fromkeys(range(1, 13), "x"), 13: "y"}),
    ("… x [y]", 13, {}),  # no window of that place
    ("a b [c]", 1, {}),
    ("", 0, {}),
])  # fmt: skip
def test_words_of_a_window(text: str, at: int, found: dict[int, str]) -> None:
    assert window(text, at) == found

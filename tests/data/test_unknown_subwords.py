"""The share of pieces that a vocabulary does not have: counted for every format and side, warned of above 2 %."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headscope.cli import main
from headscope.cli.main import app
from headscope.config import Companions, EvaluateConfig
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import UnknownSubwords, count_unknown
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.plan import analyze
from headscope.evaluation.run import run_evaluation
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from tests.makers.story_files import HP, written
from tests.oracles import checkpoints, fairseq, story

TEXT = ["a b unseen c", "c c d", "unseen", "e unseen unseen b"]  # 4 of 12 pieces
OTHER = ["a b c", "d e", "unseen", "b"]  # 1 of 7


def corpus(source: list[str], target: list[str] | None = None) -> Corpus:
    sentences = [Sentence(n, text, target[n] if target else None) for n, text in enumerate(source)]
    return Corpus("text", len(source), "0" * 40, lambda: iter(sentences), has_target=target is not None)


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_both_sides_are_counted_without_special_pieces() -> None:
    found = count_unknown(checkpoints.small(), corpus(TEXT, OTHER), limit=50, sentences=99)
    assert found.to_json() == {
        "source": {"pieces": 12, "unknown": 4, "share": 0.333333},
        "target": {"pieces": 7, "unknown": 1, "share": 0.142857},
    }
    cut = count_unknown(checkpoints.small(), corpus(TEXT, OTHER), limit=3, sentences=2)  # two pieces and the end
    assert cut.to_json()["source"] == {"pieces": 4, "unknown": 0, "share": 0.0}


@pytest.mark.parametrize("kind", ["bert", "bart", "gpt2"])
def test_hugging_face_tokenizers_are_counted(kind: str) -> None:
    made = checkpoints.hugging(kind)
    text, sides = ["ah ŵŵ bi", "aj ŵŵ", "bl"], ("source", "target") if kind == "bart" else ("source",)
    found = count_unknown(made, corpus(text, text if kind == "bart" else None), limit=50, sentences=99)
    assert {side: (its["pieces"], its["unknown"]) for side, its in found.to_json().items()} == dict.fromkeys(
        sides, (6, 2)
    )
    assert "language, script and case" in found.remarks(made)[1]


def opened(folder: Path, kind: str) -> Checkpoint:
    if kind == "fairseq":
        options = fairseq.BASE
        path = fairseq.write(folder / "c.pt", options, fairseq.state(options))
        fairseq.dictionaries(folder)
        return open_checkpoint(str(path), device="cpu", companions=Companions(dicts=folder))
    if kind == "native":
        NATIVE.save(checkpoints.small(), folder / "native")
        return open_checkpoint(str(folder / "native"), device="cpu")
    hp = HP | {"rescale_emb": True}
    return open_checkpoint(str(written(folder / "story", hp, story.make(hp, (7, 11), 13, seed=3))), device="cpu")


@pytest.mark.parametrize(
    ("kind", "known", "cause"),
    [
        ("fairseq", "a@@ c", "already split into subwords: give --bpe CODES,"),
        ("native", "a c", "already split into subwords: split it with the model's codes,"),
        ("story", "src3 src4", "already split into subwords: give --bpe CODES,"),
    ],
)
def test_every_format_counts_and_names_the_likely_cause(tmp_path: Path, kind: str, known: str, cause: str) -> None:
    made = opened(tmp_path, kind)
    counts = UnknownSubwords()
    counts.add("source", made.encode([known, f"ŵŵŵ {known}"], side="source", limit=50))
    assert counts.to_json() == {"source": {"pieces": 5, "unknown": 1, "share": 0.2}}
    assert counts.remarks(made)[0] == "unknown subwords: source 20.00% of 5"
    assert cause in counts.remarks(made)[1] and counts.remarks(made)[1].startswith("warning: 20.0% of the source's")
    assert len(counts.remarks(made)) == 2


def test_a_warning_begins_above_two_per_cent() -> None:
    made = checkpoints.small()
    for unknown, warned in ((0, False), (2, False), (3, True)):
        counts = UnknownSubwords()
        counts.add("source", made.encode(["unseen"] * unknown + ["a"] * (100 - unknown), side="source", limit=50))
        assert counts.remarks(made)[0] == f"unknown subwords: source {unknown}.00% of 100"
        assert (len(counts.remarks(made)) == 2) is warned
    assert UnknownSubwords().remarks(made) == []


@pytest.mark.parametrize("metrics", [("perplexity",), ("bleu",), ("bleu", "perplexity")])
def test_evaluation_reports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: tuple[str, ...]) -> None:
    monkeypatch.setattr("headscope.evaluation.opened.open_configured", lambda *_, **__: checkpoints.small())
    texts: dict[str, Any] = {"source": lines(tmp_path / "a", TEXT), "target": lines(tmp_path / "b", OTHER)}
    found = run_evaluation(EvaluateConfig(checkpoint="x", metrics=metrics, bootstrap=20, **texts))
    wanted = {"source": {"pieces": 12, "unknown": 4, "share": 0.333333}}
    if "perplexity" in metrics:
        wanted["target"] = {"pieces": 7, "unknown": 1, "share": 0.142857}
    assert found.unknown.to_json() == wanted
    assert any(remark.startswith("unknown subwords: source 33.33% of 12") for remark in found.remarks)
    assert any(remark.startswith("warning: 33.3% of the source's subwords") for remark in found.remarks)


def test_analyses_report_them() -> None:
    found = analyze(
        checkpoints.small(), corpus(TEXT, OTHER), analyses=[ANALYSES.get("confidence")], options=RunOptions()
    )
    assert found.record["data"]["unknown_pieces"]["source"]["unknown"] == 4
    assert found.remarks[0] == "unknown subwords: source 33.33% of 12, target 14.29% of 7"
    assert [remark.partition(":")[0] for remark in found.remarks] == ["unknown subwords", "warning", "warning"]


def test_raw_text_without_codes_is_warned_of(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fork's model on text as people write it: the commands, with and without the codes."""
    folder, raw = shared / "oracles" / "mhr", []
    model, given = folder / "alpha" / "checkpoint_best.pt", ["--dicts", str(folder / "data")]
    texts = []
    for language in ("de", "en"):
        whole = (folder / "data" / f"test.{language}").read_text(encoding="utf-8").split("\n")[:8]
        raw.append(whole)
        texts.append(lines(tmp_path / language, whole))
    runner, two = CliRunner(), [f"--source={texts[0]}", f"--target={texts[1]}"]
    evaluate = ["evaluate", str(model), *given, *two, "--metrics", "perplexity", "--bootstrap", "10", "--json"]
    without = json.loads(runner.invoke(app, evaluate).output)["record"]
    expected = []
    for language, text in zip(("de", "en"), raw, strict=True):
        listed = {line.split(" ")[0] for line in (folder / "data" / f"dict.{language}.txt").read_text().split("\n")}
        pieces = [piece for line in text for piece in line.split()]
        expected.append((len(pieces), sum(piece not in listed for piece in pieces)))
    assert [(its["pieces"], its["unknown"]) for its in without["unknown_pieces"].values()] == expected
    assert sum("give --bpe CODES" in remark for remark in without["remarks"]) == 2
    coded = runner.invoke(app, [*evaluate, "--bpe", str(folder / "data" / "codes")]).output
    with_codes = json.loads(coded)["record"]
    assert max(its["share"] for its in with_codes["unknown_pieces"].values()) < 0.02
    assert not any("warning" in remark for remark in with_codes["remarks"])
    assert with_codes["scores"][0]["value"] < without["scores"][0]["value"]
    out = tmp_path / "run"
    asked = ["analyze", str(model), *given, *two, "--only", "confidence", "--no-figures", "--out", str(out), "--json"]
    shown = json.loads(runner.invoke(app, asked).output)["record"]
    meta = json.loads((out / "run.json").read_text())
    assert shown["data"]["unknown_pieces"] == meta["data"]["unknown_pieces"] == without["unknown_pieces"]
    assert shown["remarks"] == meta["remarks"] and meta["remarks"][1].startswith("warning: ")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(texts[0].read_bytes()), isatty=lambda: False))
    monkeypatch.setattr(sys, "argv", ["headscope", "translate", str(model), *given, "--greedy"])
    with pytest.raises(SystemExit):
        main.run()
    assert "unknown" in capfd.readouterr().err


def test_ranking_reports_them(tmp_path: Path) -> None:
    NATIVE.save(checkpoints.small(), tmp_path / "model")
    asked = ["prune", "rank", str(tmp_path / "model"), "--by", "magnitude", "--keep-fraction", "0.5", "--device", "cpu"]
    given = ["--source", str(lines(tmp_path / "a", TEXT)), "--target", str(lines(tmp_path / "b", OTHER))]
    found = CliRunner().invoke(app, [*asked, *given, "--out", str(tmp_path / "out"), "--json"])
    assert found.exit_code == 0, found.output
    assert (
        json.loads(found.output)["record"]["remarks"][0] == "unknown subwords: source 33.33% of 12, target 14.29% of 7"
    )

"""The share of pieces that a vocabulary does not have: counted for every format and side, warned of above 2 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headscope.config import Companions, EvaluateConfig
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import UnknownSubwords, count_unknown
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

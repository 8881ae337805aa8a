"""Quality before and after a removal: the metric, its intervals, and the verdict."""

import json
from pathlib import Path

import pytest
import torch

import headscope as hs
from headscope.errors import ConfigError
from headscope.report.page.write import gather
from headscope.results.removal import Removal
from tests.makers.shared import Command, succeed
from tests.makers.sweeps import scores
from tests.oracles import classifiers

pytestmark = pytest.mark.slow

REMOVED = "encoder-self.0.1,encoder-self.1.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, texts, and its own predictions as their labels: its accuracy is 1."""
    folder = tmp_path_factory.mktemp("quality")
    classifiers.folder(folder / "encoder", "bert-encoder")
    texts = [text for text in dict.fromkeys(classifiers.texts(60)) if text.strip()]
    classifier, tokenizer = classifiers.model("bert"), classifiers.tokenizer("bert")
    with torch.no_grad():
        logits = torch.cat([classifier(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        classifier.classifier.bias -= logits.mean(dim=0)  # else one label is right for all
    predictions = (logits - logits.mean(dim=0)).argmax(dim=-1).tolist()
    classifier.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text").write_text("".join(f"{text}\n" for text in texts))
    (folder / "labels").write_text("".join(f"{classifiers.NAMES[label]}\n" for label in predictions))
    return folder


def test_a_classifier_has_its_accuracy_and_a_verdict(folder: Path, tmp_path: Path, command: Command) -> None:
    text = ("--source", folder / "text", "--labels", folder / "labels", "--device", "cpu", "--rounds", 0)
    arguments = ("prune", "remove", folder / "model", "--heads", REMOVED)
    output = succeed(command, *arguments, *text, "--out", tmp_path / "small")
    quality = json.loads((tmp_path / "small/pruning.json").read_text())["quality"]
    files = {"source": folder / "text", "labels": folder / "labels"}
    before, after = (scores(path, **files) for path in (folder / "model", tmp_path / "small"))
    assert before["accuracy"] == 1 and quality["before"]["value"] == 1
    assert quality["after"]["value"] == pytest.approx(after["accuracy"])
    assert quality["loss"] == pytest.approx([before["loss"], after["loss"]], rel=1e-4)
    verdict = quality["verdict"]
    assert verdict["worse"] == pytest.approx(1 - after["accuracy"]) and verdict["margin"] == pytest.approx(0.01)
    lines = output.splitlines()
    assert lines[0].startswith("small: 2 of ") and "WORSE, by more than 1 %" in lines[0] and "loss (nats)" in output
    succeed(command, *arguments, *text, "--out", tmp_path / "wide", "--margin", 1)
    assert json.loads((tmp_path / "wide/pruning.json").read_text())["quality"]["verdict"]["verdict"] == "non-inferior"
    (block,) = gather([tmp_path / "small"]).blocks
    assert block.answers == Removal.open(tmp_path / "small").answers() and block.answers[1].table is not None
    assert block.answers[1].table.rows[0][1:3] == ("1", f"{after['accuracy']:.4g}")
    assert "accuracy" in (tmp_path / "small/README.md").read_text()


def test_what_a_refit_is_worth_is_measured_on_text_that_was_held_out(folder: Path, tmp_path: Path) -> None:
    lines, labels = ((folder / name).read_text().splitlines() for name in ("text", "labels"))
    model = hs.load(folder / "model", device="cpu")
    count = len(lines) // 5
    small = model.remove(REMOVED, text=lines, labels=labels, refit=hs.Refit())
    assert small.quality is not None and small.quality["sentences"] == count
    accuracy = small.evaluate(lines[-count:], labels=labels[-count:], bootstrap=10)["accuracy"].value
    assert small.quality["after"]["value"] == pytest.approx(accuracy)
    other = model.remove(REMOVED, valid=hs.Texts(lines[:7], labels=labels[:7]), metric="macro-f1")
    assert other.quality is not None and (other.quality["metric"], other.quality["sentences"]) == ("macro-f1", 7)
    bare = model.remove(REMOVED).quality
    assert bare is not None and (bare["metric"], Path(bare["text"]).name) == ("cosine", "sample.en"), "as the command"
    with pytest.raises(ConfigError, match="accuracy needs --labels FILE"):
        model.remove(REMOVED, metric="accuracy")


def test_text_that_a_model_was_refitted_on_is_no_test_of_it(folder: Path, tmp_path: Path, command: Command) -> None:
    """Whatever the file's name and the order of its lines; the suggested next command names another file."""
    lines, labels = ((folder / name).read_text().splitlines() for name in ("text", "labels"))
    text = ("--source", folder / "text", "--labels", folder / "labels", "--device", "cpu", "--rounds", 0)
    arguments = ("prune", "remove", folder / "model", "--heads", REMOVED, "--compensate", "least-squares")
    output = succeed(command, *arguments, *text, "--out", tmp_path / "small")
    ending = next(line for line in output.splitlines() if line.startswith("Test on text it has not seen:"))
    assert f"evaluate {tmp_path / 'small'} --source YOUR-TEST.txt --labels YOUR-TEST.labels" in ending
    small, refit_count = hs.load(tmp_path / "small", device="cpu"), len(lines) - len(lines) // 5
    for order in (slice(None), slice(None, None, -1)):
        remark = small.evaluate(lines[order], labels=labels[order], bootstrap=10).remarks[0]
        assert remark.startswith(f"warning: {refit_count} of {len(lines)} different lines are among those")
    new_text = small.evaluate(["a text of its own", "another one"], labels=labels[:2], bootstrap=10)
    intact = hs.load(folder / "model", device="cpu").evaluate(lines, labels=labels, bootstrap=10)
    assert not any("different lines" in remark for remark in (*new_text.remarks, *intact.remarks))


def test_translation_has_its_perplexity_and_bleu_where_it_is_asked_for(
    caption_files: tuple[Path, Path], tmp_path: Path, command: Command
) -> None:
    text = ("--source", caption_files[0], "--target", caption_files[1], "--device", "cpu", "--rounds", 0)
    for metric, metric_options in (("perplexity", ()), ("bleu", ("--metric", "bleu", "--max-sentences", 4))):
        options = ("--heads", "cross.1.*,encoder-self.0.0", "--out", tmp_path / metric, *text, *metric_options)
        assert metric in succeed(command, "prune", "remove", hs.assets.trained_model(), *options).lower()
        record = json.loads((tmp_path / metric / "pruning.json").read_text())
        texts = {"source": caption_files[0], "target": caption_files[1]}
        score = scores(tmp_path / metric / record["output"]["file"], metrics=(metric,), **texts)[metric]
        assert record["quality"]["metric"] == metric
        assert record["quality"]["after"]["value"] == pytest.approx(score, rel=1e-3)

"""Choosing heads of models that predict no words: by labels, or by the distance to the intact model, without labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
from headscope.config.analyze import AnalyzeConfig
from headscope.config.commands import EvaluateConfig
from headscope.data.corpus import open_corpus
from headscope.data.labels import with_labels
from headscope.engine.study import run_analysis
from headscope.errors import ConfigError
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.examples import Distillation, LabelLoss, TrainingExamples, training_loss
from headscope.pruning.learning.finetuning import Recipe, Tuner, mean_loss, trained_parameters
from headscope.pruning.learning.learn import run_learning
from headscope.pruning.learning.learners.l0 import L0Options
from headscope.pruning.learning.learners.subset import SubsetOptions
from headscope.pruning.options.choice import LearnConfig, SweepConfig
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from headscope.pruning.sweep.sweep import run_sweep
from tests.makers.shared import write_lines
from tests.oracles import classifiers
from tests.oracles.classifiers import NAMES

pytestmark = pytest.mark.slow

COUNT = 29


def texts_of(kind: str, folder: Path) -> dict[str, Any]:
    """Options for the texts and labels that a model learns from."""
    texts = classifiers.texts(COUNT)
    if kind == "bert-tags":
        rows = [[f"{word} {NAMES[n % 5]}" for n, word in enumerate(text.split())] for text in texts]
        return {"labels": write_lines(folder / "tags", [line for row in rows for line in [*row, ""]])}
    files = {"source": write_lines(folder / "text", texts)}
    if kind != "bert-encoder":
        files["labels"] = write_lines(folder / "labels", [NAMES[label] for label in classifiers.labels(COUNT)])
    return files


@pytest.fixture(scope="module", params=["bert", "bert-tags", "bert-encoder"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = classifiers.folder(folder / "model", request.param)
    return request.param, {"checkpoint": str(checkpoint), "dtype": "float64", **texts_of(request.param, folder)}


def text_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("checkpoint", "dtype", "source", "labels") if name in options}


def open_case(case: tuple[str, dict[str, Any]]) -> tuple[Checkpoint, Any]:
    _, options = case
    checkpoint = open_checkpoint(options["checkpoint"], dtype="float64")
    corpus = open_corpus(options.get("source"), columns=None if "source" in options else options["labels"])
    return checkpoint, with_labels(checkpoint, corpus, options.get("labels"))


def learn_config(case: tuple[str, dict[str, Any]], out: Path, method: Any, **options: Any) -> LearnConfig:
    defaults = {"updates": 4, "batch_tokens": 97, "method": method}
    return LearnConfig(out=out, **{**case[1], **defaults, **options})


def test_what_is_learnt_by_is_what_evaluate_measures(case: tuple[str, dict[str, Any]]) -> None:
    kind, options = case
    checkpoint, corpus = open_case(case)
    loss = training_loss(checkpoint, corpus, objective="", smoothing=None, learns=True, seed=1)
    data = TrainingExamples(checkpoint, corpus, limit=61, with_labels=loss.needs_labels)
    gates = GateLayout(checkpoint.attention_sites)
    kept = torch.tensor([1.0, 0, 1, 1, 1, 0], dtype=torch.float64)
    removed = ",".join(map(str, gates.closed_heads(kept.bool())))
    texts = text_options(options)
    metric = "cosine" if kind == "bert-encoder" else "loss"
    for values, mask in ((torch.ones_like(kept), None), (kept, removed)):
        losses = [mean_loss(checkpoint, data, tokens=n, seed=1, gates=gates.spread(values), loss=loss) for n in (1, 83)]
        score = evaluate_metric(texts, metric, mask)
        expected = 1 - score if metric == "cosine" else score
        assert losses == pytest.approx([expected, expected], abs=1e-12)


def evaluate_metric(texts: dict[str, Any], metric: str, mask: str | None = None) -> float:
    """A metric of the masked model; metrics of states without a mask compare the model with itself."""
    states = metric in ("cosine", "token-cosine", "l2", "token-l2")
    against = texts["checkpoint"] if states and mask is None else None
    config = EvaluateConfig(**texts, mask=mask, metrics=(metric,), bootstrap=10, against=against)
    return run_evaluation(config)[metric].value


@pytest.mark.parametrize("name", ["representation", "representation-l2", "token-representation"])
def test_the_teacher_stays_as_it_was_while_the_model_learns(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(classifiers.folder(tmp_path / "model", "bert")), dtype="float64")
    corpus = open_corpus(classifiers.texts(COUNT))
    loss = training_loss(checkpoint, corpus, objective=name, smoothing=None, learns=True, seed=1)
    data = TrainingExamples(checkpoint, corpus, limit=61, with_labels=False)
    removed = list(GateLayout(checkpoint.attention_sites).gated_heads)[:3]
    before = {key: value.clone() for key, value in checkpoint.model.state_dict().items()}

    def damage() -> float:
        gates = GateLayout(checkpoint.attention_sites)
        kept = torch.tensor([unit[0] not in removed for unit in gates.units], dtype=torch.float64)
        return mean_loss(checkpoint, data, tokens=97, seed=1, gates=gates.spread(kept), loss=loss)

    masked = damage()
    recipe = Recipe(updates=12, lr=8e-3, tokens=97)
    Tuner(checkpoint, data, recipe, trained_parameters(checkpoint, "none"), closed_heads=removed, loss=loss).run()
    assert isinstance(loss, Distillation)
    after, teacher = checkpoint.model.state_dict(), loss.teacher.model.state_dict()
    assert any(not torch.equal(after[key], value) for key, value in before.items())
    assert all(torch.equal(teacher[key], value) for key, value in before.items())
    assert damage() < 0.8 * masked


def test_label_smoothing_is_that_of_torch(tmp_path: Path) -> None:
    folder = classifiers.folder(tmp_path / "model", "bert")
    case = ("bert", {"checkpoint": str(folder), **texts_of("bert", tmp_path)})
    checkpoint, corpus = open_case(case)
    data = TrainingExamples(checkpoint, corpus, limit=61)
    model, texts = classifiers.model("bert"), classifiers.texts(COUNT)
    logits = torch.stack([classifiers.logits(model, "bert", text) for text in texts])
    labels = torch.tensor(classifiers.labels(COUNT))
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    loss, nll, count = LabelLoss(0.1).of(checkpoint, data.batch(np.arange(COUNT), seed=1))
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    assert count == COUNT


@pytest.mark.parametrize("method", [L0Options(keep=2), SubsetOptions(keep=4)])
def test_gates_are_learnt(case: tuple[str, dict[str, Any]], tmp_path: Path, method: Any) -> None:
    choice = run_learning(learn_config(case, tmp_path / "run", method, tune_updates=2))
    record = json.loads((tmp_path / "run" / "pruning.json").read_text())
    assert len(choice.kept) == method.keep and record["kept"] == method.keep
    quantity = "damage" if case[0] == "bert-encoder" else "nll"
    assert set(record[quantity]) == {"before", "gated", "masked", "tuned"}
    assert ("nll" in record) is (quantity == "nll")
    if quantity == "damage":
        assert record["damage"]["before"] == pytest.approx(0, abs=1e-12) and record["damage"]["masked"] > 1e-4


def test_a_sweep_measures_it(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """By the model's default metric; tags by a requested one."""
    kind, options = case
    if kind == "bert-encoder":
        with pytest.raises(ConfigError, match="macro-f1 needs a classifier"):
            run_sweep(SweepConfig(**options, out=tmp_path / "run", methods=("random",), keep=(3,), metric="macro-f1"))
    metric = "token-l2" if kind == "bert-tags" else ""
    quick: dict[str, Any] = {"seeds": 1, "batch_tokens": 97, "bootstrap": 20, "keep": (3,)}
    sweep = run_sweep(SweepConfig(**options, out=tmp_path / "run", methods=("gradient",), metric=metric, **quick))
    name = metric or ("cosine" if kind == "bert-encoder" else "accuracy")
    table = sweep.cells.set_index("cell")
    assert set(table["metric"]) == {name} and len(table) == 2
    texts = text_options(options)
    rows = zip(*(sweep.survivors[column] for column in ("cell", "site", "layer", "head")), strict=True)
    heads = {(cell, f"{site}.{layer}.{head}") for cell, site, layer, head in rows}
    all_heads, kept = ({head for cell, head in heads if cell == row} for row in ("unpruned", "gradient-keep3-seed1"))
    assert (len(all_heads), len(kept)) == (6, 3)
    mask = ",".join(all_heads - kept)
    scores = run_evaluation(EvaluateConfig(**texts, mask=mask, metrics=(name,), bootstrap=10))
    assert table.loc["gradient-keep3-seed1", "value"] == pytest.approx(scores[name].value)
    intact = evaluate_metric(texts, name)
    assert table.loc["unpruned", "value"] == pytest.approx(intact, abs=1e-12)
    difference = table.loc["gradient-keep3-seed1", "difference"]
    assert difference == pytest.approx(scores[name].value - intact)


def test_the_table_of_a_removal_is_measured_by_the_metric(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    kind, options = case
    removed = "encoder-self.0.1,encoder-self.1.0"
    setup = {"heads": removed, "rounds": 0, "compensate": "least-squares", "calibration_sentences": COUNT}
    texts = text_options(options)
    valid = {f"valid_{name}": texts[name] for name in ("source", "labels") if name in texts}
    removal = run_removal(RemoveConfig(**texts, **valid, **setup, out=tmp_path / "run"))  # type: ignore[arg-type]
    name = "cosine" if kind == "bert-encoder" else "loss"
    table = removal.record["compensation"]["performance"]
    for row, mask in (("intact", None), ("removed", removed)):
        value = evaluate_metric(texts, name, mask)
        assert table[row]["value"] == pytest.approx(value, abs=1e-9)
    smaller = texts | {"checkpoint": str(removal.path)}
    value = run_evaluation(EvaluateConfig(**smaller, metrics=(name,), bootstrap=10))[name].value
    assert table["refitted"]["value"] == pytest.approx(value, abs=1e-9)
    if kind == "bert-encoder":
        return  # by the cosine whatever is said
    if kind == "bert-tags":
        by: dict[str, Any] = {"objective": "representation", "out": tmp_path / "by"}
        by_cosine = run_removal(RemoveConfig(**texts, **valid, **setup, **by))  # type: ignore[arg-type]
        cosines = {name: entry["value"] for name, entry in by_cosine.record["compensation"]["performance"].items()}
        assert cosines["intact"] == pytest.approx(1) and cosines["removed"] < cosines["refitted"] < 1
        return
    files = {name.replace("source", "text"): path for name, path in (texts | valid).items() if path is not None}
    model = hs.load(files.pop("checkpoint"), dtype=files.pop("dtype", "auto"))
    held_out = hs.Texts(files.pop("valid_text", None), labels=files.pop("valid_labels", None))
    small = model.remove(removed.split(","), **files, valid=held_out, refit=hs.Refit(sentences=COUNT))
    assert small.compensation is not None
    assert small.compensation["performance"] == table
    with pytest.raises(ConfigError, match=r"--objective.*--compensate"):
        RemoveConfig(checkpoint="", out=tmp_path, heads=removed, objective="representation")
    with pytest.raises(ConfigError, match="objective"):
        model.remove(removed, refit=hs.Refit(method="none", objective="representation"))


def test_the_ablation_of_a_head_is_what_evaluate_measures_without_it(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    kind, options = case
    texts = text_options(options)
    run_analysis(AnalyzeConfig(**texts, out=tmp_path / "run", only=("ablation",), figures=False, bootstrap=10))
    heads = pd.read_csv(tmp_path / "run" / "heads.csv").set_index(["site", "layer", "head"])["ablation"]
    table = run_each_head(EvaluateConfig(**texts, each_head=True, bootstrap=10)).table.iloc[1:]
    for row in table.to_dict("records"):
        expected = 1 - row["cosine"] if kind == "bert-encoder" else row["nll_per_token_difference"]
        assert heads[row["site"], row["layer"], row["head"]] == pytest.approx(expected, abs=1e-10)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["data"]["labels"] == (str(options["labels"]) if "labels" in options else None)

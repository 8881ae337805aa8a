"""Classifiers and models that tag words, measured by their labels, against transformers run one text at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.config.commands import EvaluateConfig
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.run import run_evaluation
from tests.makers.shared import Command, write_lines
from tests.oracles import classifiers
from tests.oracles.classifiers import NAMES

COUNT = 23
SEQUENCE = ("bert", "distilbert", "roberta", "gpt2")


def scores(checkpoint: Path, **options: Any) -> dict[str, float]:
    config = EvaluateConfig(checkpoint=str(checkpoint), dtype="float64", **{"bootstrap": 20, **options})
    return {score.metric: score.value for score in run_evaluation(config).scores}


def expected(outputs: list[torch.Tensor], wanted: list[int]) -> dict[str, float]:
    said = [int(output.argmax()) for output in outputs]
    nll = [-float(output.log_softmax(-1)[label]) for output, label in zip(outputs, wanted, strict=True)]
    return {
        "loss": sum(nll) / len(nll),
        "accuracy": sum(a == b for a, b in zip(said, wanted, strict=True)) / len(said),
        "macro-f1": classifiers.macro_f1(said, wanted),
    }


@pytest.mark.parametrize("kind", SEQUENCE)
@pytest.mark.parametrize("tokens", [1, 101])
def test_loss_accuracy_and_macro_f1_are_those_of_a_plain_loop(kind: str, tokens: int, tmp_path: Path) -> None:
    its = classifiers.model(kind)
    texts, wanted = classifiers.texts(COUNT), classifiers.labels(COUNT)
    names = [NAMES[label] if number % 2 or label == 2 else str(label) for number, label in enumerate(wanted)]
    found = scores(
        classifiers.folder(tmp_path / "model", kind),
        source=write_lines(tmp_path / "text", texts),
        labels=write_lines(tmp_path / "labels", names),
        batch_tokens=tokens,
    )
    assert found == pytest.approx(expected([classifiers.logits(its, kind, text) for text in texts], wanted))


def test_labels_that_never_occur_have_no_part_in_macro_f1() -> None:
    said, wanted = [0, 0, 3, 3, 3], [0, 3, 3, 4, 3]
    columns = [
        [(a == b == label, a == label, b == label) for a, b in zip(said, wanted, strict=True)] for label in range(6)
    ]
    counts = np.array(columns, dtype=float).sum(axis=1).reshape(1, -1)
    assert METRICS.get("macro-f1").of(counts) == pytest.approx([classifiers.macro_f1(said, wanted)])


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2"])
@pytest.mark.parametrize("together", [False, True])
def test_pairs_of_texts_are_read_as_the_tokenizer_writes_them(kind: str, together: bool, tmp_path: Path) -> None:
    its = classifiers.model(kind)
    first, second = classifiers.texts(COUNT), classifiers.texts(COUNT, seed=5)
    wanted = classifiers.labels(COUNT)
    if together:
        lines = [f"{one}\t{other}" for one, other in zip(first, second, strict=True)]
        text: dict[str, Any] = {"source": write_lines(tmp_path / "pairs", lines), "pairs": True}
    else:
        text = {"source": write_lines(tmp_path / "a", first), "source2": write_lines(tmp_path / "b", second)}
    found = scores(
        classifiers.folder(tmp_path / "model", kind),
        labels=write_lines(tmp_path / "labels", [NAMES[label] for label in wanted]),
        batch_tokens=97,
        **text,
    )
    pairs = zip(first, second, strict=True)
    assert found == pytest.approx(expected([classifiers.logits(its, kind, *pair) for pair in pairs], wanted))


def columns(texts: list[str], tags: list[list[int]]) -> list[str]:
    lines = []
    for text, row in zip(texts, tags, strict=True):
        rows = zip(text.split(), row, strict=True)
        lines += [*(f"{word}\tX\t{NAMES[tag]}" for word, tag in rows), ""]
    return lines


@pytest.mark.parametrize("kind", ["bert-tags", "distilbert-tags"])
@pytest.mark.parametrize("with_source", [False, True])
def test_a_tag_is_said_at_the_first_subword_of_its_word(kind: str, with_source: bool, tmp_path: Path) -> None:
    its, tokenizer = classifiers.model(kind), classifiers.tokenizer(kind)
    texts = classifiers.texts(COUNT)
    tags = [classifiers.labels(len(text.split()), seed) for seed, text in enumerate(texts)]
    outputs, wanted = [], []
    for text, row in zip(texts, tags, strict=True):
        output, place = classifiers.logits(its, kind, text), 1
        for word, tag in zip(text.split(), row, strict=True):
            outputs.append(output[place])
            wanted.append(tag)
            place += len(tokenizer.tokenize(word))
        assert place + 1 == len(output)
    found = scores(
        classifiers.folder(tmp_path / "model", kind),
        labels=write_lines(tmp_path / "tags.conll", columns(texts, tags)),
        source=write_lines(tmp_path / "text", [text.replace(" ", "  ") for text in texts]) if with_source else None,
        batch_tokens=83,
    )
    assert found == pytest.approx(expected(outputs, wanted))


# Files that are wrong.


@pytest.mark.parametrize(
    ("kind", "lines", "message"),
    [
        ("bert", ["bad", "good"], "labels have different numbers of sentences"),
        ("bert", ["bad", "good", "bad", "bad"], "labels have different numbers of sentences"),
        ("bert", ["bad", "worse", "good"], "labels:2: the model has no class 'worse'; it has 0 (bad), 1 (fair)"),
        ("bert", ["bad", "5", "good"], "labels:2: the model has no class '5'"),
        ("bert", [], "labels is empty"),
        ("bert-encoder", ["bad"] * 3, "--labels: a model of type 'bert' is no classifier; leave it out"),
        ("bert-tags", ["bad"] * 3, "labels:1: 'bad' is not a word and its tag"),
        ("bert-tags", ["ah bad", "", "aj bad"], "labels have different numbers of sentences"),
        ("bert-tags", ["ah bad", "", "aj bad", "", "bk bad"], "is not the text of sentence 3"),
        ("bert-tags", ["ah bad", "", "aj bad", "", "bl B-X"], "labels:5: the model has no tag 'B-X'"),
    ],
)
def test_bad_labels_are_one_line(kind: str, lines: list[str], message: str, tmp_path: Path, command: Command) -> None:
    source, labels = write_lines(tmp_path / "text", ["ah", "aj", "bl"]), write_lines(tmp_path / "labels", lines)
    model = classifiers.folder(tmp_path / "model", kind)
    status, _, err = command("evaluate", model, "--source", source, "--labels", labels)
    assert status == 2 and message in err and err.count("\n") == 1

"""Classifiers and models that tag words, measured by their labels, against transformers run one text at a time."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import headscope as hs
from headscope.config.commands import EvaluateConfig
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.run import run_evaluation
from headscope.heads import Site
from tests.makers.shared import Command, write_lines
from tests.oracles import classifiers, tiny
from tests.oracles.classifiers import NAMES

COUNT = 23
SEQUENCE = ("bert", "distilbert", "roberta", "gpt2")


def scores(checkpoint: Path, **options: Any) -> dict[str, float]:
    config = EvaluateConfig(checkpoint=str(checkpoint), dtype="float64", **{"bootstrap": 20, **options})
    return {score.metric: score.value for score in run_evaluation(config).scores}


def expected(outputs: list[torch.Tensor], labels: list[int]) -> dict[str, float]:
    predictions = [int(output.argmax()) for output in outputs]
    nll = [-float(output.log_softmax(-1)[label]) for output, label in zip(outputs, labels, strict=True)]
    return {
        "loss": sum(nll) / len(nll),
        "accuracy": sum(a == b for a, b in zip(predictions, labels, strict=True)) / len(predictions),
        "macro-f1": classifiers.macro_f1(predictions, labels),
    }


@pytest.mark.parametrize("kind", SEQUENCE)
@pytest.mark.parametrize("tokens", [1, 101])
def test_loss_accuracy_and_macro_f1_are_those_of_a_plain_loop(kind: str, tokens: int, tmp_path: Path) -> None:
    model = classifiers.model(kind)
    texts, labels = classifiers.texts(COUNT), classifiers.labels(COUNT)
    names = [NAMES[label] if number % 2 or label == 2 else str(label) for number, label in enumerate(labels)]
    actual = scores(
        classifiers.folder(tmp_path / "model", kind),
        source=write_lines(tmp_path / "text", texts),
        labels=write_lines(tmp_path / "labels", names),
        batch_tokens=tokens,
    )
    assert actual == pytest.approx(expected([classifiers.logits(model, kind, text) for text in texts], labels))


def test_labels_that_never_occur_have_no_part_in_macro_f1() -> None:
    outputs, labels = [0, 0, 3, 3, 3], [0, 3, 3, 4, 3]
    columns = [
        [(a == b == label, a == label, b == label) for a, b in zip(outputs, labels, strict=True)] for label in range(6)
    ]
    counts = np.array(columns, dtype=float).sum(axis=1).reshape(1, -1)
    assert METRICS.get("macro-f1").of(counts) == pytest.approx([classifiers.macro_f1(outputs, labels)])


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2"])
@pytest.mark.parametrize("in_one_file", [False, True])
def test_pairs_of_texts_are_read_as_the_tokenizer_writes_them(kind: str, in_one_file: bool, tmp_path: Path) -> None:
    model = classifiers.model(kind)
    first, second = classifiers.texts(COUNT), classifiers.texts(COUNT, seed=5)
    labels = classifiers.labels(COUNT)
    if in_one_file:
        lines = [f"{left}\t{right}" for left, right in zip(first, second, strict=True)]
        text: dict[str, Any] = {"source": write_lines(tmp_path / "pairs", lines), "pairs": True}
    else:
        text = {"source": write_lines(tmp_path / "a", first), "source2": write_lines(tmp_path / "b", second)}
    actual = scores(
        classifiers.folder(tmp_path / "model", kind),
        labels=write_lines(tmp_path / "labels", [NAMES[label] for label in labels]),
        batch_tokens=97,
        **text,
    )
    pairs = zip(first, second, strict=True)
    assert actual == pytest.approx(expected([classifiers.logits(model, kind, *pair) for pair in pairs], labels))


def columns(texts: list[str], tags: list[list[int]]) -> list[str]:
    lines = []
    for text, row in zip(texts, tags, strict=True):
        rows = zip(text.split(), row, strict=True)
        lines += [*(f"{word}\tX\t{NAMES[tag]}" for word, tag in rows), ""]
    return lines


@pytest.mark.parametrize("kind", ["bert-tags", "distilbert-tags"])
@pytest.mark.parametrize("with_source", [False, True])
def test_a_tag_is_said_at_the_first_subword_of_its_word(kind: str, with_source: bool, tmp_path: Path) -> None:
    model, tokenizer = classifiers.model(kind), classifiers.tokenizer(kind)
    texts = classifiers.texts(COUNT)
    tags = [classifiers.labels(len(text.split()), seed) for seed, text in enumerate(texts)]
    outputs, labels = [], []
    for text, row in zip(texts, tags, strict=True):
        output, index = classifiers.logits(model, kind, text), 1
        for word, tag in zip(text.split(), row, strict=True):
            outputs.append(output[index])
            labels.append(tag)
            index += len(tokenizer.tokenize(word))
        assert index + 1 == len(output)
    actual = scores(
        classifiers.folder(tmp_path / "model", kind),
        labels=write_lines(tmp_path / "tags.conll", columns(texts, tags)),
        source=write_lines(tmp_path / "text", [text.replace(" ", "  ") for text in texts]) if with_source else None,
        batch_tokens=83,
    )
    assert actual == pytest.approx(expected(outputs, labels))


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


# Classifiers with an encoder and a decoder: the decoder reads the text too, moved right by one.


IDS: dict[str, Any] = {"pad_token_id": tiny.PAD, "bos_token_id": tiny.START, "eos_token_id": tiny.END, "num_labels": 3}
BART: dict[str, Any] = {
    **{"d_model": 15, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 61},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 17, "decoder_ffn_dim": 17},
}
KINDS: dict[str, dict[str, Any]] = {
    "bart": {**BART, "decoder_start_token_id": tiny.END},
    "mbart": BART,  # the last id comes first
    "t5": {"d_model": 13, "d_kv": 5, "d_ff": 17, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": tiny.PAD},
}
TEXTS, LABELS = classifiers.texts(7), [0, 1, 2, 0, 1, 2, 0]


def build_model(kind: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **IDS, **KINDS[kind], vocab_size=len(tiny.PIECES))
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4 if parameter.ndim > 1 else 0.1)
    return model


def load(kind: str) -> hs.Model:
    return hs.load(build_model(kind), tokenizer=tiny.tokenizer([tiny.START], [tiny.END]))


def confidence(model: Any, site: Site) -> torch.Tensor:
    """The mean largest weight [h] in the second layer, by transformers alone, without the decoder's first input."""
    eager, tokenizer = copy.deepcopy(model), tiny.tokenizer([tiny.START], [tiny.END])
    eager.set_attn_implementation("eager")
    rows = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            output = eager(input_ids=ids, output_attentions=True)
        plain = (ids[0] != tiny.START) & (ids[0] != tiny.END)
        decoder_mask = torch.cat([plain.new_zeros(1), plain[:-1]])
        keys = decoder_mask if site is Site.DECODER_SELF else plain
        weights = output.decoder_attentions if site is Site.DECODER_SELF else output.cross_attentions
        rows.append(weights[1][0][:, decoder_mask][:, :, keys].amax(dim=-1))  # [h t]
    return torch.cat(rows, dim=-1).mean(dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_the_decoder_is_measured_on_what_it_reads(kind: str) -> None:
    model = load(kind)
    plain = model.analyze(TEXTS, only="confidence", bootstrap=10)
    full = model.analyze(TEXTS, labels=LABELS, only="confidence,gradient,ablation", bootstrap=10, batch_tokens=11)
    for study in (plain, full):
        for site in (Site.DECODER_SELF, Site.CROSS):
            heads = study.heads[(study.heads.site == site.value) & (study.heads.layer == 1)]
            assert heads.confidence.tolist() == pytest.approx(confidence(build_model(kind), site).tolist())
    assert full.heads.notna().all(axis=None)


@pytest.mark.slow
def test_ablation_is_what_evaluation_says_of_each_head() -> None:
    model = load("bart")
    study = model.analyze(TEXTS, labels=LABELS, only="ablation", bootstrap=10)
    ablation = study.heads.set_index(["site", "layer", "head"])["ablation"]
    masked_loss = model.evaluate(TEXTS, labels=LABELS, mask="cross.1.2", bootstrap=10)["loss"].value
    loss = model.evaluate(TEXTS, labels=LABELS, bootstrap=10)["loss"].value
    assert ablation["cross", 1, 2] == pytest.approx(masked_loss - loss)
    assert model.evaluate(TEXTS, mask="cross.1.2", metrics="cosine", bootstrap=10)["cosine"].value < 1 - 1e-6

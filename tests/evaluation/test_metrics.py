"""Every metric, also of another package, is the same in `evaluate`, with each head off and in sweeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope.bootstrap import Bootstrap
from headscope.config.commands import EvaluateConfig
from headscope.data.batching import batches
from headscope.data.corpus import Corpus, open_corpus
from headscope.evaluation.before_after import compare
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.evaluation.metrics.base import METRICS, ValidationText, choose_metric, fitting_metrics, resample
from headscope.evaluation.metrics.states import compare_states
from headscope.evaluation.opened import open_evaluation
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, select_heads
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import gated, masked
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from tests.makers.shared import write_lines
from tests.oracles import checkpoints, classifiers, plugin, speakers, tiny
from tests.oracles.checkpoints import SOURCES, TARGETS

HEADS = {
    "native": "cross.0.1",
    "gpt2": "decoder-self.1.2",
    "bert": "encoder-self.0.1",
    "bert-encoder": "encoder-self.1.0",
}
METRIC_NAMES = {
    "native": ["bleu", "chrf", "perplexity", "accuracy", "length-ratio"],
    "gpt2": ["perplexity", "accuracy"],
    "bert": ["loss", "accuracy", "macro-f1"],
    "bert-encoder": [],
}
STATES = ["cosine", "token-cosine", "l2", "token-l2"]


@pytest.fixture(autouse=True)
def register_length_ratio() -> Iterator[None]:
    """`length-ratio` is a metric of another package (tests/plugin)."""
    with plugin.register_plugin(METRICS, "length_ratio"):
        yield


def files(folder: Path, kind: str) -> dict[str, Any]:
    """A checkpoint of a kind and a text, as options."""
    sources = SOURCES if kind == "native" else classifiers.texts(13)
    options: dict[str, Any] = {"checkpoint": str(folder / "model"), "source": write_lines(folder / "source", sources)}
    if kind == "native":
        NATIVE.save(checkpoints.small(), folder / "model")
        options["target"] = write_lines(folder / "target", TARGETS)
    elif kind == "gpt2":
        checkpoints.save_model(folder / "model", "gpt2")
    else:
        classifiers.folder(folder / "model", kind)
    if kind == "bert":
        options["labels"] = write_lines(
            folder / "labels", [classifiers.NAMES[label] for label in classifiers.labels(13)]
        )
    return options | {"dtype": "float64"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_every_metric_is_the_same_wherever_it_is_measured(kind: str, tmp_path: Path) -> None:
    options = files(tmp_path, kind) | {"bootstrap": 23, "seed": 5}
    setup = open_evaluation(EvaluateConfig(**options, mask=HEADS[kind]))
    order = [name for name in [*METRIC_NAMES[kind], *STATES] if name != "length-ratio"]
    fitting = list(fitting_metrics(setup.checkpoint))
    assert [name for name in fitting if name != "length-ratio"] == order
    assert set(fitting) == {*METRIC_NAMES[kind], *STATES}
    metrics = tuple(reversed(fitting))
    result = run_evaluation(EvaluateConfig(**options, metrics=metrics, mask=HEADS[kind]))
    assert [score.metric for score in result.scores] == fitting
    table = run_each_head(EvaluateConfig(**options, metrics=metrics, each_head=True, heads=HEADS[kind])).table
    text = ValidationText(setup.corpus, setup.likelihood_options, setup.translate_options, intact=setup.checkpoint)
    with masked(setup.checkpoint.model, [HeadId.parse(HEADS[kind])]):
        for score in result.scores:
            metric = METRICS.get(score.metric)
            parts = metric.score(setup.checkpoint, text)
            values = resample(metric.of, parts.sums, Bootstrap(seed=5, replicates=23))
            change = compare(values, values)
            tolerance = 1e-3 if score.metric == "perplexity" else 1e-9  # its percentiles are of nats
            assert score.value == pytest.approx(change.value, abs=1e-12) and score.decimals == metric.decimals
            assert (score.low, score.high) == pytest.approx((change.low, change.high), rel=tolerance, abs=1e-12)
            column = "nll_per_token" if score.metric == "loss" else score.metric
            assert table[column][1] == pytest.approx(score.value, abs=1e-12)
            if score.metric in STATES:
                total, count = parts.loss.sum(axis=0)
                cosine = table["token-cosine" if score.metric.startswith("token") else "cosine"][1]
                assert total / count == pytest.approx(1 - cosine)


def test_p_of_a_difference_counts_the_observed_one_too() -> None:
    """By hand: of 4, 3, 2 and -1, less their mean, two are as far from 0 as the 2 that was observed."""
    change = compare(np.array([3.0, 5.0, 4.0, 3.0, 0.0]), np.ones(5))
    assert (change.value, change.difference, change.p) == (3.0, 2.0, (1 + 2) / (1 + 4))


# Cosines and distances of final states to the intact model's, against transformers run one text at a time.


REMOVED = "encoder-self.0.1,encoder-self.1.*"


def zero_heads(model: Any, heads: list[HeadId]) -> Any:
    """The model with the heads' columns of the output projection set to zero, by hand."""
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        for head in heads:
            matrix = model.encoder.layer[head.layer].attention.output.dense.weight
            matrix[:, head.head * width : (head.head + 1) * width] = 0
    return model


def expected(texts: list[str], mask: str) -> dict[str, float]:
    """Mean metrics of states, computed one sentence and one token at a time."""
    kind = "bert-encoder"
    model, tokenizer = classifiers.model(kind), classifiers.tokenizer(kind)
    heads = select_heads(mask, {layer: 3 for layer in CHECKPOINT[0].layout}) if mask else []
    other = zero_heads(classifiers.model(kind), heads)
    sums: dict[str, list[float]] = {name: [] for name in STATES}
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            first, second = (net(**inputs).last_hidden_state[0] for net in (model, other))
        add(sums, "", first.mean(dim=0), second.mean(dim=0))
        for left, right in zip(first, second, strict=True):
            add(sums, "token-", left, right)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def add(sums: dict[str, list[float]], kind: str, first: Tensor, second: Tensor) -> None:
    dot = float((first * second).sum())
    lengths = [float((state * state).sum()) ** 0.5 for state in (first, second)]
    sums[f"{kind}cosine"].append(dot / lengths[0] / lengths[1])
    sums[f"{kind}l2"].append(float(((first - second) ** 2).sum()) ** 0.5 / lengths[0])


CHECKPOINT: list[Checkpoint] = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = classifiers.folder(tmp_path_factory.mktemp("states") / "model", "bert-encoder")
    CHECKPOINT[:] = [open_checkpoint(str(path), dtype="float64")]
    return path


def config_for(checkpoint: Path, texts: list[str], tmp_path: Path, **options: Any) -> EvaluateConfig:
    source = write_lines(tmp_path / "text", texts)
    return EvaluateConfig(checkpoint=str(checkpoint), source=source, dtype="float64", bootstrap=10, **options)


def evaluate(*arguments: Any, **options: Any) -> dict[str, float]:
    return {score.metric: score.value for score in run_evaluation(config_for(*arguments, **options)).scores}


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["", REMOVED])
@pytest.mark.parametrize("tokens", [1, 71])
def test_evaluate_equals_plain_loops(folder: Path, tmp_path: Path, mask: str, tokens: int) -> None:
    texts = classifiers.texts(19)
    options = {"mask": mask} if mask else {"against": str(folder)}
    scores = evaluate(folder, texts, tmp_path, batch_tokens=tokens, **options)
    assert list(scores) == STATES
    assert scores == pytest.approx(expected(texts, mask), abs=1e-12)
    assert (scores["cosine"] == pytest.approx(1, abs=1e-12)) is not bool(mask)


@pytest.mark.slow
def test_each_head_is_the_mask_of_it(folder: Path, tmp_path: Path) -> None:
    texts = classifiers.texts(7)
    table = run_each_head(config_for(folder, texts, tmp_path, each_head=True)).table
    assert table[STATES].iloc[0].to_list() == pytest.approx([1, 1, 0, 0], abs=1e-12)
    assert bool(table["cosine"].iloc[1:].is_monotonic_increasing) and len(table) == 7
    for row in table.iloc[1:].to_dict("records"):
        by_hand = expected(texts, f"{row['site']}.{row['layer']}.{row['head']}")
        assert {name: row[name] for name in STATES} == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.slow
def test_a_small_model_is_compared_with_what_it_was_made_of(folder: Path, tmp_path: Path) -> None:
    """It is never compared with itself."""
    small, texts = tmp_path / "small", classifiers.texts(11)
    run_removal(RemoveConfig(checkpoint=str(folder), out=small, heads=REMOVED, rounds=0, dtype="float64"))
    masked = pytest.approx(evaluate(folder, texts, tmp_path, mask=REMOVED), abs=1e-9)
    result = run_evaluation(config_for(small, texts, tmp_path))
    remarks = " ".join(result.remarks)
    assert {score.metric: score.value for score in result.scores} == masked and result["cosine"].value < 0.999
    assert str(folder) in remarks and "pruning.json" in remarks
    assert evaluate(small, texts, tmp_path, against=str(folder)) == masked
    table = run_each_head(config_for(small, texts, tmp_path, each_head=True)).table
    assert table["cosine"].iloc[0] == pytest.approx(result["cosine"].value, abs=1e-9)


def test_every_model_has_a_metric() -> None:
    checkpoint = CHECKPOINT[0]
    assert choose_metric("", checkpoint, has_target=False, has_labels=False) == "cosine"
    decoder = tiny.checkpoint("t5", 3)
    for has_target in (False, True):
        assert choose_metric("", decoder, has_target=has_target, has_labels=False) == "cosine"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "marian", "t5"])
def test_final_states_are_what_the_output_layer_reads(kind: str) -> None:
    """A T5 scales states by d^-0.5 before the output layer."""
    checkpoint: Any = speakers.checkpoint(kind)
    states: list[Tensor] = []
    options: dict[str, Any] = {"tokens": 101, "limit": 90}
    batch = next(iter(batches(speakers.corpus(kind), checkpoint, **options)))
    layer: Any = checkpoint.model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    checkpoint.logits(batch)
    hook.remove()
    scale = checkpoint.config.d_model**-0.5 if kind == "t5" else 1.0
    torch.testing.assert_close(checkpoint.states(batch) * scale, states[0].view_as(checkpoint.states(batch)))


def test_masked_removed_and_gated_are_the_same() -> None:
    checkpoint = CHECKPOINT[0]
    options = LikelihoodOptions(61, 61)
    heads = select_heads("encoder-self.0.1,encoder-self.1.0", checkpoint.layout)
    removed = checkpoint.alter_heads(plan_removal(checkpoint.attention_sites, heads), "shrink")
    by_removal = compare_states(removed, corpus(), options, intact=checkpoint)
    by_masks = compare_states(checkpoint, corpus(), options, masks=[[], heads])
    with masked(checkpoint.model, heads):
        by_mask = compare_states(checkpoint, corpus(), options)
    ones = {layer: torch.ones(count) for layer, count in checkpoint.layout.items()}
    with gated(checkpoint.model, ones):
        by_ones = compare_states(checkpoint, corpus(), options)
    for name in ("pooled_sums", "tokens"):
        expected = getattr(by_mask, name).total[:, 0]
        torch.testing.assert_close(getattr(by_removal, name).total[:, 0], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(getattr(by_masks, name).total[:, 1], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(getattr(by_masks, name).total[:, 0], getattr(by_ones, name).total[:, 0])
        assert not torch.allclose(expected, getattr(by_ones, name).total[:, 0])


def corpus() -> Corpus:
    return open_corpus(classifiers.texts(17))

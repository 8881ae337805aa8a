"""Every metric, also of another package, is the same in `evaluate`, with each head off and in sweeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.bootstrap import Bootstrap
from headscope.config.commands import EvaluateConfig
from headscope.evaluation.before_after import compare, compare_scores
from headscope.evaluation.metrics.base import METRICS, ValidationText, fitting_metrics
from headscope.evaluation.opened import open_all
from headscope.evaluation.run import run_each_head, run_evaluation
from headscope.formats.native import NATIVE
from headscope.heads import HeadId
from headscope.model.taps import masked
from tests.makers.shared import write_lines
from tests.oracles import checkpoints, classifiers, plugin
from tests.oracles.checkpoints import SOURCES, TARGETS

HEADS = {
    "native": "cross.0.1",
    "gpt2": "decoder-self.1.2",
    "bert": "encoder-self.0.1",
    "bert-encoder": "encoder-self.1.0",
}
MEASURED = {
    "native": ["bleu", "chrf", "perplexity", "accuracy", "length-ratio"],
    "gpt2": ["perplexity", "accuracy"],
    "bert": ["loss", "accuracy", "macro-f1"],
    "bert-encoder": [],
}
STATES = ["cosine", "token-cosine", "l2", "token-l2"]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """`length-ratio` is a metric of another package (tests/plugin)."""
    with plugin.registered(METRICS, "length_ratio"):
        yield


def files(folder: Path, kind: str) -> dict[str, Any]:
    """A checkpoint of a kind and a text, as options."""
    sources = SOURCES if kind == "native" else classifiers.texts(13)
    options: dict[str, Any] = {"checkpoint": str(folder / "model"), "source": write_lines(folder / "source", sources)}
    if kind == "native":
        NATIVE.save(checkpoints.small(), folder / "model")
        options["target"] = write_lines(folder / "target", TARGETS)
    elif kind == "gpt2":
        checkpoints.saved(folder / "model", "gpt2")
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
    opened = open_all(EvaluateConfig(**options, mask=HEADS[kind]))
    order = [name for name in [*MEASURED[kind], *STATES] if name != "length-ratio"]
    fitting = list(fitting_metrics(opened.checkpoint))
    assert [name for name in fitting if name != "length-ratio"] == order
    assert set(fitting) == {*MEASURED[kind], *STATES}
    metrics = tuple(reversed(fitting))
    found = run_evaluation(EvaluateConfig(**options, metrics=metrics, mask=HEADS[kind]))
    assert [score.metric for score in found.scores] == fitting
    table = run_each_head(EvaluateConfig(**options, metrics=metrics, each_head=True, heads=HEADS[kind])).table
    text = ValidationText(opened.corpus, opened.likelihood_options, opened.translate_options, intact=opened.checkpoint)
    with masked(opened.checkpoint.model, [HeadId.parse(HEADS[kind])]):
        for score in found.scores:
            metric = METRICS.get(score.metric)
            sums = metric.score(opened.checkpoint, text).sums
            swept = compare_scores(metric, sums, sums, Bootstrap(seed=5, replicates=23))
            tolerance = 1e-3 if score.metric == "perplexity" else 1e-9  # its percentiles are of nats
            assert score.value == pytest.approx(swept.value, abs=1e-12) and score.decimals == metric.decimals
            assert (score.low, score.high) == pytest.approx((swept.low, swept.high), rel=tolerance, abs=1e-12)
            column = "nll_per_token" if score.metric == "loss" else score.metric
            assert table[column][1] == pytest.approx(score.value, abs=1e-12)


def test_p_of_a_difference_counts_the_observed_one_too() -> None:
    """By hand: of 4, 3, 2 and -1, less their mean, two are as far from 0 as the 2 that was observed."""
    found = compare(np.array([3.0, 5.0, 4.0, 3.0, 0.0]), np.ones(5))
    assert (found.value, found.difference, found.p) == (3.0, 2.0, (1 + 2) / (1 + 4))

"""Which metrics `headscope evaluate` can measure of which model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from headscope.config import EvaluateOptions
from headscope.errors import ConfigError
from headscope.evaluation.labels import no_labels
from headscope.formats.base import Checkpoint, Predicts

TRANSLATION_METRICS = ("bleu", "chrf")
STATE_METRICS = ("cosine", "token-cosine", "l2", "token-l2")
PREDICTION_METRICS: Mapping[Predicts, tuple[str, ...]] = {
    "words": ("perplexity", "accuracy"),
    "classes": ("loss", "accuracy", "macro-f1"),
    "tags": ("loss", "accuracy", "macro-f1"),
    "nothing": (),
}
"""The metrics of what a model predicts, which one pass measures for any number of masks."""


def check_metric_names(names: Sequence[str]) -> None:
    """ConfigError for a name that is no metric."""
    known = dict.fromkeys((*TRANSLATION_METRICS, *chain(*PREDICTION_METRICS.values()), *STATE_METRICS))
    if strange := [name for name in names if name not in known]:
        raise ConfigError(f"--metrics {strange[0]!r} is not known; available: {', '.join(known)}")


def fitting_metrics(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The metrics that can be measured of a checkpoint, those of what it predicts first."""
    translations = TRANSLATION_METRICS if checkpoint.needs_target else ()
    return (*translations, *prediction_metrics(checkpoint), *STATE_METRICS)


def prediction_metrics(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The metrics of what a checkpoint predicts; none for what cannot be compared with labels."""
    return () if checkpoint.label_names and no_labels(checkpoint) else PREDICTION_METRICS[checkpoint.predicts]


def choose_metrics(config: EvaluateOptions, checkpoint: Checkpoint, *, against: bool = False) -> tuple[str, ...]:
    """The metrics of the config, or all that fit (with `--each-head` those that need no translation).

    Those of states are among them where another model is given to compare with (`against`). ConfigError for metrics
    that do not fit, and for `against` where none compares states.
    """
    check_metric_names(config.metrics)
    fitting, predictions = fitting_metrics(checkpoint), prediction_metrics(checkpoint)
    if unfit := [name for name in config.metrics if name not in fitting]:
        needs = {"words": ("perplexity",), "translates": TRANSLATION_METRICS}
        what = next((what for what, names in needs.items() if unfit[0] in names), "classifies")
        raise ConfigError(
            f"{unfit[0]} needs a model that {'predicts words' if what == 'words' else what}; a model of type "
            f"{checkpoint.model_type!r} can be asked for {', '.join(fitting)}"
        )
    if against and config.metrics and not compares_states(config.metrics):
        states = ", ".join(STATE_METRICS)
        raise ConfigError(f"--against names a model to compare states with; add some of {states} to --metrics")
    default = fitting if against else fitting[: -len(STATE_METRICS)] if predictions else STATE_METRICS
    each_head = config.each_head
    return config.metrics or tuple(name for name in default if not (each_head and name in TRANSLATION_METRICS))


def predictions_of(metrics: Sequence[str]) -> set[str]:
    """Those of the metrics that the likelihood of labels gives."""
    return set(metrics) - {*TRANSLATION_METRICS, *STATE_METRICS}


def compares_states(metrics: Sequence[str]) -> bool:
    """Whether any of the metrics compares states with those of the intact model."""
    return any(name in STATE_METRICS for name in metrics)


def needs_translation(metrics: Sequence[str]) -> bool:
    """Whether any of the metrics compares translations."""
    return any(name in TRANSLATION_METRICS for name in metrics)

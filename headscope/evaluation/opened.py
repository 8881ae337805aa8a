"""A checkpoint, a corpus and the intact model of an evaluation, opened and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headscope.config import EvaluateConfig, EvaluateOptions
from headscope.data.batching import BatchingOptions, sentence_limit
from headscope.data.corpus import Corpus
from headscope.data.unknown_subwords import UnknownSubwords
from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError
from headscope.evaluation.fitting_metrics import (
    STATE_METRICS,
    check_metric_names,
    choose_metrics,
    compares_states,
    needs_translation,
    predictions_of,
)
from headscope.evaluation.intact import NO_OTHER, Against, against_option, check_comparable
from headscope.evaluation.labels import open_text, with_labels
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.formats.base import Checkpoint, open_configured
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId, select_heads


@dataclass
class OpenedEvaluation:
    """A checkpoint and a corpus that fit each other, and the options of an evaluation."""

    config: EvaluateOptions
    checkpoint: Checkpoint
    corpus: Corpus
    metrics: tuple[str, ...]
    masked_heads: list[HeadId]
    likelihood_options: LikelihoodOptions
    translate_options: TranslateOptions
    remarks: list[str] = field(default_factory=list)
    unknown: UnknownSubwords = field(default_factory=UnknownSubwords)
    processes: Processes = ALONE
    intact: Checkpoint | None = None


def open_all(config: EvaluateConfig) -> OpenedEvaluation:
    """The checkpoint and corpus of a config, checked against each other and against the config."""
    check_metric_names(config.metrics)
    corpus = open_text(config, max_sentences=config.max_sentences)
    checkpoint = open_configured(config)
    corpus = with_labels(checkpoint, corpus, config.labels)
    return matched(checkpoint, corpus, config, against=against_option(config))


def matched(
    checkpoint: Checkpoint,
    corpus: Corpus,
    config: EvaluateOptions,
    *,
    against: Against = NO_OTHER,
    altered: bool = False,
) -> OpenedEvaluation:
    """A checkpoint and a corpus, checked against each other and the config; ConfigError where they do not fit.

    `against` finds the intact model that states are compared with. Metrics of states are left out, with a remark, where
    there is none and nothing is masked nor, with `altered`, gated.
    """
    kind = f"a model of type {checkpoint.model_type!r}"
    if corpus.has_target and not checkpoint.two_sided:
        raise ConfigError(f"{kind} reads one side only; leave out --target")
    if checkpoint.needs_target and not corpus.has_target:
        raise ConfigError(f"{kind} needs --target, the references")
    metrics = choose_metrics(config, checkpoint, against=against.named)
    if checkpoint.label_names and predictions_of(metrics) and not corpus.has_labels:
        raise ConfigError(
            f"{metrics[0]} needs --labels FILE, what is right; without labels there are {', '.join(STATE_METRICS)}"
        )
    batching = BatchingOptions(tokens=config.batch_tokens, limit=config.max_length, long=config.long)
    limit = sentence_limit(checkpoint, batching)
    likelihood_options = LikelihoodOptions(config.batch_tokens, limit, config.long, config.hiding, config.seed)
    translate_options = TranslateOptions(
        beam=config.beam,
        power=config.lenpen,
        max_ratio=config.max_len_a,
        max_extra=config.max_len_b,
        longest=config.max_length,
    )
    if needs_translation(metrics):
        checkpoint.search_facts(translate_options)
    masked_heads = select_heads(config.mask, checkpoint.layout) if config.mask else []
    opened = OpenedEvaluation(config, checkpoint, corpus, metrics, masked_heads, likelihood_options, translate_options)
    if compares_states(metrics):
        _find_intact(opened, against, altered=altered or bool(masked_heads) or config.each_head)
    return opened


def _find_intact(opened: OpenedEvaluation, against: Against, *, altered: bool) -> None:
    """Open what states are compared with; leave those metrics out where that is the model as it is."""
    found, checkpoint = against.find(), opened.checkpoint
    opened.intact = found.checkpoint
    opened.remarks += found.remarks
    if found.checkpoint is not None:
        reading = opened.likelihood_options
        limit = min(reading.limit, found.checkpoint.limit or reading.limit)
        opened.likelihood_options = replace(reading, limit=limit)
        check_comparable(checkpoint, found.checkpoint, opened.corpus, limit=limit)
    elif altered:
        opened.remarks += ["states are compared with those of the same model without --mask"] if found.remarks else []
    else:
        left_out = [name for name in opened.metrics if name in STATE_METRICS]
        opened.metrics = tuple(name for name in opened.metrics if name not in left_out)
        opened.remarks.append(
            f"left out: {', '.join(left_out)}: no head is masked and there is no other model to compare with; give "
            "--against CKPT, the intact model, or --mask LIST"
        )

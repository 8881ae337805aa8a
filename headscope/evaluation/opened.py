"""A checkpoint, a corpus and the intact model of an evaluation, opened and checked against each other.

States are compared with the intact model: a named one, or the model that a removal made the checkpoint from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.config import COMPANIONS, CheckpointOptions, Companions
from headscope.config.commands import EvaluateConfig, TranslateOptions
from headscope.config.option import take_config
from headscope.data.batching import automatic_tokens, sentence_limit
from headscope.data.corpus import Corpus, line_digests, open_text
from headscope.data.encoded import SIDE_NAMES, UNCUT, Batch, UnknownSubwords, encode_side, pad_side
from headscope.data.labels import with_labels
from headscope.distributed import ALONE, Processes
from headscope.errors import ConfigError, HeadscopeError, flag
from headscope.evaluation.likelihood import LikelihoodOptions, default_positions, make_trial
from headscope.evaluation.metrics.base import (
    METRICS,
    Metric,
    Pass,
    check_idle_options,
    choose_metric,
    fitting_metrics,
    metrics_in_order,
)
from headscope.evaluation.translation import RAW, TextMode, text_mode
from headscope.files.hub import is_cached
from headscope.files.reading import read_record
from headscope.formats.base import Checkpoint, detect_format, open_configured
from headscope.heads import HeadId, select_heads
from headscope.model.discovery import eval_mode
from headscope.model.mixing.experts import one_expert
from headscope.model.taps import masked

LONGEST = 512  # subwords of a sentence in a single forward pass, where the model has no limit


def check_sides(checkpoint: Checkpoint, corpus: Corpus, *, target: str) -> None:
    """ConfigError if a translation model lacks a target text, or another model has one.

    `target` names the purpose of the target text, for the message.
    """
    if checkpoint.needs_target and not corpus.has_target:
        raise ConfigError(f"a model of type {checkpoint.model_type!r} needs {flag.target}, {target}")
    refuse_unread_target(checkpoint, corpus)


def refuse_unread_target(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """ConfigError if a corpus has a target and the model reads only one side, or the source on both."""
    if corpus.has_target and (checkpoint.rereads_source or not checkpoint.two_sided):
        advice = (
            f" or, in analyze, give {flag.template}" if checkpoint.decodes and not checkpoint.rereads_source else ""
        )
        why = "classifies, and its decoder reads the source too" if checkpoint.rereads_source else "reads one side only"
        raise ConfigError(f"a model of type {checkpoint.model_type!r} {why}; leave out {flag.target}{advice}")


def forward_pass(checkpoint: Checkpoint, corpus: Corpus) -> Tensor:
    """The output of one pass without gradients over all sentences as one batch.

    Logits [b t V] of models that predict words, [b classes] of classifiers, final states [b t d] of other models.
    """
    refuse_unread_target(checkpoint, corpus)
    batch = one_batch(checkpoint, [(sentence.source, sentence.target) for sentence in corpus]).to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.no_grad():
        if checkpoint.predicts == "classes":
            return checkpoint.logits(batch)[:, 0]
        if checkpoint.predicts == "words" and (corpus.has_target or not checkpoint.two_sided):
            return checkpoint.logits(batch)
        return checkpoint.states(batch)


def one_batch(checkpoint: Checkpoint, pairs: Sequence[tuple[str, str | None]], *, longest: int = UNCUT) -> Batch:
    """Sentences, with or without translations, as one batch padded on the right."""
    limit = min(longest, checkpoint.limit or LONGEST)
    source = pad_side(checkpoint.encode([text for text, _ in pairs], side="source", limit=limit))
    targets = [text for _, text in pairs if text is not None]
    target = pad_side(checkpoint.encode(targets, side="target", limit=limit)) if targets else None
    return Batch(torch.arange(len(pairs)), 0, source, target)


def check_template(checkpoint: Checkpoint) -> None:
    """ConfigError unless the model is a decoder language model, which templates are for."""
    if checkpoint.two_sided or not checkpoint.decodes:
        raise ConfigError(
            f"{flag.template} is for decoder language models; leave it out for type {checkpoint.model_type!r}"
        )


RECORD = "pruning.json"
OVERLAP = 0.01  # share of lines that may also be in the calibration text: any two texts share short lines
COMPARED_LINES = 16  # lines that both models must split into the same subwords


Intact = tuple[Checkpoint | None, list[str]]
"""A model to compare states with, if there is one, and remarks on it."""


# The intact model that states are compared with.


def find_intact(config: EvaluateConfig) -> Intact:
    """The checkpoint that `--against` names, else the source in the `pruning.json` of a removal.

    It is opened with the options of the config that its format uses.
    """
    if (path := config.against) is None:
        source = removal_record(config.checkpoint).get("source")
        return load_intact(source, config) if isinstance(source, Mapping) else (None, [])
    takes = detect_format(path).takes
    useless: dict[str, Any] = dict.fromkeys(name for name in COMPANIONS if name not in takes)
    return open_configured(replace(config, checkpoint=path, format=None, **useless)), []


def removal_record(checkpoint: str) -> Mapping[str, Any]:
    """The `pruning.json` beside a checkpoint, if a removal wrote both; empty for other checkpoints."""
    path = Path(checkpoint)
    if not os.path.exists(path):
        return {}
    record = read_record((path if path.is_dir() else path.parent) / RECORD)
    output = record.get("output")
    is_its = isinstance(output, Mapping) and output.get("file") in (".", path.name)
    return record if record.get("kind") in ("removal", "shrink") and is_its else {}


def warn_of_seen_lines(checkpoint: str, corpus: Corpus) -> list[str]:
    """A warning if the heads of a smaller model were chosen or refitted on some lines of the text."""
    if not (lines := (removal_record(checkpoint).get("compensation") or {}).get("lines")):
        return []
    digests = set(line_digests(corpus))
    overlap = len(digests.intersection(lines))
    if overlap <= OVERLAP * len(digests):
        return []
    return [
        f"warning: {overlap} of {len(digests)} different lines are among those that heads were chosen by or refitted "
        f"on ({RECORD}), so the numbers flatter the model; give text that it has not seen"
    ]


def load_intact(source: Mapping[str, Any], options: CheckpointOptions) -> Intact:
    """The checkpoint that a record's `source` names, if it still exists with the recorded digest."""
    path, why = str(source.get("path")), "is not there"
    companions: dict[str, Any] = dict.fromkeys(COMPANIONS) | take_config(Companions, source).companion_values()
    if os.path.exists(path) or is_cached(path):
        try:
            checkpoint = open_configured(replace(options, checkpoint=path, format=source.get("format"), **companions))
        except HeadscopeError:
            why = "cannot be opened"
        else:
            if checkpoint.digest == source.get("digest"):
                return checkpoint, [f"states are compared with those of {path}, which {RECORD} names"]
            why = "has changed since (another digest)"
    return None, [f"{RECORD} names {path} as the intact model, which {why}; {flag.against} CKPT names another"]


@dataclass
class OpenedEvaluation:
    """A checkpoint and a corpus that fit each other, and the options of an evaluation."""

    config: EvaluateConfig
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
    text: TextMode = RAW

    @contextmanager
    def configured_model(self) -> Iterator[None]:
        """Within the block the config's heads are masked, and mixtures use one expert if the config says so."""
        model = self.checkpoint.model
        with masked(model, self.masked_heads), one_expert(model, self.config.expert, seed=self.config.seed):
            yield

    def fit_batches(self) -> None:
        """Make batches as large as memory allows, unless the config sets their size."""
        if self.config.batch_tokens is None:
            reading = self.likelihood_options
            tokens, remark = automatic_tokens(
                self.checkpoint.device,
                partial(make_trial, self.checkpoint, self.corpus, reading),
                limit=reading.limit,
                default=reading.tokens,
                processes=self.processes,
            )
            self.likelihood_options = replace(reading, tokens=tokens)
            self.remarks += [remark] if remark and remark not in self.remarks else []

    def requested_metrics(self, reads: Pass | None = None) -> list[Metric]:
        """The metrics to measure, of all passes or one, in their order."""
        return metrics_in_order(self.metrics, reads=reads)


def open_evaluation(
    config: EvaluateConfig,
    *,
    checkpoint: Checkpoint | None = None,
    against: Checkpoint | None = None,
    find: Callable[[EvaluateConfig], Intact] = find_intact,
    has_gates: bool = False,
) -> OpenedEvaluation:
    """Open the checkpoint and corpus of a config, and check them against each other and the config.

    An open `checkpoint` is used as it is. States are compared with `against`, with the checkpoint that the config
    names, or with the result of `find`. Without any of these metrics of states are left out, with a remark, unless
    heads are masked, or gated (`has_gates`). ConfigError if something does not fit.
    """
    for name in config.metrics:
        METRICS.get(name)
    corpus = open_text(config, max_sentences=config.max_sentences)
    checkpoint = checkpoint or open_configured(config)
    corpus = with_labels(checkpoint, corpus, config.labels)
    check_sides(checkpoint, corpus, target="the references")
    checkpoint.start_ids()  # refuses a model that cannot read text, even if no metric is left
    metrics = choose_metrics(config, checkpoint, against=bool(against or config.against))
    for name in metrics:
        choose_metric(name, checkpoint, **corpus.comes_with)
    tokens = config.batch_tokens or default_positions(checkpoint)  # on an accelerator `fit_batches` knows better
    limit = sentence_limit(checkpoint, config.max_length)
    likelihood_options = LikelihoodOptions(tokens, limit, config.long, config.hiding, config.seed)
    translate_options = take_config(TranslateOptions, vars(config))
    check_idle_options(config, checkpoint, metrics)
    text, remarks = RAW, list[str]()
    if metrics_in_order(metrics, reads="translations"):
        checkpoint.search_facts(translate_options)
        text, remarks = text_mode(checkpoint, config.text, config.bleu_tokenize)
    masked_heads = select_heads(config.mask, checkpoint.layout) if config.mask else []
    setup = OpenedEvaluation(config, checkpoint, corpus, metrics, masked_heads, likelihood_options, translate_options)
    setup.text, setup.remarks = text, [*warn_of_seen_lines(checkpoint.path, corpus), *remarks]
    if setup.requested_metrics("states"):
        intact = (against, []) if against else find_intact(config) if config.against else find(config)
        is_altered = has_gates or bool(masked_heads or config.expert) or config.each_head
        _compare_with(setup, *intact, is_altered=is_altered)
    return setup


def _compare_with(setup: OpenedEvaluation, intact: Checkpoint | None, remarks: list[str], *, is_altered: bool) -> None:
    """Set the model to compare states with; without one leave out metrics of states, unless heads are altered."""
    setup.intact = intact
    setup.remarks += remarks
    if intact is not None:
        reading = setup.likelihood_options
        limit = min(reading.limit, intact.limit or reading.limit)
        setup.likelihood_options = replace(reading, limit=limit)
        check_comparable(setup.checkpoint, intact, setup.corpus, limit=limit)
    elif is_altered:
        setup.remarks += [f"states are compared with the same model's without {flag.mask}"] if remarks else []
    else:
        left_out = [metric.name for metric in setup.requested_metrics("states")]
        setup.metrics = tuple(name for name in setup.metrics if name not in left_out)
        why = (
            f"{', '.join(left_out)}: no head is masked and there is no other model to compare with; give "
            f"{flag.against} CKPT, the intact model, or {flag.mask} LIST"
        )
        if not setup.metrics:
            raise ConfigError(why)
        setup.remarks.append(f"left out: {why}")


def choose_metrics(config: EvaluateConfig, checkpoint: Checkpoint, *, against: bool = False) -> tuple[str, ...]:
    """The metrics of the config, or all that fit; with `--each-head` only those without translations.

    With `against`, a model to compare with, metrics of states are included. ConfigError for `against` if none of the
    config's metrics compares states.
    """
    if against and config.metrics and not metrics_in_order(config.metrics, reads="states"):
        states = ", ".join(metric.name for metric in metrics_in_order(reads="states"))
        raise ConfigError(f"{flag.against} is what states are compared with; add some of {states} to {flag.metrics}")
    if config.metrics:
        return config.metrics
    metrics = metrics_in_order(fitting_metrics(checkpoint))
    usual = [metric for metric in metrics if metric.default or (against and metric.reads == "states")]
    slow = "translations" if config.each_head else ""
    return tuple(metric.name for metric in usual or metrics if metric.reads != slow)


def check_comparable(checkpoint: Checkpoint, intact: Checkpoint, corpus: Corpus, *, limit: int) -> None:
    """ConfigError if two models do not split a text into the same tokens, so that their states cannot be compared."""
    pair = f"{checkpoint.path} and the intact model {intact.path}"
    if checkpoint.two_sided is not intact.two_sided:
        raise ConfigError(f"{pair} cannot be compared: one has an encoder and a decoder, the other has not")
    lines = list(islice(corpus, COMPARED_LINES))
    for side in SIDE_NAMES if checkpoint.two_sided and corpus.has_target else SIDE_NAMES[:1]:
        split, other = (encode_side(lines, model, side, limit=limit) for model in (checkpoint, intact))
        if [line.ids for line in split] != [line.ids for line in other]:
            raise ConfigError(f"{pair} have different subwords, so cannot be compared; give {flag.against} CKPT")

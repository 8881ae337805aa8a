"""Evaluation and translation with an open checkpoint, and `ScoredModel`, whose methods they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from headscope.api.open_model import OpenModel
from headscope.api.options import EvaluateMore, PathName, Report, configured, in_python, progress_of, python_words
from headscope.api.selection import Heads, head_ids_of, heads_option
from headscope.api.texts import LabelList, Text, Texts, one_text, texts_of
from headscope.config import CheckpointOptions, EvaluateOptions
from headscope.data.lines import raw_lines
from headscope.errors import ConfigError
from headscope.evaluation.each_head import score_each_head
from headscope.evaluation.opened import Against, Intact, OpenedEvaluation, matched, named, recorded
from headscope.evaluation.quality import Evaluation, score_corpus
from headscope.evaluation.translation import decoded_lines, translate_lines
from headscope.formats.base import DTYPES, Checkpoint
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.model.discovery import eval_mode
from headscope.model.mixing.experts import one_expert
from headscope.model.taps import masked
from headscope.registry import unknown
from headscope.signature import Signature

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack


class TranslateMore(TypedDict, total=False):
    """Options of `Model.translate`; see `headscope.formats.translate_options.TranslateOptions`."""

    beam: int | None
    lenpen: float | None
    max_len_a: float | None
    max_len_b: int | None
    max_length: int | None
    keep_pieces: bool
    mask: Heads | None
    expert: str | None
    seed: int
    batch_tokens: int | None
    progress: Report


_SEARCH = {"lenpen": "power", "max_len_a": "max_ratio", "max_len_b": "max_extra", "max_length": "longest"}


def translations_of(
    checkpoint: Checkpoint, text: Text, options: dict[str, Any], *, nbest: int, scores: bool
) -> list[list[Translation]]:
    """The best translations of every sentence; `options` are those of `TranslateMore`."""
    if strange := sorted(set(options) - set(TranslateMore.__annotations__)):
        raise ConfigError(unknown("option of translate", strange[0], sorted(TranslateMore.__annotations__)))
    mask, expert = options.pop("mask", None), options.pop("expert", None)
    report, seed = options.pop("progress", False), options.pop("seed", 1)
    tokens = options.pop("batch_tokens", None)
    search = {_SEARCH.get(name, name): value for name, value in options.items()}
    checked = configured(TranslateOptions, {**search, "best": nbest, "scores": scores}, function="translate")
    off = [] if mask is None else head_ids_of(mask, checkpoint.layout, name="mask")
    source = one_text(text)
    if isinstance(source, (str, Path)):
        lines, total = decoded_lines(raw_lines(Path(source)), name=str(source)), 0
    else:
        lines, total = iter(source), len(source)
    with (
        eval_mode(checkpoint.model),
        masked(checkpoint.model, off),
        one_expert(checkpoint.model, expert, seed=seed),
        progress_of(report)("translating", total) as step,
    ):
        return list(translate_lines(checkpoint, lines, options=checked, tokens=tokens, progress=step))


class ScoredModel(OpenModel):
    """An open checkpoint, what it scores on texts, and what it translates."""

    @in_python
    def evaluate(
        self,
        text: Text | None = None,
        *,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        metrics: str | Iterable[str] = (),
        tokenised: bool = False,
        mask: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Unpack[EvaluateMore],
    ) -> Evaluation:
        """Score the model on a text: what `headscope evaluate` does; `["bleu"].value` of the result is a score.

        text, target, second, labels: see `analyze`; models that translate need the references, classifiers labels.
        metrics: "bleu", "chrf", "perplexity", "accuracy", of classifiers "loss", "accuracy", "macro-f1", of every model
            "cosine", "token-cosine", "l2", "token-l2" to the intact model; default: all that fit the model, the last
            ones for encoders without a head, and where `against` is given.
        tokenised: BLEU and chrF of tokenised text, whatever its case, instead of detokenised text as it is.
        mask: heads that are off meanwhile.
        against: the intact model, open or its path; default: what heads were removed from to make this one, else this
            one without `mask`. Where that is the same the metrics that compare are left out, as a remark says.
        options: further ones, of `headscope.config.EvaluateOptions` (`beam`, `max_sentences`, `seed`, …).
        """
        settings = {**options, "metrics": metrics, "mask": mask, **_protocol(tokenised)}
        with self._scored(texts_of(text, target, second=second, labels=labels), settings, against) as opened:
            evaluation = score_corpus(opened, progress=progress_of(progress))
        evaluation.remarks = [python_words(remark) for remark in evaluation.remarks]
        evaluation.signature = self._gated_signature(evaluation.signature)
        return evaluation

    @in_python
    def evaluate_heads(
        self,
        text: Text | None = None,
        *,
        target: Text | None = None,
        second: Text | None = None,
        labels: LabelList | None = None,
        heads: Heads | None = None,
        metrics: str | Iterable[str] = (),
        tokenised: bool = False,
        mask: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Unpack[EvaluateMore],
    ) -> pd.DataFrame:
        """Score the model with each of `heads` (default: every one) off by itself: `headscope evaluate --each-head`.

        The first row is the model as it is; then come the heads whose loss harms most. Default metrics are perplexity
        and accuracy, of all heads in one pass; "bleu" and "chrf" translate the whole text for every head.
        """
        settings = {
            **options,
            "metrics": metrics,
            "mask": mask,
            **_protocol(tokenised),
            "heads": heads,
            "each_head": True,
        }
        with self._scored(texts_of(text, target, second=second, labels=labels), settings, against) as opened:
            scores = score_each_head(opened, progress=progress_of(progress))
        scores.table.attrs["signature"] = str(self._gated_signature(scores.signature))
        return scores.table

    @in_python
    def translate(self, text: Text, **options: Unpack[TranslateMore]) -> list[str]:
        """The best translation of every sentence, in their order; an empty one stays empty.

        beam, lenpen: hypotheses that are followed, power of the length penalty; default: the checkpoint's own.
        max_len_a, max_len_b: n source tokens give at most a · n + b tokens.
        max_length: subwords of a sentence, longer ones are cut; default: the model's limit, or 1024.
        keep_pieces: leave the subwords apart.
        mask: heads that are off meanwhile.
        expert, seed: of a mixture of experts one alone: "top", "random" (drawn by the seed) or its number.
        batch_tokens, progress: positions of a batch; see `analyze`.
        """
        translations = translations_of(self.checkpoint, text, {**options}, nbest=1, scores=False)
        return [best[0].text for best in translations]

    @in_python
    def translations(self, text: Text, *, nbest: int = 1, **options: Unpack[TranslateMore]) -> list[list[Translation]]:
        """The `nbest` best translations of every sentence with their scores, best first: `text` and `score` of each.

        options: those of `translate`. What `headscope translate --nbest N --scores` writes.
        """
        return translations_of(self.checkpoint, text, {**options}, nbest=nbest, scores=True)

    @contextmanager
    def _scored(
        self, texts: Texts, options: Mapping[str, Any], against: OpenModel | PathName | None
    ) -> Iterator[OpenedEvaluation]:
        """What is scored on what, within the block; this model and the intact one are then in eval mode."""
        checkpoint, function = self.checkpoint, "evaluate_heads" if "each_head" in options else "evaluate"
        heads = {
            name: heads_option(options[name], checkpoint.layout, name=name) for name in {"mask", "heads"} & {*options}
        }
        checked = configured(EvaluateOptions, {**options, **heads}, function=function)
        corpus = texts.corpus(checkpoint, max_sentences=checked.max_sentences)
        opened = matched(checkpoint, corpus, checked, against=self._against(against), altered=bool(self.gates))
        with eval_mode(checkpoint.model), eval_mode((opened.intact or checkpoint).model):
            yield opened

    def _gated_signature(self, signature: Signature) -> Signature:
        return signature.having(gates=self.gates) if self.gates else signature

    def _against(self, against: OpenModel | PathName | None) -> Against:
        """How the intact model is found; ConfigError for what is neither a model nor a path."""
        if against is None:
            return Against(self._made_of)
        if isinstance(against, OpenModel):
            return Against(partial(Intact, against.checkpoint), named=True)
        if isinstance(against, (str, PathLike)):
            return Against(partial(named, str(against), self._opened_as), named=True)
        raise ConfigError(f"against is of type {type(against).__name__}; give a checkpoint's path or a Model")

    def _made_of(self) -> Intact:
        """The intact model that heads were removed from to make this one, where its files say so."""
        return recorded(self._opened_as)

    @property
    def _opened_as(self) -> CheckpointOptions:
        """Where this model came from and runs, as options that open another one to compare it with."""
        opened, dtype = self.checkpoint, str(self.checkpoint.dtype).removeprefix("torch.")
        dtype = dtype if dtype in DTYPES else "auto"
        needs = self._companions.given()
        return CheckpointOptions(checkpoint=opened.path, device=str(opened.device), dtype=dtype, **needs)


def _protocol(tokenised: bool) -> dict[str, str]:
    return {"text": "tokenised-lowercase" if tokenised else "raw"}

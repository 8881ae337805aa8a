"""Evaluation and translation with an open checkpoint, and `ScoredModel`, whose methods they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.api.open_model import OpenModel
from headscope.api.options import PathName, Report, in_python, progress_of
from headscope.api.selection import Heads, head_ids_of, heads_option
from headscope.api.texts import Text, Texts, one_text, texts_in
from headscope.config import CheckpointOptions, EvaluateOptions
from headscope.config.option import configured
from headscope.config.small import TranslateConfig
from headscope.data.lines import raw_lines
from headscope.errors import ConfigError, python_words
from headscope.evaluation.each_head import score_each_head
from headscope.evaluation.opened import Against, Intact, OpenedEvaluation, matched, named, recorded
from headscope.evaluation.quality import Evaluation, score_corpus
from headscope.evaluation.translation import decoded_lines, translate_lines
from headscope.formats.base import DTYPES
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.model.discovery import eval_mode
from headscope.model.mixing.experts import one_expert
from headscope.model.taps import masked
from headscope.signature import Signature

if TYPE_CHECKING:
    import pandas as pd


class ScoredModel(OpenModel):
    """An open checkpoint, what it scores on texts, and what it translates."""

    @in_python
    def evaluate(
        self,
        text: Text | None = None,
        *,
        metrics: str | Iterable[str] = (),
        tokenised: bool = False,
        mask: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Any,
    ) -> Evaluation:
        """Score the model on a text: what `headscope evaluate` does; `["bleu"].value` of the result is a score.

        text: see `analyze`; models that translate need the `target`, classifiers `labels`.
        metrics: "bleu", "chrf", "perplexity", "accuracy", of classifiers "loss", "accuracy", "macro-f1", of every model
            "cosine", "token-cosine", "l2", "token-l2" to the intact model; default: all that fit the model, the last
            ones for encoders without a head, and where `against` is given.
        tokenised: BLEU and chrF of tokenised text, whatever its case, instead of detokenised text as it is.
        mask: heads that are off meanwhile.
        against: the intact model, open or its path; default: what heads were removed from to make this one, else this
            one without `mask`. Where that is the same the metrics that compare are left out, as a remark says.
        options: `target`, `second`, `labels` of the text, and those of `headscope.config.EvaluateOptions` (`beam`,
            `max_sentences`, `seed`, …).
        """
        settings = {"metrics": metrics, "mask": mask, "text": _protocol(tokenised)}
        with self._scored(texts_in(options, text), {**options, **settings}, against) as opened:
            evaluation = score_corpus(opened, progress=progress_of(progress))
        evaluation.remarks = [python_words(remark) for remark in evaluation.remarks]
        evaluation.signature = self._gated_signature(evaluation.signature)
        return evaluation

    @in_python
    def evaluate_heads(
        self,
        text: Text | None = None,
        *,
        heads: Heads | None = None,
        metrics: str | Iterable[str] = (),
        tokenised: bool = False,
        mask: Heads | None = None,
        against: OpenModel | PathName | None = None,
        progress: Report = False,
        **options: Any,
    ) -> pd.DataFrame:
        """Score the model with each of `heads` (default: every one) off by itself: `headscope evaluate --each-head`.

        The first row is the model as it is; then come the heads whose loss harms most. Default metrics are perplexity
        and accuracy, of all heads in one pass; "bleu" and "chrf" translate the whole text for every head.
        """
        settings = {"metrics": metrics, "mask": mask, "text": _protocol(tokenised), "heads": heads, "each_head": True}
        with self._scored(texts_in(options, text), {**options, **settings}, against) as opened:
            scores = score_each_head(opened, progress=progress_of(progress))
        scores.table.attrs["signature"] = str(self._gated_signature(scores.signature))
        return scores.table

    @in_python
    def translate(self, text: Text, **options: Any) -> list[str]:
        """The best translation of every sentence, in their order; an empty one stays empty.

        options: `mask` (heads that are off meanwhile), `progress`, and those of `headscope translate`: `beam`,
            `lenpen`, `max_len_a`, `max_len_b`, `max_length`, `keep_bpe`, `expert`, `seed`, `batch_tokens`.
        """
        return [best[0].text for best in self._translations(text, {**options, "nbest": 1})]

    @in_python
    def translations(self, text: Text, *, nbest: int = 1, **options: Any) -> list[list[Translation]]:
        """The `nbest` best translations of every sentence with their scores, best first: `text` and `score` of each.

        options: those of `translate`. What `headscope translate --nbest N --scores` writes.
        """
        return self._translations(text, {**options, "nbest": nbest, "scores": True})

    def _translations(self, text: Text, options: dict[str, Any]) -> list[list[Translation]]:
        checkpoint, mask, report = self.checkpoint, options.pop("mask", None), options.pop("progress", False)
        config = configured(TranslateConfig, {**options, "checkpoint": checkpoint.path}, what="translate")
        off = [] if mask is None else head_ids_of(mask, checkpoint.layout, name="mask")
        source = one_text(text)
        if isinstance(source, (str, Path)):
            lines, total = decoded_lines(raw_lines(Path(source)), name=str(source)), 0
        else:
            lines, total = iter(source), len(source)
        with (
            eval_mode(checkpoint.model),
            masked(checkpoint.model, off),
            one_expert(checkpoint.model, config.expert, seed=config.seed),
            progress_of(report)("translating", total) as step,
        ):
            search = TranslateOptions.of(config)
            return list(translate_lines(checkpoint, lines, options=search, tokens=config.batch_tokens, progress=step))

    @contextmanager
    def _scored(
        self, texts: Texts, options: Mapping[str, Any], against: OpenModel | PathName | None
    ) -> Iterator[OpenedEvaluation]:
        """What is scored on what, within the block; this model and the intact one are then in eval mode."""
        checkpoint = self.checkpoint
        heads = {
            name: heads_option(options[name], checkpoint.layout, name=name) for name in {"mask", "heads"} & {*options}
        }
        checked = configured(EvaluateOptions, {**options, **heads}, what="evaluate")
        corpus = texts.corpus(checkpoint, max_sentences=checked.max_sentences)
        opened = matched(checkpoint, corpus, checked, against=self._against(against), altered=bool(self.gates))
        with eval_mode(checkpoint.model), eval_mode((opened.intact or checkpoint).model):
            yield opened

    def _gated_signature(self, signature: Signature) -> Signature:
        return signature.with_entries(gates=self.gates) if self.gates else signature

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


def _protocol(tokenised: bool) -> str:
    return "tokenised-lowercase" if tokenised else "raw"

"""Evaluation and translation with an open checkpoint, for the methods of `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from headscope.api.options import configured, python_words
from headscope.api.progress import Report, progress_of
from headscope.api.selection import Heads, head_ids_of, heads_option
from headscope.api.texts import Text, TextPair, one_text
from headscope.config import EvaluateOptions
from headscope.errors import ConfigError
from headscope.evaluation.each_head import score_each_head
from headscope.evaluation.quality import Evaluation, OpenedEvaluation, matched, score_corpus
from headscope.evaluation.translation import decoded_lines, translate_lines
from headscope.files.lines import raw_lines
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions, Translation
from headscope.model.discovery import eval_mode
from headscope.model.gating import masked
from headscope.registry import unknown

if TYPE_CHECKING:
    import pandas as pd


class TranslateMore(TypedDict, total=False):
    """Options of `Model.translate`; see `headscope.formats.translate_options.TranslateOptions`."""

    beam: int | None
    lenpen: float | None
    max_len_a: float | None
    max_len_b: int | None
    max_length: int | None
    keep_pieces: bool
    mask: Heads | None
    batch_tokens: int
    progress: Report


def evaluation_of(
    checkpoint: Checkpoint,
    texts: TextPair,
    options: Mapping[str, Any],
    *,
    gates: str,
    progress: Report,
) -> Evaluation:
    """Scores of an open checkpoint on a text."""
    opened = _open_evaluation(checkpoint, texts, options, function="evaluate")
    with eval_mode(checkpoint.model):
        evaluation = score_corpus(opened, progress=progress_of(progress))
    evaluation.remarks = [python_words(remark) for remark in evaluation.remarks]
    if gates:
        evaluation.signature = evaluation.signature.having(gates=gates)
    return evaluation


def head_scores_of(
    checkpoint: Checkpoint,
    texts: TextPair,
    options: Mapping[str, Any],
    *,
    gates: str,
    progress: Report,
) -> pd.DataFrame:
    """Scores with each head masked by itself; the signature is in the table's `attrs`."""
    opened = _open_evaluation(checkpoint, texts, {**options, "each_head": True}, function="evaluate_heads")
    with eval_mode(checkpoint.model):
        scores = score_each_head(opened, progress=progress_of(progress))
    signature = scores.signature.having(gates=gates) if gates else scores.signature
    scores.table.attrs["signature"] = str(signature)
    return scores.table


def _open_evaluation(
    checkpoint: Checkpoint, texts: TextPair, options: Mapping[str, Any], *, function: str
) -> OpenedEvaluation:
    heads: dict[str, Heads | None] = {name: options.get(name) for name in ("mask", "heads") if name in options}
    selected = {name: heads_option(selection, checkpoint.layout) for name, selection in heads.items()}
    checked = configured(EvaluateOptions, {**options, **selected}, function=function)
    corpus = texts.corpus(checkpoint, max_sentences=checked.max_sentences)
    return matched(checkpoint, corpus, checked)


_SEARCH = {"lenpen": "power", "max_len_a": "max_ratio", "max_len_b": "max_extra", "max_length": "longest"}


def translations_of(
    checkpoint: Checkpoint, text: Text, options: dict[str, Any], *, nbest: int, scores: bool
) -> list[list[Translation]]:
    """The best translations of every sentence; `options` are those of `TranslateMore`."""
    if strange := sorted(set(options) - set(TranslateMore.__annotations__)):
        raise ConfigError(unknown("option of translate", strange[0], sorted(TranslateMore.__annotations__)))
    mask, report = options.pop("mask", None), options.pop("progress", False)
    tokens = options.pop("batch_tokens", 2048)
    search = {_SEARCH.get(name, name): value for name, value in options.items()}
    checked = configured(TranslateOptions, {**search, "best": nbest, "scores": scores}, function="translate")
    off = [] if mask is None else head_ids_of(mask, checkpoint.layout)
    source = one_text(text)
    lines, total = (_file_lines(Path(source)), 0) if isinstance(source, (str, Path)) else (iter(source), len(source))
    with eval_mode(checkpoint.model), masked(checkpoint.model, off), progress_of(report)("translating", total) as step:
        return list(translate_lines(checkpoint, lines, options=checked, tokens=tokens, progress=step))


def _file_lines(path: Path) -> Iterator[str]:
    return decoded_lines(raw_lines(path), name=str(path))

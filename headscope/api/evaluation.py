"""How good a model is on a text, and what it translates: what `Model.evaluate` and its like do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.api.options import configured, python_words
from headscope.api.progress import Report, progress_of
from headscope.api.selection import Heads, heads_option
from headscope.api.texts import Text, given, one_text
from headscope.config import EvaluateOptions
from headscope.evaluation.each_head import score_each_head
from headscope.evaluation.quality import Evaluation, OpenedEvaluation, matched, score_corpus
from headscope.evaluation.translation import decoded_lines, translate_lines
from headscope.files.lines import raw_lines
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.model.discovery import eval_mode

if TYPE_CHECKING:
    import pandas as pd


def evaluation_of(
    checkpoint: Checkpoint,
    text: Text,
    target: Text | None,
    options: Mapping[str, Any],
    *,
    gates: str,
    progress: Report,
) -> Evaluation:
    """Scores of an open checkpoint on a text."""
    opened = _opened(checkpoint, text, target, options, function="evaluate")
    with eval_mode(checkpoint.model):
        found = score_corpus(opened, progress=progress_of(progress))
    found.remarks = [python_words(remark) for remark in found.remarks]
    if gates:
        found.signature = found.signature.having(gates=gates)
    return found


def head_scores_of(
    checkpoint: Checkpoint,
    text: Text,
    target: Text | None,
    options: Mapping[str, Any],
    *,
    gates: str,
    progress: Report,
) -> pd.DataFrame:
    """Scores with each head off by itself; the signature is in the table's `attrs`."""
    opened = _opened(checkpoint, text, target, {**options, "each_head": True}, function="evaluate_heads")
    with eval_mode(checkpoint.model):
        found = score_each_head(opened, progress=progress_of(progress))
    signature = found.signature.having(gates=gates) if gates else found.signature
    found.table.attrs["signature"] = str(signature)
    return found.table


def _opened(
    checkpoint: Checkpoint, text: Text, target: Text | None, options: Mapping[str, Any], *, function: str
) -> OpenedEvaluation:
    heads: dict[str, Heads | None] = {name: options.get(name) for name in ("mask", "heads") if name in options}
    named = {name: heads_option(chosen, checkpoint.layout) for name, chosen in heads.items()}
    chosen = configured(EvaluateOptions, {**options, **named}, function=function)
    corpus = given(text, target).corpus(max_sentences=chosen.max_sentences)
    return matched(checkpoint, corpus, chosen)


def translations_of(
    checkpoint: Checkpoint, text: Text, options: TranslateOptions, *, tokens: int, progress: Report
) -> list[str]:
    """The best translation of every sentence."""
    source = one_text(text)
    lines: Iterable[str] = source if not isinstance(source, (str, Path)) else _file_lines(Path(source))
    total = len(source) if not isinstance(source, (str, Path)) else 0
    with eval_mode(checkpoint.model), progress_of(progress)("translating", total) as step:
        found = translate_lines(checkpoint, lines, options=options, tokens=tokens, progress=step)
        return [best[0].text for best in found]


def _file_lines(path: Path) -> Iterable[str]:
    return decoded_lines(raw_lines(path), name=str(path))

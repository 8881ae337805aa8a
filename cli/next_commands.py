"""The commands that could come next, ready to be typed, with the options of the last command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headscope.config import Companions, TextFiles, ValidatedTextFiles
from headscope.config.analyze import AnalyzeConfig
from headscope.config.inputs import DATA, MODEL
from headscope.config.option import plain_value, typed_words
from headscope.heads import Site

if TYPE_CHECKING:
    from headscope.results.ranking import Ranking
    from headscope.results.removal import Removal
    from headscope.results.study import Study

CHECKPOINT_OPTIONS = ("format", *(entry.name for entry in fields(Companions)))
TEXT_OPTIONS = tuple(entry.name for entry in fields(TextFiles))
BOTH_TEXTS_OPTIONS = tuple(entry.name for entry in fields(ValidatedTextFiles))
DEFAULTS = {entry.name: entry.default for entry in fields(AnalyzeConfig)}
INPUT_OPTIONS = [entry.name for entry in fields(AnalyzeConfig) if entry.metadata.get("panel") in (DATA, MODEL)]
INPUT_OPTIONS.remove("batch_tokens")  # records have the number that was used, not the one that was given
ANALYSIS_OPTIONS = (*INPUT_OPTIONS, "queries", "keep_special", "exclude_sinks")
OPTIONS = (*fields(AnalyzeConfig), *fields(ValidatedTextFiles))
FLAGLESS = {entry.name for entry in OPTIONS if entry.metadata.get("flagless")}
SHRINK_LINES, REFIT_LINES = 40, 10
"""Fewest lines of a text for which `shrink` and a refit are proposed; both hold out a fifth of them."""
HALF = 0.5
"""Share of the heads to keep that is proposed."""


def command_line(*words: object, options: Mapping[str, Any] | None = None, names: tuple[str, ...] = ()) -> str:
    """A command line of `headscope`, quoted for a shell: words, then the `options` that `names` lists."""
    words_of_line = ["headscope", *map(str, words)]
    for name in names:
        value = (options or {}).get(name)
        if value not in (None, False, "", DEFAULTS.get(name)):
            words_of_line += typed_words(name, value, flagless=name in FLAGLESS or "." in name)
    return shlex.join(words_of_line)


def after_analysis(study: Study) -> Iterator[tuple[str, str]]:
    """Commands after `analyze`: measure importance, or if it was measured draw it and make a smaller model."""
    options, folder = study.record.get("options", {}), study.folder
    checkpoint = options.get("checkpoint")
    if not checkpoint or not study.complete:
        return
    if study.has_table("importance"):
        from headscope.results.study_answers import main_importance

        if measure := main_importance(study):
            figure = ("plot", "heads", folder, "--measure", measure.name, "--style", "paper")
            yield "Figure for a paper", command_line(*figure, "--out", f"{folder}-heads.pdf")
        if int(study.record["data"].get("in_corpus") or 0) >= SHRINK_LINES:
            small = ("prune", "shrink", checkpoint, "--keep-fraction", HALF, "--out", f"{folder}-small")
            yield "Smaller model", command_line(*small, options=options, names=(*TEXT_OPTIONS, *CHECKPOINT_OPTIONS))
    elif not study.has_table("patching"):
        rerun = ("analyze", checkpoint, "--importance", "--out", f"{folder}-importance")
        of_analyses = _default_analysis_options(options)
        names = (*ANALYSIS_OPTIONS, *of_analyses)
        yield "Which heads matter", command_line(*rerun, options={**options, **of_analyses}, names=names)


def _default_analysis_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options of the analyses that run by default, as `--set` names them (`alignment.alignments`)."""
    from headscope.config.declarations import analysis_options
    from headscope.engine.base import ANALYSES

    values: dict[str, Any] = {}
    for name, option in analysis_options().items():
        unset = plain_value(option.field.default)
        if options.get(name, unset) != unset and any(ANALYSES.get(analysis).default for analysis in option.analyses):
            values[f"{option.analyses[0]}.{name}"] = options[name]
    return values


def after_choice(choice: Ranking, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The command after a choice of heads: remove them, and measure the result on the same text.

    After a ranking on enough text it refits the other heads (`--compensate auto`). `--export native` is proposed where
    the remaining heads fit the model's own class.
    """
    record = choice.record
    if record["removed_to"] is not None:
        yield "What it is", command_line("show", record["removed_to"])
        return
    if not choice.removed:
        return
    ranking = record.get("ranking", {})
    source_folder = choice.folder / "model" if record["model"] else record["source"]["path"]
    words = ["prune", "remove", source_folder, "--heads", choice.folder / "removed.txt"]
    words += ["--out", f"{choice.folder}-pruned"]
    lines_read = int((re.findall(r"\|data:[^|]*n=(\d+)", choice.signature) or ["0"])[0])
    has_cross_text = options.get("target") or not {head.site for head in choice.removed} >= {Site.CROSS}
    is_refitted = (
        ranking and not record["model"] and options.get("source") and has_cross_text and lines_read >= REFIT_LINES
    )
    words += ["--compensate", "auto"] if is_refitted else []
    words += ["--export", "native"] if ranking.get("native") else []
    names = (*BOTH_TEXTS_OPTIONS, *(["bpe"] if record["model"] else CHECKPOINT_OPTIONS))  # a learnt model holds them
    names = ("sequential", *names) if is_refitted else names
    yield "Smaller model", command_line(*words, options=options, names=names)


def after_removal(removal: Removal, options: Mapping[str, Any]) -> tuple[str, str]:
    """The command after a removal: score the smaller model on unseen text, or on the sample that ships.

    The text that was given is not proposed, as heads were chosen and weights refitted on it.
    """
    from headscope.assets import sample

    quality = removal.record["quality"]
    if quality is None:
        return "What it is", command_line("show", removal.path)
    text_names = [name for name in TEXT_OPTIONS if options.get(name) or options.get(f"valid_{name}")]
    text: dict[str, Any] = {name: f"YOUR-TEST.{'txt' if name == 'source' else name}" for name in text_names}
    text |= {"pairs": True} if "pairs" in text_names else {}
    if not {"source", "labels"} & set(text_names):
        text = {"source": sample("en"), "target": sample("de") if removal.record["before"]["cross_cache"] else None}
    by_states = "labels" not in text_names and quality["metric"] == "cosine"
    more = {**text, "metrics": "cosine" if by_states else None, "bpe": options.get("bpe")}
    return "Test on text it has not seen", command_line("evaluate", removal.path, options=more, names=tuple(more))

"""The command that could come next, ready to be typed: made of what the last one was given."""

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

COMPANIONS = ("format", *(entry.name for entry in fields(Companions)))
TEXT = tuple(entry.name for entry in fields(TextFiles))
TEXTS = tuple(entry.name for entry in fields(ValidatedTextFiles))
DEFAULTS = {entry.name: entry.default for entry in fields(AnalyzeConfig)}
OF_TEXT = [entry.name for entry in fields(AnalyzeConfig) if entry.metadata.get("panel") in (DATA, MODEL)]
OF_TEXT.remove("batch_tokens")  # of which records have what was used
ANALYSIS_OPTIONS = (*OF_TEXT, "queries", "keep_special", "exclude_sinks")
OPTIONS = (*fields(AnalyzeConfig), *fields(ValidatedTextFiles))
FLAGLESS = {entry.name for entry in OPTIONS if entry.metadata.get("flagless")}
LINES, HALF = 40, 0.5  # of a text, of which a fifth is held out; of the heads, where nothing says how many stay
FEWEST = 10  # lines of which a fifth is held out and the rest, eight at least, refitted on


def command_line(*words: object, options: Mapping[str, Any] | None = None, names: tuple[str, ...] = ()) -> str:
    """A command line of `headscope` with words and some of the given options, quoted for a shell."""
    words_of_line = ["headscope", *map(str, words)]
    for name in names:
        value = (options or {}).get(name)
        if value not in (None, False, "", DEFAULTS.get(name)):
            words_of_line += typed_words(name, value, flagless=name in FLAGLESS or "." in name)
    return shlex.join(words_of_line)


def after_analysis(study: Study) -> Iterator[tuple[str, str]]:
    """After the functions of heads their importance; then a figure of it, and the way to a smaller model."""
    options, folder = study.record.get("options", {}), study.folder
    checkpoint = options.get("checkpoint")
    if not checkpoint or not study.complete:
        return
    if study.has_table("importance"):
        from headscope.results.study_answers import main_importance

        if measure := main_importance(study):
            figure = ("plot", "heads", folder, "--measure", measure.name, "--style", "paper")
            yield "Figure for a paper", command_line(*figure, "--out", f"{folder}-heads.pdf")
        if int(study.record["data"].get("in_corpus") or 0) >= LINES:
            small = ("prune", "shrink", checkpoint, "--keep-fraction", HALF, "--out", f"{folder}-small")
            yield "Smaller model", command_line(*small, options=options, names=(*TEXT, *COMPANIONS))
    elif not study.has_table("patching"):
        rerun = ("analyze", checkpoint, "--importance", "--out", f"{folder}-importance")
        own = _of_analyses(options)
        yield "Which heads matter", command_line(*rerun, options={**options, **own}, names=(*ANALYSIS_OPTIONS, *own))


def _of_analyses(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of analyses that run unasked (`alignment.alignments`), as far as they were given."""
    from headscope.config.declarations import analysis_options
    from headscope.engine.base import ANALYSES

    own: dict[str, Any] = {}
    for name, option in analysis_options().items():
        unset = plain_value(option.field.default)
        if options.get(name, unset) != unset and any(ANALYSES.get(analysis).default for analysis in option.analyses):
            own[f"{option.analyses[0]}.{name}"] = options[name]
    return own


def after_choice(choice: Ranking, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The commands after a choice of heads: cut them out, measured on the same text, or what remains to do.

    A ranking on text is followed by the compensation that harms least there and on other text, and heads that a plain
    class can hold by its export.
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
    read = int((re.findall(r"\|data:[^|]*n=(\d+)", choice.signature) or ["0"])[0])
    has_cross_text = options.get("target") or not {head.site for head in choice.removed} >= {Site.CROSS}
    is_refitted = ranking and not record["model"] and options.get("source") and has_cross_text and read >= FEWEST
    words += ["--compensate", "auto"] if is_refitted else []
    words += ["--export", "native"] if ranking.get("native") else []
    names = (*TEXTS, *(["bpe"] if record["model"] else COMPANIONS))  # what has learnt holds the others
    names = ("sequential", *names) if is_refitted else names
    yield "Smaller model", command_line(*words, options=options, names=names)


def after_removal(removal: Removal, options: Mapping[str, Any]) -> tuple[str, str]:
    """The commands after a removal: score the smaller model, on unseen text or the sample that ships.

    Heads were chosen, and what is left was refitted, on the text that was given.
    """
    from headscope.assets import sample

    quality = removal.record["quality"]
    if quality is None:
        return "What it is", command_line("show", removal.path)
    text_names = [name for name in TEXT if options.get(name) or options.get(f"valid_{name}")]
    text: dict[str, Any] = {name: f"YOUR-TEST.{'txt' if name == 'source' else name}" for name in text_names}
    text |= {"pairs": True} if "pairs" in text_names else {}
    if not {"source", "labels"} & set(text_names):
        text = {"source": sample("en"), "target": sample("de") if removal.record["before"]["cross_cache"] else None}
    by_states = "labels" not in text_names and quality["metric"] == "cosine"
    more = {**text, "metrics": "cosine" if by_states else None, "bpe": options.get("bpe")}
    return "Test on text it has not seen", command_line("evaluate", removal.path, options=more, names=tuple(more))

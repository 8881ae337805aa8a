"""From a text and options to a `Study`: the pass that `Model.analyze` makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.api.options import PathName, configured
from headscope.api.reporting import Report, progress_of
from headscope.api.selection import Heads, joined
from headscope.api.study import Study, sources
from headscope.api.texts import Text, given
from headscope.config import AnalyzeOptions
from headscope.formats.base import Checkpoint
from headscope.model.places import still
from headscope.output.folders import check_writable
from headscope.output.rule import check_folder
from headscope.runfiles import ANALYSIS
from headscope.runs import chosen_analyses, measure

COMMAND = ("headscope.Model.analyze",)


def study_of(
    checkpoint: Checkpoint,
    text: Text | None,
    target: Text | None,
    options: Mapping[str, Any],
    *,
    mask: Heads | None,
    gates: str,
    out: PathName | None,
    figures: bool,
    force: bool,
    progress: Report,
) -> Study:
    """Measure every head of an open checkpoint, and write the run if `out` says where.

    What can be checked before the pass is checked first: options, the text, the folder.
    """
    chosen = configured(AnalyzeOptions, {**options, "mask": joined(mask, checkpoint.layout)}, function="analyze")
    chosen_analyses(chosen)
    texts = given(text, target)
    if out is not None:
        read = sources(checkpoint.path, {**chosen.settings(), **texts.settings()})
        check_folder(Path(out), ANALYSIS, inputs=read, force=force)
        check_writable(Path(out))
    corpus = texts.corpus(parse=chosen.parse, max_sentences=chosen.max_sentences)
    about = {**texts.settings(), **({"gates": gates} if gates else {})}
    with still(checkpoint.model):
        found = measure(checkpoint, corpus, chosen, about=about, command=COMMAND, progress=progress_of(progress))
    study = Study(found)
    if out is not None:
        study.save(out, figures=figures, force=force)
    return study

"""`headscope analyze`: measure every attention head of a checkpoint on a text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from headscope.cli import console
from headscope.cli.console import Printer
from headscope.cli.options import STDIN, options_from
from headscope.config.analyze import AnalyzeConfig, configured_analysis
from headscope.config.declarations import declarations
from headscope.errors import ConfigError, DataError

PAGE = "report.html"


def typed_text(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """The sentences on stdin by option: `source`, and after a tab `target` if that is `-` too; {} if neither is `-`.

    ConfigError for `--target -` alone and under torchrun, DataError for lines without a sentence.
    """
    names = [name for name in ("source", "target") if values.get(name) == STDIN]
    if names == ["target"]:
        raise ConfigError("--target - goes with --source -, a sentence and its translation in turn; give a file")
    if not names:
        return {}
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError("--source - is read by one process; under torchrun give a file")
    if sys.stdin.isatty():
        console.say(f"one sentence a line{', a tab, its translation' * (len(names) > 1)}; Ctrl-D ends")
    from headscope.files.reading import is_empty, lines_of

    lines = list[list[str]]()
    for number, line in enumerate(lines_of(sys.stdin.buffer, name="stdin"), start=1):
        parts = [part.strip() for part in line.split("\t")] if len(names) > 1 else [line]
        if len(parts) != len(names):
            raise DataError(f"stdin:{number}: for --source - --target - give a sentence, a tab and its translation")
        if any(map(is_empty, parts)):
            raise DataError(f"stdin:{number}: the line is empty; every line must hold one sentence")
        lines.append(parts)
    if not lines:
        raise DataError("there is no sentence on stdin; type one, or pipe a text in: … --source - < sentences")
    return {name: list(texts) for name, texts in zip(names, zip(*lines, strict=True), strict=True)}


def read_values(values: dict[str, Any]) -> tuple[AnalyzeConfig, dict[str, list[str]]]:
    """The config of the command, and the sentences on stdin by option."""
    typed_texts = typed_text(values)
    return configured_analysis({**values, **typed_texts, **({"report": True} if typed_texts else {})}), typed_texts


@options_from(
    AnalyzeConfig,
    verbose=True,
    stdin_texts=("source", "target"),
    owners=lambda: {analysis.name: analysis.Options for analysis in declarations()},
    read=read_values,
)
def analyze(config: AnalyzeConfig, typed_texts: Mapping[str, Any], printer: Printer) -> None:
    """Measure every attention head of a checkpoint on a text, in one forward pass.

    Writes heads.csv (a row per head), a table per analysis, run.json and figures. With --source - it measures the
    sentences that are typed or piped in, and writes the page of their attention too.
    """
    from headscope.cli.next_commands import after_analysis
    from headscope.engine.study import run_analysis

    study = run_analysis(config, about={"typed": typed_texts} if typed_texts else {}, progress=console.progress)
    if study.folder is None:  # another process of torchrun writes
        return
    page = study.folder / PAGE
    location = f"Page: {page}" if page.is_file() else f"Results: {study.folder}"
    files = f"{location}   Cite: {study.folder / 'run.json'}   {study.record['seconds']:.0f} s"
    printer.show(study, out=study.folder, files=[files], commands=after_analysis(study))
    if not study.complete:
        missing = [omission.analysis for omission in study.left_out if omission.is_interrupted]
        what = f"what {study.sentences} sentences gave" + (f", without {', '.join(missing)}" if missing else "")
        console.end_interrupted(f": {study.folder} holds {what}; run.json says complete: false")

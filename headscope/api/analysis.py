"""From a config to the files of a finished run: what `headscope analyze` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from headscope.config import AnalyzeConfig, AnalyzeOptions
from headscope.config.declarations import checked_options
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.distributed import ALONE, Processes, process_group
from headscope.engine.attention_maps import short_examples
from headscope.engine.base import Analysis, RunOptions
from headscope.engine.conclusion import INTERRUPTED, AnalysisResult, LeftOut
from headscope.engine.fork.batches import BatchSize
from headscope.engine.fork.pickles import mhr_pickles
from headscope.engine.plan import analyze, chosen_analyses, reads, run_options, with_stanza
from headscope.engine.run_files import ANALYSIS, PAGE, RunDescription, describe_run, write_run
from headscope.errors import ConfigError, OutputError
from headscope.evaluation.prompts import with_answers
from headscope.files.folders import Build
from headscope.files.output_checks import inputs_of
from headscope.files.tables import Example
from headscope.files.writing import deferred
from headscope.formats.base import Checkpoint, open_configured
from headscope.heads import select_heads
from headscope.model.process_settings import keep_few_kernels
from headscope.model.taps import masked
from headscope.progress import Progress, no_progress
from headscope.pruning.engines.alignment import check_alignment_model, write_measured
from headscope.pruning.gate_layout import gate_layout
from headscope.signature import Signature

NOTHING: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class FinishedRun:
    """A run that has been written; `main` is False in those of several processes that wrote nothing.

    `record` is what run.json says, `seconds` how long everything took: opening, passes, faithfulness, figures;
    `together` of its heads can only go together, as they share keys and values or weights.
    """

    study: AnalysisResult
    folder: Path
    signature: Signature
    figures: list[Path]
    main: bool = True
    page: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    together: int = 1


@dataclass(frozen=True)
class Measurement:
    """What came of the passes over a text, before anything is written.

    `description` says what shapes the numbers, `pickles` are further files in the layout of the MHR fork, `examples`
    sentences whose attention is kept. In those of several processes that write nothing `description` is None.
    """

    study: AnalysisResult
    description: RunDescription | None
    pickles: Mapping[str, Any]
    examples: Sequence[Example] = ()


def run_analysis(
    config: AnalyzeConfig, *, typed: Mapping[str, Sequence[str]] = NOTHING, progress: Progress = no_progress
) -> FinishedRun:
    """Open checkpoint and corpus, measure, write `config.out`.

    `typed` has sentences in the place of files: of `source`, and perhaps of `target`; run.json keeps them.
    An earlier run in `config.out` stays until the new one is complete. HeadscopeError for whatever the user can fix.
    Interrupted by Ctrl-C, it writes what was done (`complete` is then false), beside an earlier run if there is one.
    Under torchrun every process measures its share of the batches, and the first one goes on with the sums of all.
    """
    began = time.monotonic()
    chosen = chosen_analyses(config, prompts=config.clean is not None)
    if config.write_alignment and "alignment" not in [analysis.name for analysis in chosen]:
        raise ConfigError("--write-alignment is about what the analysis alignment measures; run it: --only alignment")
    inputs = inputs_of(config)
    with (
        process_group() as processes,
        Build(config.out, ANALYSIS, inputs=inputs, force=config.force, writes=processes.main) as build,
    ):
        corpus = open_text(
            replace(config.text, **cast(Any, typed)),  # lists are as good as files
            parses=config.conllu_file,
            target_parses=config.target_parse,
            max_sentences=config.max_sentences,
        )
        if config.dtype not in ("bfloat16", "float16"):
            keep_few_kernels()
        checkpoint = open_configured(config)
        if config.write_alignment:
            check_alignment_model(config.write_alignment, checkpoint.layout)
        corpus = with_labels(checkpoint, corpus, config.labels)
        if config.corrupt is not None and config.answer is not None:
            corpus = with_answers(checkpoint, corpus, config.corrupt, config.answer)
        measurement = measure_heads(
            checkpoint,
            corpus,
            config,
            about={"typed": typed} if typed else {},
            command=sys.argv,
            processes=processes,
            progress=progress if processes.main else no_progress,
        )
        study = measurement.study
        if measurement.description is None:
            return FinishedRun(study, config.out, Signature({}), [], main=False)
        study.seconds = time.monotonic() - began
        out, figures = save_measurement(measurement, build, figures=config.figures, report=config.report)
        if config.write_alignment and study.complete:
            most, force = config.alignment_heads, config.force
            study.remarks.append(write_measured(config.write_alignment, study.heads, most, force=force))
        return FinishedRun(
            study,
            out,
            measurement.description.signature,
            figures,
            page=out / PAGE if config.report else None,
            record=measurement.description.record,
            seconds=time.monotonic() - began,
            together=int(gate_layout(checkpoint.attention_sites).sizes.max()),
        )


def measure_heads(
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: AnalyzeOptions,
    *,
    about: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    processes: Processes = ALONE,
    progress: Progress = no_progress,
) -> Measurement:
    """Measure every head of an open checkpoint on a text, and describe how; writes nothing.

    `corpus` has its parses already unless `options.parse` is "stanza". `about` are further settings for the record,
    such as where the text comes from. HeadscopeError for whatever the user can fix.
    """
    began = time.monotonic()
    analyses = chosen_analyses(options, prompts=corpus.has_contrast)
    options = replace(options, analysis_options=checked_options(options.analysis_options))
    limit = sentence_limit(checkpoint, options.max_length)
    off = select_heads(options.mask, checkpoint.layout) if options.mask else []
    if options.parse == "stanza" and any(reads(cls, "parse") for cls in analyses):
        corpus = with_stanza(corpus, options, progress, processes)
    told, said = run_options(options, checkpoint, corpus, analyses, limit, processes=processes)
    options = replace(options, batch_tokens=told.batching.tokens)
    with masked(checkpoint.model, off):
        study = analyze(
            checkpoint,
            corpus,
            analyses=analyses,
            options=told,
            replicates=options.bootstrap,
            detail=options.detail,
            progress=progress,
            processes=processes,
            partial=True,
        )
        study.remarks += [said] if said else []
        if not processes.main:
            return Measurement(study, None, {})
        with _finishing(study, "faithfulness") as wanted:
            if options.faithfulness and wanted():
                _add_faithfulness(study, checkpoint, corpus, analyses, options, told, progress)
        pickles: Mapping[str, Any] = {}
        with _finishing(study, "mhr_pickles") as wanted:
            if options.mhr_pickles and wanted():
                size, tokens = BatchSize(options.mhr_batch_size, options.mhr_max_tokens), told.batching.tokens
                pickles = mhr_pickles(checkpoint, corpus, rows=options.mhr_rows, limit=limit, tokens=tokens, size=size)
                study.sentences = study.sentences or corpus.count  # analyses of weights read none
        sentences: Sequence[Example] = []
        with _finishing(study, "examples") as wanted:
            if options.examples_kept and wanted():
                sentences = short_examples(checkpoint, corpus, options.examples_kept, limit=limit, off=off)
    study.seconds = time.monotonic() - began
    settings = {**options.settings(), **(about or {}), "limit": limit, "mask": ",".join(map(str, off)) or None}
    return Measurement(study, describe_run(study, checkpoint, corpus, settings, command), pickles, sentences)


@contextmanager
def _finishing(study: AnalysisResult, name: str) -> Iterator[Callable[[], bool]]:
    """Within the block, work that follows a study: where that, or the work, is interrupted, `name` is left out.

    The value says whether to do it; call it only for work that was asked for.
    """

    def wanted() -> bool:
        if not study.complete:
            raise KeyboardInterrupt
        return True

    try:
        yield wanted
    except KeyboardInterrupt:
        study.complete = False
        study.left_out.append(LeftOut(name, INTERRUPTED))


def _add_faithfulness(
    study: AnalysisResult,
    checkpoint: Checkpoint,
    corpus: Corpus,
    analyses: Sequence[type[Analysis]],
    options: AnalyzeOptions,
    told: RunOptions,
    progress: Progress,
) -> None:
    """Test the rankings of a study, and add what came of it."""
    from headscope.engine.faithfulness.run import try_rankings
    from headscope.pruning.ranking.criterion import ScoringContext, scores_by_criteria

    context = ScoringContext(checkpoint, corpus, told.batching, told)
    comparison = try_rankings(
        checkpoint,
        corpus,
        study.heads,
        analyses,
        config=options,
        options=told,
        criteria=dict if options.only else partial(scores_by_criteria, context),
        progress=progress,
    )
    study.tables |= {"faithfulness": comparison.curves, "faithfulness_rankings": comparison.rankings}
    study.remarks += comparison.remarks
    if not comparison.complete:
        study.complete = False
        why = f"{INTERRUPTED} when heads had been removed; BLEU and shuffled weights have no numbers"
        study.left_out.append(LeftOut("faithfulness", why))


def save_measurement(
    measurement: Measurement, build: Build, *, figures: bool, report: bool = False
) -> tuple[Path, list[Path]]:
    """Write the files of a run; the directory, and the figures that were drawn in it.

    A run that was interrupted replaces nothing (see `Build.finish`).
    """
    assert measurement.description is not None, "one process writes"
    study, record = measurement.study, dict(measurement.description.record)
    began = time.monotonic()
    with build.writing() as temporary, suppress(KeyboardInterrupt), deferred():
        write_run(temporary, study, measurement.description, measurement.pickles, measurement.examples)

    def finish() -> Path:
        record["seconds"] = round(study.seconds + time.monotonic() - began, 3)
        record.update(complete=study.complete, left_out=[asdict(omission) for omission in study.left_out])
        return build.finish(record, partial=not study.complete)

    drawn: list[Path] = []
    with build.writing() as temporary:
        try:
            with _finishing(study, "figures"):
                drawn = _figures(temporary) if figures else []
            with _finishing(study, "report"):
                if report:
                    _page(temporary, build.out.resolve().name)
        except (OutputError, OSError):
            raise
        except Exception:  # the numbers are kept without what they are drawn in
            finish()
            raise
    out = finish()
    return out, [out / "figures" / path.name for path in drawn]


def _figures(folder: Path) -> list[Path]:
    from headscope.report.registry import draw_standard

    return draw_standard(folder)


def _page(folder: Path, name: str) -> list[Path]:
    from headscope.report.page.write import write_page

    return [write_page([folder], folder / PAGE, names=[name])]

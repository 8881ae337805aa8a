"""From a config to the files of a finished run: what `headscope analyze` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headscope.attribution.objectives.base import choose_objective
from headscope.config import AnalyzeConfig, AnalyzeOptions
from headscope.data.batching import BatchingOptions, sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.distributed import ALONE, Processes, pick_device, process_group
from headscope.engine.attention_maps import short_examples
from headscope.engine.base import Analysis, RunOptions
from headscope.engine.conclusion import AnalysisResult
from headscope.engine.declarations import checked_options
from headscope.engine.fork.batches import BatchSize
from headscope.engine.fork.pickles import mhr_pickles
from headscope.engine.plan import analyze, batch_tokens, chosen_analyses, conllu_file, run_options, with_stanza
from headscope.engine.run_files import ANALYSIS, PAGE, RunDescription, describe_run, write_run
from headscope.errors import ConfigError, OutputError
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.evaluation.prompts import with_answers
from headscope.files.folders import Build
from headscope.files.output_checks import check_folder, inputs_of
from headscope.files.tables import Example
from headscope.formats.base import Checkpoint, open_configured
from headscope.heads import select_heads
from headscope.model.process_settings import keep_few_kernels
from headscope.model.taps import masked
from headscope.progress import Progress, no_progress
from headscope.pruning.engines.alignment import aligning_heads, check_alignment_model, write_alignment
from headscope.results import Signature

if TYPE_CHECKING:
    import pandas as pd

    from headscope.engine.faithfulness.orders import Scores

NOTHING: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class FinishedRun:
    """A run that has been written; `main` is False in those of several processes that wrote nothing.

    `record` is what run.json says, `seconds` how long everything took: opening, passes, faithfulness, figures.
    """

    study: AnalysisResult
    folder: Path
    signature: Signature
    figures: list[Path]
    main: bool = True
    page: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


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
    inputs = inputs_of(config)
    with process_group() as processes:
        if not processes.main:
            check_folder(config.out, ANALYSIS, inputs=inputs, force=config.force)
            return _run(config, typed, processes, no_progress)
        with Build(config.out, ANALYSIS, inputs=inputs, force=config.force) as build:
            return _run(config, typed, processes, progress, build)


def _run(
    config: AnalyzeConfig,
    typed: Mapping[str, Sequence[str]],
    processes: Processes,
    progress: Progress,
    build: Build | None = None,
) -> FinishedRun:
    began = time.monotonic()
    chosen = chosen_analyses(config, prompts=config.clean is not None)
    if config.write_alignment and "alignment" not in [analysis.name for analysis in chosen]:
        raise ConfigError("--write-alignment is about what the analysis alignment measures; run it: --only alignment")
    text = replace(config.text, **cast(Any, typed))  # lists are as good as files
    corpus = open_text(
        text, parses=conllu_file(config), target_parses=config.target_parse, max_sentences=config.max_sentences
    )
    if pick_device(config.device) == "cpu" and config.dtype not in ("bfloat16", "float16"):
        keep_few_kernels()
    checkpoint = open_configured(config)
    if config.write_alignment:
        check_alignment_model(config.write_alignment, checkpoint.layout)
    corpus = with_labels(checkpoint, corpus, config.labels)
    if config.corrupt is not None and config.answer is not None:
        corpus = with_answers(checkpoint, corpus, config.corrupt, config.answer)
    about = {"typed": typed} if typed else {}
    measurement = measure_heads(
        checkpoint, corpus, config, about=about, command=sys.argv, processes=processes, progress=progress
    )
    if measurement.description is None or build is None:
        return FinishedRun(measurement.study, config.out, Signature({}), [], main=False)
    measurement.study.seconds = time.monotonic() - began
    out, figures = save_measurement(measurement, build, figures=config.figures, report=config.report)
    if config.write_alignment and measurement.study.complete:
        heads, by = aligning_heads(measurement.study.heads, config.alignment_heads)
        measurement.study.remarks.append(f"{write_alignment(config.write_alignment, heads)} (best by {by})")
    return FinishedRun(
        measurement.study,
        out,
        measurement.description.signature,
        figures,
        page=out / PAGE if config.report else None,
        record=measurement.description.record,
        seconds=time.monotonic() - began,
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
    off = select_heads(options.mask, checkpoint.layout) if options.mask else []
    batching = BatchingOptions(limit=options.max_length, long=options.long)
    limit = sentence_limit(checkpoint, batching)
    if options.parse == "stanza" and any("parse" in cls.needs for cls in analyses):
        corpus = with_stanza(corpus, options, progress, processes)
    for_analyses = run_options(options, checkpoint, corpus, analyses, limit)
    tokens, said = options.batch_tokens, ""
    if tokens is None:
        tokens, said = batch_tokens(checkpoint, corpus, analyses, for_analyses, batching, processes=processes)
    options, batching = replace(options, batch_tokens=tokens), replace(batching, tokens=tokens)
    with masked(checkpoint.model, off), progress("analysing", corpus.count) as step:
        study = analyze(
            checkpoint,
            corpus,
            analyses=analyses,
            options=for_analyses,
            batching=batching,
            replicates=options.bootstrap,
            detail=options.detail,
            progress=step,
            processes=processes,
        )
        study.remarks += [said] if said else []
        if not processes.main:
            return Measurement(study, None, {})
        if options.faithfulness and study.complete:
            _try_rankings(study, checkpoint, corpus, options, for_analyses, analyses, batching, progress)
        pickles = {}
        if options.mhr_pickles and study.complete:
            batch = BatchSize(options.mhr_batch_size, options.mhr_max_tokens)
            text, sentences_read = corpus.counting()
            pickles = mhr_pickles(checkpoint, text, rows=options.mhr_rows, limit=limit, tokens=tokens, size=batch)
            study.sentences = study.sentences or sentences_read()  # analyses of weights read none
        kept = options.examples_kept if study.complete else 0
        sentences = short_examples(checkpoint, corpus, kept, limit=limit, off=off) if kept else []
    study.seconds = time.monotonic() - began
    settings = {**options.settings(), **(about or {}), "limit": limit, "mask": ",".join(map(str, off)) or None}
    return Measurement(study, describe_run(study, checkpoint, corpus, settings, command), pickles, sentences)


def save_measurement(
    measurement: Measurement, build: Build, *, figures: bool, report: bool = False
) -> tuple[Path, list[Path]]:
    """Write the files of a run; the directory, and the figures that were drawn in it.

    A run that was interrupted replaces nothing (see `Build.finish`).
    """
    assert measurement.description is not None, "one process writes"
    record, partial = dict(measurement.description.record), not measurement.study.complete
    began = time.monotonic()
    with build.writing() as temporary:
        write_run(temporary, measurement.study, measurement.description, measurement.pickles, measurement.examples)
    drawn = _shown(build, record, _figures, partial=partial) if figures else []
    if report:
        _shown(build, record, lambda folder: _page(folder, build.out.resolve().name), partial=partial)
    record["seconds"] = round(measurement.study.seconds + time.monotonic() - began, 3)
    out = build.finish(record, partial=partial)
    return out, [out / "figures" / path.name for path in drawn]


def _try_rankings(
    study: AnalysisResult,
    checkpoint: Checkpoint,
    corpus: Corpus,
    config: AnalyzeOptions,
    options: RunOptions,
    analyses: list[type[Analysis]],
    batching: BatchingOptions,
    progress: Progress,
) -> None:
    """Add the tables of `headscope.engine.faithfulness` to a study."""
    from headscope.engine.faithfulness.orders import ranks
    from headscope.engine.faithfulness.run import FaithfulnessOptions, try_rankings
    from headscope.pruning.ranking.criterion import ScoringContext, scores_by_criteria

    trial = FaithfulnessOptions(
        steps=config.faithfulness_steps,
        random_orders=config.faithfulness_seeds,
        bleu=config.faithfulness_bleu,
        objective=choose_objective(
            config.objective,
            checkpoint,
            has_target=corpus.has_target,
            has_labels=corpus.has_labels,
            has_answers=corpus.has_contrast,
        ),
        seed=config.seed,
        replicates=config.bootstrap,
    )
    likelihood_options = LikelihoodOptions(
        tokens=batching.tokens,
        limit=sentence_limit(checkpoint, batching),
        long=config.long,
        hiding="random",
        seed=config.seed,
    )

    def again() -> pd.DataFrame:
        ranked = [cls for cls in analyses if ranks(cls)]
        with progress("analysing shuffled weights", corpus.count) as step:
            return analyze(checkpoint, corpus, analyses=ranked, options=options, batching=batching, progress=step).heads

    def criteria() -> dict[str, Scores]:
        if config.only:
            return {}
        return scores_by_criteria(ScoringContext(checkpoint, corpus, batching, options))

    comparison = try_rankings(
        checkpoint,
        corpus,
        study.heads,
        options=trial,
        likelihood_options=likelihood_options,
        remeasure=again,
        progress=progress,
        criteria=criteria,
    )
    study.tables["faithfulness"], study.tables["faithfulness_rankings"] = comparison.curves, comparison.rankings
    study.remarks += comparison.remarks


def _shown(build: Build, record: Mapping[str, Any], draw: Callable[[Path], list[Path]], *, partial: bool) -> list[Path]:
    """Draw figures or the page; where that fails for other reasons than the disk, the numbers are kept without them."""
    with build.writing() as temporary:
        try:
            return draw(temporary)
        except (OutputError, OSError, KeyboardInterrupt):
            raise
        except Exception:
            build.finish(record, partial=partial)
            raise


def _figures(folder: Path) -> list[Path]:
    from headscope.report.registry import draw_standard

    return draw_standard(folder)


def _page(folder: Path, name: str) -> list[Path]:
    from headscope.report.page.write import write_page

    return [write_page([folder], folder / PAGE, names=[name])]

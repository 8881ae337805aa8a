"""From a config to the files of a finished run: what `headscope analyze` does."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from headscope.config.analyze import AnalyzeConfig, AnalyzeOptions
from headscope.config.declarations import checked_options
from headscope.data.batching import sentence_limit
from headscope.data.corpus import Corpus, open_text
from headscope.data.labels import with_labels
from headscope.data.template import with_template
from headscope.description.tokens import TokenReader
from headscope.distributed import ALONE, Processes, process_group
from headscope.engine.attention_maps import short_examples
from headscope.engine.faithfulness.comparison import try_rankings
from headscope.engine.joint import joint_ablation, with_budget
from headscope.engine.mhr_fork import BatchSize, mhr_pickles
from headscope.engine.plan import analyze, chosen_analyses, run_options, uses, with_stanza
from headscope.errors import ConfigError, flag
from headscope.evaluation.opened import check_template
from headscope.evaluation.prompts import with_answers
from headscope.export.alignment import check_alignment_model, write_measured
from headscope.files.folders import NOWHERE, Build
from headscope.files.output_checks import Input, inputs_of
from headscope.formats.base import Checkpoint, open_configured
from headscope.heads import select_heads
from headscope.model.discovery import eval_mode
from headscope.model.taps import masked
from headscope.progress import Progress, no_progress
from headscope.results.study import Study
from headscope.results.study_files import STUDY, build_study, optional_step
from headscope.signature import signature_of
from headscope.version import VERSION

LIBRARIES = ("torch", "transformers", "numpy", "stanza", "captum")
TEXTS = ("source", "target", "source2", "labels", "clean", "corrupt", "answer", "parse", "target_parse")


def complete_record(
    study: Study, checkpoint: Checkpoint, corpus: Corpus, settings: Mapping[str, Any], command: Sequence[str]
) -> None:
    """Fill in the record of a study: signature, settings and provenance of its numbers."""
    record = study.record
    entries: Mapping[str, Mapping[str, str]] = record["signatures"]
    count = f"{study.sentences}" if study.complete else f"{study.sentences} of {corpus.count} (interrupted)"
    common = signature_of(
        {
            "eos": "incl" if settings["keep_special"] else "excl",
            **({"first": "excl"} if settings["exclude_sinks"] else {}),
            **({"queries": settings["queries"]} if settings["queries"] != "all" else {}),
            "unit": "piece",
            "len": f"{settings['limit']}-{settings['long']}",
        },
        data=(corpus.digest, count),
        checkpoint=checkpoint,
        off={name: settings[name] for name in ("mask", "gates") if settings.get(name)},
        transformers=True,
        replicates=settings["bootstrap"],
        seed=settings["seed"],
    )
    shared_entries = {key: value for entry in entries.values() for key, value in entry.items() if key != "m" and value}
    study.record = {
        "headscope": VERSION,
        "complete": study.complete,
        "signature": str(common.with_entries(m="+".join(entries), **shared_entries)),
        "signatures": {name: str(common.with_entries(**entry)) for name, entry in entries.items()},
        "command": list(command),
        "checkpoint": {
            "path": str(Path(checkpoint.path).resolve()) if Path(checkpoint.path).exists() else checkpoint.path,
            "format": checkpoint.format,
            "digest": checkpoint.digest,
            "model_type": checkpoint.model_type,
            **({"marks": TokenReader.of(checkpoint, "target").marks} if "examples" in study.tables else {}),
        },
        **{name: record[name] for name in ("layout", "objective", "sampled")},
        "data": {
            **{name: settings.get(name) for name in TEXTS},
            "pairs": settings.get("pairs", False),
            "digest": corpus.digest,
            "in_corpus": corpus.count,
            **record["data"],
        },
        "left_out": record["left_out"],
        "remarks": study.remarks,
        "options": dict(settings),
        "seed": settings["seed"],
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "device": str(checkpoint.device),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "seconds": round(record["seconds"], 3),
    }


def run_analysis(
    config: AnalyzeConfig,
    *,
    checkpoint: Checkpoint | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Study:
    """Open checkpoint and corpus, measure, write `config.out`; of several processes the first one writes.

    `about` are further settings for the record, such as typed sentences. An open `checkpoint` is used as it is, in this
    process alone. An earlier run in `config.out` stays until the new one is complete. Interrupted by Ctrl-C, the run
    writes what it has measured (`complete` is then false), beside an earlier run if there is one. Under torchrun every
    process measures its share of the batches, and the first one goes on with the sums of all. HeadscopeError for
    whatever the user can fix.
    """
    began = time.monotonic()
    analyses = chosen_analyses(config, prompts=config.clean is not None)
    if config.write_alignment and "alignment" not in [analysis.name for analysis in analyses]:
        raise ConfigError(f"{flag.write_alignment} needs the analysis alignment; run it: {flag.only} alignment")
    written_into = [Input(path, checkpoint=True) for path in [config.write_alignment] if path is not None]
    inputs = [*inputs_of(config), *written_into]
    with (
        nullcontext(ALONE) if checkpoint else process_group() as processes,
        Build(config.out, STUDY, inputs=inputs, force=config.force, writes=processes.main) as build,
    ):
        corpus = open_text(
            config.text,
            parses=config.conllu_file,
            target_parses=config.target_parse,
            max_sentences=config.max_sentences,
        )
        checkpoint = checkpoint or open_configured(config)
        if config.write_alignment:
            check_alignment_model(config.write_alignment, checkpoint.layout)
        corpus = with_labels(checkpoint, corpus, config.labels)
        if config.corrupt is not None and config.answer is not None:
            corpus = with_answers(checkpoint, corpus, config.corrupt, config.answer)
        with eval_mode(checkpoint.model):
            study = measure_heads(
                checkpoint,
                corpus,
                config,
                about={**(about or {}), **({"out": None} if config.out is NOWHERE else {})},
                command=sys.argv,
                processes=processes,
                progress=progress if processes.main else no_progress,
            )
        if not processes.main or config.out is NOWHERE:
            return study
        study.record["seconds"] = time.monotonic() - began
        try:
            if config.write_alignment and study.complete:
                study.record["alignment_heads"] = write_measured(
                    config.write_alignment, study.heads, config.alignment_heads, force=config.force
                )
        finally:  # the study is kept even if the other model cannot be written
            build_study(study, build, figures=config.figures, report=config.report)
        return study


def measure_heads(
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: AnalyzeOptions,
    *,
    about: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    processes: Processes = ALONE,
    progress: Progress = no_progress,
) -> Study:
    """The study of every head of an open checkpoint on a text; writes nothing.

    `corpus` has its parses unless `options.parse` is "stanza". `about` are further entries of the record's settings.
    """
    began = time.monotonic()
    analyses = chosen_analyses(options, prompts=corpus.has_contrast)
    options = with_budget(replace(options, analysis_options=checked_options(options.analysis_options)))
    limit = sentence_limit(checkpoint, options.max_length)
    if options.template is not None:
        check_template(checkpoint)
        corpus = with_template(corpus, options.template, examples=options.examples)
    off = select_heads(options.mask, checkpoint.layout) if options.mask else []
    if options.parse == "stanza" and any(uses(cls, "parse") for cls in analyses):
        corpus = with_stanza(corpus, options, progress, processes)
    run, remark = run_options(options, checkpoint, corpus, analyses, limit, processes=processes)
    options = replace(options, batch_tokens=run.batching.tokens)
    with masked(checkpoint.model, off):
        study = analyze(
            checkpoint,
            corpus,
            analyses=analyses,
            options=run,
            replicates=options.bootstrap,
            progress=progress,
            processes=processes,
            partial=True,
        )
        study.record["remarks"] += [remark] if remark else []
        if not processes.main:
            return study
        has_roles = options.importance != "none" and bool(study.labels) and "ablation" in study.heads
        with optional_step(study, "roles", is_requested=has_roles) as runs:
            if runs:
                joint_ablation(study, checkpoint, corpus, run, replicates=options.bootstrap, progress=progress)
        with optional_step(study, "faithfulness", is_requested=options.faithfulness) as runs:
            if runs:
                try_rankings(study, checkpoint, corpus, analyses, config=options, options=run, progress=progress)
        with optional_step(study, "mhr_pickles", is_requested=options.mhr_pickles) as runs:
            if runs:
                size, tokens = BatchSize(options.mhr_batch_size, options.mhr_max_tokens), run.batching.tokens
                batches: dict[str, Any] = {"limit": limit, "tokens": tokens, "size": size}
                study.pickles = mhr_pickles(checkpoint, corpus, rows=options.mhr_rows, **batches)
                study.record["data"]["sentences"] = study.sentences or corpus.count  # analyses of weights read none
        with optional_step(study, "examples", is_requested=bool(options.examples_kept)) as runs:
            if runs:
                study.examples = short_examples(checkpoint, corpus, options.examples_kept, limit=limit, off=off)
    study.record["seconds"] = time.monotonic() - began
    settings = {**options.settings(), **(about or {}), "limit": limit, "mask": ",".join(map(str, off)) or None}
    complete_record(study, checkpoint, corpus, settings, command)
    return study

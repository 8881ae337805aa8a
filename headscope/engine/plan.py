"""`headscope analyze`: from options to analyses, and one forward pass over the corpus, which they all share."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from headscope.attribution.objectives.base import choose_objective
from headscope.bootstrap import FOLDS, REPLICATES, Bootstrap
from headscope.config.analyze import AnalyzeOptions
from headscope.config.declarations import checked_options, refuse_idle_options
from headscope.data.batching import (
    DEFAULT_TOKENS,
    TRIAL_SENTENCES,
    BatchingOptions,
    BatchTrial,
    Omissions,
    automatic_tokens,
    batches,
    prefetch,
    sentence_limit,
)
from headscope.data.corpus import Corpus
from headscope.data.encoded import UNCUT, Batch, CountedTokens, Encoded, pad_side
from headscope.data.parses import Parse
from headscope.data.stanza_parses import parse_with_stanza
from headscope.data.template import with_scrambled_sources
from headscope.distributed import ALONE, Processes
from headscope.engine.base import ANALYSES, Analysis, RunOptions, needs_objective
from headscope.engine.frequencies import token_frequencies
from headscope.engine.runner import AnalysisRunner, has_own_passes
from headscope.errors import ConfigError, flag, flags
from headscope.evaluation.opened import refuse_unread_target
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, Site
from headscope.progress import Progress, no_progress
from headscope.results.study import LeftOut, Study

RANDOM_SEQUENCES, RANDOM_BLOCK = 64, 25  # random texts, and the tokens of each that are repeated


def choose_analyses(
    *, only: Sequence[str] = (), skip: Sequence[str] = (), also: Sequence[str] = ()
) -> list[type[Analysis]]:
    """The analyses to run: the default ones, or `only` these; plus `also`, minus `skip`.

    Names are those of analyses or of their groups. ConfigError for an unknown name, with the nearest known one.
    """
    variants = dict(ANALYSES)
    names = _members(only) or {name for name, cls in variants.items() if cls.default}
    names = (names | _members(also)) - _members(skip)
    if not names:
        raise ConfigError("no analysis is left to run; ask for fewer to be skipped")
    return sorted((variants[name] for name in names), key=lambda cls: (cls.order, cls.name))


def _members(names: Sequence[str]) -> set[str]:
    members = ([member for member, cls in ANALYSES if cls.group == name] or [ANALYSES.get(name).name] for name in names)
    return {member for of_name in members for member in of_name}


def chosen_analyses(options: AnalyzeOptions, *, prompts: bool = False) -> list[type[Analysis]]:
    """The requested analyses, with `prompts` those of prompts too; ConfigError for an option that none of them uses."""
    importance = options.importance
    if importance == "none" and options.faithfulness and not options.only:
        importance = "cheap"
    also = [*options.also, *(["prompts"] if prompts and not options.only else [])]
    if importance != "none":
        members = (cls for _, cls in ANALYSES if cls.group == "importance")
        also += [cls.name for cls in members if importance == "all" or not cls.many_passes]
    analyses = choose_analyses(only=options.only, skip=options.skip, also=also)
    if options.objective and not any(map(needs_objective, analyses)):
        raise ConfigError(f"{flag.objective} is what importances explain; ask for one ({flag.importance})")
    has_text = options.parse == "stanza" or getattr(options, "source", None) is not None  # else parses are the text
    for option, value, need in (
        (flag.parse, has_text and options.parse, "parse"),
        (flag.target_parse, options.target_parse, "parse"),
        (flag.frequencies, options.frequencies, "frequencies"),
        (flag.frequency_corpus, options.frequency_corpus, "frequencies"),
    ):
        if value and not any(uses(cls, need) for cls in analyses):
            able = [name for name, cls in ANALYSES if uses(cls, need)]
            raise ConfigError(f"{option} is what {' and '.join(able)} read; ask for one ({flag.also} {able[-1]})")
    reasons = {name: f"ask for it ({flag.also} {name})" for name, cls in ANALYSES if cls not in analyses}
    refuse_idle_options(checked_options(options.analysis_options), [cls.name for cls in analyses], reasons)
    return analyses


def uses(cls: type[Analysis], data: str) -> bool:
    """Whether an analysis, or one of its measures, needs some `data`, such as "parse"."""
    return data in cls.needs or any(measure.needs == data for measure in cls.measures)


def with_stanza(
    corpus: Corpus, config: AnalyzeOptions, progress: Progress = no_progress, processes: Processes = ALONE
) -> Corpus:
    """The corpus with parses: stanza runs once, in the first process, and every pass reads them from its cache."""

    def parses() -> Iterator[Parse]:
        lines = (sentence.source for sentence in corpus)
        return parse_with_stanza(lines, lang=config.lang, resources=config.stanza_dir, download=config.download)

    if processes.main:
        with progress("parsing", corpus.count) as step:
            for _ in parses():
                step(1)
    processes.wait()
    return corpus.with_parses(parses)


def run_options(
    config: AnalyzeOptions,
    checkpoint: Checkpoint,
    corpus: Corpus,
    analyses: Sequence[type[Analysis]],
    limit: int,
    *,
    processes: Processes = ALONE,
) -> tuple[RunOptions, str]:
    """The options of the analyses, and remarks on the size of batches.

    Token frequencies are counted only if one of the analyses needs them.
    """
    sentences = f"stanza-{config.lang}" if config.parse == "stanza" else Path(config.parse or "").name
    parse_name = "+".join(filter(None, (sentences, config.target_parse.name if config.target_parse else "")))
    options = RunOptions(
        token_filter=CountedTokens(config.keep_special, config.exclude_sinks, config.queries),
        parse=parse_name,
        seed=config.seed,
        objective=config.objective,
        detail=config.detail,
        attention=config.attention,
        batching=BatchingOptions(config.batch_tokens or DEFAULT_TOKENS, limit, config.long),
        analysis_options=config.analysis_options,
    )
    if any("frequencies" in cls.needs for cls in analyses) and not checkpoint.reads_sound:
        frequency_options = {"file": config.frequencies, "text": config.frequency_corpus}
        options = replace(options, **token_frequencies(checkpoint, corpus, **frequency_options, limit=limit))
    if config.batch_tokens is not None:
        return options, ""
    tokens, remarks = batch_tokens(checkpoint, corpus, analyses, options, processes=processes)
    return replace(options, batching=replace(options.batching, tokens=tokens)), remarks


def analyze(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    analyses: Sequence[type[Analysis]],
    options: RunOptions,
    batching: BatchingOptions | None = None,
    replicates: int = REPLICATES,
    progress: Progress = no_progress,
    title: str = "analysing",
    processes: Processes = ALONE,
    partial: bool = False,
) -> Study:
    """Measure every head of a checkpoint on a corpus: all `analyses` in one pass, then those with passes of their own.

    Each of several `processes` takes its share of the batches; the first returns the study of all shares, the others
    that of their own share.

    A KeyboardInterrupt ends the passes and is raised again, unless `partial` and some batch was done: the study then
    covers these batches, names the analyses that are missing, and has `complete=False`. CheckpointError if the model's
    heads cannot be seen, DataError if the corpus cannot be read.
    """
    began = time.monotonic()
    options = replace(options, batching=batching or options.batching)
    running, left_out = _applicable(checkpoint, corpus, analyses, options)
    runner = AnalysisRunner(checkpoint, running, refusals=left_out)
    omissions, complete = Omissions(), True
    streams = _streams(checkpoint, corpus, running, omissions)
    corpus, sentences_read = corpus.counting()
    try:
        runner.read(corpus)
        with runner.hooks():
            scrambles = corpus.has_template and any("scrambled" in analysis.passes for analysis in running)
            with progress(title, corpus.count * (1 + scrambles)) as step, _prefetched(streams, checkpoint) as stream:
                for number, batch in enumerate(stream):
                    if processes.owns(number):
                        runner.run(batch)
                    step(len(batch.indices) if batch.kind != "random" else 0)
            for analysis in filter(has_own_passes, runner.running):
                stream = _streams(checkpoint, runner.texts[analysis.name], running, only="text")
                _explain(runner, analysis, stream, processes, progress)
    except KeyboardInterrupt:
        if not partial or not runner.counts[""]:
            raise
        complete = False
    for part, part_complete in processes.gather((runner.part(), complete))[1:]:
        runner.merge(part)
        complete = complete and part_complete
    bootstrap = Bootstrap(seed=options.seed, replicates=replicates)
    study = runner.conclude(bootstrap, sentences=corpus.count, complete=complete, progress=progress)
    if not partial and not study.complete:
        raise KeyboardInterrupt
    reads_text = any("text" in analysis.passes for analysis in running)  # others read the text by themselves
    study.record |= {
        "remarks": [*omissions.unknown.remarks(checkpoint), *study.record["remarks"]],
        "data": {"sentences": runner.counts[""] if reads_text else sentences_read(), **omissions.to_json()},
        "seconds": time.monotonic() - began,
    }
    return study


def _explain(
    runner: AnalysisRunner,
    analysis: Analysis,
    stream: Generator[Batch, None, None],
    processes: Processes,
    progress: Progress,
) -> None:
    """Run the passes of one analysis over its own text, until the end or until the analysis is left out."""
    count = runner.texts[analysis.name].count
    with progress(analysis.name, count) as step, _prefetched(stream, runner.checkpoint) as stream_ahead:
        for number, batch in enumerate(stream_ahead):
            if analysis not in runner.running:
                break
            if processes.owns(number):
                runner.explain(analysis, batch, step)
            else:
                step(len(batch.indices))


@contextmanager
def _prefetched(stream: Generator[Batch, None, None], checkpoint: Checkpoint) -> Iterator[Iterator[Batch]]:
    """Within the block the batches of a stream; for an accelerator the next one is prepared meanwhile."""
    if checkpoint.device.type != "cpu":
        stream = prefetch(batch.pin(checkpoint.device) for batch in stream)
    with closing(stream):
        yield stream


def batch_tokens(
    checkpoint: Checkpoint,
    corpus: Corpus,
    analyses: Sequence[type[Analysis]],
    options: RunOptions,
    *,
    processes: Processes = ALONE,
) -> tuple[int, str]:
    """The number of positions of a batch, and remarks, by `headscope.data.batching.automatic_tokens`.

    Trials take the longest of the first sentences, and the analyses that only observe the common pass.
    """
    first, batching = corpus.first(TRIAL_SENTENCES), options.batching
    observers = [
        cls for cls in analyses if cls.read is Analysis.read and cls.explain is Analysis.explain and cls.passes
    ]

    def trial() -> BatchTrial | None:
        try:
            running, _ = _applicable(checkpoint, first, observers, options)
        except ConfigError:  # other analyses may run; if not, `analyze` says why
            return None
        stream = _streams(checkpoint, first, running)
        longest = max((batch for batch in stream if batch.kind == "text"), key=lambda batch: batch.longest)
        runner = AnalysisRunner(checkpoint, running)
        for analysis in running:
            analysis.inspect(checkpoint)

        def run(batch: Batch) -> None:
            with runner.hooks():
                runner.run(batch)

        return BatchTrial.of(longest, run)

    limit = sentence_limit(checkpoint, batching.limit)
    return automatic_tokens(checkpoint.device, trial, limit=limit, default=batching.tokens, processes=processes)


def _applicable(
    checkpoint: Checkpoint, corpus: Corpus, analyses: Sequence[type[Analysis]], options: RunOptions
) -> tuple[list[Analysis], list[LeftOut]]:
    """Instances of the analyses that can run, with their objective, and the others with the reason why not."""
    refuse_unread_target(checkpoint, corpus)
    if not any(checkpoint.layout.values()):
        raise ConfigError(f"{checkpoint.path} has no attention heads (any more), so there is nothing to analyse")
    sites = {attention_site.site for attention_site in checkpoint.attention_sites.order}
    readable = sites if decoder_reads(checkpoint, corpus) else sites & {Site.ENCODER_SELF}
    left_out = []
    if unmeasured_sites := sorted(site.value for site in sites - readable):
        left_out.append(LeftOut(" and ".join(unmeasured_sites), f"need a {flag.target}, which the decoder is to read"))
    fitting = []
    for cls in analyses:
        reason = _missing_data(cls, checkpoint, corpus, options, sites, readable) or cls.applies(checkpoint)
        if reason:
            left_out.append(LeftOut(cls.name, reason))
        else:
            fitting.append(cls)
    default_names = {cls.name for cls in analyses if cls.default}  # the study itself names other ones that are left out
    idle = {omission.analysis: f"it {omission.why}" for omission in left_out if omission.analysis in default_names}
    refuse_idle_options(options.analysis_options, [cls.name for cls in fitting], idle)
    if not fitting:
        reasons = "; ".join(f"{omission.analysis}: {omission.why}" for omission in left_out)
        raise ConfigError(f"no analysis can run: {reasons}")
    if any(map(needs_objective, analyses)):
        name = choose_objective(options.objective, checkpoint, **corpus.comes_with, has_answers=corpus.has_contrast)
        options = replace(options, objective=name)
    return [cls(options) for cls in fitting], left_out


def _missing_data(
    cls: type[Analysis],
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: RunOptions,
    sites: set[Site],
    readable: set[Site],
) -> str | None:
    """The data or sites that an analysis lacks here. Returns None if it lacks nothing."""
    if "random" in cls.passes and checkpoint.reads_sound:
        return "gives random subwords to the encoder, and this one reads sound"
    if "parse" in cls.needs and not corpus.has_parses and not corpus.has_target_parses:
        return f"needs {flag.parse}"
    if "contrast" in cls.needs and not corpus.has_contrast:
        return f"needs {flags('clean', 'corrupt', 'answer')}"
    if "frequencies" in cls.needs and options.ranks is None:
        return "needs token frequencies"
    if cls.passes and not cls.sites & readable:
        if cls.sites & sites:
            return f"needs a {flag.target}"
        names = " or ".join(site.value for site in SITES if site in cls.sites)
        return f"is for {names}; measured here: {', '.join(site.value for site in SITES if site in readable)}"
    return None


def _streams(
    checkpoint: Checkpoint,
    corpus: Corpus,
    running: Sequence[Analysis],
    omissions: Omissions | None = None,
    *,
    only: str = "",
) -> Generator[Batch, None, None]:
    """The batches that some analysis reads: of the text, of scrambled sources, of random tokens; or `only` one kind."""
    seed, batching = running[0].run.seed, running[0].run.batching
    passes = {name for analysis in running for name in analysis.passes if only in ("", name)}
    needs_labels = any(needs_objective(type(analysis)) or "labels" in analysis.needs for analysis in running)
    labels = needs_labels and gives_labels(checkpoint, corpus)
    limit, tokens, long = sentence_limit(checkpoint, batching.limit), batching.tokens, batching.long
    read = partial(batches, encoder=checkpoint, tokens=tokens, limit=limit, long=long)
    if "text" in passes:
        yield from read(corpus, omissions=omissions, labels=labels)
    if "scrambled" in passes and corpus.has_template:
        yield from (replace(batch, kind="scrambled") for batch in read(with_scrambled_sources(corpus, seed=seed)))
    if "random" in passes and decoder_reads(checkpoint, corpus):
        yield from random_batches(checkpoint, seed=seed, batching=batching)


def decoder_reads(checkpoint: Checkpoint, corpus: Corpus) -> bool:
    """Whether the decoder, if any, has a text to read."""
    return corpus.has_target or checkpoint.rereads_source or not checkpoint.two_sided


def gives_labels(checkpoint: Checkpoint, corpus: Corpus) -> bool:
    """Whether a corpus says what the model should predict: it has labels, or words that a decoder reads."""
    predicts = checkpoint.decodes and checkpoint.predicts == "words"
    return corpus.has_labels or (predicts and (corpus.has_target or not checkpoint.two_sided))


def random_batches(checkpoint: Checkpoint, *, seed: int, batching: BatchingOptions) -> Iterator[Batch]:
    """Sequences of random tokens, each block repeated once (Olsson et al. 2022): what only copying explains.

    Sequences begin as texts do. An encoder reads the block once, its decoder the block twice. Batches are as large as
    `batching` says, of `FOLDS` sequences at least. Nothing where the model has no room for two tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = torch.tensor(checkpoint.common_ids())
    two_sided = checkpoint.two_sided
    start = checkpoint.encode(["a"], side="target", limit=UNCUT)[0].ids[:1] if two_sided else checkpoint.start_ids()
    limit = sentence_limit(checkpoint, batching.limit)
    block = min(RANDOM_BLOCK, (limit - len(start)) // 2)
    if block < 1:
        return
    size = max(FOLDS, batching.tokens // (len(start) + 2 * block))
    drawn_ids = plain[torch.randint(len(plain), (RANDOM_SEQUENCES, block), generator=generator)]
    for indices in torch.arange(RANDOM_SEQUENCES).split(size):
        blocks_drawn = drawn_ids[indices].tolist()
        blocks = pad_side([Encoded.plain(ids) for ids in blocks_drawn])
        repetitions = pad_side([Encoded.plain([*ids, *ids], start=start) for ids in blocks_drawn])
        source, target = (blocks, repetitions) if two_sided else (repetitions, None)
        yield Batch(indices, 0, source, target, kind="random")

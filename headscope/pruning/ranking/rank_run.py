"""From options to a ranking: what `headscope prune rank` does, and `Model.rank` of an open model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.config.declarations import Measure, measured_columns
from headscope.data.batching import DEFAULT_TOKENS
from headscope.distributed import ALONE, Processes, process_group
from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.errors import CheckpointError, ConfigError, flag, restate
from headscope.files.folders import Build
from headscope.files.output_checks import check_folder, inputs_of
from headscope.formats.base import FORMATS, Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.model.stored_weights import round_weights, rounding_note
from headscope.progress import Progress, no_progress
from headscope.pruning.gate_layout import tie_remarks
from headscope.pruning.learning.examples import PruningLoss, TrainingExamples, training_loss
from headscope.pruning.learning.finetuning import Tuner, default_freeze, mean_loss, trained_parameters
from headscope.pruning.learning.learn import recipe_of, tune
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.shared import Freeze, other_text
from headscope.pruning.ranking.criterion import (
    CRITERIA,
    Criterion,
    MeasuredColumn,
    ScoringContext,
    column_named,
    criterion_named,
    measured_allocation,
    moments_of,
    refitted_checkpoint,
    scoring_context,
)
from headscope.pruning.ranking.ranking import Ranked, check_keep, nearest_keep, rank_heads
from headscope.pruning.scores_file import other_weights, read_heads, read_scores, scores_in
from headscope.pruning.selection import OpenedSelection, choice_by, open_selection, ranking_of, write_selection
from headscope.results.ranking import Ranking
from headscope.results.study import Study


def _rank(
    config: RankConfig, setup: OpenedSelection, progress: Progress, processes: Processes
) -> tuple[int, Scoring, Ranked]:
    """The number of heads to keep, the scoring of heads, and the ranking."""
    gates, keep = setup.gating, config.keep
    if keep is None:
        keep = nearest_keep(gates, config.keep_fraction or 0.0, config.allocate)
    check_keep(gates, keep, config.allocate)
    if config.steps > max(gates.heads - keep, 1):
        raise ConfigError(
            f"{flag('steps', config.steps)}: only {gates.heads - keep} heads are removed; take at most as many steps"
        )
    scoring = scoring_of(config, setup, processes)
    with progress("ranking", config.steps) as step:
        all_scores = dict[HeadId, float]()

        def score(removed_heads: list[HeadId]) -> Scores:
            all_scores.update(scoring.score(removed_heads))
            step(1)
            return all_scores

        ranking = rank_heads(gates, keep, score, steps=config.steps, allocation=config.allocate)
    refits_at_once = config.compensate != "none" and not config.sequential
    if processes.world > 1 and (config.allocate == "measured" or refits_at_once):
        moments_of(scoring.context)  # all processes collect them; the search and the refit find them in the cache
    scoring = scoring._replace(context=replace(scoring.context, processes=ALONE))
    if config.allocate == "measured" and processes.main:
        search = measured_allocation(scoring.context, gates.units, all_scores)
        measured_scores = search.take(gates.heads - keep, progress=progress)
        ranking = rank_heads(gates, keep, lambda heads_off: measured_scores)
    return keep, scoring, ranking


def run_shared_ranking(config: RankConfig, *, progress: Progress = no_progress) -> Ranking | None:
    """`run_ranking` under torchrun: each process scores its share; only the main one returns a ranking."""
    with process_group() as processes:
        if processes.main:
            return run_ranking(config, progress=progress, processes=processes)
        check_folder(config.out, choice_by("rank"), inputs=inputs_of(config), force=config.force)
        _rank(config, open_selection(config, trains=config.tune_updates > 0), no_progress, processes)
        return None


def run_ranking(config: RankConfig, *, progress: Progress = no_progress, processes: Processes = ALONE) -> Ranking:
    """Rank the heads of a checkpoint, decide which stay, and write `config.out`."""
    return rank_and_tune(config, progress=progress, processes=processes)[0]


def rank_and_tune(
    config: RankConfig, *, progress: Progress = no_progress, processes: Processes = ALONE
) -> tuple[Ranking, Checkpoint]:
    """`run_ranking` that also returns the checkpoint as it was refitted and tuned."""
    with Build(config.out, choice_by("rank"), inputs=inputs_of(config), force=config.force) as build:
        setup = open_selection(config, trains=config.tune_updates > 0)
        keep, scoring, ranking = _rank(config, setup, progress, processes)
        gates = setup.gating
        removed_heads = gates.closed_heads(ranking.stays_open)
        freeze = config.freeze or default_freeze(setup.checkpoint, {site for site, _ in gates.counts})
        loss = _loss(config, setup)
        checkpoint, intact = refitted_checkpoint(scoring.context, removed_heads, config.refit), setup.checkpoint
        quality = {} if loss is None else _tune(config, setup, checkpoint, ranking, freeze, loss, progress)
        facts: dict[str, Any] = {
            **scoring.facts,
            "refits": config.by in CRITERIA.names() and not config.is_file and CRITERIA.get(config.by).refits,
            "native": config.allocate == "uniform" and _fits_plain_class(setup.checkpoint, removed_heads),
            "steps": config.steps,
            "allocate": config.allocate,
            "compensate": config.compensate,
            "sequential": config.sequential,
        }
        if config.tune_updates:
            facts |= {"tune_updates": config.tune_updates, "freeze": freeze}
        choice = ranking_of(
            setup,
            config,
            removed_heads,
            {"ranking": ranking.table(gates)},
            method="rank",
            entries=_signature_entries(config, scoring, keep),
            facts={"ranking": facts},
            quality=quality,
            loss=loss,
            has_trained=checkpoint is not intact or (config.tune_updates > 0 and freeze != "model"),
            remarks=[*other_weights(config.run, intact), *tie_remarks(gates, ranking.tied)],
        )
        write_selection(choice, checkpoint, config, build)
    return choice, checkpoint


def _fits_plain_class(checkpoint: Checkpoint, removed_heads: list[HeadId]) -> bool:
    """Whether `--export native` can hold the remaining heads: the same number in every layer."""
    native = [export for export in FORMATS.get(checkpoint.format).exports if export.name == "native"]
    n_removed = Counter((head.site, head.layer) for head in removed_heads)
    counts = {heads - n_removed[site_layer] for site_layer, heads in checkpoint.layout.items()}
    if not native or len(counts) != 1 or 0 in counts:
        return False
    holds = native[0].holds
    return holds is None or holds(checkpoint)


def _signature_entries(config: RankConfig, scoring: Scoring, keep: int | None = None) -> dict[str, str]:
    """The entries of the signature that decide which heads stay."""
    keep_entry = {} if keep is None else {"keep": str(keep)}
    entries = {"by": scoring.name, **keep_entry, "steps": str(config.steps)}
    entries |= {"objective": config.objective} if config.objective else {}
    if config.allocate != "global":
        entries["allocate"] = config.allocate
    if config.compensate != "none":
        entries["compensate"] = config.refit.name
    return entries if config.damping is None else {**entries, "damping": f"{config.damping:g}"}


class Scoring(NamedTuple):
    """A way to score heads: `score` takes the heads removed so far and returns scores of which the highest stay.

    `name` stands in signatures, `facts` in the record.
    """

    context: ScoringContext
    score: Callable[[list[HeadId]], Scores]
    name: str
    facts: Mapping[str, Any]


def scoring_of(
    config: RankConfig, setup: OpenedSelection, processes: Processes = ALONE, *, study: Study | None = None
) -> Scoring:
    """The way to score heads that the options name: a file, a `study` or run, or a criterion to measure.

    ConfigError for options that fit none of these.
    """
    anchor = other_text("anchor", config.anchor if config.allocate == "measured" else ())
    context = scoring_context(setup, config, processes=processes, damping=config.damping, anchor=anchor)
    layout, is_criterion = setup.checkpoint.layout, config.by in CRITERIA.names()
    refits = is_criterion and CRITERIA.get(config.by).refits
    refits = refits or config.allocate == "measured" or config.compensate == "least-squares"
    if config.damping is not None and not refits:
        raise ConfigError(f"{flag.damping} is for what refits, and {flag.by} {config.by} does not; leave it out")
    facts, label = {"by": config.by}, config.by
    if config.is_file:
        column, scores = read_scores(Path(config.by), layout, column=config.column)
        measure = Measure(column, keep="highest", why="the higher a score, the longer its head stays")
        criterion: Criterion = column_named(column) if column in measured_columns() else MeasuredColumn(measure)
        facts = {"by": Path(config.by).name, "column": column}
        label = f"{column} of {facts['by']}"
    elif study is not None or config.run is not None:
        if is_criterion:
            raise ConfigError(f"{flag.by} {config.by} is not a column of heads.csv; leave out {flag('from')}")
        criterion = column_named(config.by)
        facts |= {"column": criterion.column, "from": str(config.run)}
        heads = read_heads(Path(str(config.run)), layout) if study is None else study.heads
        if others := [head for head in heads_of_rows(heads) if head.head >= layout.get((head.site, head.layer), 0)]:
            raise ConfigError(f"the study is of another model: this one has no head {others[0]}")
        scores = scores_in(heads, criterion.column)
    else:
        scores, criterion = None, criterion_named(config.by)
        if criterion.reads_text and context.corpus is None:
            raise ConfigError(
                f"{flag.by} {criterion.name} is measured on text: give {flag.source} FILE, or {flag('from')} RUN"
            )
        if config.steps > 1 and not criterion.changes:
            raise ConfigError(f"{flag('steps', config.steps)}: scores by {criterion.name} never change; leave it out")
    direction = criterion.direction(config.end)

    def score(removed_heads: list[HeadId]) -> Scores:
        return direction.apply(criterion.scores(replace(context, removed=removed_heads)) if scores is None else scores)

    facts |= {"keep": direction.keep, "direction": f"by {label}: {direction}"}
    return Scoring(context, score, facts["by"] + f"-{direction.keep}" * direction.is_requested, facts)


def _loss(config: RankConfig, setup: OpenedSelection) -> PruningLoss | None:
    """The loss to tune and measure by: the objective if it can be trained on, else the default; None if none applies.

    CheckpointError or ConfigError if none applies and `--tune-updates` needs one.
    """
    if setup.valid is None:
        return None
    objective, tunes = config.objective, config.tune_updates > 0
    trains = objective in OBJECTIVES.names() and OBJECTIVES.get(objective).trains
    corpus, smoothing = (setup.corpus, config.label_smoothing) if tunes else (setup.valid, None)
    assert corpus is not None
    options: dict[str, Any] = {"objective": objective if trains else "", "smoothing": smoothing, "learns": tunes}
    try:
        return training_loss(setup.checkpoint, corpus, **options, seed=config.seed)
    except (CheckpointError, ConfigError):
        if tunes:
            raise
        return None


def _tune(
    config: RankConfig,
    setup: OpenedSelection,
    checkpoint: Checkpoint,
    ranking: Ranked,
    freeze: Freeze,
    loss: PruningLoss,
    progress: Progress,
) -> dict[str, float]:
    """The loss of the "before", "masked", "refitted" and "tuned" model on the validation text; tunes the checkpoint."""
    gates = setup.gating
    assert setup.valid is not None
    valid = TrainingExamples(setup.checkpoint, setup.valid, limit=setup.limit, with_labels=loss.needs_labels)

    def measure(model: Checkpoint, *, masked: bool = True) -> float:
        head_gates = gates.spread(ranking.stays_open.double()) if masked else None
        tokens = config.batch_tokens or DEFAULT_TOKENS
        return mean_loss(model, valid, tokens=tokens, seed=config.seed, gates=head_gates, loss=loss)

    quality = {"before": measure(setup.checkpoint, masked=False), "masked": measure(setup.checkpoint)}
    if checkpoint is not setup.checkpoint:
        quality["refitted"] = measure(checkpoint)
    if config.tune_updates:
        assert setup.corpus is not None
        data = TrainingExamples(checkpoint, setup.corpus, limit=setup.limit, with_labels=loss.needs_labels)
        recipe = recipe_of(config, checkpoint, updates=config.tune_updates)
        torch.manual_seed(config.seed)
        parameters, heads_off = trained_parameters(checkpoint, freeze), gates.closed_heads(ranking.stays_open)
        tune(Tuner(checkpoint, data, recipe, parameters, closed_heads=heads_off, loss=loss), progress)
        if types := round_weights(checkpoint.model, checkpoint.stored_dtype):
            setup.remarks.append(rounding_note(types))
        quality["tuned"] = measure(checkpoint)
    return quality


def rank_open_model(
    checkpoint: Checkpoint, config: RankConfig, *, study: Study | None, gates: Callable[[], str], progress: Progress
) -> Ranking:
    """The ranking that `prune rank` computes, for an open checkpoint; no head is chosen for removal yet.

    `gates` describes the gates that are active, for the signature.
    """
    if study is not None and not isinstance(study, Study):
        raise ConfigError(f"study is of type {type(study).__name__}; give what analyze returns")
    setup, gates_at_start = open_selection(config, trains=False, checkpoint=checkpoint), gates()
    scoring, gating = scoring_of(config, setup, study=study), setup.gating
    removable = gating.heads - len(gating.protected_heads)

    def score(heads_off: list[HeadId]) -> Scores:
        if gates() != gates_at_start:
            raise ConfigError(
                "steps score anew, and other gates are active than when this ranking was made; rank again"
            )
        with eval_mode(checkpoint.model):
            return scoring.score(heads_off)

    with progress("ranking", 1) as step, eval_mode(checkpoint.model):
        first = score([])
        if config.allocate == "measured":
            first = measured_allocation(scoring.context, gating.units, first).take(removable)
        ranking = rank_heads(gating, gating.heads, lambda heads_off: first)
        step(1)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def lowest(count: int, allocation: str) -> list[HeadId]:
        keep = gating.heads - count
        if not 0 <= count <= removable:
            raise ConfigError(f"{count} heads cannot be removed; give 0 to {removable}")
        if gating.groups and allocation:
            raise ConfigError("this ranking is by allocate='per-group', which says how many heads each layer keeps")
        with restate(ConfigError, f"{count} heads cannot be removed: {{why}}"):
            choice = rank_heads(
                gating,
                keep,
                lambda heads_off: score(heads_off) if heads_off else first,
                steps=config.steps,
                allocation=allocation or config.allocate,
            )
        return gating.closed_heads(choice.stays_open)

    inputs = {"study": study.signature} if study is not None else {}
    inputs |= {"gates": gates_at_start} if gates_at_start else {}
    return ranking_of(
        setup,
        config,
        [],
        {"ranking": ranking.table(gating)},
        method="rank",
        entries={**_signature_entries(config, scoring), **inputs},
        facts={"ranking": scoring.facts},
        folder=Path(checkpoint.path),
        lowest=lowest,
    )

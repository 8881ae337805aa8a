"""Run one cell of a sweep: remove heads by its method, and measure the model without them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from headscope.attribution.objectives.base import OBJECTIVES, Objective, choose_objective
from headscope.bootstrap import Array, Bootstrap
from headscope.config.commands import TranslateOptions
from headscope.engine.base import RunOptions
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError, HeadscopeError, OutputError, flag
from headscope.evaluation.before_after import no_baseline
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.evaluation.metrics.base import METRICS, ValidationText, choose_metric, reference_texts, resample
from headscope.evaluation.translation import RAW, text_mode, text_remarks
from headscope.files.reading import read_object
from headscope.files.tables import write_csv
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.taps import masked
from headscope.progress import Progress, no_progress
from headscope.pruning.closed_form.allocation import MeasuredAllocation
from headscope.pruning.learning.examples import training_objective
from headscope.pruning.learning.learn import learn_gates
from headscope.pruning.options.choice import LEARNERS, LearnConfig, RankConfig, SweepConfig
from headscope.pruning.options.shared import missing_text
from headscope.pruning.ranking.criterion import for_all_heads, measured_allocation, refitted_checkpoint, scoring_context
from headscope.pruning.ranking.rank_run import rank_and_tune
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.scores_file import read_scores
from headscope.pruning.selection import MODEL, STATE, OpenedSelection, open_selection
from headscope.pruning.sweep.cells import (
    RUNS,
    SCORES,
    UNPRUNED,
    Cell,
    cell_path,
    cells_of,
    criterion_of,
    head_functions,
    keep_model,
    labeller,
)
from headscope.results.ranking import Ranking
from headscope.training.config import TrainConfig
from headscope.training.from_scratch import RUN, native_only, read_recipe, train_from_scratch


class SweepContext:
    """What all cells of a sweep share: checkpoint, texts, gates and scores of heads; opened once a process.

    `refit`, if set, gives the refitted model for removed heads, instead of the refit of the config.
    """

    def __init__(self, config: SweepConfig, selection: OpenedSelection | None = None) -> None:
        self.config = config
        self.refit: Callable[[Sequence[HeadId]], Checkpoint] | None = None
        self.criteria = {name: criterion_of(name) for name in config.methods if name not in config.learnt}
        self.selection = selection or open_selection(config, trains=config.trains)
        self.checkpoint, self.gating = self.selection.checkpoint, self.selection.gating
        corpus, valid = self.selection.corpus, self.selection.valid
        self.objective: Objective | None = None  # the objective of scores, if one applies
        with suppress(ConfigError):  # criteria that need one raise it
            if corpus is not None:
                name = choose_objective(config.objective, self.checkpoint, **corpus.comes_with)
                self.objective = OBJECTIVES.get(name)()
        self.cells = cells_of(config, self.gating, self.is_drawn)  # refuses a wrong size before the text is read
        assert valid is not None
        if config.trains:
            assert corpus is not None
            training_objective(config.objective, self.checkpoint, corpus)
        self.metric = choose_metric(config.metric, self.checkpoint, **valid.comes_with)
        self.bootstrap = Bootstrap(seed=config.seed, replicates=config.bootstrap)
        self.scoring = scoring_context(self.selection, config)  # one for all cells
        tokens = self.scoring.batching.tokens
        reading = LikelihoodOptions(tokens, self.selection.limit, "truncate", config.hiding, config.seed)
        search = TranslateOptions(beam=config.beam)
        text, self.remarks = RAW, list[str]()
        if METRICS.get(self.metric).reads == "translations":
            text, self.remarks = text_mode(self.checkpoint, config.text, config.bleu_tokenize)
            self.remarks += text_remarks(reference_texts(self.checkpoint, valid), text)
        self.data = ValidationText(valid, reading, search, text, intact=self.checkpoint)
        self._criterion_scores: dict[tuple[str, int], Scores] = {}  # by method and seed, for all sizes
        self._searches: dict[tuple[str, int], MeasuredAllocation] = {}  # continued for smaller sizes
        for method, (criterion, _) in self.criteria.items():
            if corpus is None and criterion.reads_text:
                raise ConfigError(missing_text(f"{method} is measured on text"))
        run = config.functions
        self.functions = None if run is None else head_functions(run, self.checkpoint)
        self.labeller = labeller(run, self.checkpoint) if run is not None and config.relabel else None

    def forget(self) -> None:
        """Free moments, searches and refits, when no further heads are chosen."""
        self._searches.clear()
        self.scoring.cache.clear()
        self.scoring, self.refit = replace(self.scoring, bench=None), None

    def why_no_baseline(self, baseline_sums: Array) -> str | None:
        """Why a loss against the unpruned model, with sums [g c], cannot be judged; None if it can.

        ConfigError with that reason if a margin was requested.
        """
        metric, margin = METRICS.get(self.metric), self.config.tolerance
        floor = metric.floor(self.checkpoint, self.data)
        why = no_baseline(metric, resample(metric.of, baseline_sums, self.bootstrap), margin=margin, floor=floor)
        if why and self.config.margin is not None:
            raise ConfigError(f"{flag.margin} {self.config.margin}: {why}")
        return why

    def is_drawn(self, method: str) -> bool:
        """Whether the ranking by a method depends on the seed, with this checkpoint and objective.

        A measured allocation depends on it too if the objective hides tokens at random.
        """
        hides = self.objective is not None and self.objective.alters(self.checkpoint)
        criterion, _ = self.criteria[method]
        return criterion.draws(self.checkpoint, self.objective) or (self.config.allocate == "measured" and hides)

    def scores(self, cell: Cell, *, progress: Progress = no_progress) -> Scores:
        """Scores of heads by the criterion of a cell, kept in a file for the other sizes."""
        path, layout = self.scores_path(cell), self.checkpoint.layout
        if path.is_file():
            return read_scores(path, layout, column="score")[1]
        is_drawn = self.is_drawn(cell.method)
        seed = self.config.seed if cell.seed is None or not is_drawn else cell.seed
        options = RunOptions(seed=seed, objective=self.config.objective)
        key, context = (cell.method, seed), replace(self.scoring, options=options)
        if key not in self._criterion_scores:
            criterion, direction = self.criteria[cell.method]
            with progress("ranking heads", 1) as step:
                self._criterion_scores[key] = direction.apply(criterion.scores(context))
                step(1)
        scores = self._criterion_scores[key]
        if self.config.allocate == "measured":
            if key not in self._searches:
                self._searches[key] = measured_allocation(context, self.gating.units, scores)
            scores = for_all_heads(context, self._searches[key].take(self.max_removed, progress=progress))
        rows = [(head.site.value, head.layer, head.head, score) for head, score in scores.items()]
        write_csv(path, pd.DataFrame(rows, columns=["site", "layer", "head", "score"]))
        return scores

    def scores_path(self, cell: Cell) -> Path:
        """The file of a cell's scores, of which the highest stay."""
        seed = f"-seed{cell.seed}" if self.is_drawn(cell.method) else ""
        name = f"{cell.method}{seed}".replace(":", "-")
        is_partial = self.config.allocate == "measured" and self.max_removed < len(self.gating.gated_heads)
        return self.config.out / SCORES / (f"{name}.{self.max_removed}.csv" if is_partial else f"{name}.csv")

    @property
    def max_removed(self) -> int:
        """The number of heads to remove for the smallest size."""
        least_kept = min((cell.keep for cell in self.cells if cell.keep is not None), default=0)
        return min(self.gating.heads - least_kept, len(self.gating.gated_heads))

    @cached_property
    def recipe(self) -> TrainConfig:
        """The recipe for training the controls; CheckpointError for an architecture that cannot be trained."""
        native_only(self.checkpoint)
        names = ("source", "target", "max_sentences", "device", "checkpoint")
        options = {name: getattr(self.config, name) for name in names}
        return read_recipe(self.config.recipe, two_sided=self.checkpoint.two_sided, **options)


Pruned = tuple[Checkpoint, list[HeadId], dict[str, Any]]
"""The result of a method: a checkpoint, the heads that it removes, and facts for the record."""


def run_cell(context: SweepContext, cell: Cell) -> dict[str, Any]:
    """Prune and measure; returns the record of a cell: the heads that stay and the metric's sums, as JSON values."""
    began = time.monotonic()
    checkpoint, removed, facts = _prune(context, cell)
    heads_off = [] if cell.control else removed
    with masked(checkpoint.model, heads_off):
        scores = METRICS.get(context.metric).score(checkpoint, context.data)
    labels = {}
    if cell.method == UNPRUNED:
        context.why_no_baseline(scores.sums)
    elif context.labeller is not None and not cell.control:
        labels["labels"] = context.labeller(checkpoint, heads_off)
    seconds = time.monotonic() - began
    return {
        "cell": vars(cell),
        "kept": [str(head) for head in context.gating.remaining_heads(removed)],
        "metric": context.metric,
        "sums": scores.sums.tolist(),
        "loss": scores.loss.sum(axis=0).tolist(),
        "facts": facts,
        "threads": torch.get_num_threads(),
        "device": context.checkpoint.device.type,
        "seconds": round(seconds, 3),
        **labels,
        **_keep_model(context, cell, checkpoint, heads_off, facts),
    }


def _keep_model(
    context: SweepContext, cell: Cell, checkpoint: Checkpoint, heads_off: Sequence[HeadId], facts: Mapping[str, Any]
) -> dict[str, str]:
    """Write a cell's model if the options say so; returns its path in the sweep's folder, or why it cannot be kept."""
    config, run = context.config, context.config.out / RUNS / cell.folder
    if cell.method == UNPRUNED or not config.keep_models:
        shutil.rmtree(run / (RUN if cell.control else MODEL), ignore_errors=True)
        return {"model": ""}
    if cell.control:
        return {"model": (run / RUN / facts["checkpoint"]).relative_to(config.out).as_posix()}
    try:
        return {"model": keep_model(checkpoint, heads_off, run / MODEL, config).relative_to(config.out).as_posix()}
    except OutputError:
        raise
    except HeadscopeError as error:
        shutil.rmtree(run / MODEL, ignore_errors=True)  # its heads are open
        return {"model": "", "not_kept": str(error)}


def _prune(context: SweepContext, cell: Cell) -> Pruned:
    if cell.method == UNPRUNED:
        return context.checkpoint, [], {}
    if cell.control:
        return _train_control(context, cell)
    if cell.method in context.config.learnt:
        return _learn(context, cell)
    if context.config.tune_updates:
        return _tune(context, cell)
    removed = removed_heads(context, cell)
    if context.refit is not None:
        return context.refit(removed), removed, {}
    return refitted_checkpoint(context.scoring, removed, context.config.refit), removed, {}


def removed_heads(context: SweepContext, cell: Cell, scores: Scores | None = None) -> list[HeadId]:
    """The heads to remove for the size of a cell: those of the lowest `scores` (default: of the cell's method)."""
    assert cell.keep is not None
    head_scores = context.scores(cell) if scores is None else scores
    ranking = rank_heads(context.gating, cell.keep, lambda heads_off: head_scores, allocation=context.config.allocation)
    return context.gating.closed_heads(ranking.stays_open)


def _tune(context: SweepContext, cell: Cell) -> Pruned:
    """The model after `prune rank` has removed heads by the cell's scores and tuned the weights."""
    config = context.config
    context.scores(cell)
    rank = RankConfig(
        **config.for_cell(config.out / RUNS / cell.folder, cell.seed),
        by=str(context.scores_path(cell)),
        column="score",
        keep=cell.keep,
        allocate=config.allocation,
        compensate=config.compensate,
        sequential=config.sequential,
    )
    return _as_pruned(context, *rank_and_tune(rank), {})


def _learn(context: SweepContext, cell: Cell) -> Pruned:
    """The model with learnt gates; resumes the run of a killed process."""
    config, folder = context.config, context.config.out / RUNS / cell.folder
    learner, has_state = LEARNERS.get(cell.method), (folder / STATE).is_file()
    values = vars(config) | {"keep": cell.keep, "strength": cell.strength}
    names = [entry.name for entry in fields(learner.Options)]
    learn = LearnConfig(
        **config.for_cell(folder, cell.seed, force=not has_state),
        method=learner.Options(**{name: values[name] for name in names if name in values}),
        updates=config.updates,
        gate_lr=config.gate_lr,
        resume=has_state,
    )
    choice, checkpoint = learn_gates(learn)
    fact_names = (*learner.learnt_facts, "freeze", "lr")
    facts = {name: value for name, value in choice.record["learning"].items() if name in fact_names}
    return _as_pruned(context, choice, checkpoint, facts)


def _train_control(context: SweepContext, cell: Cell) -> Pruned:
    """A model trained from scratch with only the heads that the same cell, which must be finished, has kept."""
    assert cell.seed is not None
    kept = map(HeadId.parse, read_object(cell_path(context.config.out, cell.folder))["kept"])
    removed = context.gating.remaining_heads(list(kept))
    intact, options = native_only(context.checkpoint), replace(context.recipe, seed=cell.seed)
    control = train_from_scratch(intact, removed, options, context.config.out / RUNS / cell.folder)
    return control.checkpoint, removed, {"updates": control.updates, "checkpoint": control.name}


def _as_pruned(context: SweepContext, choice: Ranking, checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Pruned:
    tuned_checkpoint = checkpoint if choice.record["model"] else context.checkpoint
    return tuned_checkpoint, choice.removed, {choice.quantity: choice.quality, **facts}

"""What all cells of a sweep share: the checkpoint, the texts, the gates, and scores of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.data.batching import BatchingOptions
from headscope.engine.base import Options
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.files.output_checks import check_inputs, inputs_of
from headscope.files.writing import written
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId, all_heads
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.pruning.ranking.scores_file import read_scores
from headscope.pruning.selection import open_selection
from headscope.pruning.sweep.config import DRAWN, LEARNT, UNPRUNED, Cell, SweepConfig, cells_of
from headscope.pruning.sweep.quality import EvaluationData, metric_of, read_labels

RUNS, SCORES = "runs", "scores"


class Bench:
    """A checkpoint and the texts of a sweep, opened once in each process; never changed.

    ConfigError and the like for whatever of the options does not fit checkpoint or text.
    """

    def __init__(self, config: SweepConfig) -> None:
        self.config = config
        check_inputs(config.out, inputs_of(config))
        self.opened = open_selection(config, trains=config.trains)
        self.checkpoint, self.gating = self.opened.checkpoint, self.opened.gating
        corpus = self.opened.valid
        assert corpus is not None
        labelled = config.valid_labels is not None
        self.metric = metric_of(self.checkpoint, has_target=corpus.has_target, has_labels=labelled)
        self._check_training()
        reading = LikelihoodOptions(config.batch_tokens, self.opened.limit, "truncate", config.hiding, config.seed)
        labels: tuple[int, ...] = ()
        if config.valid_labels is not None:
            labels = read_labels(config.valid_labels, self.checkpoint, corpus.count)
        self.data = EvaluationData(corpus, reading, TranslateOptions(beam=config.beam), config.text, labels)
        self.cells = cells_of(config, self.gating)
        for method, _ in self.rankings:
            if self.opened.corpus is None and criterion_named(method).reads_text:
                raise ConfigError(f"{method} is measured on text: give --source FILE, and --target for translation")

    def _check_training(self) -> None:
        if not self.config.trains:
            return
        if self.checkpoint.predicts != "words":
            raise ConfigError(
                "l0, subset and --tune-updates learn by predicting words, and this model classifies; "
                "give --methods that rank, and no --tune-updates"
            )
        assert self.opened.corpus is not None
        if self.opened.corpus.has_target is not self.checkpoint.two_sided:
            needs = "needs --target" if self.checkpoint.two_sided else "reads one side; leave out --target"
            raise ConfigError(f"a model of type {self.checkpoint.model_type!r} {needs}")

    @property
    def rankings(self) -> list[tuple[str, int]]:
        """Rankings, by method and seed, that cells need."""
        seeds = {(cell.method, self.seed_of(cell)): None for cell in self.cells if is_ranking(cell)}
        return list(seeds)

    def seed_of(self, cell: Cell) -> int:
        """The seed of a cell's scores: rankings that do not follow from it have the first."""
        assert cell.seed is not None
        return cell.seed if cell.method in DRAWN else self.config.seed

    def scores(self, method: str, seed: int) -> Scores:
        """Scores of heads by a criterion, kept in a file for the other sizes."""
        path = self.scores_path(method, seed)
        if not path.is_file():
            self._score(method, seed, path)
        return read_scores(path, self.checkpoint.layout, column="score")[1]

    def scores_path(self, method: str, seed: int) -> Path:
        """Where a criterion's scores are kept; higher stays."""
        name = f"{method}-seed{seed}" if method in DRAWN else method
        return self.config.out / SCORES / f"{name}.csv"

    def _score(self, method: str, seed: int, path: Path) -> None:
        its, corpus, config = criterion_named(method), self.opened.corpus, self.config
        if corpus is not None:
            corpus = replace(corpus, count=min(corpus.count, config.score_sentences))
        batching = BatchingOptions(tokens=config.batch_tokens, limit=config.max_length)
        found = its.scores(ScoringContext(self.checkpoint, corpus, batching, Options(seed=seed)))
        rows = [{"site": each.site.value, "layer": each.layer, "head": each.head, "score": found.get(each)}
                for each in all_heads(self.checkpoint.layout)]  # fmt: skip
        table = pd.DataFrame(rows)
        written(path, lambda place: table.to_csv(place, index=False))

    def kept(self, removed: Sequence[HeadId]) -> list[HeadId]:
        """The heads of the gated sites that stay."""
        gone = set(removed)
        return [head for head in all_heads(self.gating.counts) if head not in gone]


@dataclass(frozen=True)
class PrunedModel:
    """What a method leaves: heads that are off in a checkpoint, and what is known of how it was made."""

    checkpoint: Checkpoint
    removed: Sequence[HeadId]
    facts: dict[str, Any] = field(default_factory=dict)


def is_ranking(cell: Cell) -> bool:
    """Whether a cell's heads are chosen by scores."""
    return cell.method not in (*LEARNT, UNPRUNED)

"""The cells of a sweep, each with a method, a size and a seed: their files, their models, and functions of heads.

The model of a cell is written as by `prune remove`. Where its format cannot lose heads, their slices of the output
projection are set to zero, and the `pruning.json` beside it has the numbers of the heads that stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headscope.config import CheckpointOptions
from headscope.config.analyze import AnalyzeConfig
from headscope.config.declarations import analysis_options, checked_options
from headscope.config.option import take_config
from headscope.data.batching import sentence_limit
from headscope.data.corpus import open_text
from headscope.data.labels import with_labels
from headscope.data.template import with_template
from headscope.engine.faithfulness.orders import heads_of_rows
from headscope.engine.plan import analyze, chosen_analyses, run_options, with_stanza
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, flag, restate
from headscope.evaluation.model_inputs import read_input_texts
from headscope.evaluation.opened import check_template
from headscope.export.base import choose_export
from headscope.files.output_checks import OutputKind
from headscope.files.reading import read_object, read_record
from headscope.files.writing import write_atomically
from headscope.formats.base import MASKED, Checkpoint, write_checkpoint
from headscope.formats.native import DIRECTORY
from headscope.heads import HeadId, select_heads
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import masked
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.choice import End, SweepConfig, learners, priced_learners
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.ranking.criterion import Criterion, Direction, criterion_named, rankable_names
from headscope.pruning.ranking.ranking import check_keep, nearest_keep
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import remove_planned, save_shrunk
from headscope.pruning.scores_file import read_heads
from headscope.pruning.selection import CHOICE, PRUNED
from headscope.registry import unknown
from headscope.training.checkpoints import TRAINING
from headscope.training.from_scratch import FRESH, RUN

UNPRUNED = "unpruned"
CELLS, SCORES, RUNS = "cells", "scores", "runs"
RECORD, TABLE, SURVIVORS = "sweep.json", "sweep.csv", "survivors.csv"
OF_CELL = OutputKind(
    "cell", "run of a cell", "", (CHOICE.record, *CHOICE.writes, *DIRECTORY.in_folder(FRESH), *TRAINING.in_folder(RUN))
)
SWEEP = OutputKind(
    "sweep",
    "run of `headscope prune sweep`",
    RECORD,
    (*(TABLE, SURVIVORS, f"{CELLS}/*.json", f"{SCORES}/*.csv"), *OF_CELL.in_folder(f"{RUNS}/*")),
    extensible=True,
)
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method, a size (`keep` heads, or λ as `strength`) and a seed; `control`: its heads, trained from scratch."""

    method: str
    keep: int | None = None
    strength: float | None = None
    seed: int | None = None
    control: bool = False

    @property
    def size(self) -> str:
        """The size in words."""
        if self.keep is None and self.strength is None:
            return ""
        return f"keep {self.keep}" if self.strength is None else f"lambda {self.strength:g}"

    @property
    def name(self) -> str:
        """The name of the cell's files."""
        seed, control = "" if self.seed is None else f"seed{self.seed}", "from-scratch" * self.control
        return "-".join(filter(None, [self.method, self.size.replace(" ", ""), seed, control])).replace(":", "-")

    @property
    def folder(self) -> str:
        """The name of the folder of its run, which a control shares with its cell."""
        return replace(self, control=False).name


def cells_of(config: SweepConfig, gating: GateLayout, is_drawn: Callable[[str], bool]) -> list[Cell]:
    """All cells of a sweep, the unpruned model first, controls last; rankings that no seed changes have one seed."""
    sizes = sorted({*config.keep, *(nearest_keep(gating, share, config.allocate) for share in config.keep_fraction)})
    for keep in sizes:
        check_keep(gating, keep, config.allocate)
    cells = [Cell(UNPRUNED)]
    for method in dict.fromkeys(config.methods):
        seeds: Sequence[int] = range(config.seed, config.seed + config.seeds)
        if method not in config.learnt and not is_drawn(method) and not config.tune_updates:
            seeds = [config.seed]
        cells_of_method = [Cell(method, keep=keep) for keep in sizes]
        if config.lambdas and method in priced_learners():
            cells_of_method = [Cell(method, strength=strength) for strength in config.lambdas]
        cells += [replace(cell, seed=seed) for cell in cells_of_method for seed in seeds]
    if config.from_scratch:
        cells += [replace(cell, control=True) for cell in cells if cell.method in config.learnt]
    return cells


def criterion_of(method: str) -> tuple[Criterion, Direction]:
    """The criterion of a ranking method, and the end that stays, from NAME, NAME:lowest or NAME:highest."""
    name, colon, end = method.partition(":")
    ends: dict[str, End] = {"lowest": "lowest", "highest": "highest"}
    if name not in rankable_names() or (colon and end not in ends):
        raise ConfigError(unknown("method", method, sorted([*learners(), *rankable_names()])))
    criterion = criterion_named(name)
    if not end and not criterion.keep:
        raise ConfigError(
            f"{name} has no agreed direction: write {name}:lowest where low values stay, or {name}:highest"
        )
    return criterion, criterion.direction(ends.get(end))


def cell_path(folder: Path, name: str) -> Path:
    """The file of a finished cell."""
    return folder / CELLS / f"{name}.json"


def write_cell(folder: Path, cell: Cell, record: Record) -> None:
    """Write the record of a finished cell."""
    text = json.dumps(record) + "\n"
    write_atomically(cell_path(folder, cell.name), text)


def read_cells(folder: Path) -> dict[str, Record]:
    """The records of finished cells by name; DataError for a file that is not a record."""
    return {path.stem: read_object(path) for path in sorted((folder / CELLS).glob("[!.]*.json"))}


def head_functions(run: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """The labels of heads in a run of `analyze`; ConfigError where it has none."""
    table = read_heads(run, checkpoint.layout)
    if "functions" not in table:
        problem = "its heads.csv has no column functions; name a run of `headscope analyze`"
        raise ConfigError(f"{flag.functions} {run}: {problem}")
    labels = table["functions"].astype(object).fillna("")  # pandas reads an empty column as NaN
    return {str(head): str(label) for head, label in zip(heads_of_rows(table), labels, strict=True)}


Labeller = Callable[[Checkpoint, Sequence[HeadId]], dict[str, str]]
"""A function of a checkpoint and heads that are off, which returns labels of heads (`positional:-1;rare`)."""


def labeller(run: Path, checkpoint: Checkpoint) -> Labeller:
    """A function that labels heads as the run did, with its mask.

    ConfigError if the run's options do not apply, or its text has changed.
    """
    record = read_record(run / "run.json")
    options, data = record.get("options"), record.get("data")
    if not isinstance(options, dict) or not isinstance(data, dict):
        raise ConfigError(f"{flag.relabel}: {run / 'run.json'} is not of `headscope analyze`; analyse CKPT again")
    of_analyses = {name: value for name, value in options.items() if name in analysis_options()}
    with restate(ConfigError, f"{flag.relabel}: {run} cannot be repeated: {{why}}", HeadscopeError, TypeError):
        config = take_config(AnalyzeConfig, {**options, "out": run, "analysis_options": checked_options(of_analyses)})
        parses = {"parses": config.conllu_file, "target_parses": config.target_parse}
        corpus = open_text(config.text, **parses, max_sentences=config.max_sentences)
        corpus = with_labels(checkpoint, corpus, config.labels)
        if config.template is not None:
            check_template(checkpoint)
            corpus = with_template(corpus, config.template, examples=config.examples)
        run_mask = select_heads(config.mask, checkpoint.layout) if config.mask else []
        analyses = [cls for cls in chosen_analyses(config) if cls.functions]
        if config.parse == "stanza":
            corpus = with_stanza(corpus, config)
    if corpus.digest != data.get("digest"):
        raise ConfigError(f"{flag.relabel}: the text of {run} was changed since; analyse CKPT again")
    if not analyses:
        raise ConfigError(f"{flag.relabel}: the analyses of {run} label no heads; analyse CKPT without {flag.only}")

    def label_heads(pruned: Checkpoint, heads_off: Sequence[HeadId]) -> dict[str, str]:
        limit = sentence_limit(pruned, config.max_length)
        analysis_settings, _ = run_options(config, pruned, corpus, analyses, limit)
        with masked(pruned.model, [*run_mask, *heads_off]):
            study = analyze(pruned, corpus, analyses=analyses, options=analysis_settings, replicates=config.bootstrap)
        return {str(head): ";".join(labels) for head, labels in study.labels.items() if labels}

    return label_heads


COMPARED_SENTENCES = 8  # sentences on which a model with closed heads is compared with the masked one


def keep_model(checkpoint: Checkpoint, heads_gone: Sequence[HeadId], folder: Path, options: CheckpointOptions) -> Path:
    """Write a checkpoint without `heads_gone` into `folder`, which is replaced; returns the path to open."""
    new = folder.with_name(PRUNED)
    shutil.rmtree(new, ignore_errors=True)
    if not heads_gone:
        new.mkdir(parents=True)
        path = write_checkpoint(checkpoint, new).path
    else:
        heads = ",".join(map(str, heads_gone))
        config = RemoveConfig(checkpoint=checkpoint.path, out=new, heads=heads, **options.companion_values())
        path = save_shrunk(without_heads(checkpoint, heads_gone), config).path
    shutil.rmtree(folder, ignore_errors=True)  # only after writing, which copies dictionaries from there
    new.replace(folder)
    return folder / path.relative_to(new)


def without_heads(checkpoint: Checkpoint, heads_gone: Sequence[HeadId], name: str | None = None) -> Shrunk:
    """A copy of a checkpoint without heads, or else with zeros in their place, verified against the masked model."""
    export = choose_export(name, checkpoint)
    try:
        plan = plan_removal(checkpoint.attention_sites, heads_gone, whole_groups=export.whole_groups)
        return remove_planned(
            checkpoint, plan, export, read_input_texts(checkpoint, None, None, sentences=COMPARED_SENTENCES)
        )
    except (ConfigError, CheckpointError):
        if export.name == MASKED.name:
            raise
        return without_heads(checkpoint, heads_gone, MASKED.name)

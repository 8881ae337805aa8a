"""Removal of heads from an open model, and saving of the result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from headscope.api.options import PathName, Report, progress_of
from headscope.api.selection import head_ids_of, heads_option
from headscope.api.texts import Texts, texts_of
from headscope.config import Companions
from headscope.config.option import configured, converted
from headscope.data.batching import sentence_limit
from headscope.data.lines import Lines
from headscope.errors import ConfigError
from headscope.files.folders import Build
from headscope.files.hub import hub_target
from headscope.files.output_checks import inputs_of
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.model.forward import outputs
from headscope.model.interface import through_attend
from headscope.model.removal_plan import keeping
from headscope.progress import Progress, no_progress
from headscope.pruning.engines.base import EngineOptions, engines_named
from headscope.pruning.model_inputs import texts
from headscope.pruning.options.refit import Refit, anchor_files
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.options.shrink import ShrinkConfig
from headscope.pruning.removal.export import as_export, split_export
from headscope.pruning.removal.merge_plan import Merge
from headscope.pruning.removal.record import Shrunk
from headscope.pruning.removal.remove import REMOVAL, Destination, pushed, remove_heads, write_shrunk
from headscope.pruning.scores_file import read_scores
from headscope.pruning.selection import OpenedSelection, gates_for
from headscope.pruning.shrink import PAGE, SIZES, opened_with, run_shrink, small_model
from headscope.registry import unknown
from headscope.results.removal import Removal

WHICH = ("heads", "keep_only", "merge_kv", "merge_by", "allocate")
REMOVING = (*WHICH, "export", "pad", "max_sentences", "metric", "margin", "bleu_tokenize")
"""The options of a removal in memory."""
HeadScores: TypeAlias = "PathName | Mapping[str, float] | Mapping[HeadId, float]"
"""Numbers by head, or a file or run that has them."""


def shrunk_copy(
    checkpoint: Checkpoint, options: Mapping[str, Any], *, text: Texts, held_out: Texts, refit: Refit | None
) -> Shrunk:
    """A copy without heads, compared with the whole model with them masked, or with key/value heads merged."""
    if refit is not None and not isinstance(refit, Refit):
        raise ConfigError(f"refit is of type {type(refit).__name__}; give hs.Refit(method='least-squares')")
    if strange := sorted(set(options) - set(REMOVING)):
        raise ConfigError(unknown("option of remove", strange[0], sorted(REMOVING)))
    calibration, scores = refit or Refit(method="none"), options.get("merge_by")
    named = {
        name: None if options[name] is None else heads_option(options[name], checkpoint.layout, name=name) or ""
        for name in ("heads", "keep_only")
    }
    fixed = {
        **{"checkpoint": checkpoint.path, "out": Path("removal"), "compensate": calibration.method},
        **{"merge_by": None if scores is None else Path("scores"), "objective": calibration.objective},
        "source": None if text.empty else Path("text"),  # checked for being there only
        "valid_source": None if held_out.empty else Path("valid"),
    }
    config = configured(RemoveConfig, {**options, **named, **fixed}, what="remove")
    merge = None
    if config.merge_kv:
        calibration = replace(calibration, sequential=calibration.method == "least-squares")
        by_head = None if scores is None else _scores(scores, checkpoint)
        merge = Merge(config.merge_kv, by_head, config.allocate == "measured")
    if own := anchor_files(calibration.anchor):
        calibration = replace(calibration, anchor=_pair(own))
    if calibration.check:
        calibration = replace(calibration, check=_pair(calibration.check))
    corpus, valid = (None if pair.empty else pair.corpus(checkpoint) for pair in (text, held_out))
    with eval_mode(checkpoint.model):
        return remove_heads(
            checkpoint,
            _heads(config, checkpoint),
            merge=merge,
            export=config.export,
            pad=config.pad,
            data=texts(checkpoint, text.source, text.target, sentences=config.max_sentences),
            corpus=corpus,
            valid=valid,
            calibration=calibration,
            metric=config.metric,
            margin=config.margin,
            bleu_tokenize=config.bleu_tokenize,
        )


def _heads(config: RemoveConfig, checkpoint: Checkpoint) -> Sequence[HeadId]:
    """The heads to remove: those that are named, or all but those that stay."""
    if config.keep_only is not None:
        return keeping(checkpoint.layout, head_ids_of(config.keep_only, checkpoint.layout))
    return [] if config.heads is None else head_ids_of(config.heads, checkpoint.layout)


def _scores(scores: HeadScores, checkpoint: Checkpoint) -> Mapping[HeadId, float]:
    if isinstance(scores, (str, PathLike)):
        return read_scores(Path(scores), checkpoint.layout)[1]
    if not isinstance(scores, Mapping) or not all(isinstance(number, Real) for number in scores.values()):
        raise ConfigError("merge_by: give a number for each head, {'decoder-self.0.1': 0.5}, or a file of scores")
    return {HeadId.parse(str(head), checkpoint.layout): float(score) for head, score in scores.items()}


def _pair(text: Any) -> tuple[Lines, ...]:
    """Source and target of a text that a refit names, as files or lists."""
    pair = texts_of(text[0] if isinstance(text, tuple) and len(text) == 1 else text)
    return tuple(side for side in (pair.source, pair.target) if side is not None)


def shrunk_folder(config: ShrinkConfig, *, progress: Progress = no_progress) -> Removal:
    """What `headscope prune shrink` does: the smaller model in a folder, with its card and a page."""
    return run_shrink(config, draw=_page_of_sizes, progress=progress)


def _page_of_sizes(folder: Path, name: str) -> None:
    """The page of a folder that will have a name: what the removal did, and the sizes that were tried, if any."""
    from headscope.report.page.report import Report, pruning_blocks
    from headscope.report.page.write import save_page
    from headscope.results.sweep import open_pruned

    tried = open_pruned([folder / SIZES]) if (folder / SIZES).is_dir() else []
    sizes = [replace(run, name="Sizes that were tried") for run in tried]
    removal = Removal(Removal.open(folder).record, Path(name))
    save_page(Report(name, blocks=list(pruning_blocks(sizes, [removal]))), folder / PAGE)


def shrunk_model(
    checkpoint: Checkpoint, text: Texts, held_out: Texts, options: Mapping[str, Any], *, progress: Report
) -> Shrunk:
    """The same in memory, of an open checkpoint and texts in memory; what is measured lies in a temporary folder."""
    protect = options["protect"]
    settings = {
        **options,
        "checkpoint": checkpoint.path,
        "source": None if text.empty else Path("text"),  # checked for being there only
        "protect": protect if isinstance(protect, str) else heads_option(protect, checkpoint.layout, name="protect"),
    }
    with TemporaryDirectory() as folder, eval_mode(checkpoint.model):
        config = configured(ShrinkConfig, {**settings, "out": folder}, what="shrink")
        corpus = text.corpus(checkpoint, max_sentences=config.max_sentences)
        valid = None if held_out.empty else held_out.corpus(checkpoint, max_sentences=config.valid_sentences)
        gating = gates_for(checkpoint, config, whole_groups=config.allocation != "per-group")
        limit = sentence_limit(checkpoint, config.max_length)
        selection = OpenedSelection(checkpoint, gating, corpus, None, limit)
        opened = opened_with(config, config.out, selection, valid, (text.source, text.target))
        return small_model(opened, progress=progress_of(progress))


def save_shrunk(
    shrunk: Shrunk,
    folder: PathName,
    *,
    companions: Companions,
    export: str | Iterable[str] | None,
    onnx: bool,
    options: EngineOptions,
    force: bool,
    push_to: str | None,
    public: bool,
) -> Removal:
    """Write a shrunk checkpoint, open it again, and compare its outputs with those of the model in memory."""
    began, target = time.monotonic(), hub_target(push_to, public=public)
    kind, names = split_export([*converted("export", tuple[str, ...], export or ()), *(["onnx"] if onnx else [])])
    engines = engines_named(names, options)
    to = Destination(out=Path(folder), companions=companions, engines=engines, options=options)
    inputs = inputs_of({"checkpoint": shrunk.source["path"]}, companions)
    with Build(to.out, REMOVAL, inputs=inputs, force=force) as build:
        for engine in engines:
            engine.check(shrunk.checkpoint)
        model = shrunk.checkpoint.model
        with eval_mode(model):
            with through_attend(model), torch.no_grad():
                expected = outputs(model, shrunk.data.feeds[0])
            if kind is not None:
                exported, built = as_export(shrunk.checkpoint, shrunk.export, shrunk.removal, kind)
                shrunk = replace(shrunk, checkpoint=exported, export=built)
            removal = write_shrunk(shrunk, to, build, wanted=expected, began=began)
    return pushed(removal, target)

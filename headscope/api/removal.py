"""Removal of heads from an open model, and saving of the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from headscope.api.options import PathName
from headscope.api.texts import TextPair
from headscope.config import Companions
from headscope.errors import ConfigError, check_one_given
from headscope.files.folders import Build
from headscope.files.hub import hub_target
from headscope.files.output_checks import inputs_of
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.discovery import eval_mode
from headscope.model.interface import through_attend
from headscope.model.removal_plan import plan_removal
from headscope.pruning.closed_form.calibration import calibration_text
from headscope.pruning.engines.base import ENGINES, EngineOptions
from headscope.pruning.model_inputs import outputs, texts
from headscope.pruning.options.refit import CalibrationOptions
from headscope.pruning.options.remove import RemoveConfig, check_merge
from headscope.pruning.removal.export import as_export, kind_of_folder
from headscope.pruning.removal.merge_plan import Merge, plan_merge
from headscope.pruning.removal.push import pushed
from headscope.pruning.removal.quality import MEASURED, quality_question
from headscope.pruning.removal.record import Removed, Shrunk
from headscope.pruning.removal.remove import (
    REMOVAL,
    engines_of,
    export_for,
    folder_kinds,
    shrink,
    write_shrunk,
)
from headscope.pruning.removal.savings import size


def shrunk_copy(
    checkpoint: Checkpoint,
    heads: Sequence[HeadId],
    *,
    export: str | None,
    text: TextPair,
    max_sentences: int,
    calibration: CalibrationOptions,
    held_out: TextPair,
    metric: str = "",
    margin: str | None = None,
    pad: bool = False,
    merge: Merge | None = None,
) -> Shrunk:
    """A copy without `heads`, compared with the whole model with them masked, refitted as `calibration` says.

    Or with all of them, and key/value heads merged.
    """
    kinds, engines = split_export(export)
    if merge is not None:
        check_merge(pad=pad, compensate=calibration.compensate)
        calibration = replace(calibration, sequential=calibration.compensate == "least-squares")
    kind = kind_of_folder(kinds, checkpoint, merges=merge is not None)
    chosen = export_for(kind, checkpoint, [ENGINES.get(name) for name in engines], pad=pad)
    if held_out.target is not None and held_out.source is None:
        raise ConfigError("valid_target is for valid_text; give that too")
    if calibration.compensate == "none" and held_out.empty and calibration.objective:
        raise ConfigError("objective is what a refit is measured by; give compensate or valid_text")
    corpus, valid = (None if pair.empty else pair.corpus(checkpoint) for pair in (text, held_out))
    calibrated = calibration_text(calibration, corpus, valid)
    measured = calibrated.held_out if calibrated else valid or (corpus and corpus.first(MEASURED))
    with eval_mode(checkpoint.model):
        data = texts(checkpoint, text.source, text.target, sentences=max_sentences)
        if merge is None:
            removal = plan_removal(checkpoint.attention_sites, heads, whole_groups=chosen.whole_groups)
        else:
            removal = plan_merge(checkpoint.attention_sites, merge.count, scores=merge.scores)
        asked, why = quality_question(checkpoint, measured, metric=metric, margin=margin)
        return shrink(
            checkpoint,
            removal,
            export=chosen,
            data=data,
            text=calibrated,
            calibration=calibration,
            asked=asked or why,
        )


def merge_of(
    count: int | None, scores: Mapping[str, float] | Mapping[HeadId, float] | None, *, heads: object
) -> Merge | None:
    """How key/value heads are merged; ConfigError unless either that or heads to remove are given."""
    check_one_given({"heads, those that go": heads, "merge_kv, the key/value heads that stay": count})
    if count is None:
        if scores is not None:
            raise ConfigError("merge_by says which key/value heads merge_kv merges; give that too")
        return None
    if scores is None:
        return Merge(count)
    return Merge(count, {HeadId.parse(str(head)): float(score) for head, score in scores.items()})


def split_export(export: str | None) -> tuple[list[str], list[str]]:
    """Kinds of folders and engines of an `export`, names with commas between them."""
    names = [name.strip() for name in (export or "").split(",") if name.strip()]
    engines = [name for name in names if name in ENGINES.names()]
    return [name for name in names if name not in engines], engines


def sizes_of(done: Shrunk) -> Mapping[str, Mapping[str, int]]:
    """Sizes of the model before and after the removal."""
    with eval_mode(done.checkpoint.model):
        after = size(done.checkpoint, done.data)
    return {"before": asdict(done.before), "after": asdict(after)}


def save_shrunk(
    done: Shrunk,
    folder: PathName,
    *,
    companions: Companions,
    export: str | None,
    onnx: bool,
    options: EngineOptions,
    force: bool,
    push_to: str | None = None,
    public: bool = False,
) -> Removed:
    """Write a shrunk checkpoint, open it again, and compare its outputs with those of the model in memory."""
    began = time.monotonic()
    kinds, engines = split_export(export)
    merged = [len(sets) for sets in done.removal.merged.values()]
    config = RemoveConfig(
        checkpoint=done.source["path"],
        out=Path(folder),
        heads=None if merged else ",".join(map(str, done.removal.removed)),
        merge_kv=merged[0] if merged else None,
        export=tuple(dict.fromkeys([*kinds, *engines, *(["onnx"] if onnx else [])])),
        quantize=options.quantize,
        unverified=options.unverified,
        rounds=0,
        dicts=companions.dicts,
        hp=companions.hp,
        bpe=companions.bpe,
        hub_name=push_to,
        hub_public=public,
        force=force,
    )
    target = hub_target(push_to, public=public)
    with Build(config.out, REMOVAL, inputs=inputs_of(config), force=config.force) as build:
        for engine in engines_of(config):
            engine.check(done.checkpoint)
        model = done.checkpoint.model
        with eval_mode(model):
            with through_attend(model), torch.no_grad():
                expected = outputs(model, done.data.feeds[0])
            if of_folder := folder_kinds(config.export):
                exported, built = as_export(done.checkpoint, done.export, done.removal, of_folder[0])
                done = replace(done, checkpoint=exported, export=built)
            removed = write_shrunk(done, config, build, wanted=expected, began=began)
    return pushed(removed, target)

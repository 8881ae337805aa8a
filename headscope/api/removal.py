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
from headscope.pruning.engines.base import EngineOptions, engines_named
from headscope.pruning.model_inputs import outputs, texts
from headscope.pruning.options.refit import CalibrationOptions
from headscope.pruning.options.remove import check_merge
from headscope.pruning.removal.export import as_export, split_export
from headscope.pruning.removal.merge_plan import Merge
from headscope.pruning.removal.record import Removed, Shrunk, pushed
from headscope.pruning.removal.remove import REMOVAL, Destination, remove_heads, write_shrunk
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
    if merge is not None:
        check_merge(pad=pad, compensate=calibration.compensate)
        calibration = replace(calibration, sequential=calibration.compensate == "least-squares")
    if held_out.target is not None and held_out.source is None:
        raise ConfigError("valid_target is for valid_text; give that too")
    if calibration.compensate == "none" and held_out.empty and calibration.objective:
        raise ConfigError("objective is what a refit is measured by; give compensate or valid_text")
    corpus, valid = (None if pair.empty else pair.corpus(checkpoint) for pair in (text, held_out))
    with eval_mode(checkpoint.model):
        return remove_heads(
            checkpoint,
            heads,
            merge=merge,
            export=_names(export),
            pad=pad,
            data=texts(checkpoint, text.source, text.target, sentences=max_sentences),
            corpus=corpus,
            valid=valid,
            calibration=calibration,
            metric=metric,
            margin=margin,
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


def _names(export: str | None) -> tuple[str, ...]:
    """The names of an `export`, with commas between them."""
    return tuple(name.strip() for name in (export or "").split(",") if name.strip())


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
    began, target = time.monotonic(), hub_target(push_to, public=public)
    kind, names = split_export(_names(export))
    engines = engines_named(dict.fromkeys((*names, *(["onnx"] if onnx else []))), options)
    to = Destination(out=Path(folder), companions=companions, engines=engines, options=options)
    inputs = inputs_of({"checkpoint": done.source["path"]}, companions)
    with Build(to.out, REMOVAL, inputs=inputs, force=force) as build:
        for engine in engines:
            engine.check(done.checkpoint)
        model = done.checkpoint.model
        with eval_mode(model):
            with through_attend(model), torch.no_grad():
                expected = outputs(model, done.data.feeds[0])
            if kind is not None:
                exported, built = as_export(done.checkpoint, done.export, done.removal, kind)
                done = replace(done, checkpoint=exported, export=built)
            removed = write_shrunk(done, to, build, wanted=expected, began=began)
    return pushed(removed, target)

"""From a list of heads to a smaller checkpoint on disk: what `headscope prune remove` does.

Order: check, cut, compare with the masked model, write into a directory beside the output, open what was written and
compare again, count and time, then swap the directory in. Whatever fails leaves everything as it was, and the input is
only read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from headscope.errors import CheckpointError, ConfigError
from headscope.evaluation.before_after import Question, quality_change
from headscope.files.folders import Build
from headscope.files.hub import hub_target
from headscope.files.output_checks import inputs_of
from headscope.files.output_kind import MODEL_FILES, OutputKind
from headscope.files.reading import is_file
from headscope.formats.base import (
    Checkpoint,
    Export,
    SavedFiles,
    open_checkpoint,
    open_configured,
    write_checkpoint,
)
from headscope.formats.card import write_card
from headscope.heads import HeadId, select_heads
from headscope.model.interface import through_attend
from headscope.model.removal_plan import RemovalPlan, keeping, plan_removal
from headscope.pruning.closed_form.calibration import CalibrationText, Compensated, calibration_text, compensated
from headscope.pruning.engines.base import ENGINES, EngineExport, EngineOptions, engines_named
from headscope.pruning.options.refit import Refit
from headscope.pruning.options.remove import RemoveConfig
from headscope.pruning.ranking.scores_file import read_scores
from headscope.pruning.removal.export import choose_export, kind_of_folder
from headscope.pruning.removal.merge_plan import plan_merge
from headscope.pruning.removal.model_inputs import InputTexts, outputs, texts
from headscope.pruning.removal.push import pushed, typed_command
from headscope.pruning.removal.quality import MEASURED, corpora, quality_question, sample_text
from headscope.pruning.removal.record import Removed, Shrunk, padding_note, removal_card, removal_record
from headscope.pruning.removal.savings import size, timings
from headscope.pruning.removal.timing import Timing
from headscope.pruning.removal.verify import max_abs_difference, reference, require, verify
from headscope.results import Signature, signature_of

RECORD = "pruning.json"
REMOVAL = OutputKind("removal", "run of `headscope prune remove`", RECORD, MODEL_FILES)


def folder_kinds(export: Sequence[str]) -> tuple[str, ...]:
    """Exports that are folders; ConfigError for more than one kind."""
    kinds = tuple(name for name in export if name not in ENGINES.names())
    if len(kinds) > 1:
        engines = " and ".join(ENGINES.names())
        raise ConfigError(f"--export {','.join(export)}: one kind of folder at a time, and {engines} besides")
    return kinds


def engine_options(config: RemoveConfig) -> EngineOptions:
    """How files for engines store weights, and whether they must be proved."""
    return EngineOptions(quantize=config.quantize, unverified=config.unverified)


def engines_of(config: RemoveConfig) -> tuple[EngineExport, ...]:
    """The engines that files are written for; ConfigError where there is no such export or a package is missing."""
    folder_kinds(config.export)
    return engines_named([name for name in config.export if name in ENGINES.names()], engine_options(config))


def run_removal(config: RemoveConfig, *, progress: Callable[[str], None] = lambda what: None) -> Removed:
    """Remove heads from a checkpoint and write the smaller one to `config.out`.

    HeadscopeError for whatever the user can fix; then nothing was written. The result's `pruning.json` has
    everything that is returned.
    """
    target = hub_target(config.hub_name, public=config.hub_public)
    engines = engines_of(config)
    with Build(config.out, REMOVAL, inputs=inputs_of(config), force=config.force) as build:
        removed = _run(config, engines, build, progress)
    return pushed(removed, target)


def _run(
    config: RemoveConfig, engines: Sequence[EngineExport], build: Build, progress: Callable[[str], None]
) -> Removed:
    began = time.monotonic()
    checkpoint = open_configured(config)
    kind = kind_of_folder(folder_kinds(config.export), checkpoint, merges=config.merge_kv is not None)
    export = export_for(kind, checkpoint, engines, pad=config.pad)
    removal = _plan(config, checkpoint, export)
    data = texts(checkpoint, config.source, config.target, sentences=config.max_sentences)
    corpus, valid = corpora(config, checkpoint)
    text = calibration_text(config.calibration, corpus, valid)
    held_out = text.held_out if text else valid or (corpus and corpus.first(MEASURED))
    measured = held_out or sample_text(checkpoint, data, config.max_sentences)
    asked, why = quality_question(checkpoint, measured, metric=config.metric, margin=config.margin)
    done = shrink(
        checkpoint,
        removal,
        export=export,
        data=data,
        text=text,
        calibration=config.calibration,
        asked=asked or why,
        progress=progress,
    )
    pooled = checkpoint.with_pooled_groups(removal) if removal.merged else checkpoint
    whole = pooled if done.compensated is None else done.compensated.checkpoint
    wanted = reference(whole, done.removal.removed, data.feeds[0])
    return write_shrunk(done, config, build, wanted=wanted, whole=checkpoint, began=began, progress=progress)


def export_for(
    kind: str | None, checkpoint: Checkpoint, engines: Sequence[EngineExport], *, pad: bool = False
) -> Export:
    """The kind of folder, as far as all engines can follow it; ConfigError where one never can."""
    export = choose_export(kind, checkpoint, pad=pad)
    for engine in engines:
        engine.check(checkpoint)
    return replace(export, adds_bias=export.adds_bias and all(engine.adds_bias(checkpoint) for engine in engines))


def shrink(
    checkpoint: Checkpoint,
    removal: RemovalPlan,
    *,
    export: Export,
    data: InputTexts,
    text: CalibrationText | None = None,
    calibration: Refit | None = None,
    asked: Question | str = "",
    progress: Callable[[str], None] = lambda what: None,
) -> Shrunk:
    """Build a copy as a plan says and compare it with the whole model; the checkpoint stays as it is.

    The whole model has the removed heads masked, or the merged groups' means in the place of each group. With a `text`
    its output projections are refitted as `calibration` says. What is `asked` is measured of
    both (a text says why nothing is). ConfigError for heads that cannot go, CheckpointError
    where the copy computes something else.
    """
    done, pooled = None, checkpoint.with_pooled_groups(removal) if removal.merged else None
    if text is not None:
        progress("refitting")
        options = calibration or Refit(method="none")
        done = compensated(checkpoint, removal.removed, text, options, altered=pooled, add_bias=export.adds_bias)
    whole = done.checkpoint if done is not None else pooled or checkpoint
    progress("removing")
    made = export.build(whole, removal)
    progress("comparing")
    verified = verify(whole, made, removal.removed, data)
    quality = None
    if isinstance(asked, Question):
        progress("measuring")
        quality = quality_change(checkpoint, made, asked)
    return Shrunk(
        checkpoint=made,
        export=export,
        source={"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest},
        removal=removal,
        verified=verified,
        data=data,
        before=size(checkpoint, data),
        signature=_signature(checkpoint, export, removal, data, done),
        compensated=done,
        quality=quality,
        unmeasured=asked if isinstance(asked, str) else "",
    )


def write_shrunk(
    done: Shrunk,
    config: RemoveConfig,
    build: Build,
    *,
    wanted: Tensor,
    whole: Checkpoint | None = None,
    began: float | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Removed:
    """Write a shrunk checkpoint where `build` says, open it again, and compare its outputs with `wanted` [n V].

    Times are measured against the `whole` checkpoint, where there is one and `config.rounds` says so. CheckpointError
    where the files compute something else; then nothing was written.
    """
    with build.writing() as made:
        written = write_checkpoint(done.checkpoint, made, config.companions)
        verified = replace(done.verified, reloaded=_reloaded(done, written, wanted))
        files = []
        for engine in engines_of(config):
            progress(f"exporting to {engine.name}")
            files.append(engine.write(done.checkpoint, done.data, made, engine_options(config)))
    times: tuple[Timing, ...] = ()
    if config.rounds and whole is not None:
        progress("timing")
        times = tuple(timings(whole, done.checkpoint, done.data, batch=config.batch, rounds=config.rounds))
    result = Removed(
        path=config.out / written.path.relative_to(made),
        out=config.out,
        heads=_list_file(config),
        command=typed_command(config),
        format=written.format,
        export=done.export.name,
        source={**done.source, **{name: str(getattr(config, name)) for name in config.companions.names()}},
        removal=done.removal,
        verified=verified,
        before=done.before,
        after=size(done.checkpoint, done.data),
        paces=times,
        notes=(
            *written.notes,
            *padding_note(done),
            *([done.unmeasured] if done.unmeasured else []),
            *(() if done.compensated is None else done.compensated.remarks()),
            *(note for file in files for note in file.notes),
        ),
        signature=done.signature,
        engines=tuple(files),
        seconds=time.monotonic() - (began or time.monotonic()),
        compensated=done.compensated,
        quality=done.quality,
    )
    write_card(removal_card(result, written), made)
    build.finish(removal_record(result))
    return result


def _plan(config: RemoveConfig, checkpoint: Checkpoint, export: Export) -> RemovalPlan:
    """What goes or is merged; ConfigError where that cannot be."""
    if config.merge_kv is not None:
        by = config.merge_by
        scores = None if by is None else read_scores(by, checkpoint.layout, column=config.column)[1]
        return plan_merge(checkpoint.attention_sites, config.merge_kv, scores=scores)
    return plan_removal(checkpoint.attention_sites, _chosen(config, checkpoint), whole_groups=export.whole_groups)


def _chosen(config: RemoveConfig, checkpoint: Checkpoint) -> Sequence[HeadId]:
    if config.heads is not None:
        return select_heads(config.heads, checkpoint.layout)
    assert config.keep_only is not None
    return keeping(checkpoint.layout, select_heads(config.keep_only, checkpoint.layout))


def _list_file(config: RemoveConfig) -> dict[str, str | None]:
    """The list as it was given, and the digest of its file if it is one (a ranking that a method wrote)."""
    if config.merge_kv is not None:
        by = config.merge_by
        table = None if by is None else (by / "heads.csv" if by.is_dir() else by)
        scores = None if table is None else hashlib.sha256(table.read_bytes()).hexdigest()
        return {"option": "--merge-kv", "list": str(config.merge_kv), "sha256": scores}
    heads = config.heads or config.keep_only or ""
    is_list_file = "," not in heads and is_file(heads)
    digest = hashlib.sha256(Path(heads).read_bytes()).hexdigest() if is_list_file else None
    return {"option": "--heads" if config.heads else "--keep-only", "list": heads, "sha256": digest}


def _reloaded(done: Shrunk, written: SavedFiles, wanted: Tensor) -> float:
    """Differences of the files that were written, opened again; CheckpointError where they are too large."""
    shrunk = done.checkpoint
    dtype = str(shrunk.dtype).removeprefix("torch.")
    again = open_checkpoint(
        str(written.path),
        format=written.format,
        device=str(shrunk.device),
        dtype=dtype,
    )
    if again.layout != shrunk.layout:
        raise CheckpointError("the files that were written have other heads; nothing was saved")
    with through_attend(again.model):
        logits = outputs(again.model, done.data.feeds[0])
    far = max_abs_difference(logits, wanted)
    require(far, 10 * done.verified.tolerance, "what was saved", merges=bool(done.removal.merged))
    return far


def _signature(
    checkpoint: Checkpoint, export: Export, removal: RemovalPlan, data: InputTexts, done: Compensated | None
) -> Signature:
    before, after = checkpoint.layout, removal.layout
    return signature_of(
        {
            "m": "prune.remove",
            "export": export.name,
            "heads": f"{sum(after.values())}/{sum(before.values())}",
            **({"merged": _short(repr(sorted(removal.merged.items())))} if removal.merged else {}),
            "removed": _short(",".join(map(str, removal.removed))),
            **({} if done is None else done.signature()),
            "ckpt": checkpoint.digest[:8],
            "data": data.name,
            "device": str(checkpoint.device),
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
        },
        transformers=True,
    )


def _short(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:8]

"""From a list of heads to a smaller checkpoint on disk: what `headscope prune remove` does.

Order: check, cut, compare with the masked model, write into a directory beside the output, open what was written and
compare again, count and time, then swap the directory in. Whatever fails leaves everything as it was, and the input is
only read.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from headscope.assets import sample
from headscope.attribution.objectives.base import warn_without_target
from headscope.data.corpus import Corpus, open_corpus, open_text
from headscope.data.labels import with_labels
from headscope.errors import CheckpointError, ConfigError, HeadscopeError, flag
from headscope.evaluation.before_after import QualityTask, make_quality_task, quality_change
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.export.base import choose_export, engines_named, export_for, split_export
from headscope.files.folders import Build
from headscope.files.hub import check_hub, push
from headscope.files.output_checks import OutputKind, inputs_of
from headscope.files.writing import write_json
from headscope.formats.base import Checkpoint, Export, SavedFiles, open_checkpoint, open_configured, write_checkpoint
from headscope.formats.exports import MODEL_FILES, write_card
from headscope.formats.size import measure_size
from headscope.heads import HeadId, select_heads
from headscope.model.discovery import eval_mode
from headscope.model.forward import first_sentence, max_abs_difference, outputs, return_freed_memory
from headscope.model.interface import through_attend
from headscope.model.removal_plan import RemovalPlan, alignment_note, heads_to_remove, plan_removal
from headscope.model.stored_weights import round_weights, rounding_note
from headscope.progress import Progress, no_progress
from headscope.pruning.closed_form.bench import RefitBench
from headscope.pruning.closed_form.compensate import Compensated, split_text
from headscope.pruning.options.removal import RemoveConfig, ShrinkConfig
from headscope.pruning.removal.merge_plan import measured_counts, plan_merge
from headscope.pruning.removal.record import Shrunk, removal_card, shrunk_record
from headscope.pruning.removal.verify import Timing, compare, require, timings, verify
from headscope.pruning.scores_file import read_scores
from headscope.results.removal import RECORD, Removal
from headscope.signature import Signature, signature_of

REMOVAL = OutputKind("removal", "run of `headscope prune remove`", RECORD, MODEL_FILES)
QUALITY_SENTENCES = 1000
"""Lines on which quality is measured where all of the text is unused by refits."""


def run_removal(config: RemoveConfig, *, progress: Progress = no_progress) -> Removal:
    """Remove heads from a checkpoint and write the smaller one to `config.out`."""
    check_targets(config)
    began = time.monotonic()
    with (
        Build(config.out, REMOVAL, inputs=inputs_of(config), force=config.force) as build,
        progress("removing", None, unit="steps") as step,
    ):
        begin = partial(step, 1)
        begin("opening")
        checkpoint = open_configured(config)
        shrunk = removed_copy(config, checkpoint, progress=begin)
        removal = write_shrunk(shrunk, config, build, whole=checkpoint, began=began, progress=begin)
    return push_removal(removal, config)


def check_targets(config: RemoveConfig | ShrinkConfig) -> None:
    """Raise ConfigError where the folder cannot be pushed to the hub or an engine is not installed."""
    engines_named(split_export(config.export)[1], config.quantize)
    check_hub(config.hub_name)


def save_shrunk(shrunk: Shrunk, config: RemoveConfig | ShrinkConfig) -> Removal:
    """Write a smaller model to the folder and in the formats of the options; it may have been trained since."""
    check_targets(config)
    began = time.monotonic()
    inputs = inputs_of({"checkpoint": shrunk.source["path"]}, config.companion_values())
    with Build(config.out, REMOVAL, inputs=inputs, force=config.force) as build:
        removal = write_shrunk(shrunk, config, build, began=began)
    return push_removal(removal, config)


def removed_copy(
    config: RemoveConfig,
    checkpoint: Checkpoint,
    *,
    refit_texts: Mapping[str, Any] | None = None,
    scores: Mapping[HeadId, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Shrunk:
    """A smaller copy in memory of an open checkpoint, by the options of `prune remove`; writes nothing.

    `refit_texts` (`anchor`, `check`) and `scores` of heads to merge replace the files that the options name. Quality is
    measured on `--valid-source`, else on the text held out of `--source`, else on the sample. ConfigError for heads
    that cannot be removed and for an export that cannot hold the others.
    """
    calibration, layout = replace(config.calibration, **(refit_texts or {})), checkpoint.layout
    heads = () if config.merge_kv else select_heads(config.heads or config.keep_only or "", layout)
    if config.merge_by is not None:
        scores = read_scores(config.merge_by, layout, column=config.column)[1]
    data = read_input_texts(checkpoint, config.source, config.target, sentences=config.max_sentences)
    corpus = with_labels(checkpoint, open_text(config), config.labels) if config.has_text else None
    if corpus is not None and config.measures_quality and not config.objective:
        warn_without_target(checkpoint, has_target=corpus.has_target)
    valid = None
    if config.valid_text is not None:
        valid = with_labels(checkpoint, open_text(config.valid_text), config.valid_labels, option="valid_labels")
    counts, is_measured = config.merge_kv, config.allocate == "measured"
    is_uniform = len(set(counts)) == 1 and not is_measured
    export = export_for(config.export, checkpoint, merges=is_uniform, pad=config.pad)
    text = None
    if corpus is not None and (calibration.method != "none" or valid is not None):
        text = split_text(corpus, valid, sentences=calibration.sentences)
    refit_text = text
    if not counts:
        heads = heads if config.heads is not None else heads_to_remove(layout, heads)
        removal = plan_removal(checkpoint.attention_sites, heads, whole_groups=export.whole_groups)
    else:
        if not is_uniform and export.name == "native":
            raise ConfigError(
                f"{flag.export} native: a plain class has one number of key/value heads for all layers; give "
                f"{flag.merge_kv} N alone, or {flag.export} deci-hf, gguf or self-contained"
            )
        if is_measured and corpus is not None:
            refit_text = text or split_text(corpus, valid, sentences=calibration.sentences)
            measuring: dict[str, Any] = {"scores": scores, "objective": calibration.objective}
            counts = measured_counts(checkpoint, counts[0], refit_text.calibration, **measuring)
        removal = plan_merge(checkpoint.attention_sites, counts, scores=scores)
    held_out = refit_text.held_out if refit_text else valid or (corpus and corpus.first(QUALITY_SENTENCES))
    if held_out is None and data.sources:  # the model reads text
        has_target = checkpoint.two_sided and checkpoint.predicts in ("words", "nothing")
        held_out = open_corpus(sample("en"), target=sample("de") if has_target else None).first(config.max_sentences)
    bench = None
    if text is not None:
        merged_copy = checkpoint.alter_heads(removal, "pool") if removal.merged else None
        bench = RefitBench(checkpoint, text, replace(calibration, add_bias=export.adds_bias), merged_copy)
    quality_task = quality_question(checkpoint, held_out, config)
    return remove_planned(checkpoint, removal, export, data, bench, quality_task, progress=progress)


def quality_question(checkpoint: Checkpoint, corpus: Corpus | None, config: RemoveConfig) -> QualityTask | str:
    """The metric to measure quality by, with its text; or why there is none: ConfigError if one was requested."""
    metric, margin, bleu_tokenize = config.metric, config.margin, config.bleu_tokenize
    if corpus is None:
        if metric or margin is not None:
            raise ConfigError(f"{flag.metric} and {flag.margin} need text; give {flag.source}, or {flag.valid_source}")
        return "quality was not measured: there is no text"
    try:
        return make_quality_task(checkpoint, corpus, metric=metric, margin=margin, bleu_tokenize=bleu_tokenize)
    except HeadscopeError as error:
        if metric or margin is not None or bleu_tokenize is not None:
            raise
        return f"quality was not measured: {error}"


def remove_planned(
    checkpoint: Checkpoint,
    removal: RemovalPlan,
    export: Export,
    data: InputTexts,
    bench: RefitBench | None = None,
    quality_task: QualityTask | str = "",
    elsewhere: QualityTask | None = None,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> Shrunk:
    """A smaller copy: refitted by the `bench`, cut, verified, and measured by `quality_task` and `elsewhere`.

    It is compared with the whole model with removed heads masked, or each merged group's mean in place of its members.
    ConfigError for heads that cannot be removed, CheckpointError where the copy computes something else.
    """
    return_freed_memory()
    compensation, whole = None, checkpoint.alter_heads(removal, "pool") if removal.merged else checkpoint
    if bench is not None:
        if not (removal.merged or bench.recent):  # refuse heads that cannot be removed before the refit
            progress("comparing")
            compare(checkpoint, export.build(checkpoint, removal), removal.removed, data.first())
        progress("refitting")
        compensation = bench.compensation(removal.removed)
        whole = compensation.checkpoint
    progress("removing")
    smaller = export.build(whole, removal)
    remarks, before = alignment_note(checkpoint.model, smaller.model), measure_size(checkpoint, data.feeds)
    progress("comparing")
    verification = verify(whole, smaller, removal.removed, data)
    remarks += _round_weights(smaller, data)
    progress("measuring")
    return Shrunk(
        checkpoint=smaller,
        export=export,
        source={"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest},
        removal=removal,
        verification=verification,
        data=data,
        before=before,
        signature=_signature(checkpoint, export, removal, data, compensation),
        compensation=compensation,
        quality=quality_change(checkpoint, smaller, quality_task) if isinstance(quality_task, QualityTask) else None,
        elsewhere=None if elsewhere is None else quality_change(checkpoint, smaller, elsewhere),
        why_unmeasured=quality_task if isinstance(quality_task, str) else "",
        remarks=remarks,
    )


def _round_weights(smaller: Checkpoint, data: InputTexts) -> tuple[str, ...]:
    """Round a smaller model as its files will be, so that measurements hold for them; returns a remark on the effect.

    Refitted, averaged, folded or tuned weights may need more digits than the type in which the source is stored.
    """
    with through_attend(smaller.model):
        before = outputs(smaller.model, data.feeds[0])
        if not (types := round_weights(smaller.model, smaller.stored_dtype)):
            return ()
        share = max_abs_difference(outputs(smaller.model, data.feeds[0]), before)
    return (f"{rounding_note(types)}: outputs move by {share:.1e} of the largest",)


def write_shrunk(
    shrunk: Shrunk,
    config: RemoveConfig | ShrinkConfig,
    build: Build,
    *,
    began: float,
    whole: Checkpoint | None = None,
    add: Callable[[Path], None] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Removal:
    """Write a shrunk checkpoint and files for engines, reopen it, and compare it with the model in memory.

    The `whole` model, if given, and the smaller one are timed if the options say so. `add` writes more into the
    complete folder. CheckpointError where the files compute something else.
    """
    kind, names = split_export(config.export)
    engines = engines_named(names, config.quantize)
    for engine in engines:
        engine.check(shrunk.checkpoint)
    with eval_mode(shrunk.checkpoint.model), through_attend(shrunk.checkpoint.model):
        expected_logits = outputs(shrunk.checkpoint.model, first_sentence(shrunk.data.feeds[0]))
    if kind not in (None, shrunk.export.name):
        export, made_for = choose_export(kind, shrunk.checkpoint), shrunk.export.name
        if export.refine is None or made_for != choose_export(None, shrunk.checkpoint).name:
            problem = f"the heads were removed for export={made_for!r}, which cannot become {kind!r}"
            raise ConfigError(f"{problem}; say remove(..., export={kind!r})")
        whole_copy = shrunk.checkpoint.with_model(copy.deepcopy(shrunk.checkpoint.model))
        shrunk = replace(shrunk, checkpoint=export.refine(whole_copy, shrunk.removal), export=export)
    with build.writing() as folder, eval_mode(shrunk.checkpoint.model):
        files = write_checkpoint(shrunk.checkpoint, folder)
        difference = _reload_difference(shrunk, files, expected_logits)
        shrunk = replace(shrunk, verification=replace(shrunk.verification, reloaded=difference))
        engine_files = []
        for engine in engines:
            progress(f"exporting to {engine.name}")
            engine_files.append(engine.write(shrunk.checkpoint, shrunk.data, folder, quantize=config.quantize))
    times = list[Timing]()
    if config.rounds and whole is not None:
        progress("timing")
        batch = getattr(config, "batch", RemoveConfig.batch)
        times = timings(whole, shrunk.checkpoint, shrunk.data, batch=batch, rounds=config.rounds)
    seconds = round(time.monotonic() - began, 3)
    record = shrunk_record(shrunk, config, files=files, engines=engine_files, times=times, seconds=seconds)
    write_card(removal_card(Removal(record, config.out)), folder)
    if add is not None:
        with build.writing() as folder:
            write_json(folder / RECORD, build.kind.describe(record))
            add(folder)
    return Removal.open(build.finish(record))


def push_removal(removal: Removal, config: RemoveConfig | ShrinkConfig) -> Removal:
    """The removal, after its folder is pushed to the hub if the options say so; OutputError where that fails."""
    if config.hub_name is not None:
        counts = [removal.record[when]["attention_heads"] for when in ("after", "before")]
        title = f"{counts[0]} of {counts[1]} attention heads, by headscope prune remove"
        removal.pushed = push(removal.folder, config.hub_name, public=config.hub_public, title=title)
    return removal


def _reload_difference(result: Shrunk, files_written: SavedFiles, expected_logits: Tensor) -> float:
    """The difference of a sentence's logits by the files, opened again; CheckpointError where it is too large."""
    return_freed_memory()
    shrunk = result.checkpoint
    dtype = str(shrunk.dtype).removeprefix("torch.")
    reopened_checkpoint = open_checkpoint(
        str(files_written.path), format=files_written.format, device=str(shrunk.device), dtype=dtype
    )
    if reopened_checkpoint.layout != shrunk.layout:
        raise CheckpointError("the files that were written have other heads; nothing was saved")
    with through_attend(reopened_checkpoint.model):
        logits = outputs(reopened_checkpoint.model, first_sentence(result.data.feeds[0]))
    difference = max_abs_difference(logits, expected_logits)
    require(difference, 10 * result.verification.tolerance, "what was saved", merges=bool(result.removal.merged))
    return difference


def _signature(
    checkpoint: Checkpoint, export: Export, removal: RemovalPlan, data: InputTexts, compensation: Compensated | None
) -> Signature:
    before, after = checkpoint.layout, removal.layout
    entries = {
        "m": "prune.remove",
        "export": export.name,
        "heads": f"{sum(after.values())}/{sum(before.values())}",
        **({"merged": _short_digest(repr(sorted(removal.merged.items())))} if removal.merged else {}),
        "removed": _short_digest(",".join(map(str, removal.removed))),
        **({} if compensation is None else compensation.signature()),
        "ckpt": checkpoint.digest[:8],
        "data": data.name,
        "device": str(checkpoint.device),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
    }
    return signature_of(entries, transformers=True)


def _short_digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:8]

"""A checkpoint as it is, in another format or in a file for an engine: what `headscope convert` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from headscope.errors import CheckpointError, ConfigError, HeadscopeError, reason_of
from headscope.files.folders import Build
from headscope.files.hub import hub_target, push
from headscope.files.output_checks import Input
from headscope.formats.base import FORMATS, Checkpoint
from headscope.formats.convert import CONVERSION, Converted, convert, goals
from headscope.formats.exports import Card, write_card
from headscope.model.discovery import eval_mode
from headscope.model.forward import ModelInputs, outputs, refuse_overflow
from headscope.model.nonfinite import is_finite
from headscope.pruning.engines.base import ENGINES, EngineOptions, engines_named
from headscope.pruning.model_inputs import texts
from headscope.registry import unknown
from headscope.version import VERSION

SENTENCES = 8


def converted(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    to: str,
    options: EngineOptions,
    inputs: Sequence[Input] = (),
    force: bool = False,
    push_to: str | None = None,
    public: bool = False,
) -> Converted:
    """Write `checkpoint` as `to`, a format or an engine; with `push_to` the complete folder goes to the hub."""
    target = hub_target(push_to, public=public)
    check_goal(to)
    if to in ENGINES.names():
        done = convert_for_engine(checkpoint, folder, engine=to, options=options, inputs=inputs, force=force)
    else:
        engines_named((), options)
        done = convert(checkpoint, folder, goal=to, inputs=inputs, force=force)
    if target is None:
        return done
    return replace(done, pushed=push(done.folder, target, title=f"{done.architecture}, by headscope convert"))


def check_goal(to: str) -> None:
    """ConfigError for what is no format that a checkpoint can be written in, and no engine."""
    allowed = [*goals(), *ENGINES.names()]
    if to in allowed:
        return
    why = unknown("format", to, allowed)
    if to in FORMATS.names():
        why = f"nothing is converted to {to}; available: {', '.join(allowed)}"
    elif to in {export.name for _, each in FORMATS for export in each.exports}:
        why = f"{to} is how heads are taken out (prune remove --export {to}); available: {', '.join(allowed)}"
    raise ConfigError(f"--to: {why}")


def _run(checkpoint: Checkpoint, batch: ModelInputs) -> Tensor:
    """What the model computes; CheckpointError for one that needs other inputs than texts and pictures."""
    try:
        return outputs(checkpoint.model, batch)
    except HeadscopeError:
        raise
    except Exception as error:  # anything that a model's own code may raise
        _ = checkpoint.attention_sites  # refuses it by what it takes, where it takes something else
        raise CheckpointError(
            f"{checkpoint.path} cannot be run to be held against what is written: {reason_of(error)}"
        ) from error


def convert_for_engine(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    engine: str,
    options: EngineOptions,
    inputs: Sequence[Input] = (),
    force: bool = False,
) -> Converted:
    """Write `checkpoint`, with the heads that it has, for an engine, and run it there; else nothing is left behind."""
    (chosen,) = engines_named([engine], options)
    chosen.check(checkpoint)
    kind, digest = checkpoint.format, checkpoint.digest
    reads = [Input(Path(checkpoint.path), checkpoint=True)] if Path(checkpoint.path).exists() else []
    with Build(folder, CONVERSION, inputs=[*reads, *inputs], force=force) as build, eval_mode(checkpoint.model):
        with build.writing() as temporary:
            data = texts(checkpoint, None, None, sentences=SENTENCES)
            for batch in data.feeds:
                run = partial(_run, checkpoint, batch)
                if not is_finite(run(), masked=True):
                    refuse_overflow(checkpoint, run)  # no engine can be held against it
            written = chosen.write(checkpoint, data, temporary, options)
            card = Card(
                title=f"{Path(checkpoint.path).name} for {written.export}",
                command=f"convert --to {written.export}",
                facts=(f"made of {Path(checkpoint.path).name} ({kind}, {digest[:12]})", written.proof, *written.notes),
                opens=written.opens,
                limits=written.limits,
            )
            write_card(card, temporary)
        source = {"path": checkpoint.path, "format": kind, "digest": digest}
        build.finish({"headscope": VERSION, "source": source, "to": written.export, "engine": asdict(written)})
    return Converted(folder, engine, written.sizes, written.difference, (written.proof, *written.notes))

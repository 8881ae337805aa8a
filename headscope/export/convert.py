"""Write a checkpoint in another format or as a file for an engine, and verify it: what `headscope convert` does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError, HeadscopeError, flag, reason_of
from headscope.evaluation.model_inputs import InputTexts, read_input_texts
from headscope.export.base import ENGINES, EngineExport, check_difference, engines_named
from headscope.files.folders import Build
from headscope.files.hub import check_hub, push
from headscope.files.output_checks import Input, OutputKind
from headscope.formats.base import FORMATS, Checkpoint
from headscope.formats.exports import MODEL_FILES, Card, Probe, SavedFiles, hub_metadata, write_card
from headscope.formats.huggingface.from_native import special_ids
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, probe_logits
from headscope.model.discovery import eval_mode
from headscope.model.forward import reference
from headscope.registry import unknown
from headscope.results.overview import Conversion
from headscope.version import VERSION

SENTENCES = 8
TOLERANCE = 1e-5  # of the largest logit; transformers computes sinusoids in single precision
CONVERSION = OutputKind("conversion", "run of `headscope convert`", "conversion.json", MODEL_FILES)


def convert(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    to: str,
    quantize: str = "none",
    inputs: Sequence[Input] = (),
    force: bool = False,
    push_to: str | None = None,
    public: bool = False,
) -> Conversion:
    """Write `checkpoint` as `to`, a format or an engine; with `push_to` the folder is pushed to the hub.

    CheckpointError, and no folder, where the written model computes something else.
    """
    check_hub(push_to)
    check_target_format(to)
    engines = engines_named([to] if to in ENGINES.names() else [], quantize)
    _check_fit(checkpoint, to, engines)
    source = {"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest}
    record: dict[str, Any] = {"headscope": VERSION, "source": source, "to": to}
    reads = [Input(Path(checkpoint.path), checkpoint=True)] if Path(checkpoint.path).exists() else []
    with Build(folder, CONVERSION, inputs=[*reads, *inputs], force=force) as build:
        with build.writing() as build_folder:
            if engines:
                with eval_mode(checkpoint.model):
                    file = engines[0].write(checkpoint, _comparison_texts(checkpoint), build_folder, quantize=quantize)
                record |= {"engine": asdict(file)}
                result = Conversion(record, folder, file.sizes, file.difference, (file.proof, *file.notes))
                opens, limits, metadata, facts = file.opens, file.limits, {}, result.notes
            else:
                native = cast(TransformerCheckpoint, checkpoint)
                files, difference = _write_format(native, build_folder, to)
                opens, limits, notes = files.opens, files.limits, files.notes
                record |= {"architecture": files.architecture, "logit_difference": difference, "notes": list(notes)}
                name = "" if files.path == build_folder else files.path.name
                readable = "headscope" in opens
                result = Conversion(record, folder, files.architecture, difference, notes, name, readable)
                proof = f"logits of random ids differ by at most {difference:.1e} from the original's"
                facts = (f"{files.architecture}: {proof}", *notes)
                library = "transformers" if to == "huggingface" else to
                metadata = hub_metadata(checkpoint.path, library=library, tags=("converted",))
            origin = f"made of {Path(checkpoint.path).name} ({checkpoint.format}, {checkpoint.digest[:12]})"
            card = Card(
                title=f"{Path(checkpoint.path).name} as {to}",
                command=f"convert {flag.to} {to}",
                facts=(origin, *facts),
                opens=opens,
                limits=limits,
                metadata=metadata,
            )
            write_card(card, build_folder)
        build.finish(record)
    if push_to is not None:
        result.pushed = push(folder, push_to, public=public, title=f"{result.architecture}, by headscope convert")
    return result


def writable_formats() -> list[str]:
    """Names of the formats that checkpoints can be converted to, headscope's own first."""
    return sorted((name for name, format in FORMATS if format.converts), key=lambda name: name != "native")


def check_target_format(to: str) -> None:
    """Raise ConfigError for a name that is neither a format to write nor an engine."""
    available = [*writable_formats(), *ENGINES.names()]
    why, advice = unknown("format", to, available), f"available: {', '.join(available)}"
    if to in FORMATS.names():
        why = f"nothing is converted to {to}; {advice}"
    elif to in {export.name for _, opener in FORMATS for export in opener.exports}:
        why = f"{to} is how heads are taken out (`headscope prune remove --export {to}`); {advice}"
    if to not in available:
        raise ConfigError(f"{flag.to}: {why}")


def _check_fit(checkpoint: Checkpoint, to: str, engines: Sequence[EngineExport]) -> None:
    """Raise HeadscopeError where `to` cannot hold the checkpoint; the message names formats and engines that can."""
    try:
        if engines:
            engines[0].check(checkpoint)
        elif not checkpoint.is_native:
            raise ConfigError(
                f"{checkpoint.path} is of type {checkpoint.model_type} ({checkpoint.format}), and {flag.to} {to} "
                "is for fairseq, MHR, story-of-heads and native Transformers"
            )
    except HeadscopeError as error:
        names = ["native"] * checkpoint.is_native
        for name, engine in ENGINES:
            with suppress(HeadscopeError):
                engine.check(checkpoint)
                names.append(name)
        fitting = " or ".join(f"{flag.to} {name}" for name in names)
        raise type(error)(f"{error}; give {fitting}" if fitting else f"{error}; no format holds it") from error


def _write_format(checkpoint: TransformerCheckpoint, folder: Path, to: str) -> tuple[SavedFiles, float]:
    """Write a checkpoint in a format; returns its files and the largest difference of logits.

    CheckpointError where that is too large.
    """
    probe = _probe(checkpoint)
    files = FORMATS.get(to).convert(checkpoint, folder, probe)
    assert files.logits is not None
    expected_logits = probe_logits(copy.deepcopy(checkpoint.model).cpu().to(files.logits.dtype).eval(), probe)
    same_shape = files.logits.shape == expected_logits.shape
    difference = float((expected_logits - files.logits).abs().max()) if same_shape else float("inf")
    limit = TOLERANCE * max(1.0, float(expected_logits.abs().max()))
    check_difference(difference, limit, f"{to} made of {checkpoint.path}", "logits differ by")
    return files, difference


def _comparison_texts(checkpoint: Checkpoint) -> InputTexts:
    """The texts to compare an engine on; CheckpointError if the model overflows on them or needs other inputs."""
    data = read_input_texts(checkpoint, None, None, sentences=SENTENCES)
    try:
        for batch in data.feeds:
            reference(checkpoint, (), batch)
    except HeadscopeError:
        raise
    except Exception as error:  # a model's own code may raise anything
        _ = checkpoint.attention_sites  # raises, with the inputs that the model needs, where it reads no text
        raise CheckpointError(
            f"{checkpoint.path} cannot be run, so nothing can be compared with it: {reason_of(error)}"
        ) from error
    return data


def _probe(checkpoint: TransformerCheckpoint) -> Probe:
    """Random sources [2 9] with ends, their mask (one is padded), and decoder inputs [2 7] with starts.

    No other special ids are in them. Sources are shorter for models with fewer positions.
    """
    config, ids = checkpoint.model.config, None
    if checkpoint.target is not None or checkpoint.format == "fairseq":
        ids = special_ids(checkpoint)
    low = 0 if ids is None else max(ids.start, ids.end, ids.pad, ids.begin) + 1
    generator = torch.Generator().manual_seed(0)
    longest = min(checkpoint.limit or 9, 9)

    def draw(size: int, length: int) -> Tensor:
        first = low if low < size else 0
        return torch.randint(first, size, (2, length), generator=generator)

    source = draw((config.encoder or config.decoder).vocabulary, longest)
    real = torch.ones_like(source, dtype=torch.bool)
    real[1, (longest + 1) // 2 :] = False
    target = draw(config.decoder.vocabulary, min(longest, 7))
    if ids is not None:
        end = ids.end if checkpoint.source is None else checkpoint.source.end
        source[0, -1] = source[1, (longest + 1) // 2 - 1] = end
        target[:, 0] = ids.start
    source[~real] = 0 if ids is None else ids.pad
    return Probe(source, real, target)

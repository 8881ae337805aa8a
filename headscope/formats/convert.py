"""From one checkpoint format to another, verified: a folder whose logits differ is never left behind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError
from headscope.files.folders import Build
from headscope.files.output_checks import Input
from headscope.files.output_kind import MODEL_FILES, OutputKind
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.formats.huggingface.from_native import make, quiet_transformers, special_ids, write_vocabulary
from headscope.formats.native import NATIVE
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.transformer import Transformer
from headscope.version import VERSION

Goal = Literal["native", "huggingface"]
GOALS: tuple[Goal, ...] = get_args(Goal)
TOLERANCE = 1e-5  # of the largest logit; transformers computes sinusoids in single precision
OWN_CODE = ("FSMT", "XGLM")  # they bypass transformers' attention interface, and overflow in double precision
CONVERSION = OutputKind("conversion", "run of `headscope convert`", "conversion.json", MODEL_FILES)


@dataclass(frozen=True)
class Converted:
    """What was written: the class of the model, the largest difference of logits, and what the user must know."""

    folder: Path
    goal: Goal
    architecture: str
    difference: float
    notes: tuple[str, ...] = ()


def convert(
    checkpoint: Checkpoint, folder: Path, *, goal: str, inputs: Sequence[Input] = (), force: bool = False
) -> Converted:
    """Write `checkpoint` to `folder` in another format.

    `inputs` are further files that were read with it. CheckpointError where the format cannot express the model, or
    where what was written and read again does not give the same logits: then nothing is left behind.
    """
    if goal not in GOALS:
        raise ConfigError(f"cannot convert to {goal!r}; available: {', '.join(GOALS)}")
    if not isinstance(checkpoint, TransformerCheckpoint):
        raise ConfigError(
            f"{checkpoint.path} is a {checkpoint.format} checkpoint of type {checkpoint.model_type}; headscope "
            "converts fairseq, MHR, story-of-heads and native Transformers"
        )
    reads = [Input(Path(checkpoint.path), checkpoint=True)] if Path(checkpoint.path).exists() else []
    with Build(folder, CONVERSION, inputs=[*reads, *inputs], force=force) as build:
        with build.writing() as made:
            done = _native(checkpoint, made) if goal == "native" else _huggingface(checkpoint, made)
        build.finish(_record(checkpoint, goal, *done))
    return Converted(folder, goal, *done) if goal == "native" else Converted(folder, "huggingface", *done)


def _record(
    checkpoint: Checkpoint, goal: str, architecture: str, difference: float, notes: tuple[str, ...]
) -> dict[str, Any]:
    """What `conversion.json` says."""
    return {
        "headscope": VERSION,
        "source": {"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest},
        "to": goal,
        "architecture": architecture,
        "logit_difference": difference,
        "notes": list(notes),
    }


def _native(checkpoint: TransformerCheckpoint, folder: Path) -> tuple[str, float, tuple[str, ...]]:
    NATIVE.write(checkpoint, folder)
    again = open_checkpoint(str(folder), format="native", device="cpu", dtype="float64")
    assert isinstance(again, TransformerCheckpoint)
    source, real, target = _probe(checkpoint)
    with torch.no_grad():
        found = _logits(again.model, source, real, target)
    without = () if checkpoint.target is not None else ("no vocabulary: the checkpoint came without",)
    return "Transformer", _compared(checkpoint, found, (source, real, target)), without


def _huggingface(checkpoint: TransformerCheckpoint, folder: Path) -> tuple[str, float, tuple[str, ...]]:
    import transformers

    mixed = any(module.mixing is not None for _, _, _, module in checkpoint.model.attention_modules())
    name = make(checkpoint, folder)
    auto: Any = transformers.AutoModelForSeq2SeqLM if checkpoint.two_sided else transformers.AutoModelForCausalLM
    probe = source, real, target = _probe(checkpoint)
    dtype = torch.float32 if name.startswith(OWN_CODE) else torch.float64
    with quiet_transformers(), torch.no_grad():
        again = auto.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        if checkpoint.two_sided:
            given = {"input_ids": source, "attention_mask": real.long(), "decoder_input_ids": target}
        else:
            given = {"input_ids": target}
        found = again(**given, use_cache=False).logits
    difference = _compared(checkpoint, found, probe)
    notes = [write_vocabulary(checkpoint, folder)]
    if mixed:
        notes.append("the matrices that mix heads are folded into the output projections")
    if name.startswith(OWN_CODE):
        notes.append(
            f"transformers computes {name}'s attention in code of its own; analyse the original, not this copy"
        )
    return name, difference, tuple(notes)


def _probe(checkpoint: TransformerCheckpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Random sources [2 9] with padding, their masks, and decoder inputs [2 7], without special ids."""
    config, ids = checkpoint.model.config, None
    if checkpoint.target is not None or checkpoint.format == "fairseq":
        ids = special_ids(checkpoint)
    low = 0 if ids is None else max(ids.start, ids.end, ids.pad, ids.begin) + 1
    generator = torch.Generator().manual_seed(0)
    most = min(checkpoint.limit or 9, 9)

    def draw(size: int, length: int) -> Tensor:
        first = low if low < size else 0
        return torch.randint(first, size, (2, length), generator=generator)

    source = draw(config.encoder.vocabulary if config.encoder else config.decoder.vocabulary, most)
    real = torch.ones_like(source, dtype=torch.bool)
    real[1, (most + 1) // 2 :] = False
    source[~real] = 0 if ids is None else ids.pad
    target = draw(config.decoder.vocabulary, min(most, 7))
    return source, real, target


def _logits(model: Transformer, source: Tensor, real: Tensor, target: Tensor) -> Tensor:
    if model.config.encoder is None:
        return model(target=target)  # type: ignore[no-any-return]
    return model(source, target, source_mask=real)  # type: ignore[no-any-return]


def _compared(checkpoint: TransformerCheckpoint, found: Tensor, probe: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest difference of logits, in the type of `found`; CheckpointError where it is too large."""
    with torch.no_grad():
        wanted = _logits(copy.deepcopy(checkpoint.model).cpu().to(found.dtype).eval(), *probe)
    difference = float((wanted - found).abs().max()) if wanted.shape == found.shape else float("inf")
    if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise CheckpointError(
            f"{checkpoint.path} was converted, but its logits differ by {difference:.1e}; nothing was left behind. "
            "Please report this with the output of `headscope show`"
        )
    return difference

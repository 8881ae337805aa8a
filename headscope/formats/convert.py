"""From one checkpoint format to another, verified: a folder whose logits differ is never left behind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from headscope.errors import CheckpointError, ConfigError
from headscope.files.folders import Build
from headscope.files.output_checks import Input, OutputKind
from headscope.formats.base import FORMATS, Checkpoint
from headscope.formats.exports import MODEL_FILES, Card, Conversion, Probe, hub_metadata, write_card
from headscope.formats.huggingface.native_models.from_native import special_ids
from headscope.formats.transformer_checkpoint import TransformerCheckpoint, probe_logits
from headscope.version import VERSION

TOLERANCE = 1e-5  # of the largest logit; transformers computes sinusoids in single precision
CONVERSION = OutputKind("conversion", "run of `headscope convert`", "conversion.json", MODEL_FILES)


@dataclass(frozen=True)
class Converted:
    """What was written: `difference` of logits, `file` to open in the folder, `pushed` address on the hub."""

    folder: Path
    goal: str
    architecture: str
    difference: float | None
    notes: tuple[str, ...] = ()
    pushed: str = ""
    file: str = ""
    opened: bool = True

    @property
    def path(self) -> Path:
        """What to open."""
        return self.folder / self.file


def convert(
    checkpoint: Checkpoint, folder: Path, *, goal: str, inputs: Sequence[Input] = (), force: bool = False
) -> Converted:
    """Write `checkpoint` to `folder` in another format; CheckpointError, and nothing left, where logits differ."""
    if not checkpoint.is_native:
        raise ConfigError(
            f"{checkpoint.path} is a {checkpoint.format} checkpoint of type {checkpoint.model_type}; headscope "
            "converts fairseq, MHR, story-of-heads and native Transformers"
        )
    native = cast(TransformerCheckpoint, checkpoint)
    reads = [Input(Path(checkpoint.path), checkpoint=True)] if Path(checkpoint.path).exists() else []
    with Build(folder, CONVERSION, inputs=[*reads, *inputs], force=force) as build:
        with build.writing() as temporary:
            probe = _probe(native)
            written = FORMATS.get(goal).convert(native, temporary, probe)
            difference = _difference(native, written.logits, probe)
            write_card(_card(checkpoint, written, goal, difference), temporary)
        opened = "headscope" in written.opens
        converted = Converted(
            folder, goal, written.architecture, difference, written.notes, file=written.file, opened=opened
        )
        record = {
            "headscope": VERSION,
            "source": {"path": checkpoint.path, "format": checkpoint.format, "digest": checkpoint.digest},
            "to": converted.goal,
            "architecture": converted.architecture,
            "logit_difference": converted.difference,
            "notes": list(converted.notes),
        }
        build.finish(record)
    return converted


def goals() -> list[str]:
    """Names of the formats that checkpoints can be converted to, headscope's own first."""
    return sorted((name for name, format in FORMATS if format.converts), key=lambda name: name != "native")


def _card(checkpoint: Checkpoint, written: Conversion, goal: str, difference: float) -> Card:
    name = Path(checkpoint.path).name
    origin = f"made of {name} ({checkpoint.format}, {checkpoint.digest[:12]})"
    proof = f"{written.architecture}: logits of random ids differ by at most {difference:.1e} from the original's"
    return Card(
        title=f"{name} as {goal}",
        command=f"convert --to {goal}",
        facts=(origin, proof, *written.notes),
        opens=written.opens,
        limits=written.limits,
        metadata=hub_metadata(
            checkpoint.path, library="transformers" if goal == "huggingface" else goal, tags=("converted",)
        ),
    )


def _probe(checkpoint: TransformerCheckpoint) -> Probe:
    """Random sources [2 9] with padding, their masks, and decoder inputs [2 7], without special ids."""
    config, ids = checkpoint.model.config, None
    if checkpoint.target is not None or checkpoint.format == "fairseq":
        ids = special_ids(checkpoint)
    low = 0 if ids is None else max(ids.start, ids.end, ids.pad, ids.begin) + 1
    generator = torch.Generator().manual_seed(0)
    longest = min(checkpoint.limit or 9, 9)

    def draw(size: int, length: int) -> Tensor:
        first = low if low < size else 0
        return torch.randint(first, size, (2, length), generator=generator)

    source = draw(config.encoder.vocabulary if config.encoder else config.decoder.vocabulary, longest)
    real = torch.ones_like(source, dtype=torch.bool)
    real[1, (longest + 1) // 2 :] = False
    source[~real] = 0 if ids is None else ids.pad
    target = draw(config.decoder.vocabulary, min(longest, 7))
    return Probe(source, real, target)


def _difference(checkpoint: TransformerCheckpoint, logits: Tensor, probe: Probe) -> float:
    """The largest difference of logits [2 t V], in the type of `found`; CheckpointError where it is too large."""
    expected = probe_logits(copy.deepcopy(checkpoint.model).cpu().to(logits.dtype).eval(), probe)
    difference = float((expected - logits).abs().max()) if expected.shape == logits.shape else float("inf")
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise CheckpointError(
            f"{checkpoint.path} was converted, but its logits differ by {difference:.1e}; nothing was left behind. "
            "Please report this with the output of `headscope show`"
        )
    return difference

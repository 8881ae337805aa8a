"""Checkpoints of a run: DIR/last, DIR/best, DIR/averaged, and the weights that averages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headscope.config import Companions
from headscope.errors import CheckpointError, reason_of
from headscope.files.replace import recover, replacing
from headscope.files.writing import write_atomically
from headscope.formats.native import DIRECTORY, NATIVE, native_state
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.decoding.beams import SearchConfig
from headscope.model.native.transformer import Transformer
from headscope.training.run_state import TrainingRun

WEIGHTS, CONFIDENCE = "weights", "confs"
NAMES = ("last", "best", "averaged")


def checkpoint(run: TrainingRun, model: Transformer | None = None) -> TransformerCheckpoint:
    """The model of a run (or another of its kind) as analyses and searches take it."""
    return TransformerCheckpoint(
        path=str(run.config.out),
        format="native",
        model=model or run.model,
        model_type="transformer",
        digest="",
        source=run.data.source,
        target=run.data.target,
        search=SearchConfig(beam=run.config.beam),
    )


def save(run: TrainingRun, name: str, model: Transformer | None = None) -> None:
    """Write DIR/name in headscope's native format; there is a whole one at (almost) every moment, see `recover_all`."""
    with replacing(run.config.out / name, DIRECTORY) as temporary:
        NATIVE.write(checkpoint(run, model), temporary, Companions())


def recover_all(folder: Path) -> None:
    """Tidy up after a process that was killed: a checkpoint between its two renames is put back."""
    for name in NAMES:
        recover(folder / name, DIRECTORY)


def keep_weights(run: TrainingRun, update: int) -> None:
    """Write the weights of this update for averaging."""
    folder = run.config.out / WEIGHTS
    state = native_state(run.model, {})
    write_atomically(folder / f"{update}.safetensors", lambda path: save_file(state, path))


def drop_weights(run: TrainingRun, updates: Sequence[int]) -> None:
    """Remove the weights of every update that is not among `updates`."""
    for path in (run.config.out / WEIGHTS).glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) not in updates:
            path.unlink(missing_ok=True)


def save_average(run: TrainingRun, updates: Sequence[int]) -> None:
    """Write DIR/averaged: the mean of the weights of these updates, summed in float64."""
    model = Transformer(run.model.config)
    filled = average(_weights(run.config.out / WEIGHTS / f"{update}.safetensors") for update in updates)
    for copy, original in model.tied().items():
        filled.setdefault(copy, filled[original])
    model.load_state_dict(filled)
    save(run, "averaged", model)


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path)
        return weights
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        problem = f"{path}, which is to be averaged, is damaged ({reason_of(error, most=120)})"
        raise CheckpointError(f"{problem}; train anew") from None


def average(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight, one state in memory at a time; what is no floating-point number is the last one's."""
    totals: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    count = 0
    for state in states:
        last, count = state, count + 1
        for key, value in state.items():
            if value.is_floating_point():
                totals[key] = value.double() + totals.get(key, 0)
    return {key: (totals[key] / count).to(like.dtype) if key in totals else like for key, like in last.items()}

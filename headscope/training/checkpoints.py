"""Checkpoints of a run: DIR/last, DIR/best, DIR/averaged, and the weights that averages are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headscope.formats.native import DIRECTORY, NATIVE, native_state
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.search import SearchConfig
from headscope.model.transformer import Transformer
from headscope.output.files import written
from headscope.output.swap import recover, replacing
from headscope.training.run import Run

WEIGHTS, CONFIDENCE = "weights", "confs"
NAMES = ("last", "best", "averaged")


def checkpoint(run: Run, model: Transformer | None = None) -> TransformerCheckpoint:
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


def save(run: Run, name: str, model: Transformer | None = None) -> None:
    """Write DIR/name in headscope's native format; there is a whole one at (almost) every moment, see `recover_all`."""
    with replacing(run.config.out / name, DIRECTORY) as made:
        NATIVE.write(checkpoint(run, model), made)


def recover_all(folder: Path) -> None:
    """Tidy up after a process that was killed: a checkpoint between its two renames is put back."""
    for name in NAMES:
        recover(folder / name, DIRECTORY)


def keep_weights(run: Run, update: int) -> None:
    """Write the weights of this update for averaging."""
    folder = run.config.out / WEIGHTS
    state = native_state(run.model, {})
    written(folder / f"{update}.safetensors", lambda path: save_file(state, path))


def drop_weights(run: Run, kept: Sequence[int]) -> None:
    """Remove weights that are not among the updates `kept`."""
    for path in (run.config.out / WEIGHTS).glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) not in kept:
            path.unlink(missing_ok=True)


def save_average(run: Run, kept: Sequence[int]) -> None:
    """Write DIR/averaged: the mean of the weights of these updates, summed in float64."""
    states = [load_file(run.config.out / WEIGHTS / f"{update}.safetensors") for update in kept]
    model = Transformer(run.model.config)
    filled = average(states)
    for copy, original in model.tied().items():
        filled.setdefault(copy, filled[original])
    model.load_state_dict(filled)
    save(run, "averaged", model)


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight; what is no floating-point number is the last one's."""
    found = dict(states[-1])
    for key, like in states[-1].items():
        if like.is_floating_point():
            total = torch.zeros_like(like, dtype=torch.float64)
            for state in states:
                total += state[key]
            found[key] = (total / len(states)).to(like.dtype)
    return found

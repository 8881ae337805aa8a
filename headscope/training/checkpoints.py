"""Checkpoints of a run: DIR/last, DIR/best, DIR/averaged, and the weights that averages are made of."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headscope.formats.native import NATIVE, native_state
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.search import SearchConfig
from headscope.model.transformer import Transformer
from headscope.results import written
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
    """Write DIR/name in headscope's native format; there is a whole one at (almost) every moment, see `recover`."""
    place = run.config.out / name
    made = Path(tempfile.mkdtemp(dir=run.config.out, prefix=f".{name}."))
    try:
        NATIVE.save(checkpoint(run, model), made, force=True)
        made.chmod(0o755)
        _exchange(made, place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _exchange(made: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    made.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Tidy up after a process that was killed: a checkpoint between its two renames is put back."""
    for name in NAMES:
        old = folder / f".{name}.old"
        if old.is_dir() and not (folder / name).exists():
            old.rename(folder / name)
    names = [f"{dots}{name}.*" for name in (*NAMES, "state", "run", "metrics") for dots in (".", "..")]
    left = [path for pattern in names for path in folder.glob(pattern)]
    inside = [path for name in ("data", WEIGHTS, CONFIDENCE) for path in (folder / name).glob(".*")]
    for path in [*left, *inside]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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

"""Going on after a kill: what a run that learns gates saves as it goes, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import CheckpointError, ConfigError
from headscope.files.writing import save_torch, write_atomically
from headscope.pruning.learning.finetuning import Tuner
from headscope.pruning.selection import COMPANIONS, STATE, TEXTS
from headscope.training.files.state import load_record, restoring

VERSION, ANEW = 2, "learn anew with --force"
FREE = {
    "out",
    "resume",
    "force",
    "save_every",
    "remove",
    "export",
    "tune_updates",
    "checkpoint",
    "device",
    "device_map",
}
"""Options that may change within a run; texts and companions are known by their digests."""


def save_gate_state(
    tuner: Tuner, settings: Mapping[str, Any], folder: Path, trace: list[dict[str, Any]], nll: dict[str, float]
) -> None:
    """Write DIR/state.pt; every process calls this, and the first writes."""
    content = {"version": VERSION, "settings": _fixed(settings), "trace": trace, "nll": nll, "tuner": tuner.state()}
    content["digests"] = [tuner.checkpoint.digest, tuner.data.digest]
    if tuner.processes.main:
        write_atomically(folder / STATE, lambda path: save_torch(content, path))


def read_gate_state(folder: Path) -> dict[str, Any] | None:
    """What a run that was killed has saved; None where there is nothing. CheckpointError for a broken file."""
    if not (folder / STATE).is_file():
        return None
    state = load_record(folder / STATE, advice=ANEW)
    if state.get("version") != VERSION:
        raise CheckpointError(f"{folder / STATE} is of another version of headscope; learn anew with --force")
    return state


def restore_gate_state(
    tuner: Tuner, state: Mapping[str, Any], settings: Mapping[str, Any], out: Path
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Bring a fresh run to where the state was saved; what was measured before, and the trajectory so far.

    ConfigError for other options, another checkpoint, another text, or another number of processes.
    """
    with restoring(out / STATE, advice=ANEW):
        fixed, saved = _fixed(settings), dict(state["settings"])
    if changed := [name for name in fixed if saved.get(name) != fixed[name]]:
        raise ConfigError(
            f"--resume: the run in {out} was begun with another --{changed[0].replace('_', '-')} "
            f"({saved.get(changed[0])}, now {fixed[changed[0]]}); give the same options, or another --out"
        )
    if state.get("digests") != [tuner.checkpoint.digest, tuner.data.digest]:
        raise ConfigError(f"--resume: the run in {out} was begun with another checkpoint or text; give the same")
    with restoring(out / STATE, advice=ANEW):
        tuner.restore(state["tuner"])
        return dict(state["nll"]), [dict(row) for row in state["trace"]]


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options that must not change within a run."""
    return {name: value for name, value in settings.items() if name not in FREE | TEXTS | COMPANIONS}

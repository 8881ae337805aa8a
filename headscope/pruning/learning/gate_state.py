"""Going on after a kill: what a run that learns gates saves as it goes, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.config.option import changed, flag, identity
from headscope.errors import CheckpointError, ConfigError
from headscope.files.writing import save_torch, write_atomically
from headscope.pruning.learning.finetuning import Tuner
from headscope.pruning.options.learn import LearnConfig
from headscope.pruning.selection import STATE
from headscope.training.files.state import load_record, restoring

VERSION, ANEW = 2, "learn anew with --force"
AFTERWARDS = {"tune_updates"}  # which may change within a run: it follows what is saved


def save_gate_state(
    tuner: Tuner, config: LearnConfig, folder: Path, trace: list[dict[str, Any]], nll: dict[str, float]
) -> None:
    """Write DIR/state.pt; every process calls this, and the first writes."""
    content = {"version": VERSION, "settings": _fixed(config), "trace": trace, "nll": nll, "tuner": tuner.state()}
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
    tuner: Tuner, state: Mapping[str, Any], config: LearnConfig
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Bring a fresh run to where the state was saved; what was measured before, and the trajectory so far.

    ConfigError for other options, another checkpoint, another text, or another number of processes.
    """
    out = config.out
    with restoring(out / STATE, advice=ANEW):
        fixed, saved = _fixed(config), dict(state["settings"])
    if others := changed(fixed, saved, LearnConfig):
        raise ConfigError(
            f"--resume: the run in {out} was begun with another {flag(others[0])} "
            f"({saved.get(others[0])}, now {fixed[others[0]]}); give the same options, or another --out"
        )
    if state.get("digests") != [tuner.checkpoint.digest, tuner.data.digest]:
        raise ConfigError(f"--resume: the run in {out} was begun with another checkpoint or text; give the same")
    with restoring(out / STATE, advice=ANEW):
        tuner.restore(state["tuner"])
        return dict(state["nll"]), [dict(row) for row in state["trace"]]


def _fixed(config: LearnConfig) -> dict[str, Any]:
    """Options that must not change within a run; texts and companions are known by their digests."""
    options = identity(config) | {"method": config.settings()["method"]}
    return {name: value for name, value in options.items() if name not in AFTERWARDS}

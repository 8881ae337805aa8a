"""Checkpoints of a run (DIR/last, DIR/best, DIR/averaged, the weights of averages), its folder, and its exact resume.

All state that decides how training goes on is in one file, which is replaced atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headscope.distributed import Processes, random_state, set_random_state
from headscope.errors import CheckpointError, ConfigError, DataError, OutputError, flag, raise_first, restate
from headscope.files.folders import Workplace, recover, replacing, to_resume, workplace
from headscope.files.output_checks import OutputKind, inputs_of
from headscope.files.reading import read_object
from headscope.files.writing import save_torch, write_atomically
from headscope.formats.native import DIRECTORY, NATIVE
from headscope.formats.native import FILES as CHECKPOINT_FILES
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.beams import SearchConfig
from headscope.model.native.transformer import Transformer
from headscope.training.config import TrainConfig, TrainingPosition, preset, updates_until_end
from headscope.training.losses import Sums
from headscope.training.prepare import FOLDER as DATA
from headscope.training.run_state import TrainingRun

WEIGHTS, CONFIDENCE, METRICS = "weights", "confs", "metrics.csv"
NAMES = ("last", "best", "averaged")


def checkpoint(run: TrainingRun, model: Transformer | None = None) -> TransformerCheckpoint:
    """The model of a run, or another of the same kind, as a `Checkpoint`."""
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
    """Write DIR/name in headscope's native format, swapped in when complete."""
    with replacing(run.config.out / name, DIRECTORY) as temporary:
        NATIVE.write(checkpoint(run, model), temporary)


def save_average(run: TrainingRun, updates: Sequence[int]) -> None:
    """Write DIR/averaged: the mean of the weights after these updates, summed in float64."""
    model = Transformer(run.model.config)
    mean_state = average(_weights(run.config.out / WEIGHTS / f"{update}.safetensors") for update in updates)
    for copy, original in model.tied().items():
        mean_state.setdefault(copy, mean_state[original])
    model.load_state_dict(mean_state)
    save(run, "averaged", model)


def _weights(path: Path) -> dict[str, Tensor]:
    kinds = (OSError, SafetensorError, ValueError, KeyError)
    with restate(CheckpointError, f"{path} is damaged ({{why}}); train anew", *kinds):
        return dict(load_file(path))


def average(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each floating-point weight, one state in memory at a time; other entries as in the last state."""
    totals: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    count = 0
    for state in states:
        last, count = state, count + 1
        for key, value in state.items():
            if value.is_floating_point():
                totals[key] = value.double() + totals.get(key, 0)
    return {key: (totals[key] / count).to(like.dtype) if key in totals else like for key, like in last.items()}


@dataclass
class Progress:
    """The validations of a run and the sums of its next line of metrics.csv, saved with the training state.

    `best` is the best value so far (lower is better: BLEU is negated), at update `best_update`; `since_best` counts
    validations after it, `validations` all of them. `kept` are updates whose weights are kept for the average,
    `values` their values; `nll` and `bleu` are the last validation's. `window` has the sums since the last line of
    metrics.csv, `window_seconds` the time of their updates without validations.
    """

    best: float | None = None
    best_update: int = 0
    since_best: int = 0
    validations: int = 0
    kept: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    nll: float | None = None
    bleu: float | None = None
    window: Sums = Sums()
    window_seconds: float = 0.0
    seconds: float = 0.0
    latest: dict[str, float] = field(default_factory=dict)

    def after_validation(self, value: float, update: int) -> bool:
        """Count a validation; returns whether it is the best so far."""
        self.validations += 1
        better = self.best is None or value < self.best
        if better:
            self.best, self.best_update, self.since_best = value, update, 0
        else:
            self.since_best += 1
        return better

    def keep(self, value: float, update: int, *, count: int, best: bool) -> bool:
        """Update `kept` to the last, or the best, `count` updates; returns whether this update is one of them."""
        entries = [*zip(self.values, self.kept, strict=True), (value, update)]
        order = sorted(entries) if best else sorted(entries, key=lambda entry: -entry[1])
        kept_entries = sorted(order[:count], key=lambda entry: entry[1])
        self.values, self.kept = [entry[0] for entry in kept_entries], [entry[1] for entry in kept_entries]
        return update in self.kept

    def plain(self) -> dict[str, Any]:
        """The fields as plain values, for the state."""
        return asdict(self) | {"window": list(self.window)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Progress:
        """Inverse of `plain`."""
        return cls(**values | {"window": Sums(*values["window"])})


FILE = "state.pt"
# files may have moved: their content is compared
FILES = {"out", "source", "target", "valid_source", "valid_target", "tokenizer", "init", "dicts", "bpe"}
ENDS = {"updates", "max_epochs", "patience"}
MAY_CHANGE = FILES | ENDS | {"preset", "save_every", "tensorboard", "device", "threads", "compile", "average"}


def save_state(run: TrainingRun, progress: Progress, settings: Mapping[str, Any]) -> None:
    """Write DIR/state.pt; the file is whole, the old or the new one, whenever the process ends."""
    random = run.processes.all(random_state(run.device))
    if not run.processes.main:
        return
    content = {
        "settings": dict(settings),
        "data": run.data.digest,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "moment": asdict(run.position),
        "progress": progress.plain(),
        "random": random,
        "generator": run.generator.get_state(),
        "variant": dict(run.variant.state_dict()),
    }
    write_atomically(run.config.out / FILE, lambda path: save_torch(content, path))


def read_state(folder: Path, *names: str) -> dict[str, Any] | None:
    """The state of a training run or of a run that learns gates, on the CPU; None if none is written yet.

    CheckpointError for a file that is not a state with entries of these names. No code in it is executed.
    """
    path, advice = folder / FILE, f"begin anew with {flag.force}"
    if not path.is_file():
        return None
    # in damaged bytes torch's unpickler may raise any exception
    with restate(CheckpointError, f"{path} cannot be read ({{why}}); {advice}", Exception):
        record = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(record, dict) or not set(names) <= record.keys():
        raise CheckpointError(f"{path} is not the state of such a run; {advice}")
    return record


def check_settings(state: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError where options that decide the result differ from those that the run began with."""
    before = state["settings"]
    changes = [
        f"{flag(name.rpartition('.')[2])} (was {before.get(name)}, is {value})"
        for name, value in settings.items()
        if name not in MAY_CHANGE and before.get(name) != value
    ]
    if changes:
        raise ConfigError(
            f"{flag.resume}: the run in {folder} was begun with other options: {', '.join(changes)}; "
            f"give the same ones, or another {flag.out}"
        )


def load_state(run: TrainingRun, state: Mapping[str, Any]) -> Progress:
    """Bring a new run to where the state was saved; it then goes on as if it had never stopped.

    The run ends by the limits given now, but schedules follow the length planned at first. ConfigError for another
    text, another number of processes, and a cosine rate that is 0 before the new end.
    """
    n_processes, world = len(state["random"]), run.processes.world
    problems = {
        f"the text or the vocabulary is not what the run in {run.config.out} was begun with; give the same files, or "
        f"another {flag.out}": state["data"] != run.data.digest,
        f"the run has {n_processes} processes, not {world}; start all": n_processes != world,
    }
    raise_first(ConfigError, problems, f"{flag.resume}: ")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scaler.load_state_dict(state["scaler"])
    run.position = TrainingPosition(**state["moment"])  # with the length that was planned at first
    _check_length(run)
    run.generator.set_state(state["generator"])
    run.variant.load_state_dict(state["variant"])
    set_random_state(state["random"][run.processes.rank], run.device)
    return Progress.from_plain(state["progress"])


def _check_length(run: TrainingRun) -> None:
    """Raise ConfigError where a cosine rate is 0 before the end that is requested now."""
    config, planned_length = run.config, run.position.planned_length
    requested_length = updates_until_end(config.updates, config.epochs, run.position.updates_per_epoch)
    if config.schedule != "cosine" or config.min_lr or planned_length is None or requested_length is None:
        return
    if requested_length > planned_length:
        raise ConfigError(
            f"{flag.resume}: the cosine rate of {config.out} falls to {flag('min_lr', 0)} by update "
            f"{planned_length}, and up to update {requested_length} nothing more would be learnt; end it there, "
            f"or begin another run with {flag.init} {config.out / 'last'}"
        )


TRAINING = OutputKind(
    "training",
    "run of `headscope train`",
    "run.json",
    (
        *("run.json", METRICS, FILE, f"{DATA}/*.model", f"{WEIGHTS}/*.safetensors"),
        *("tensorboard/events.out.tfevents.*", f"{CONFIDENCE}/epoch-*.pkl"),
        *(f"{name}/{file}" for name in NAMES for file in CHECKPOINT_FILES),
    ),
    extensible=True,
)


@contextmanager
def training_folder(
    config: TrainConfig, options: Any, processes: Processes, *, resume: bool, force: bool
) -> Iterator[Workplace]:
    """The folder in which the run is built; the main process prepares it, and its errors reach all processes.

    A run that fails or is interrupted before its first state leaves no folder behind.
    """
    resume_folder = to_resume(config.out, TRAINING) if resume else None
    opening = workplace(config.out, TRAINING, inputs=inputs_of(config, options), force=force, resume=resume_folder)
    with ExitStack() as stack:
        workspace = processes.on_main(lambda: stack.enter_context(opening))
        try:
            for name in NAMES if processes.main else ():  # a process may have died between the two renames of a swap
                recover(workspace.path / name, DIRECTORY)
            yield workspace
        except (CheckpointError, ConfigError, DataError, OutputError, KeyboardInterrupt):
            if processes.main and not (workspace.path / FILE).exists():
                workspace.discard()
            raise


def with_defaults(values: Mapping[str, Any], variant: str, *, resume: bool) -> dict[str, Any]:
    """The given options, completed by those of the resumed run, then by those of the preset.

    ConfigError where the run is of another variant.
    """
    earlier, folder = dict[str, Any](), Path(values.get("out", TrainConfig.out))
    if resume and (path := to_resume(folder, TRAINING) / "run.json").exists():
        problem = f"{flag.resume}: {folder} is not a training run; choose another {flag.out}"
        with restate(ConfigError, problem, DataError, KeyError, TypeError):
            record = read_object(path)
            options = {**record["config"], **record["options"]}
            earlier = {name: value for name, value in options.items() if name != "out"}
        if (other := record.get("variant")) != variant:
            raise ConfigError(f"{flag.resume}: the run in {folder} is of variant {other!r}, not {variant!r}")
    return {**preset(values.get("preset", earlier.get("preset"))), **earlier, **values}

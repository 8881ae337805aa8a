"""The directory of a training run: what is in it, and where a new, a resumed and a replacing run are made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headscope.distributed import Processes
from headscope.errors import CheckpointError, ConfigError, DataError, OutputError
from headscope.files.folders import Workplace, to_resume, workplace
from headscope.files.output_checks import OutputKind, inputs_of
from headscope.files.reading import read_object, read_text
from headscope.files.writing import write_atomically, write_errors
from headscope.formats.native import FILES
from headscope.training.config import TrainConfig, preset
from headscope.training.data.prepare import FOLDER as DATA
from headscope.training.files import checkpoints
from headscope.training.files.checkpoints import FILE as STATE

METRICS = "metrics.csv"
COLUMNS = (
    *("update", "epoch", "sentences", "tokens", "seconds", "tokens_per_second", "lr", "loss", "nll", "gradient_norm"),
    *("valid_nll", "valid_perplexity", "bleu", "best"),
)


class History:
    """Lines of metrics.csv, each written as soon as it is known; the columns are set by the first line."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        """Lines after `update` are of a process that was killed, and are taken out."""
        self.path = folder / METRICS
        self.columns: list[str] = []
        if self.path.exists():
            self._cut(update)
        self.board = _board(folder, update) if tensorboard else None

    def add(self, row: Mapping[str, float | int | None]) -> None:
        """Write a line; what is no finite number stays empty, as the norm of a gradient that overflowed in fp16."""
        if not self.columns:
            self.columns = [*COLUMNS, *(name for name in row if name not in COLUMNS)]
            write_atomically(self.path, lambda path: path.write_text(_line(self.columns), encoding="utf-8"))
        with write_errors(self.path):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line([_cell(row.get(name)) for name in self.columns]))
            if self.board is not None:
                for name, value in row.items():
                    if value is not None and value == value and name not in ("update", "epoch"):
                        self.board.add_scalar(name, value, int(row["update"] or 0))
                self.board.flush()

    def close(self) -> None:
        """Close the event files."""
        if self.board is not None:
            self.board.close()

    def _cut(self, update: int) -> None:
        lines = read_text(self.path, error=CheckpointError).splitlines()
        self.columns, *rows = [line.split(",") for line in lines] or [[]]
        complete = [row for row in rows if len(row) == len(self.columns)]
        rows = [row for row in complete if row[0].isdecimal() and int(row[0]) <= update]
        text = "".join(map(_line, [self.columns, *rows]))
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def _cell(value: float | int | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _line(cells: list[str]) -> str:
    return ",".join(cells) + "\n"


def _board(folder: Path, update: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ConfigError("--tensorboard needs its package: pip install 'headscope[train]'") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)


TRAINING = OutputKind(
    "training",
    "run of `headscope train`",
    "run.json",
    (
        *("run.json", METRICS, STATE, f"{DATA}/*.model", f"{checkpoints.WEIGHTS}/*.safetensors"),
        *("tensorboard/events.out.tfevents.*", f"{checkpoints.CONFIDENCE}/epoch-*.pkl"),
        *(f"{name}/{file}" for name in checkpoints.NAMES for file in FILES),
    ),
    extensible=True,
)


def training_workspace(
    config: TrainConfig, options: Any, processes: Processes, stack: ExitStack, *, resume: bool, force: bool
) -> Workplace:
    """Where the run is made; the first process tidies the directory and tells the others, its errors too."""

    def claim() -> Workplace:
        inputs, resumed = inputs_of(config, options), to_resume(config.out, TRAINING) if resume else None
        workspace = stack.enter_context(workplace(config.out, TRAINING, inputs=inputs, force=force, resume=resumed))
        checkpoints.recover_all(workspace.path)
        return workspace

    return processes.on_main(claim)


@contextmanager
def cleaned(workspace: Workplace, processes: Processes) -> Iterator[None]:
    """A run that cannot begin or write, or is stopped, before there is a state to go on from leaves nothing behind."""
    try:
        yield
    except (CheckpointError, ConfigError, DataError, OutputError, KeyboardInterrupt):
        if processes.main and not (workspace.path / STATE).exists():
            workspace.discard()
        raise


def with_defaults(values: Mapping[str, Any], variant: str, *, resume: bool) -> dict[str, Any]:
    """Options that were given, over those of the run that is resumed, over those of a preset."""
    earlier = _resumed_options(Path(values.get("out", TrainConfig.out)), variant) if resume else {}
    return {**preset(values.get("preset", earlier.get("preset"))), **earlier, **values}


def _resumed_options(folder: Path, variant: str) -> dict[str, Any]:
    """The options of the run in a folder, nothing where there is none; ConfigError where it is of another variant."""
    path = to_resume(folder, TRAINING) / "run.json"
    if not path.exists():
        return {}
    try:
        about = read_object(path)
        options = {name: value for name, value in {**about["config"], **about["options"]}.items() if name != "out"}
    except (DataError, KeyError, TypeError):
        raise ConfigError(f"--resume: {folder / 'run.json'} is not of a training run; choose another --out") from None
    if about.get("variant") != variant:
        raise ConfigError(f"--resume: the run in {folder} is of variant {about.get('variant')!r}, not {variant!r}")
    return options

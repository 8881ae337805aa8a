"""The directory of a training run: what is in it, and where a new, a resumed and a replacing run are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headscope.distributed import Processes
from headscope.errors import OutputError
from headscope.files.folders import Workplace, to_resume, workplace
from headscope.files.output_checks import inputs_of
from headscope.files.output_kind import OutputKind
from headscope.formats.native import FILES
from headscope.training.config import TrainConfig
from headscope.training.data.prepare import FOLDER as DATA
from headscope.training.files import checkpoints
from headscope.training.files.history import FILE as METRICS
from headscope.training.files.state import FILE as STATE

_KEPT = tuple(
    f"{DATA}/{name}" for name in ("source.model", "target.model", "vocabulary.json", "train.npz", "valid.npz")
)
TRAINING = OutputKind(
    "training",
    "run of `headscope train`",
    "run.json",
    (
        *("run.json", METRICS, STATE, *_KEPT, f"{checkpoints.WEIGHTS}/*.safetensors"),
        *("tensorboard/events.out.tfevents.*", f"{checkpoints.CONFIDENCE}/epoch-*.pkl"),
        *(f"{name}/{file}" for name in checkpoints.NAMES for file in FILES),
    ),
    unfinished=_KEPT,
    extensible=True,
)


def training_workspace(
    config: TrainConfig, options: Any, processes: Processes, stack: ExitStack, *, resume: bool, force: bool
) -> Workplace:
    """Where the run is made; the first process tidies the directory and tells the others, its errors too."""
    workspace, problem = None, None
    if processes.main:
        inputs, resumed = inputs_of(config, options), to_resume(config.out, TRAINING) if resume else None
        try:
            workspace = stack.enter_context(
                workplace(config.out, TRAINING, inputs=inputs, force=force, resume=resumed, leftover=_KEPT)
            )
            checkpoints.recover_all(workspace.path)
        except OutputError as error:
            problem = str(error)
    path, problem = processes.broadcast(
        (None if workspace is None else workspace.path, problem) if processes.main else None
    )
    if problem is not None or path is None:
        raise OutputError(problem)
    return workspace or Workplace(path, config.out, TRAINING)


@contextmanager
def cleaned(workspace: Workplace, processes: Processes) -> Iterator[None]:
    """A run that cannot write, or is stopped, before there is a state to go on from leaves nothing in the way."""
    try:
        yield
    except (OutputError, KeyboardInterrupt) as error:
        if processes.main and not (workspace.path / STATE).exists():
            workspace.discard(keep=() if isinstance(error, OutputError) else _KEPT)
        raise

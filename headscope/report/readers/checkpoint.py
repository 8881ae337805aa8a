"""What figures are drawn from: runs, pickles, and of checkpoints their alpha matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import is_zipfile

from headscope.errors import DataError
from headscope.report.readers.fork import ForkRun, matrices_run
from headscope.report.readers.run import AnalysisRun, RunError, load_run

CHECKPOINTS = ("best", "last", "averaged", "model")  # in the directories of `train` and `prune`


def format_of(path: Path) -> str | None:
    """The name of the checkpoint format that a file or directory has, by its headers; None for anything else."""
    from headscope.formats.base import FORMATS

    if not path.exists():
        return None
    return next((name for name, candidate in FORMATS if candidate.recognise(path)), None)


def read_run(
    path: Path,
    *,
    from_pickle: Callable[[Path], AnalysisRun] | None = None,
    from_checkpoint: Callable[[Path], AnalysisRun] | None = None,
) -> AnalysisRun:
    """The run of a directory, or what the others make of a pickle of the fork and of a checkpoint.

    RunError where a checkpoint stands in the place of a run, saying how to make one; DataError for broken pickles.
    """
    try:
        if from_pickle is not None and path.is_file() and not is_zipfile(path):  # zips may be large: no pickles
            return from_pickle(path)
        return load_run(path)
    except (RunError, DataError) as error:
        format = format_of(path)
        if format is None:
            inside = next((path / name for name in CHECKPOINTS if format_of(path / name)), None)
            if inside is None:
                raise
            raise RunError(f"{error}; it holds a checkpoint: {inside}") from None
    if from_checkpoint is not None:
        return from_checkpoint(path)
    raise RunError(
        f"{path} is a checkpoint ({format}), and this figure is drawn from a run; measure the checkpoint first: "
        f"`headscope analyze {path} --source TEXT --out RUN`, and name RUN"
    )


def checkpoint_alphas(path: Path) -> ForkRun:
    """The alpha matrices of a checkpoint as a run that `alphas_figure` draws; RunError where it has none."""
    from headscope.engine.fork.pickles import fork_alphas
    from headscope.formats.base import open_checkpoint

    checkpoint = open_checkpoint(str(path), device="cpu")
    matrices = {f"{site}/{layer}/alpha": alpha for (site, layer), alpha in fork_alphas(checkpoint).items()}
    if not matrices:
        raise RunError(
            f"{path} has no alpha matrices: it is a {checkpoint.format} checkpoint ({checkpoint.model_type}) without "
            "them; models of the MHR fork and of `headscope train mixing` have some"
        )
    signature = f"ckpt:{checkpoint.format}-sha256={checkpoint.digest[:12]}"
    return matrices_run(path, matrices, signature=signature, model_type=checkpoint.model_type)

"""`load`, which opens a model, and a function per command: `analyze`, `evaluate`, `prune`, `train`, `plot`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from torch import cuda, nn
from torch.random import fork_rng

from headscope.api.arguments import PathName, Report, progress_of, public_api
from headscope.api.model import Model
from headscope.config import CheckpointOptions
from headscope.config.declarations import import_target
from headscope.config.option import make_config, pop_config
from headscope.errors import ConfigError
from headscope.formats.base import open_configured
from headscope.registry import unknown
from headscope.results.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headscope.results.ranking import Ranking
    from headscope.results.removal import Removal
    from headscope.results.sweep import Sweep
    from headscope.results.training import Training

R = TypeVar("R")
KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


@public_api
def load(
    source: PathName | nn.Module | Model,
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    format: str | None = None,
    **options: Any,
) -> Model:
    """Open a model.

    source: a checkpoint of any format (a file, a directory or a hub id), or a transformers model in memory, which every
        call leaves as it was.
    tokenizer: of a model in memory; without it the model can be captured and gated, not read text.
    device, dtype: "cpu", "cuda:1", "mps"; "float32", "bfloat16", …; "auto": a GPU if there is one, as stored.
    device_map: "auto" spreads a Hugging Face model over devices and disk, or a JSON file says which module goes where.
    options: `dicts`, `hp`, `bpe` (dictionaries, hyper-parameters and codes of a fairseq or story-of-heads checkpoint),
        `src_lang`, `tgt_lang` ("eng_Latn", as the tokenizer has them), `task` (of a Whisper: "translate").

    CheckpointError where there is no such checkpoint or it is broken, ConfigError for options that do not fit.
    """
    if isinstance(source, Model):
        return source
    load_options = {"device": device, "dtype": dtype, "device_map": device_map, "format": format, **options}
    if isinstance(source, (str, PathLike)):
        if tokenizer is not None:
            raise ConfigError("tokenizer= is for a model in memory; a checkpoint has its own")
        config = make_config(CheckpointOptions, {"checkpoint": source, **load_options}, what="load")
        return Model(open_configured(config), companions=config)
    if unused := [name for name, value in load_options.items() if value not in (None, "auto")]:
        raise ConfigError(f"{unused[0]}= is for checkpoints on disk; a model in memory is used as it is")
    return Model(import_target("headscope.formats.huggingface.checkpoint:checkpoint_in_memory")(source, tokenizer))


Source: TypeAlias = "PathName | nn.Module | Model"
"""What `load` opens."""
PRUNING = {
    "rank": ("options.choice:RankConfig", "ranking.rank_run:run_ranking"),
    "sweep": ("options.choice:SweepConfig", "sweep.sweep:run_sweep"),
    "shrink": ("options.removal:ShrinkConfig", "shrink:run_shrink"),
    "remove": ("options.removal:RemoveConfig", "removal.remove:run_removal"),
}
"""The config class and the function of every way to prune but learners."""


def as_function(method: Callable[..., R]) -> Callable[..., R]:
    """A method of `Model` as a function whose first argument is anything that `load` opens."""

    @wraps(method)
    def function(model: Source, *values: Any, **options: Any) -> R:
        return method(load(model), *values, **options)

    _, *parameters = inspect.signature(method).parameters.values()
    signed_function: Any = function
    signed_function.__signature__ = inspect.Signature([inspect.Parameter("model", KEYWORD), *parameters])
    return function


analyze, evaluate = as_function(Model.analyze), as_function(Model.evaluate)


@overload
def prune(
    checkpoint: PathName, method: Literal["rank", "l0", "subset"], *, out: PathName, **options: Any
) -> Ranking: ...
@overload
def prune(checkpoint: PathName, method: Literal["sweep"], *, out: PathName, **options: Any) -> Sweep: ...
@overload
def prune(checkpoint: PathName, method: Literal["shrink", "remove"], *, out: PathName, **options: Any) -> Removal: ...
@public_api
@fork_rng(range(cuda.device_count()))
def prune(
    checkpoint: str | PathLike[str],
    method: str,
    *,
    out: PathName,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Ranking | Sweep | Removal:
    """Choose or remove heads of a checkpoint (a path or a hub id), and write that to `out`: `headscope prune METHOD`.

    method: "rank" (`by=`, `keep=` or `keep_fraction=`), "l0" (`strength=` or `keep=`), "subset" (`keep=`) or another
        package's learner, "sweep" (`methods=`, several sizes), "remove" (`heads=`), "shrink" (the whole way).
    options: those of the command, with underscores: `source=` and `target=` (files), `sites=`, `protect=`, …; see
        `RankConfig`, `LearnConfig`, `SweepConfig`, `RemoveConfig` and `ShrinkConfig`. ConfigError for unknown ones.
    """
    from headscope.pruning.learning.learn import run_learning
    from headscope.pruning.options.choice import LEARNERS, LearnConfig

    if not isinstance(checkpoint, (str, PathLike)):
        raise ConfigError("prune takes a checkpoint's path; a loaded model has rank and remove")
    if method not in (ways := [*PRUNING, *LEARNERS.names()]):
        raise ConfigError(unknown("way to prune", method, ways))
    values, command = {**options, "checkpoint": checkpoint, "out": out, "force": force}, f"prune {method}"
    if method in PRUNING:
        cls, run = (import_target(f"headscope.pruning.{target}") for target in PRUNING[method])  # type: Any, Any
    else:
        cls, run = LearnConfig, run_learning
        values["method"] = pop_config(LEARNERS.get(method).Options, values)
    return run(make_config(cls, values, what=command), progress=progress_of(progress))


@public_api
@fork_rng(range(cuda.device_count()))
def train(
    variant: str = "baseline",
    *,
    out: PathName,
    resume: bool = False,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Training:
    """Train a Transformer, plain or in variants ("mixing", "swap", "mae+wide"), into `out`: `headscope train VARIANT`.

    `resume` goes on with the run in `out`, whose options are the defaults; `force` replaces it.
    options: those of the command, with underscores: `source=`, `target=`, `preset="tiny"`, …; see `TrainConfig` and the
        files in `headscope.training.variants`.

    ConfigError for unknown options, TrainingError where the loss is NaN or infinite.
    """
    from headscope.training.checkpoints import with_defaults
    from headscope.training.config import TrainConfig
    from headscope.training.trainer import train as run_training
    from headscope.training.variant import find_variant

    cls, command = find_variant(str(variant)), f"train {variant}"
    values = with_defaults({**options, "out": out}, cls.name, resume=resume)
    own_options = cls(pop_config(cls.Options, values))
    return run_training(
        make_config(TrainConfig, values, what=command, extra_names=[entry.name for entry in fields(cls.Options)]),
        own_options,
        resume=resume,
        force=force,
        progress=progress_of(progress),
        remark=lambda text: warnings.warn(text, stacklevel=4),
        command=("headscope.train", variant),
    )


Runs: TypeAlias = "Study | PathName | Sequence[Study | PathName]"
"""The input of figures: a study, the folder of a run, or several of these."""


@overload
def plot(runs: Runs, name: Literal["report"], *, out: PathName, force: bool = False) -> Path: ...


@overload
def plot(runs: Runs, name: str = "heads", **options: Any) -> Figure: ...


@public_api
def plot(
    runs: Runs, name: str = "heads", *, out: PathName | None = None, force: bool = False, **options: Any
) -> Figure | Path:
    """Draw a figure of finished runs: what `headscope plot NAME` does; "report" writes a page and returns its path.

    runs: a study, the folder of a run, or several of these. name: of a figure (`headscope list figures`).
    out: a .png, .svg or .pdf file to write; `force` replaces a file that is there.
    options: those of the figure, and `style` ("screen", "paper"), `width` in inches, `title`, `signature`, `dpi`.

    ConfigError for an unknown figure or option, MissingTable where the run has no data for it.
    """
    from headscope.report.registry import find_figure
    from headscope.report.styles import FigureStyle

    figure = find_figure(name)
    style = pop_config(FigureStyle, options)
    settings = make_config(figure.Options, options, what=f"plot {name}")
    is_list = isinstance(runs, Sequence) and not isinstance(runs, str)
    run_list: list[Any] = [*runs] if is_list else [runs]  # type: ignore[misc]  # a sequence, as it says
    if wrong := [run for run in run_list if not isinstance(run, (Study, str, PathLike))]:
        raise ConfigError(f"runs: a {type(wrong[0]).__name__} is no run; give a study, a folder or a list of these")
    if figure.page and out is None:
        raise ConfigError(f"{name!r} is a page; give out='page.html'")
    studies_and_paths = [run if isinstance(run, Study) else Path(run) for run in run_list]
    return figure.render(studies_and_paths, settings, style, None if out is None else Path(out), force=force)

"""One function per command: `headscope.analyze`, `evaluate`, `prune`, `train`, `plot`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, overload

from headscope.api.loading import load
from headscope.api.model import Model
from headscope.api.options import PathName, configured, in_python
from headscope.api.progress import Report, TrainingReport, progress_of
from headscope.api.study import Study
from headscope.errors import ConfigError
from headscope.pruning.selection import Selection
from headscope.registry import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from headscope.pruning.sweep.sweep import Sweep
    from headscope.training.trainer import TrainingResult


P = ParamSpec("P")
R = TypeVar("R")
Source: TypeAlias = "PathName | nn.Module | Model"
"""What `load` opens."""


def of_loaded(method: Callable[Concatenate[Model, P], R]) -> Callable[Concatenate[Source, P], R]:
    """A method of `Model` as a function: its first parameter is what `load` takes, the others are the method's."""

    def function(model: Source, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(load(model), *args, **kwargs)

    function.__name__, function.__doc__, signature = method.__name__, method.__doc__, inspect.signature(method)
    self_parameter, *others = signature.parameters.values()
    first = self_parameter.replace(name="model", annotation="PathName | nn.Module | Model")
    function.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    return function  # type: ignore[return-value]  # `model` may also be named


analyze = of_loaded(Model.analyze)
evaluate = of_loaded(Model.evaluate)


@overload
def prune(
    checkpoint: str | PathLike[str],
    method: Literal["rank", "l0", "subset"],
    *,
    out: PathName,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Selection: ...
@overload
def prune(
    checkpoint: str | PathLike[str],
    method: Literal["sweep"],
    *,
    out: PathName,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Sweep: ...
@in_python
def prune(
    checkpoint: str | PathLike[str],
    method: str,
    *,
    out: PathName,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> Selection | Sweep:
    """Choose heads to remove, by a ranking or by learned gates, and write the choice: `headscope prune METHOD`.

    checkpoint: a path or a hub id.
    method: "rank" (`by=`, `keep=` or `fraction=`), "l0" (`strength=` or `keep=`), "subset" (`keep=`) or a learner of
        another package; or "sweep", which compares `methods=` at several sizes (`keep=` or `fractions=`).
    out: the folder to write; it must be empty unless `force` is given.
    options: those of the command, with underscores: `source=` and `target=` (files), `sites=`, `protect=`, `updates=`,
        `remove=True`, …; see `RankConfig`, `LearnConfig` and `SweepConfig` in `headscope.pruning.options`, and the
        files in `headscope.pruning.learning.learners`.

    The result's `removed` and `kept` are the heads, `ranking` a table; that of a sweep is a `Sweep`, with its `table`.
    ConfigError for unknown options.
    """
    from headscope.pruning.learning.learn import run_learning
    from headscope.pruning.options.learn import LEARNERS, LearnConfig
    from headscope.pruning.options.rank import RankConfig
    from headscope.pruning.options.sweep import SweepConfig
    from headscope.pruning.ranking.rank_run import run_ranking
    from headscope.pruning.sweep.sweep import run_sweep

    if not isinstance(checkpoint, (str, PathLike)):
        raise ConfigError(
            "prune takes a checkpoint's path, as it writes checkpoints; a loaded model has rank and remove"
        )
    if method not in (ways := ["rank", *LEARNERS.names(), "sweep"]):
        raise ConfigError(unknown("way to prune", method, ways))
    common = {**options, "checkpoint": str(checkpoint), "out": out, "force": force}
    report = progress_of(progress)
    function = f"prune {method}"
    if method == "rank":
        return run_ranking(configured(RankConfig, common, function=function), progress=report)
    if method == "sweep":
        return run_sweep(configured(SweepConfig, common, function=function), progress=report)
    options_class = LEARNERS.get(method).Options
    method_options, run_options = _split(common, options_class)
    learnt = {**run_options, "method": configured(options_class, method_options, function=function)}
    return run_learning(configured(LearnConfig, learnt, function=function), progress=report)


@in_python
def train(
    variant: str = "baseline",
    *,
    out: PathName,
    resume: bool = False,
    force: bool = False,
    progress: Report = False,
    **options: Any,
) -> TrainingResult:
    """Train a Transformer, plain or in one of the variants, and write it to `out`: `headscope train VARIANT`.

    variant: "baseline", "wide", "mixing", "swap", "mae", …, or several, "mixing+swap".
    out: the folder to write; `resume` continues the run in it, whose options are the defaults, `force`
        replaces it.
    options: those of the command, with underscores: `source=`, `target=`, `valid_source=`, `preset="tiny"`, and the
        variant's own; see `headscope.training.config.TrainConfig` and the files in `headscope.training.variants`.

    ConfigError for unknown options, TrainingError where the loss is NaN or infinite.
    """
    from headscope.training.composed import find_variant
    from headscope.training.config import TrainConfig, preset
    from headscope.training.files.resumed_options import resumed_options
    from headscope.training.trainer import train as run_training

    cls, function = find_variant(variant), f"train {variant}"
    earlier = resumed_options(Path(out), cls.name) if resume else {}
    shaped = preset(options.get("preset", earlier.get("preset")))
    variant_options, shared = _split({**shaped, **earlier, **options, "out": out}, cls.Options)
    config = configured(TrainConfig, shared, function=function)
    configured_variant = cls(configured(cls.Options, variant_options, function=function))
    with TrainingReport(progress_of(progress)) as listener:
        return run_training(
            config,
            configured_variant,
            resume=resume,
            force=force,
            listener=listener,
            command=("headscope.train", variant),
        )


def _split(options: Mapping[str, Any], cls: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are fields of a config class, and the others."""
    names = {option.name for option in fields(cls)}
    return (
        {name: value for name, value in options.items() if name in names},
        {name: value for name, value in options.items() if name not in names},
    )


@in_python
def plot(
    runs: Study | PathName | Sequence[Study | PathName],
    name: str = "heads",
    *,
    out: PathName | None = None,
    dpi: int | None = None,
    force: bool = False,
    style: str = "screen",
    width: float | None = None,
    title: bool = True,
    signature: bool = True,
    **options: Any,
) -> Figure:
    """Draw a figure of a finished run: what `headscope plot NAME` does.

    runs: a study, or the folder of a run; two of them for "compare", any number for "training" and "pruning".
    name: heads, functions, rankings, faithfulness or the figure of an analysis (positional, similarity, …) of a study;
        compare (`measure=`) of two; training (`axis=`) of runs of `train`, gates of one; pruning (`figure=`,
        `functions=`) of runs of `prune`.
    out: a .png, .svg or .pdf file to write; `dpi` is for PNG, `force` replaces a file that is there.
    style: screen, or paper, which has letters of print; `width` in inches; whether to write `title` and `signature`.

    ConfigError for an unknown figure or option, MissingTable where the run has no data for it.
    """
    from headscope.report.layout.notebooks import show_in_notebook
    from headscope.report.layout.save import check_path, write_figure
    from headscope.report.layout.style import FigureStyle, figure_style

    if out is not None:
        check_path(Path(out), force=force)
    show_in_notebook()
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    chosen: list[Any] = [*runs] if several else [runs]  # type: ignore[misc]  # a sequence, as it says
    if strange := [run for run in chosen if not isinstance(run, (Study, str, PathLike))]:
        raise ConfigError(f"runs: a {type(strange[0]).__name__} is no run; give a study, a folder or a list of these")
    with figure_style(FigureStyle(style, width, title=title, signature=signature)):
        figure = _drawn(chosen, name, options)
        if out is not None:
            write_figure(figure, Path(out), dpi=dpi, force=force)
    return figure


def _drawn(runs: list[Study | PathName], name: str, options: dict[str, Any]) -> Figure:
    from headscope.report.named import draw, figure_names
    from headscope.report.several import SEVERAL, draw_several

    if name in SEVERAL:
        return draw_several([run.run() if isinstance(run, Study) else Path(run) for run in runs], name, **options)
    if name == "report":
        raise ConfigError("the report is no figure but a page; study.report('page.html') writes it")
    if name not in figure_names():
        raise ConfigError(unknown("figure", name, [*figure_names(), *SEVERAL]))
    if len(runs) != 1:
        raise ConfigError(f"the figure {name!r} is of one run; {len(runs)} were given")
    from headscope.report.readers.run import load_run

    (run,) = runs
    return draw(run.run() if isinstance(run, Study) else load_run(Path(run)), name, **options)

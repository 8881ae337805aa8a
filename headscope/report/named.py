"""The figures of one run by the names that `headscope plot` gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report.figures.alphas import alphas_figure
from headscope.report.figures.faithfulness import faithfulness_figure
from headscope.report.figures.functionmap import functions_figure
from headscope.report.figures.headmap import heads_figure
from headscope.report.figures.offsets import offset_histograms
from headscope.report.figures.relations import relation_accuracy
from headscope.report.figures.similarity import similarity_matrices
from headscope.report.readers.run import AnalysisRun


def _heads(run: AnalysisRun, *, measure: str | Sequence[str] | None = None, sort: bool = False) -> Figure:
    return heads_figure(run, [measure] if isinstance(measure, str) else measure, sort=sort)


def _functions(run: AnalysisRun) -> Figure:
    return functions_figure(run)


def _positional(run: AnalysisRun) -> Figure:
    return offset_histograms(run)


def _syntactic(run: AnalysisRun) -> Figure:
    return relation_accuracy(run)


def _similarity(run: AnalysisRun, *, measure: str = "cosine") -> Figure:
    return similarity_matrices(run, measure)


def _alphas(run: AnalysisRun) -> Figure:
    return alphas_figure(run)


def _faithfulness(run: AnalysisRun, *, metric: str | None = None) -> Figure:
    return faithfulness_figure(run, metric)


FIGURES: dict[str, Callable[..., Figure]] = {
    "heads": _heads,
    "functions": _functions,
    "positional": _positional,
    "syntactic": _syntactic,
    "similarity": _similarity,
    "alphas": _alphas,
    "faithfulness": _faithfulness,
}


def draw(run: AnalysisRun, name: str, **options: Any) -> Figure:
    """Draw a figure of a run; ConfigError for an unknown name or option, with those that there are."""
    if name not in FIGURES:
        raise ConfigError(unknown("figure", name, list(FIGURES)))
    known = [each for each in inspect.signature(FIGURES[name]).parameters if each != "run"]
    for option in options:
        if option not in known:
            raise ConfigError(f"the figure {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return FIGURES[name](run, **options)

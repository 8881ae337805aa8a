"""The figures that every run gets: whichever its tables allow, as PNG in its `figures` folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from headscope.report.figures.alphas import alphas_figure
from headscope.report.figures.faithfulness import faithfulness_figure
from headscope.report.figures.functionmap import functions_figure
from headscope.report.figures.headmap import heads_figure
from headscope.report.figures.offsets import offset_histograms
from headscope.report.figures.relations import relation_accuracy
from headscope.report.figures.similarity import similarity_matrices, similarity_measures
from headscope.report.layout.save import DPI, write_figure
from headscope.report.readers.run import AnalysisRun, MissingTable, load_run

STANDARD: dict[str, Callable[[AnalysisRun], Figure]] = {
    "heads": heads_figure,
    "functions": functions_figure,
    "offsets": offset_histograms,
    "relations": relation_accuracy,
    "similarity": lambda run: similarity_matrices(run, _first_similarity(run)),
    "alphas": alphas_figure,
    "faithfulness": faithfulness_figure,
}


def draw_standard(run_dir: Path | str, *, dpi: int = DPI) -> list[Path]:
    """Draw every standard figure whose table exists, replacing older ones; the files written, in order."""
    run = load_run(run_dir)
    written = []
    for name, draw in STANDARD.items():
        try:
            figure = draw(run)
        except MissingTable:
            continue
        written.append(write_figure(figure, run.path / "figures" / f"{name}.png", dpi=dpi, force=True))
    return written


def _first_similarity(run: AnalysisRun) -> str:
    found = similarity_measures(run)
    return "cosine" if "cosine" in found or not found else found[0]

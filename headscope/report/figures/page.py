"""The page of any runs: what `headscope.report.page` gathers and writes."""

from headscope.report.registry import PlotFigure, Source

REPORT = PlotFigure(
    "report",
    "One HTML page about runs, which works from disk: map and cards of heads, findings, comparison, figures, table.",
    "headscope.report.page.write:gather",
    source=Source("RUN", "Directories that `headscope analyze`, `prune` or `train` wrote, in any order.", studies=True),
    runs="together",
    order=1000,
    page=True,
)

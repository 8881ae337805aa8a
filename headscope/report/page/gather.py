"""Runs of any command read into one JSON-serialisable report, the whole content of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headscope.files.examples import Example
from headscope.files.reading import read_record
from headscope.report.layout.methods import method_style
from headscope.report.page.analysis import analysis_data, functions_present, marks
from headscope.report.page.comparison import comparison_data
from headscope.report.page.findings import compared, findings, pruned, trained
from headscope.report.page.importance import faithfulness_data, importance_data
from headscope.report.page.numbers import palettes
from headscope.report.page.pruning import RECORD, is_removal, pruning_data, removal_data
from headscope.report.page.training import distinct, training_data
from headscope.report.page.weights import examples_data
from headscope.report.readers.checkpoint import read_run
from headscope.report.readers.run import AnalysisRun, RunError
from headscope.version import VERSION

Report = dict[str, Any]


def gather(given: Sequence[Path | AnalysisRun], *, names: Sequence[str] = ()) -> Report:
    """The report on runs of `analyze`, `prune` and `train`, in whatever order they are named.

    Studies in memory may be among the runs of `analyze`. `names` replace those of the directories, where all are
    analysis runs. RunError for a directory that is no run.
    """
    analysed: list[AnalysisRun] = []
    others: dict[str, list[Path]] = {"pruning": [], "removal": [], "training": []}
    for run in given:
        if isinstance(run, AnalysisRun):
            analysed.append(run)
        elif (kind := kind_of(run)) == "analysis":
            analysed.append(read_run(run))
        else:
            others[kind].append(run)
    analyses = [
        analysis_report(run, run.examples, name=name)
        for run, name in zip(analysed, names or distinct([run.name for run in analysed]), strict=True)
    ]
    return report_of(
        analyses,
        pruning=pruning_data(others["pruning"]),
        removals=[removal_data(path) for path in others["removal"]],
        training=training_data(others["training"]),
    )


def kind_of(path: Path) -> str:
    """ "analysis", "pruning", "removal" or "training", by the files of a directory; "analysis" for anything else."""
    if is_removal(path):
        return "removal"
    if (path / "sweep.json").is_file() or (path / RECORD).is_file() or any(path.glob(f"lambda-*/{RECORD}")):
        return "pruning"
    if (path / "metrics.csv").is_file() and not (path / "heads.csv").is_file():
        return "training"
    if path.is_dir() and (record := read_record(path / "run.json").get("kind")) not in (None, "analysis"):
        raise RunError(f"{path} is a run of another kind ({str(record)[:40]}), which no report shows")
    return "analysis"


def analysis_report(run: AnalysisRun, examples: Sequence[Example], *, name: str = "") -> Report:
    """Everything that the page shows of one analysis run."""
    data = analysis_data(run, name=name)
    data["importance"] = importance_data(run, data)
    data["faithfulness"] = faithfulness_data(run)
    data["examples"] = examples_data(examples)
    data["findings"] = findings(data)
    return data


def report_of(
    analyses: Sequence[Report],
    *,
    pruning: Sequence[Report] = (),
    removals: Sequence[Report] = (),
    training: Report | None = None,
) -> Report:
    """A report from its parts; every analysis run is compared with the first one."""
    comparisons = []
    for number, other in enumerate(analyses[1:], start=1):
        comparison = comparison_data(analyses[0], other)
        comparisons.append({"runs": [0, number], **comparison, "findings": compared(analyses[0], other, comparison)})
    return {
        "headscope": VERSION,
        "title": title_of(analyses, pruning, removals, training),
        "analyses": list(analyses),
        "comparisons": comparisons,
        "pruning": {"runs": list(pruning), "removals": list(removals), "findings": pruned(pruning, removals)},
        "training": {**(training or {"runs": [], "panels": []}), "findings": trained(training)},
        "families": functions_present(analyses),
        "marks": marks(analyses),
        "methodColors": method_colors(pruning),
        "palettes": palettes(measure["scale"]["cmap"] for data in analyses for measure in data["measures"]),
    }


def method_colors(pruning: Sequence[Report]) -> dict[str, str]:
    """The colour of every method of the sweeps, which the figures give it too."""
    methods = (method for run in pruning for method in run["cells"]["method"])
    return {method: method_style(method).color for method in methods}


def title_of(
    analyses: Sequence[Report], pruning: Sequence[Report], removals: Sequence[Report], training: Report | None
) -> str:
    """What the page is about: models, or names of runs where there is none."""
    models = list(dict.fromkeys(data["model"] for data in analyses))
    names = [run["name"] for run in (*pruning, *removals, *(training or {"runs": []})["runs"])]
    return ", ".join(models or names) or "nothing"

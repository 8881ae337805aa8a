"""What the page says about runs: heads, and blocks of answers and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headscope.config.declarations import measure_of
from headscope.errors import HeadscopeError
from headscope.files.reading import read_record
from headscope.report.fork import read_run
from headscope.report.page.compare import comparison
from headscope.report.page.heads import facts, marks, run_data
from headscope.report.page.svg import figure_svg
from headscope.report.registry import find_figure, plot_figures
from headscope.results.answer import Answer
from headscope.results.removal import KINDS, RECORD, Removal
from headscope.results.study import Study
from headscope.results.study_answers import main_importance
from headscope.results.study_tables import RunError
from headscope.results.sweep import PruningCells, open_pruned
from headscope.results.training import Training, training_answers

LIVE = "functions"
"""The figure that the page has as a map to choose heads from."""


@dataclass
class PageBlock:
    """Answers under one heading of a section, figures below; `run` is the number of the study that heads are of."""

    section: str
    title: str = ""
    answers: Sequence[Answer] = ()
    figures: Sequence[Markup] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Full names of heads by the names that the answers give them."""
    run: int = 0


@dataclass
class Report:
    """Everything that the page shows; sections come in the order of their first blocks."""

    title: str
    studies: Sequence[Study] = ()
    runs: Sequence[dict[str, Any]] = ()
    """What the script shows of each study."""
    blocks: Sequence[PageBlock] = ()

    @property
    def sections(self) -> dict[str, list[PageBlock]]:
        """Blocks by the titles of their sections; those without anything are left out."""
        sections: dict[str, list[PageBlock]] = {}
        for block in (block for block in self.blocks if block.answers or block.figures):
            sections.setdefault(block.section, []).append(block)
        return sections

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads."""
        heads = [head for run in self.runs for head in run["heads"]]
        labels, colors = marks({label for head in heads for label in (*head["labels"], *head["weak"])})
        return {"runs": self.runs, "labels": labels, "colors": dict(colors.values())}

    @property
    def facts(self) -> list[tuple[Study, str, Mapping[str, str]]]:
        """Of every study its name on the page and what is known of it."""
        return [(study, run["name"], facts(study)) for study, run in zip(self.studies, self.runs, strict=True)]


def gather(given: Sequence[Path | Study], *, names: Sequence[str] = ()) -> Report:
    """The report on runs of `analyze`, `prune` and `train`, in whatever order they are named.

    Studies in memory may be among the runs of `analyze`. `names` replace those of the directories, where all are
    analysis runs. RunError for a directory that is no run.
    """
    runs: dict[str, list[Any]] = {"analysis": [], "pruning": [], "removal": [], "training": []}
    for run in given:
        kind = "analysis" if isinstance(run, Study) else kind_of(run)
        runs[kind].append(read_run(run) if kind == "analysis" and isinstance(run, Path) else run)
    studies = runs["analysis"]
    names = names or distinct([study.name for study in studies])
    pruning = open_pruned(runs["pruning"]) if runs["pruning"] else []
    removals = [Removal.open(path) for path in runs["removal"]]
    histories = [Training.open(path) for path in runs["training"]]
    models = list(dict.fromkeys(study.model for study in studies))
    others = [*(run.name for run in pruning), *(path.resolve().name for path in (*runs["removal"], *runs["training"]))]
    shown = [run_data(study, name) for study, name in zip(studies, names, strict=True)]
    blocks = [*study_blocks(studies, shown), *pruning_blocks(pruning, removals), *training_blocks(histories)]
    return Report(", ".join(models or others) or "nothing", studies, shown, blocks)


def kind_of(path: Path) -> str:
    """ "analysis", "pruning", "removal" or "training", by the files of a directory; "analysis" for anything else."""
    if read_record(path / RECORD).get("kind") in KINDS:
        return "removal"
    if (path / "sweep.json").is_file() or (path / RECORD).is_file():
        return "pruning"
    if (path / "metrics.csv").is_file() and not (path / "heads.csv").is_file():
        return "training"
    if not path.exists() or (path.is_dir() and not (path / "run.json").is_file()):
        what = "has no run.json" if path.exists() else "is no directory"
        raise RunError(f"{path} {what}; name what `headscope analyze`, `prune` or `train` wrote with --out")
    if path.is_dir() and (record := read_record(path / "run.json").get("kind")) not in (None, "analysis"):
        raise RunError(f"{path} is a run of another kind ({str(record)[:40]}), which no report shows")
    return "analysis"


def study_blocks(studies: Sequence[Study], shown: Sequence[Mapping[str, Any]]) -> Iterator[PageBlock]:
    """Findings of every study, the comparisons of the first with the others before them; then figures."""
    names = [run["name"] for run in shown]
    short = [{head["short"]: head["name"] for head in run["heads"]} for run in shown]
    several = len(studies) > 1
    for other, name in zip(studies[1:], names[1:], strict=True):
        answers = comparison(studies[0], other, (names[0], name))
        yield PageBlock("Findings", f"{names[0]} and {name} compared", answers, (), short[0])
    for number, (study, name) in enumerate(zip(studies, names, strict=True)):
        yield PageBlock("Findings", f"Run {name}" if several else "", study.answers(), (), short[number], number)
    for number, other in enumerate(studies[1:], start=1):
        measure = compared_measure(studies[0], other)
        drawn = draw("compare", [studies[0], other], f"compare{number}", measure=measure) if measure else []
        yield PageBlock("Comparison", f"{names[0]} and {names[number]}", (), drawn)
    if several:
        yield PageBlock("Comparison", "Do functions predict importance", (), draw("needs", studies, "all"))
    for number, (study, name) in enumerate(zip(studies, names, strict=True)):
        wanted = [figure.name for figure in plot_figures().values() if figure.every_run and figure.name != LIVE]
        drawn = [svg for figure in wanted for svg in draw(figure, [study], f"run{number}")]
        yield PageBlock("Figures", f"Run {name}" if several else "", (), drawn)


def compared_measure(first: Study, second: Study) -> str:
    """The measure of which two studies are drawn side by side: which heads matter, else the first of an overview."""
    shared = [name for name in first.measures if name in second.measures]
    main = main_importance(first)
    if main and main.name in shared:
        return main.name
    return min(
        (name for name in shared if measure_of(name).overview), key=lambda name: measure_of(name).overview, default=""
    )


def draw(name: str, runs: Sequence[Any], prefix: str, **options: Any) -> list[Markup]:
    """A figure as SVG, nothing where it is none of the runs or they lack what it shows."""
    figure = find_figure(name)
    try:
        if figure.runs == "each" and not figure.is_of(runs[0]):
            return []
        drawn = figure.drawn(runs, figure.Options(**options))
    except HeadscopeError:
        return []
    return [figure_svg(drawn, f"{prefix}-{name}", figure.summary)]


def pruning_blocks(runs: Sequence[PruningCells], removals: Sequence[Removal]) -> Iterator[PageBlock]:
    """Verdicts first; then of every sweep its conclusions, its cells and what it costs where."""
    for removal in removals:
        yield PageBlock("Pruning", removal.folder.resolve().name, removal.answers())
    for number, run in enumerate(runs):
        kinds = [*(["quality"] if run.measured else []), "sites", *(["gates"] if run.gates else [])]
        drawn = [svg for kind in kinds for svg in draw("pruning", [run], f"sweep{number}-{kind}", figure=kind)]
        yield PageBlock("Pruning", run.name, run.answers(), drawn)


def training_blocks(runs: Sequence[Training]) -> Iterator[PageBlock]:
    """The best of every training, and curves of all quantities."""
    if runs:
        answers = training_answers(runs, distinct([run.name for run in runs]))
        yield PageBlock("Training", "", answers, draw("training", runs, "all"))


def distinct(names: Sequence[str]) -> list[str]:
    """Names, numbered where several are the same."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]

"""What the page says about runs: heads, and blocks of answers and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from matplotlib import rc_context

from headscope.errors import HeadscopeError
from headscope.files.reading import read_record
from headscope.report.comparison import StudyComparison
from headscope.report.fork import read_run
from headscope.report.page.heads import marks, run_data
from headscope.report.registry import find_figure, plot_figures
from headscope.report.styles import FigureStyle, number_same
from headscope.results.answer import Answer
from headscope.results.removal import KINDS, RECORD, Removal
from headscope.results.result import CONTROL
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.sweep import open_pruned
from headscope.results.training import Training, training_answers

LIVE = "functions"
"""The figure that the page has as a map to choose heads from."""
LONG = re.compile(r"(\d\.\d\d)\d+")


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


def gather(given: Sequence[Path | Study], *, names: Sequence[str] = ()) -> Report:
    """The report on runs of `analyze`, `prune` and `train`, in whatever order they are named.

    Studies in memory may be among the runs of `analyze`. `names` replace those of the directories, where all are
    analysis runs. RunError for a directory that is no run.
    """
    runs: dict[str, list[Any]] = {"analysis": [], "pruning": [], "removal": [], "training": []}
    for run in given:
        runs["analysis" if isinstance(run, Study) else kind_of(run)].append(run)
    studies = [read_run(run) if isinstance(run, Path) else run for run in runs["analysis"]]
    results: list[Any] = [
        *map(Removal.open, runs["removal"]),
        *(open_pruned(runs["pruning"]) if runs["pruning"] else []),
        *map(Training.open, runs["training"]),
    ]
    shown = [
        run_data(study, name)
        for study, name in zip(studies, names or number_same([study.name for study in studies]), strict=True)
    ]
    titles = [study.model for study in studies] or [
        result.folder.resolve().name if isinstance(result, Removal) else result.name for result in results
    ]
    blocks = [*study_blocks(studies, shown), *other_blocks(results)]
    return Report(", ".join(dict.fromkeys(titles)) or "nothing", studies, shown, blocks)


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
    titles = [f"Run {name}" for name in names] if len(studies) > 1 else [""] * len(studies)
    pairs = [
        StudyComparison([studies[0], other], names=(names[0], name))
        for other, name in zip(studies[1:], names[1:], strict=True)
    ]
    for pair in pairs:
        title = " and ".join(pair.names)
        yield PageBlock("Findings", f"{title} compared", pair.answers()[1:], (), short[0])
    for number, study in enumerate(studies):
        yield PageBlock("Findings", titles[number], study.answers(), (), short[number], number)
    for pair in pairs:
        drawn = draw("compare", [pair.first, pair.second], measure=pair.measure) if pair.measure else []
        yield PageBlock("Comparison", " and ".join(pair.names), (), drawn)
    if pairs:
        yield PageBlock("Comparison", "Do functions predict importance", (), draw("needs", studies))
    wanted = [figure.name for figure in plot_figures().values() if figure.every_run and figure.name != LIVE]
    for title, study in zip(titles, studies, strict=True):
        yield PageBlock("Figures", title, (), [image for figure in wanted for image in draw(figure, [study])])


def other_blocks(results: Sequence[Any]) -> Iterator[PageBlock]:
    """Verdicts of removals first; then of every sweep its conclusions, its cells and what it costs where; trainings."""
    histories = [result for result in results if isinstance(result, Training)]
    for result in results:
        if isinstance(result, Removal):
            yield PageBlock("Pruning", result.folder.resolve().name, result.answers())
        elif not isinstance(result, Training):
            kinds = [*(["quality"] if result.measured else []), "sites", *(["gates"] if result.gates else [])]
            drawn = [image for kind in kinds for image in draw("pruning", [result], figure=kind)]
            yield PageBlock("Pruning", result.name, result.answers(), drawn)
    if histories:
        answers = [answer for run in histories for answer in run.answers()]
        answers += training_answers(histories, number_same([run.name for run in histories]))
        yield PageBlock("Training", "", answers, draw("training", histories))


def draw(name: str, runs: Sequence[Any], **options: Any) -> list[Markup]:
    """A figure as an image, nothing where it is none of the runs or they lack what it shows."""
    figure = find_figure(name)
    try:
        if figure.runs == "each" and not figure.is_of(runs[0]):
            return []
        drawn = figure.drawn(runs, figure.Options(**options))
    except HeadscopeError:
        return []
    return [image_html(drawn, figure.summary)]


def image_html(figure: Any, title: str) -> Markup:
    """A figure as an image of SVG in the page itself, with hundredths of a point; images run and ask for nothing."""
    content = StringIO()
    with FigureStyle().in_use(), rc_context({"svg.hashsalt": "headscope"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    svg = re.sub("<[^>]+>", lambda tag: LONG.sub(r"\1", tag[0]), CONTROL.sub("\ufffd", content.getvalue()))
    kept = svg[svg.index("<svg") :].replace("<svg", '<svg xml:space="preserve"', 1)  # several spaces in a text
    address = quote(kept, safe=" <>/=:;,.'()-_!*+$@?[]{}|~&\n")
    return Markup('<img src="data:image/svg+xml,{}" alt="{}">').format(address, title)

"""The page about runs: answers and figures in sections, in one HTML file that loads nothing and sends nothing."""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape
from matplotlib import colormaps, rc_context
from matplotlib.colors import to_hex

from headscope.config.declarations import measured_columns
from headscope.errors import HeadscopeError
from headscope.files.reading import read_record
from headscope.files.writing import write_atomically
from headscope.heads import SITES
from headscope.report.comparison import StudyComparison
from headscope.report.figures.layers import PARTS
from headscope.report.fork import read_run
from headscope.report.marks import contrast
from headscope.report.page.heads import marks, run_data
from headscope.report.registry import find_figure, plot_figures
from headscope.report.styles import FigureStyle, check_path, number_same
from headscope.results.answer import CONTROL, Answer
from headscope.results.removal import KINDS, RECORD, Removal
from headscope.results.study import Study
from headscope.results.sweep import Sweep, open_pruned
from headscope.results.training import Training
from headscope.version import VERSION

LIVE = "functions"  # this figure is an interactive map on the page
LONG_DECIMAL = re.compile(r"(\d\.\d\d)\d+")
HEAD_NAME = re.compile(rf"\b(?:{'|'.join(site.value for site in SITES)})\.\d+\.\d+\b")
NAMING, FIRST_NAMES = ("head", "which"), ("the clearest",)
"""Columns of answers whose words are names of heads, and those whose first word is one."""


@dataclass
class PageBlock:
    """Answers and figures under one heading of a section; links to heads lead to the study with the number `run`."""

    section: str
    title: str = ""
    answers: Sequence[Answer] = ()
    figures: Sequence[Markup] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # full names of heads by short names
    run: int = 0


@dataclass
class Report:
    """Everything that the page shows; sections come in the order of their first blocks."""

    title: str
    studies: Sequence[Study] = ()
    runs: Sequence[dict[str, Any]] = ()  # the data of each study for the script
    blocks: Sequence[PageBlock] = ()

    @property
    def sections(self) -> dict[str, list[PageBlock]]:
        """Blocks by the titles of their sections, without empty blocks."""
        sections: dict[str, list[PageBlock]] = {}
        for block in (block for block in self.blocks if block.answers or block.figures):
            sections.setdefault(block.section, []).append(block)
        return sections


def gather(runs: Sequence[Path | Study], *, names: Sequence[str] = ()) -> Report:
    """The report on runs of `analyze`, `prune` and `train`, in any order."""
    by_kind: dict[str, list[Any]] = {"analysis": [], "pruning": [], "removal": [], "training": []}
    for run in runs:
        by_kind["analysis" if isinstance(run, Study) else kind_of(run)].append(run)
    studies = [read_run(run) if isinstance(run, Path) else run for run in by_kind["analysis"]]
    removals, trainings = list(map(Removal.open, by_kind["removal"])), list(map(Training.open, by_kind["training"]))
    sweeps = open_pruned(by_kind["pruning"])
    study_names = names or number_same([study.name for study in studies])
    run_data_list = [run_data(study, name) for study, name in zip(studies, study_names, strict=True)]
    removal_names = [removal.folder.resolve().name for removal in removals]
    removal_names += [*(sweep.name for sweep in sweeps), *(run.name for run in trainings)]
    titles = [study.model for study in studies] or removal_names
    blocks = [*study_blocks(studies, run_data_list), *pruning_blocks(removals, sweeps)]
    if trainings:
        answers = [answer for run in trainings for answer in run.answers()]
        blocks.append(PageBlock("Training", "", answers, draw("training", trainings)))
    return Report(", ".join(dict.fromkeys(titles)) or "nothing", studies, run_data_list, blocks)


def kind_of(path: Path) -> str:
    """The kind of a run by its files: "pruning", "removal", "training", else "analysis"."""
    if read_record(path / RECORD).get("kind") in KINDS:
        return "removal"
    if (path / "sweep.json").is_file() or (path / RECORD).is_file():
        return "pruning"
    return "training" if read_record(path / "run.json").get("kind") == "training" else "analysis"


def study_blocks(studies: Sequence[Study], runs: Sequence[Mapping[str, Any]]) -> Iterator[PageBlock]:
    """Comparisons of the first study with the others, findings of every study, then figures."""
    names = [run["name"] for run in runs]
    short = [{head["short"]: head["name"] for head in run["heads"]} for run in runs]
    titles = [f"Run {name}" for name in names] if len(studies) > 1 else [""] * len(studies)
    pairs = [
        StudyComparison([studies[0], other], names=(names[0], name))
        for other, name in zip(studies[1:], names[1:], strict=True)
    ]
    pairs = [pair for pair in pairs if pair.sites or pair.first.model == pair.second.model]
    for pair in pairs:
        title = " and ".join(pair.names)
        yield PageBlock("Findings", f"{title} compared", pair.answers()[1:], (), short[0])
    for number, study in enumerate(studies):
        yield PageBlock("Findings", titles[number], study.answers(), (), short[number], number)
    for pair in pairs:
        images = draw("compare", [pair.first, pair.second], measure=pair.measure) if pair.measure else []
        yield PageBlock("Comparison", " and ".join(pair.names), (), images)
    if len(studies) > 1:
        yield PageBlock("Comparison", "Do functions predict importance", (), draw("needs", studies))
    figures = [figure.name for figure in plot_figures().values() if figure.every_run and figure.name != LIVE]
    for title, study in zip(titles, studies, strict=True):
        yield PageBlock("Figures", title, (), [image for figure in figures for image in draw(figure, [study])])


def pruning_blocks(removals: Sequence[Removal], sweeps: Sequence[Sweep]) -> Iterator[PageBlock]:
    """The answers of removals, then the answers and figures of sweeps."""
    for removal in removals:
        yield PageBlock("Pruning", removal.folder.resolve().name, removal.answers())
    for sweep in sweeps:
        kinds = [*(["quality"] if sweep.has_quality else []), "sites", *(["gates"] if sweep.gates else [])]
        images = [image for kind in kinds for image in draw("pruning", [sweep], figure=kind)]
        yield PageBlock("Pruning", sweep.name, sweep.answers(), images)


def draw(name: str, runs: Sequence[Any], **options: Any) -> list[Markup]:
    """A figure as an image; nothing if the runs lack the data for it."""
    figure = find_figure(name)
    try:
        if figure.runs == "each" and not figure.is_of(runs[0]):
            return []
        sheet = figure.draw_runs(runs, figure.Options(**options))
    except HeadscopeError:
        return []
    return [image_html(sheet, figure.summary)]


def image_html(figure: Any, title: str) -> Markup:
    """A figure as an embedded SVG image, in hundredths of a point; an image runs no script and loads nothing."""
    content = StringIO()
    with FigureStyle().in_use(), rc_context({"svg.hashsalt": "headscope"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    svg = re.sub("<[^>]+>", lambda tag: LONG_DECIMAL.sub(r"\1", tag[0]), CONTROL.sub("\ufffd", content.getvalue()))
    markup = svg[svg.index("<svg") :].replace("<svg", '<svg xml:space="preserve"', 1)  # several spaces in a text
    address = quote(markup, safe=" <>/=:;,.'()-_!*+$@?[]{}|~&\n")
    return Markup('<img src="data:image/svg+xml,{}" alt="{}">').format(address, title)


def write_page(paths: Sequence[Path], out: Path, *, names: Sequence[str] = (), force: bool = True) -> Path:
    """Read runs and write the page about them; `names` replace the names of their directories."""
    check_path(out, page=True, force=force)
    return save_page(gather(paths, names=names), out)


def write_removal_page(folder: Path, name: str) -> Path:
    """Write the page of a removal whose folder will be called `name`, with the sizes that were tried, if any."""
    sweeps = open_pruned([folder / "sizes"]) if (folder / "sizes").is_dir() else []
    sizes = [replace(run, name="Sizes that were tried") for run in sweeps]
    removal = Removal(Removal.open(folder).record, Path(name))
    return save_page(Report(name, blocks=list(pruning_blocks([removal], sizes))), folder / "page.html")


def save_page(report: Report, out: Path) -> Path:
    """Write the page of a report to a path that `check_path` has accepted."""
    # lone surrogates, which some tokenizers return, are written as JSON writes them
    content = page_html(report).encode("utf-8", errors="backslashreplace")
    return write_atomically(out, content)


def page_html(report: Report) -> str:
    """The HTML of the page."""
    heads = [head for run in report.runs for head in run["heads"]]
    labels, families = marks({label for head in heads for label in (*head["labels"], *head["weak"])})
    colors = dict(families.values()) | {f"g{index}": color for index, (_, color) in enumerate(PARTS.values())}
    colors |= {f"s{step}": to_hex(colormaps["viridis"](step / 8)) for step in range(9)}
    files = resources.files(__package__) / "browser-files"
    style = (files / "page.css").read_text(encoding="utf-8") + "".join(
        f".{name} {{ background: {color}; color: {contrast(color)}; fill: {color}; }}\n"
        for name, color in colors.items()
    )
    script = (files / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        report=report,
        marks=lambda names: [labels[name] for name in names],
        measures=_definitions(report),
        facts=[(study, run["name"], facts(study)) for study, run in zip(report.studies, report.runs, strict=True)],
        policy=policy,
        version=VERSION,
        style=Markup(style),
        script=Markup(script),
        data={"runs": report.runs, "labels": labels},
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "browser-files"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: CONTROL.sub("\ufffd", value) if type(value) is str else value,
    )
    environment.filters |= {"cell": cell_html, "prose": prose_html}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment.get_template("page.html")


def digest(content: str) -> str:
    """The hash that allows an inline script or style in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}"


def facts(study: Study) -> dict[str, str]:
    """The texts and numbers in a run's record."""
    record = study.record
    entries = {**(record.get("checkpoint") or {}), **(record.get("data") or {}), **record, "signature": ""}
    entries["command"] = " ".join(map(str, record.get("command") or ()))
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in entries.items() if value}
    return {name: str(text) for name, text in texts.items() if isinstance(text, str) or type(text) is int}


def _definitions(report: Report) -> dict[str, tuple[list[str], list[str]]]:
    """By analysis the titles of its measures in the runs, and the paragraphs of its docstring."""
    columns, definitions = measured_columns(), dict[str, tuple[list[str], list[str]]]()
    for measure in (measure for run in report.runs for measure in run["measures"]):
        if measure["name"] in columns:
            analysis = columns[measure["name"]][0]
            titles, _ = definitions.setdefault(analysis.name, ([], (inspect.getdoc(analysis) or "").split("\n\n")))
            if measure["title"] not in titles:
                titles.append(measure["title"])
    return definitions


def prose_html(text: str) -> Markup:
    """A docstring as HTML: `names` as code without their packages, *words* emphasised."""
    html = re.sub(r"`(?:headscope\.(?:\w+\.)*)?([^`]+)`", r"<code>\1</code>", str(escape(CONTROL.sub("\ufffd", text))))
    return Markup(re.sub(r"\*(\w+)\*", r"<em>\1</em>", html))


def cell_html(text: str, block: PageBlock, column: str = "") -> Markup:
    """A cell or a sentence of an answer, with links for full names of heads, and for short ones in columns of heads."""
    words = text.split(" ") if column in (*NAMING, *FIRST_NAMES) else []
    naming = words[:1] if column in FIRST_NAMES else words
    if any(word in block.names for word in naming):
        links = [_link(word, block.names[word], block.run) if word in block.names else word for word in naming]
        return Markup(" ").join([*links, *words[len(naming) :]])
    html = str(escape(CONTROL.sub("\ufffd", text)))
    return Markup(HEAD_NAME.sub(lambda name: _link(name[0], name[0], block.run), html))


def _link(text: str, name: str, run: int) -> Markup:
    return Markup('<a class="head" href="#head={}/{}">{}</a>').format(run, name, text)

"""The page as one HTML file: style, scripts and data inlined, and a policy that lets it do nothing else.

A notebook shows the compact form: findings, maps as static SVG, the first rows of the table. It holds no script and no
style sheet, works in light and in dark, and shows the numbers of a cell on hover.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from headscope.files.reading import read_record
from headscope.files.tables import Example
from headscope.files.writing import write_atomically
from headscope.heads import SITES
from headscope.report.layout.legend import method_style
from headscope.report.layout.output import check_page
from headscope.report.page.analysis import analysis_data, examples_data, functions_present, marks
from headscope.report.page.cards import cards_data
from headscope.report.page.findings import compared, pruned, trained
from headscope.report.page.importance import (
    comparison_data,
    faithfulness_data,
    importance_data,
    needs_data,
)
from headscope.report.page.numbers import palettes
from headscope.report.page.pruning import RECORD, distinct, is_removal, pruning_data, removal_data, training_data
from headscope.report.readers.fork import read_run
from headscope.results.answer import Answer
from headscope.results.result import answer_html
from headscope.results.result import text_html as text
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.version import VERSION

Report = dict[str, Any]


def gather(given: Sequence[Path | Study], *, names: Sequence[str] = ()) -> Report:
    """The report on runs of `analyze`, `prune` and `train`, in whatever order they are named.

    Studies in memory may be among the runs of `analyze`. `names` replace those of the directories, where all are
    analysis runs. RunError for a directory that is no run.
    """
    analysed: list[Study] = []
    others: dict[str, list[Path]] = {"pruning": [], "removal": [], "training": []}
    for run in given:
        if isinstance(run, Study):
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
    if not path.exists() or (path.is_dir() and not (path / "run.json").is_file()):
        what = "has no run.json" if path.exists() else "is no directory"
        raise RunError(f"{path} {what}; name what `headscope analyze`, `prune` or `train` wrote with --out")
    if path.is_dir() and (record := read_record(path / "run.json").get("kind")) not in (None, "analysis"):
        raise RunError(f"{path} is a run of another kind ({str(record)[:40]}), which no report shows")
    return "analysis"


def analysis_report(run: Study, examples: Sequence[Example], *, name: str = "") -> Report:
    """Everything that the page shows of one analysis run."""
    data = analysis_data(run, name=name)
    data["importance"] = importance_data(run, data)
    data["faithfulness"] = faithfulness_data(run)
    data["examples"] = examples_data(examples)
    data["cards"] = cards_data(run)
    data["findings"] = run.answers()
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
        "needs": needs_data(analyses),
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


SCRIPTS = (
    "core",
    "charts",
    "maps",
    "table",
    "attention",
    "glance",
    "cards",
    "detail",
    "importance",
    "comparison",
    "pruning",
    "start",
)
HEAD_COLUMNS_OF_ANSWERS = ("head", "which")
HEAD_NAME = re.compile(rf"\b(?:{'|'.join(site.value for site in SITES)})\.\d+\.\d+\b")


def write_page(paths: Sequence[Path], out: Path, *, names: Sequence[str] = (), force: bool = True) -> Path:
    """Read runs and write the page about them; `names` replace those of analysis runs' directories.

    RunError for a directory that is no run, OutputError for a file that exists, unless `force` is given.
    """
    check_page(out, force=force)
    return save_page(gather(paths, names=names), out, force=force)


def save_page(report: Report, out: Path, *, force: bool = True) -> Path:
    """Write the page about a report that was gathered."""
    check_page(out, force=force)
    # half a pair of surrogates, which tokenizers may give, stays what JSON writes for it
    content = page_html(report).encode("utf-8", errors="backslashreplace")
    return write_atomically(out, lambda temporary: temporary.write_bytes(content))


def page_html(report: Report) -> str:
    """The whole page."""
    style, script = asset("page.css"), script_of(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": escape(policy),
        "title": text(report["title"]),
        "version": text(report["headscope"]),
        "style": style,
        "findings": findings_html(report),
        "data": data_json(report),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def asset(name: str) -> str:
    """A file of this package."""
    return (resources.files(__package__) / "browser-files" / name).read_text(encoding="utf-8")


def script_of(names: Sequence[str]) -> str:
    """Scripts as one, which shares its names among them and with nothing else."""
    return "(() => {\n'use strict';\n" + "\n".join(asset(f"{name}.js") for name in names) + "})();\n"


def digest(content: str) -> str:
    """How a policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}"


def data_json(report: Mapping[str, object]) -> str:
    """JSON that ends no element: without a `<`, `>` or `&`."""
    content = json.dumps(report, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=Answer.to_json)
    for letter in "<>&\u2028\u2029":
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return content


def findings_html(report: Report) -> str:
    """The findings of every part, as lists that are there without any script; names of heads are links."""
    several = len(report["analyses"]) > 1
    blocks = [
        (f"Run {data['name']}" if several else "", [answer for answer in data["findings"] if not answer.detail], number)
        for number, data in enumerate(report["analyses"])
    ]
    blocks += [("Runs compared", entry["findings"], 0) for entry in report["comparisons"]]
    blocks += [("Pruning", report["pruning"]["findings"], 0), ("Training", report["training"]["findings"], 0)]
    return "\n".join(_block(title, lines, run) for title, lines, run in blocks if lines)


def _block(title: str, lines: Sequence[Answer | str], run: int) -> str:
    heading = f"<h3>{text(title)}</h3>\n" if title else ""
    items = "\n".join(f"<li>{_item(line, run)}</li>" for line in lines)
    return f'{heading}<ul class="findings">\n{items}\n</ul>'


def _item(line: Answer | str, run: int) -> str:
    """An answer or a sentence as the content of a list item; names of heads are links."""
    if isinstance(line, str):
        return _linked(text(line), run)
    names = {name.partition(".")[2]: name for name in line.heads}

    def cell_html(column: str, cell: str) -> str:
        words = (names.get(word, word) if column in HEAD_COLUMNS_OF_ANSWERS else word for word in text(cell).split(" "))
        return _linked(" ".join(words), run)

    return answer_html(line, cell_html=cell_html)


def _linked(html: str, run: int) -> str:
    return HEAD_NAME.sub(lambda match: f'<a class="head" href="#head={run}/{match[0]}">{match[0]}</a>', html)

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

import pandas as pd

from headscope.files.reading import read_record
from headscope.files.tables import Example
from headscope.files.writing import write_atomically
from headscope.heads import SITES
from headscope.report.layout.legend import contrast, functions_of, method_style
from headscope.report.layout.output import check_page
from headscope.report.page.analysis import analysis_data, examples_data, functions_present, marks
from headscope.report.page.cards import cards_data
from headscope.report.page.findings import compared, findings, pruned, trained
from headscope.report.page.importance import (
    comparison_data,
    faithfulness_data,
    importance_data,
    needs_data,
    numbers,
    places_of,
)
from headscope.report.page.numbers import palette, palettes, words
from headscope.report.page.pruning import RECORD, distinct, is_removal, pruning_data, removal_data, training_data
from headscope.report.readers.fork import read_run
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
    if not path.exists() or (path.is_dir() and not (path / "run.json").is_file()):
        what = "has no run.json" if path.exists() else "is no directory"
        raise RunError(f"{path} {what}; name what `headscope analyze`, `prune` or `train` wrote with --out")
    if path.is_dir() and (record := read_record(path / "run.json").get("kind")) not in (None, "analysis"):
        raise RunError(f"{path} is a run of another kind ({str(record)[:40]}), which no report shows")
    return "analysis"


def analysis_report(run: AnalysisRun, examples: Sequence[Example], *, name: str = "") -> Report:
    """Everything that the page shows of one analysis run."""
    data = analysis_data(run, name=name)
    data["importance"] = importance_data(run, data)
    data["faithfulness"] = faithfulness_data(run)
    data["examples"] = examples_data(examples)
    data["cards"] = cards_data(run)
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
HEAD_NAME = re.compile(rf"\b(?:{'|'.join(site.value for site in SITES)})\.\d+\.\d+\b")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


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
    content = json.dumps(report, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return content


def text(value: object) -> str:
    """Text for HTML, also in attributes; control characters as the sign for what cannot be shown."""
    return escape(CONTROL.sub("\ufffd", str(value)))


def findings_html(report: Report) -> str:
    """The findings of every part, as lists that are there without any script; names of heads are links."""
    several = len(report["analyses"]) > 1
    blocks = [
        (f"Run {data['name']}" if several else "", data["findings"], number)
        for number, data in enumerate(report["analyses"])
    ]
    blocks += [("Runs compared", entry["findings"], 0) for entry in report["comparisons"]]
    blocks += [("Pruning", report["pruning"]["findings"], 0), ("Training", report["training"]["findings"], 0)]
    return "\n".join(_block(title, lines, run) for title, lines, run in blocks if lines)


def _block(title: str, lines: Sequence[str], run: int) -> str:
    heading = f"<h3>{text(title)}</h3>\n" if title else ""
    items = "\n".join(f"<li>{_linked(line, run)}</li>" for line in lines)
    return f'{heading}<ul class="findings">\n{items}\n</ul>'


def _linked(line: str, run: int) -> str:
    parts, end = [], 0
    for match in HEAD_NAME.finditer(line):
        parts.append(text(line[end : match.start()]))
        parts.append(f'<a class="head" href="#head={run}/{match[0]}">{match[0]}</a>')
        end = match.end()
    return "".join([*parts, text(line[end:])])


Data = Mapping[str, Any]
SHOWN = 12  # rows of the table
CELL, EDGE, TOP = 22, 26, 34  # pixels of a cell, beside and above a map
MAPS = 2  # measures


def compact_html(data: Data, heads: pd.DataFrame, remarks: Sequence[str]) -> str:
    """What `Study._repr_html_` gives: inert HTML, whatever the texts and names of a run contain."""
    findings = "".join(f"<li>{text(finding)}</li>" for finding in data["findings"])
    lines = "".join(f"<p>{text(line)}</p>" for line in remarks)
    maps = "".join(_maps(data, measure) for measure in _measures(data))
    columns = [name for name in heads.columns if not str(name).endswith(("_low", "_high"))]
    rows = (
        heads[columns].head(SHOWN).map(lambda cell: text(cell) if isinstance(cell, str) else cell).rename(columns=text)
    )
    table = rows.to_html(index=False, border=0, escape=False, float_format=lambda value: f"{value:.3f}")
    hidden = len(heads) - SHOWN
    more = f"<p>… {hidden} more heads in <code>.heads</code></p>" if hidden > 0 else ""
    details = f"<details><summary>table, remarks, signature</summary>{table}{more}{lines}"
    return (
        f"<div><ul>{findings}</ul>{maps}{details}<p><small>{text(data['signature'])}</small></p></details>"
        "<p><small>the whole page: <code>.report('page.html')</code></small></p></div>"
    )


def _measures(data: Data) -> list[Data]:
    """The first overview measures of a run, or its first one."""
    ranked = sorted((m for m in data["measures"] if m["overview"]), key=lambda measure: measure["overview"])
    measures: list[Data] = [*ranked, *data["measures"]]
    return measures[: max(min(MAPS, len(ranked)), 1)]


def _maps(data: Data, measure: Data) -> str:
    colors, values = palette(measure["scale"]["cmap"]), numbers(measure)
    grids = []
    for site, counts in data["layout"].items():
        cells = [
            _cell(place, value, labels, measure, colors)
            for place, value, labels in zip(places_of(data), values, data["functions"], strict=True)
            if place[0] == site
        ]
        width, height = EDGE + max(counts, default=0) * CELL + 4, TOP + len(counts) * CELL + 4
        layers = "".join(
            f'<text x="{EDGE - 6}" y="{TOP + layer * CELL + 15}" text-anchor="end">{layer}</text>'
            for layer in range(len(counts))
        )
        across = "".join(
            f'<text x="{EDGE + head * CELL + CELL / 2:g}" y="{TOP - 5}" text-anchor="middle">{head}</text>'
            for head in range(max(counts, default=0))
        )
        title = f'<text x="2" y="13" font-weight="bold">{text(measure["title"])} · {text(site)}</text>'
        grids.append(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
            f'aria-label="{text(measure["title"])} of the heads at {text(site)}" font-family="sans-serif" '
            f'font-size="10" fill="currentColor" overflow="visible">{title}{layers}{across}{"".join(cells)}</svg>'
        )
    return f"<p>{' '.join(grids)}</p>"


def _cell(
    place: tuple[str, int, int], value: float, labels: Sequence[str], measure: Data, colors: Sequence[str]
) -> str:
    low, high = measure["scale"]["low"], measure["scale"]["high"]
    x, y = EDGE + place[2] * CELL, TOP + place[1] * CELL
    color = ""
    if value == value:
        share = (value - low) / (high - low) if high > low else 0.5
        color = colors[round(min(max(share, 0), 1) * (len(colors) - 1))]
    fill = f'fill="{color}"' if color else 'fill="none" stroke="currentColor" stroke-opacity="0.3"'
    ink = contrast(color) if color else "currentColor"
    at = f'x="{x + CELL / 2 - 1:g}" y="{y + 14}"'
    glyph = "".join(function.family.glyph for function in functions_of(";".join(labels))[:1])
    mark = f'<text {at} text-anchor="middle" fill="{ink}">{text(glyph)}</text>' if glyph else ""
    said = f"{'.'.join(map(str, place))}: {measure['title']} {words(value)}; {', '.join(labels) or 'no label'}"
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" {fill}/>'
    return f"<g><title>{text(said)}</title>{box}{mark}</g>"

"""The page as one HTML file: style, script and data inlined, and a policy that lets it do nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import colormaps
from matplotlib.colors import to_hex

from headscope.config.declarations import measured_columns
from headscope.files.writing import write_atomically
from headscope.heads import SITES
from headscope.report.figures.explained import PARTS
from headscope.report.marks import contrast
from headscope.report.page.heads import facts
from headscope.report.page.report import PageBlock, Report, gather, other_blocks
from headscope.report.styles import check_page
from headscope.results.removal import Removal
from headscope.results.result import CONTROL
from headscope.results.sweep import open_pruned
from headscope.version import VERSION

HEAD_NAME = re.compile(rf"\b(?:{'|'.join(site.value for site in SITES)})\.\d+\.\d+\b")
NAMING, FIRST_NAMES = ("head", "which"), ("the clearest",)
"""Columns of answers that name heads, and those whose first word names one."""


def write_page(paths: Sequence[Path], out: Path, *, names: Sequence[str] = (), force: bool = True) -> Path:
    """Read runs and write the page about them; `names` replace those of analysis runs' directories.

    RunError for a directory that is no run, OutputError for a file that exists, unless `force` is given.
    """
    check_page(out, force=force)
    return save_page(gather(paths, names=names), out)


def write_removal_page(folder: Path, name: str) -> Path:
    """Write the page of a folder that will have a name: what a removal did, and the sizes that were tried, if any."""
    tried = open_pruned([folder / "sizes"]) if (folder / "sizes").is_dir() else []
    sizes = [replace(run, name="Sizes that were tried") for run in tried]
    removal = Removal(Removal.open(folder).record, Path(name))
    return save_page(Report(name, blocks=list(other_blocks([removal, *sizes]))), folder / "page.html")


def save_page(report: Report, out: Path) -> Path:
    """Write the page about a report that was gathered, where `check_page` lets it be."""
    # half a pair of surrogates, which tokenizers may give, stays what JSON writes for it
    content = page_html(report).encode("utf-8", errors="backslashreplace")
    return write_atomically(out, lambda temporary: temporary.write_bytes(content))


def page_html(report: Report) -> str:
    """The whole page."""
    data = report.data
    colors = data.pop("colors") | {f"g{place}": color for place, (_, color) in enumerate(PARTS.values())}
    colors |= {f"s{step}": to_hex(colormaps["viridis"](step / 8)) for step in range(9)}
    style = asset("page.css") + "".join(
        f".{name} {{ background: {color}; color: {contrast(color)}; fill: {color}; }}\n"
        for name, color in colors.items()
    )
    script = asset("page.js")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            marks=lambda labels: [data["labels"][label] for label in labels],
            measures=_definitions(report),
            facts=[(study, run["name"], facts(study)) for study, run in zip(report.studies, report.runs, strict=True)],
            policy=policy,
            version=VERSION,
            style=Markup(style),
            script=Markup(script),
            data=Markup(data_json(data)),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__, "browser-files"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: CONTROL.sub("\ufffd", value) if type(value) is str else value,
    )
    environment.filters |= {"cell": cell_html, "prose": prose_html}
    return environment


def asset(name: str) -> str:
    """A file of this package."""
    return (resources.files(__package__) / "browser-files" / name).read_text(encoding="utf-8")


def digest(content: str) -> str:
    """How a policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}"


def data_json(data: Mapping[str, object]) -> str:
    """JSON that ends no element: without a `<`, `>` or `&`."""
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return content


def _definitions(report: Report) -> dict[str, tuple[list[str], list[str]]]:
    """Of every analysis whose measures the runs have: their titles, and its definition in paragraphs."""
    declared, found = measured_columns(), dict[str, tuple[list[str], list[str]]]()
    for measure in (measure for run in report.runs for measure in run["measures"]):
        if measure["name"] in declared:
            analysis = declared[measure["name"]][0]
            titles, _ = found.setdefault(analysis.name, ([], without_code(analysis.about).split("\n\n")))
            if measure["title"] not in titles:
                titles.append(measure["title"])
    return found


def without_code(about: str) -> str:
    """A definition in which modules go by the last parts of their paths."""
    return re.sub(r"`headscope\.(?:\w+\.)*(\w+)`", r"`\1`", about)


def prose_html(text: str) -> Markup:
    """Text in which `names` stand in code and *words* are stressed."""
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(CONTROL.sub("\ufffd", text))))
    return Markup(re.sub(r"\*(\w+)\*", r"<em>\1</em>", html))


def cell_html(text: str, block: PageBlock, column: str = "") -> Markup:
    """A cell or a sentence of an answer; names of heads are links: full ones, and short ones where heads are named."""
    words = text.split(" ") if column in (*NAMING, *FIRST_NAMES) else []
    naming = words[:1] if column in FIRST_NAMES else words
    if any(word in block.names for word in naming):
        links = [_link(word, block.names[word], block.run) if word in block.names else word for word in naming]
        return Markup(" ").join([*links, *words[len(naming) :]])
    html = str(escape(CONTROL.sub("\ufffd", text)))
    return Markup(HEAD_NAME.sub(lambda name: _link(name[0], name[0], block.run), html))


def _link(text: str, name: str, run: int) -> Markup:
    return Markup('<a class="head" href="#head={}/{}">{}</a>').format(run, name, text)

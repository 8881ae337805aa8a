"""The page as one HTML file: style, scripts and data inlined, and a policy that lets it do nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from headscope.errors import ConfigError
from headscope.files.output_checks import check_file
from headscope.files.writing import write_atomically
from headscope.heads import SITES
from headscope.report.page.gather import Report, gather

SCRIPTS = ("core", "charts", "maps", "table", "attention", "detail", "importance", "comparison", "pruning", "start")
HEAD_NAME = re.compile(rf"\b(?:{'|'.join(site.value for site in SITES)})\.\d+\.\d+\b")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
ENDINGS = (".html", ".htm")


def check_page(out: Path, *, force: bool = False) -> None:
    """ConfigError for a name that is none of a page, OutputError for a file that must not be replaced."""
    if out.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--out {out}: the report is one HTML page; end the name with .html")
    check_file(out, force=force)


def write_page(paths: Sequence[Path], out: Path, *, names: Sequence[str] = (), force: bool = True) -> Path:
    """Read runs and write the page about them; `names` replace those of analysis runs' directories.

    RunError for a directory that is no run, OutputError for a file that exists, unless `force` is given.
    """
    check_page(out, force=force)
    return save_page(gather(paths, names=names), out, force=force)


def save_page(report: Report, out: Path, *, force: bool = True) -> Path:
    """Write the page about a report that was gathered."""
    check_page(out, force=force)
    html = page_html(report)
    return write_atomically(out, lambda temporary: temporary.write_bytes(encoded(html)))


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


def encoded(html: str) -> bytes:
    """UTF-8; half a pair of surrogates, which tokenizers may give, stays what JSON writes for it."""
    return html.encode("utf-8", errors="backslashreplace")


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

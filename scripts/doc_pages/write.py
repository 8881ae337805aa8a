"""The pages of `docs/` with what the code says in them: between `<!-- generated: NAME -->` and `<!-- end -->`.

`<!-- file: PATH -->` quotes a file under its name. All is committed, so that pages read the same in the repository and
on the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from scripts.doc_pages import known_roles, pruning_report, registries
from scripts.documented import ROOT, pages

GENERATORS: dict[str, Callable[[], str]] = {
    "analyses": registries.analyses,
    "importances": lambda: registries.analyses(group="importance"),
    "prompts": lambda: registries.analyses(group="prompts"),
    "criteria": registries.criteria,
    "variants": registries.variants,
    "engines": registries.engines,
    "objectives": registries.objectives,
    "rules": registries.rules,
    "known-roles": known_roles.known_roles,
    **pruning_report.TABLES,
}
PART = re.compile(r"^<!-- (generated|file): (\S+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
PLUGIN = ROOT / "tests" / "plugin"
"""A package of examples, whose files are called as they are in it."""
PRUNING = ROOT / "benchmarks" / "pruning" / "README.md"
LANGUAGES = {".py": "python", ".toml": "toml"}


def render_pages() -> dict[Path, str]:
    """The text of every page with a generated part."""
    texts = {page: page.read_text(encoding="utf-8") for page in (*pages(), PRUNING)}
    return {page: PART.sub(_fill, text) for page, text in texts.items() if PART.search(text)}


def _fill(part: re.Match[str]) -> str:
    kind, name = part.groups()
    text = GENERATORS[name]() if kind == "generated" else _quote(ROOT / name)
    return f"<!-- {kind}: {name} -->\n\n{text.strip()}\n\n<!-- end -->"


def _quote(file: Path) -> str:
    name = file.relative_to(PLUGIN if file.is_relative_to(PLUGIN) else ROOT).as_posix()
    return f"`{name}`:\n\n```{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8').strip()}\n```"

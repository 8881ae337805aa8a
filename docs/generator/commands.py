"""A hook of MkDocs: a page for every command and the table of the MHR fork's options, made when the site is built.

Typer's own help records are shown, so that pages and `--help` cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import typer
from mkdocs.structure.files import File

from headscope.cli import main
from headscope.cli.mhr_options import FAIRSEQ, FORK, Counterpart
from headscope.cli.options import default_words, metavar_of
from headscope.config.option import declared_options


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, with the generated pages."""
    made = {f"commands/{name}.md": text for name, text in pages().items()} | {"mhr-options.md": mhr_options()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def mhr_options() -> str:
    """What each option of the MHR fork, and of the fairseq that it extends, is called in headscope."""
    tables = {"Options of the fork": FORK, "Options of fairseq that its commands use": FAIRSEQ}
    lines = [
        "# Options of the MHR fork",
        "",
        "headscope prints the same answer when such an option is typed. `train baseline` stands for any variant.",
    ]
    for title, table in tables.items():
        rows = [f"| <code>{name}</code> | {_usage_of(each)} | {_cell(each.note)} |" for name, each in table.items()]
        lines += ["", f"## {title}", "", "| fork | headscope | |", "| --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _usage_of(counterpart: Counterpart) -> str:
    return f"<code>{_cell(counterpart.usage())}</code>" if counterpart.commands else "–"


def pages() -> dict[str, str]:
    """The text of every page, by the name of its command."""
    root = typer.main.get_command(main.app)
    return {name: "\n".join(_page(name, root.get_command(None, name))) + "\n" for name in main.COMMANDS}  # type: ignore


def _page(name: str, command: Any) -> Iterator[str]:
    yield f"# headscope {name}"
    yield from ("", *_words(command))
    if not hasattr(command, "list_commands"):
        yield from _usage(name, command)
        yield from _panels(_records(command), level=2)
        return
    below = {sub: command.get_command(None, sub) for sub in command.list_commands(command.context_class(command))}
    records = {sub: _records(each) for sub, each in below.items()}
    shared = [record for record in next(iter(records.values())) if all(record in each for each in records.values())]
    for sub, each in below.items():
        yield from ("", f"## {name} {sub}", "", *_words(each), *_usage(f"{name} {sub}", each))
        yield from _panels([record for record in records[sub] if record not in shared], level=3)
    yield from ("", f"## Options of every `headscope {name}`")
    yield from _panels(shared, level=3)


def _words(command: Any) -> list[str]:
    return [(command.help or "").strip()]


def _usage(name: str, command: Any) -> Iterator[str]:
    arguments = [_metavar(parameter) for parameter in command.params if _is_argument(parameter)]
    needed = [record[0] for record in _records(command) if record[1].endswith("[required]") and record[0][0] == "-"]
    yield from ("", "```text", " ".join(["headscope", name, *arguments, *needed, "…"]), "```")


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _context(command: Any) -> Any:
    return command.context_class(command, info_name="headscope")


Record = tuple[str, str, str]
"""How an option is written, its help text with default and range, and its panel."""


def _records(command: Any) -> list[Record]:
    """The options of a command in the order of its help."""
    context = _context(command)
    found = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if _is_argument(parameter):
            found.append((_metavar(parameter), record[1], "Arguments"))
        elif parameter.name != "help":
            found.append((*record, getattr(parameter, "rich_help_panel", None) or "Options"))
    callback = command.callback
    options = [("", *pair) for pair in getattr(callback, "entries", ()) if pair[0].metadata["flagless"]]
    for owner, cls in sorted((getattr(callback, "owners", None) or dict)().items()):
        options += [(f"{owner}.", *pair) for pair in declared_options(cls)]
    for owner, entry, hint in options:
        name = (entry.metadata["name"] or entry.name).replace("_", "-")
        text = entry.metadata["help"] + default_words(entry)
        found.append((f"--set {owner}{name}={metavar_of(entry, hint)}", text, "Options without a flag"))
    return found


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _panels(records: list[Record], *, level: int) -> Iterator[str]:
    """A table for each panel."""
    for panel in dict.fromkeys(panel for _, _, panel in records):
        yield from ("", f"{'#' * level} {panel}", "", "| option | |", "| --- | --- |")
        for written, text, of in records:
            if of == panel:
                yield f"| <code>{_cell(written)}</code> | {_cell(text)} |"


def _cell(text: str) -> str:
    """Text in a cell of a table: one line, and no sign that Markdown or HTML would take for its own."""
    parts = [escape(part).replace("|", "&#124;") for part in " ".join(text.split()).split("`")]
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))

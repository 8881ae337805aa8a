"""The commands of README and pages: every option exists, and the commands run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import headscope as hs
from headscope.cli import main
from headscope.cli.main import COMMANDS
from headscope.config.declarations import declarations
from headscope.pruning.closed_form import anchors
from headscope.pruning.removal import remove
from headscope.pruning.removal.verify import timings
from scripts.doc_pages.write import render_pages
from scripts.documented import FIRST_HOUR, README, blocks, commands, name, pages
from tests.docs.newcomer import Newcomer, narrow_bert, reduce_work
from tests.makers.figures import draw_nothing
from tests.makers.modules import ROOT
from tests.makers.shared import first_lines

COMMAND_PAGES = [*(page for page in pages() if commands(page)), FIRST_HOUR]
ELSEWHERE = {"docs/api.md", "docs/growing.md"}
"""Pages whose Python is run by `test_api_docs.py`, or is that of the plugin which `test_packaging.py` installs."""
PYTHON_PAGES = [page for page in pages() if blocks(page, "python") and name(page) not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name)
def test_every_option_of_a_page_exists(page: Path) -> None:
    for command in commands(page):
        if command.is_headscope:
            for arguments in (command.arguments, reduce_work(command.arguments)):
                _parse(typer.main.get_command(main.app), arguments)


def _parse(command: Any, arguments: list[str]) -> None:
    """Parse as the program does; fail at an unknown option, an invalid value or a missing one."""
    while hasattr(command, "list_commands"):
        word, *arguments = arguments
        assert word in command.list_commands(command.context_class(command)) or "+" in word, word
        command = command.get_command(command.context_class(command), word)
    command.make_context("headscope", arguments)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("newcomer")
        bert = narrow_bert(folder / "bert", hs.assets.demo_checkpoint())
        patch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
        patch.setattr(remove, "timings", lambda *models, batch, rounds: timings(*models, batch=batch, rounds=1))
        patch.setattr(anchors, "varied_sample", lambda kind: first_lines(hs.assets.varied_sample(kind), folder, 24))
        draw_nothing(patch)
        patch.chdir(folder)
        yield Newcomer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name)
def test_the_commands_of_a_page_run(page: Path, newcomer: Newcomer) -> None:
    """The commands of the README run first, since pages build on them; each runs once for all pages."""
    for command in [*commands(README), *commands(page)]:
        newcomer.type_command(command)


@pytest.mark.slow
def test_the_small_llama_has_learnt_something(newcomer: Newcomer) -> None:
    match = re.fullmatch(r"perplexity (\d+\.\d) on 40 captions", newcomer.outputs["python examples/make_llama.py"])
    assert match is not None and float(match[1]) < 200, "of 512 pieces"


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_the_python_of_a_page_runs(page: Path, newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run in order, with the public API alone, after the commands of the page, on few captions."""
    monkeypatch.setattr(hs.assets, "captions", lambda language: newcomer.folder / f"train.{language}")
    for command in [*commands(README), *commands(page)]:
        newcomer.type_command(command)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        assert not re.search(r"^(from|import) headscope(?! as hs$)", block.text, re.MULTILINE)
        exec(compile(block.text, name(page), "exec"), names)


# The notebook runs from its first cell to its last, as IPython runs cells, and shows what it says.


NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first lines of the captions, with a BERT that is narrow."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.pylabtools import select_figure_formats
    from traitlets.config import Config

    file = tmp_path_factory.mktemp("text") / "captions.en"
    file.write_text("\n".join(hs.assets.captions("en").read_text(encoding="utf-8").splitlines()[:24]), encoding="utf-8")
    bert = narrow_bert(file.parent / "bert", hs.assets.demo_checkpoint(), layers=4)
    monkeypatch.setattr(hs.assets, "captions", lambda language: file)
    monkeypatch.setattr(hs.assets, "demo_checkpoint", lambda: bert)
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # it is committed without what it shows
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    shell: Any = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    select_figure_formats(shell, {"png"})
    results: list[dict[str, Any]] = []
    for cell in cells:
        if cell["cell_type"] == "code":
            result = shell.run_cell("".join(cell["source"]))
            result.raise_error()
            results += [] if result.result is None else [shell.display_formatter.format(result.result)[0]]
    texts = [data["text/plain"] for data in results]
    assert "encoder-self 4 × 12" in texts[0] and "text/html" in results[1]
    assert any("image/png" in data for data in results)
    assert float(texts[-1]) > 0.95
    assert [path.name for path in tmp_path.iterdir()] in ([], [".ipython"])


def test_the_notebook_uses_the_public_api_alone() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.findall(r"(?:from|import) headscope[^\\]*", text) == ["import headscope as hs"]


# The documentation builds without a warning, asks nothing of a network, and leaves out no command and no measure.


WARNINGS = "ignore::DeprecationWarning"  # of the generator's own libraries


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or an anchor that leads nowhere, or a page in no menu, is an error of the build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        folder = tmp_path_factory.mktemp("site")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.run_event("startup", command="build", dirty=False)
        build(config)
        assert config.strict
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNINGS)
def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        urls = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\" >]+)", text)
        assert not urls, (page.name, urls)
        assert 'class="mermaid"' not in text  # the theme would fetch what draws it
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?https?:", sheets)


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNINGS)
def test_every_command_and_every_measure_has_its_place(site: Path) -> None:
    for command in COMMANDS:
        assert f"headscope {command}" in (site / "commands" / f"{command}.html").read_text(encoding="utf-8")
    assert "<code>--gamma-conf</code>" in (site / "mhr-options.html").read_text(encoding="utf-8")
    assert "<code>bert</code>" in (site / "architectures.html").read_text(encoding="utf-8")
    measures = (site / "measures.html").read_text(encoding="utf-8")
    for analysis in declarations("measures"):
        assert re.search(rf"<h3[^>]*><code>{re.escape(analysis.name)}</code>", measures), analysis.name
        assert all(f"<code>{measure.name}</code>" in measures for measure in analysis.measures)


@pytest.mark.slow
def test_pages_hold_what_the_code_says_now() -> None:
    """`python -m scripts.doc_pages` writes them."""
    stale = [page.name for page, text in render_pages().items() if page.read_text(encoding="utf-8") != text]
    assert not stale

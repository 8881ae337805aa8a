"""What README and pages tell a newcomer to type: every option exists, and the commands run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import headscope as hs
from headscope.cli import main
from headscope.pruning.removal import remove
from headscope.pruning.removal.verify import timings
from scripts.documented import FIRST_HOUR, README, blocks, commands, name, pages
from tests.docs.newcomer import Newcomer, narrow_bert, smaller

TYPED = [*(page for page in pages() if commands(page)), FIRST_HOUR]
ELSEWHERE = {"docs/api.md", "docs/growing.md"}
"""Pages whose Python is run by `test_api_docs.py`, or is that of the plugin which `test_plugins.py` installs."""
WRITTEN = [page for page in pages() if blocks(page, "python") and name(page) not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED, ids=name)
def test_every_option_of_a_page_exists(page: Path) -> None:
    for command in commands(page):
        if command.is_headscope:
            for arguments in (command.arguments, smaller(command.arguments)):
                _parsed(typer.main.get_command(main.app), arguments)


def _parsed(command: Any, arguments: list[str]) -> None:
    """Parse as the program does; an error for an unknown option, a value that is none, and one that lacks."""
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
        patch.chdir(folder)
        yield Newcomer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED, ids=name)
def test_the_commands_of_a_page_run(page: Path, newcomer: Newcomer) -> None:
    """After those of the README, which the pages build on; each once for all pages."""
    for command in [*commands(README), *commands(page)]:
        newcomer.types(command)


@pytest.mark.slow
def test_the_small_llama_has_learnt_something(newcomer: Newcomer) -> None:
    said = re.fullmatch(r"perplexity (\d+\.\d) on 40 captions", newcomer.printed["python examples/make_llama.py"])
    assert said is not None and float(said[1]) < 200, "of 512 pieces"


@pytest.mark.slow
@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_the_python_of_a_page_runs(page: Path, newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, with the public API alone, where the page's commands were typed; captions are few."""
    monkeypatch.setattr(hs.assets, "captions", lambda language: newcomer.folder / f"train.{language}")
    for command in [*commands(README), *commands(page)]:
        newcomer.types(command)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        assert not re.search(r"^(from|import) headscope(?! as hs$)", block.text, re.MULTILINE)
        exec(compile(block.text, name(page), "exec"), names)

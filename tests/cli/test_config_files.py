"""`examples/config`: a file for each command that takes `--config`, with every option, its help and its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headscope.cli.options import read_config
from tests.makers.config_files import FOLDER, configurable, filename, options, page

COMMANDS = configurable()


def test_there_is_a_file_for_each_command_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {filename(words) for words in COMMANDS} and len(COMMANDS) > 10


@pytest.mark.parametrize("words", COMMANDS)
def test_a_file_is_what_the_command_says_today(words: str) -> None:
    text = (FOLDER / filename(words)).read_text(encoding="utf-8")
    assert text == page(words, COMMANDS[words]), "the options changed: python -m tests.makers.config_files"


@pytest.mark.parametrize("words", COMMANDS)
def test_every_line_may_be_uncommented(words: str, tmp_path: Path) -> None:
    """The file sets nothing as it stands; uncommented it sets every option, to its default where it has one."""
    command, names = COMMANDS[words], list(options(COMMANDS[words]))
    known = [name.replace("-", "_") for name in names]
    assert read_config(FOLDER / filename(words), known) == {}
    text = (FOLDER / filename(words)).read_text(encoding="utf-8")
    (tmp_path / "all.toml").write_text(re.sub(r"^#(?! )", "", text, flags=re.MULTILINE), encoding="utf-8")
    values = read_config(tmp_path / "all.toml", known)
    assert sorted(values) == sorted(known)
    for name, parameter in options(command).items():
        value = values[name.replace("-", "_")]
        assert parameter.default is None or type(parameter.default)(value) == parameter.default

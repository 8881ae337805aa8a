"""`examples/config`: a file for each command that takes `--config`, with every option, its help and its default."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope.cli.options import InFile, read_config
from headscope.heads import Site, select_heads
from tests.makers.config_files import FOLDER, configurable, filename, in_file, options, page

Command = Callable[..., tuple[int, str, str]]
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
    command = COMMANDS[words]
    known = {name.replace("-", "_"): in_file(command, option) for name, option in options(command).items()}
    assert read_config(FOLDER / filename(words), known) == {}
    text = (FOLDER / filename(words)).read_text(encoding="utf-8")
    (tmp_path / "all.toml").write_text(re.sub(r"^#(?! )", "", text, flags=re.MULTILINE), encoding="utf-8")
    values = read_config(tmp_path / "all.toml", known)
    assert sorted(values) == sorted(known)
    for name, parameter in options(command).items():
        value = values[name.replace("-", "_")]
        assert parameter.default is None or type(parameter.default)(value) == parameter.default


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('bootstrap = "many"', 'bootstrap = "many"'),
        ("bootstrap = true", "give a whole number"),
        ("max-sentences = 3.5", "max-sentences = 3.5"),
        ("max_sentences = [3, 4]", "max-sentences = [3, 4]"),
        ("figures = 3", "figures = 3 is of another type; give true or false"),
        ("source = 7", "give a path in quotes"),
        ("only = true", "only = true"),
        ("only = [true]", "only = [true]"),
        ("seed = 1979-05-27", 'seed = "1979-05-27"'),
        ("batch-tokens = 0.5", "give a whole number or auto"),
        ("zero-steps = nan", "unknown option zero-steps"),
        ("max_sentences = 5\nmax-sentences = 6", "max-sentences is there twice, also as max_sentences; keep one"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_file(
    line: str, said: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f"{line}\n", encoding="utf-8")
    status, shown, error = command("analyze", hs.assets.trained(), "--config", "run.toml", "--out", "o")
    assert (status, shown, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: run.toml: ") and said in error
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_numbers_may_stand_in_quotes_and_lists_in_texts() -> None:
    numbers, tokens = InFile(tuple[int, ...]), InFile(int, ["auto"])
    assert all(numbers.fits(value) for value in ("3,4", [3, 4], ["3"], 3)) and not numbers.fits("3,x")
    assert tokens.fits("auto") and tokens.fits("12") and not tokens.fits("most")
    assert InFile(str, ["cheap", "all"]).fits(True) and not InFile(float).fits("inf")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    """As editors of Windows write one before UTF-8."""
    (tmp_path / "run.toml").write_text("bootstrap = 7\n", encoding="utf-8-sig")
    assert read_config(tmp_path / "run.toml", {"bootstrap": InFile(int)}) == {"bootstrap": 7}
    (tmp_path / "heads").write_text("cross.0.1\n", encoding="utf-8-sig")
    assert [str(head) for head in select_heads(str(tmp_path / "heads"), {(Site.CROSS, 0): 2})] == ["cross.0.1"]

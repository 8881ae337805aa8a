"""`examples/config`: a file for each command that takes `--config`, with every option, its help and its default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path

import pytest

import headscope as hs
from headscope.cli.options import read_config
from headscope.config import EvaluateConfig
from headscope.config.option import configured, declared_options
from headscope.heads import Site, select_heads
from scripts.config_files import FOLDER, configurable, filename, lines_of, options, owners, page

Command = Callable[..., tuple[int, str, str]]
COMMANDS = configurable()


def test_there_is_a_file_for_each_command_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {filename(words) for words in COMMANDS} and len(COMMANDS) > 10


@pytest.mark.parametrize("words", COMMANDS)
def test_a_file_is_what_the_command_says_today(words: str) -> None:
    text = (FOLDER / filename(words)).read_text(encoding="utf-8")
    assert text == page(words, COMMANDS[words]), "the options changed: python -m scripts.config_files"


@pytest.mark.parametrize("words", COMMANDS)
def test_every_line_may_be_uncommented(words: str, tmp_path: Path) -> None:
    """The file sets nothing as it stands; a line that is uncommented sets an option to its default, if it has one."""
    known, own = options(COMMANDS[words]), owners(COMMANDS[words])
    owned = {name: dict(pairs) for name, pairs in own.items()}
    assert read_config(FOLDER / filename(words), known, owned) == {}
    for table, pairs in {"": known, **own}.items():
        for entry, hint in pairs:
            if entry.default not in (None, (), MISSING):
                line = lines_of(entry, hint)[-1].removeprefix("#")
                (tmp_path / "one.toml").write_text(f"[{table}]\n{line}\n" if table else line, encoding="utf-8")
                assert read_config(tmp_path / "one.toml", known, owned) == {entry.name: entry.default}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('bootstrap = "many"', "bootstrap is 'many'; it must be a whole number"),
        ("bootstrap = true", "bootstrap is True; give a number"),
        ("max-sentences = 3.5", "max-sentences is 3.5"),
        ("max_sentences = [3, 4]", "max-sentences is [3, 4]"),
        ("figures = 3", "figures is 3; it must be True or False"),
        ("source = 7", "source is 7"),
        ("only = true", "only is True"),
        ("only = [true]", "only is [True]"),
        ("seed = 1979-05-27", "seed is datetime.date(1979, 5, 27)"),
        ("batch-tokens = 0.5", "batch-tokens is 0.5; it must be a whole number or auto"),
        ("zero-steps = nan", "unknown option 'zero-steps'"),
        ("max_sentences = 5\nmax-sentences = 6", "max-sentences is there twice; keep one"),
        ("[confidence]\nbaes = true", "unknown option 'confidence.baes'"),
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
    given = {"checkpoint": "x", "source": "x", "max_sentences": "3", "metrics": "bleu, chrf", "batch_tokens": "auto"}
    config = configured(EvaluateConfig, given)
    assert (config.max_sentences, config.metrics, config.batch_tokens) == (3, ("bleu", "chrf"), None)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    """As editors of Windows write one before UTF-8."""
    (tmp_path / "run.toml").write_text("bootstrap = 7\n", encoding="utf-8-sig")
    assert read_config(tmp_path / "run.toml", list(declared_options(EvaluateConfig)), {}) == {"bootstrap": 7}
    (tmp_path / "heads").write_text("cross.0.1\n", encoding="utf-8-sig")
    assert [str(head) for head in select_heads(str(tmp_path / "heads"), {(Site.CROSS, 0): 2})] == ["cross.0.1"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("sink.bins=2", "unknown option 'sink.bins'"),
        ("snk.bins=2", "unknown analysis 'snk'; did you mean 'sink'"),
        ("lrp", "--set lrp: give NAME=VALUE"),
        ("causal_head_gating.chg_batch=0", "error: --set causal_head_gating.chg-batch is '0'; it must be at least 1"),
    ],
)
def test_options_of_analyses_are_set_by_name(
    typed: str, said: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("a b\n", encoding="utf-8")
    status, _, error = command("analyze", hs.assets.trained(), "--source", "a", "--out", "o", "--set", typed)
    assert (status, error.count("\n")) == (2, 1) and said in error

"""`examples/config`: a file for each command that takes `--config`, with every option, its help and its default."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import headscope as hs
from headscope.cli import error_messages, main, mhr_options
from headscope.cli.analyze import analyze
from headscope.cli.mhr_options import FAIRSEQ, FORK, SHORT, TRAIN, counterpart
from headscope.cli.options import read_config, typed_option
from headscope.config.commands import EvaluateConfig
from headscope.config.option import make_config
from scripts.config_files import FOLDER, configurable, filename, lines_of, options, owners, page
from tests.makers.modules import MODULES
from tests.makers.shared import Command
from tests.oracles.commands import commands

COMMANDS = configurable()


def test_there_is_a_file_for_each_command_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {filename(words) for words in COMMANDS} and len(COMMANDS) > 10


@pytest.mark.parametrize("words", COMMANDS)
def test_a_file_is_what_the_command_says_today(words: str) -> None:
    text = (FOLDER / filename(words)).read_text(encoding="utf-8")
    assert text == page(words, COMMANDS[words]), "the options changed: python -m scripts.config_files"


@pytest.mark.parametrize("words", COMMANDS)
def test_every_line_may_be_uncommented(words: str, tmp_path: Path) -> None:
    """The file sets no option; an uncommented line sets an option to its default, if it has one."""
    entries, tables = options(COMMANDS[words]), owners(COMMANDS[words])
    owned_entries = {name: dict(pairs) for name, pairs in tables.items()}
    assert read_config(FOLDER / filename(words), entries, owned_entries) == {}
    for table, pairs in {"": entries, **tables}.items():
        for entry, hint in pairs:
            if entry.default not in (None, (), MISSING):
                line = lines_of(entry, hint)[-1].removeprefix("#")
                (tmp_path / "one.toml").write_text(f"[{table}]\n{line}\n" if table else line, encoding="utf-8")
                assert read_config(tmp_path / "one.toml", entries, owned_entries) == {entry.name: entry.default}


@pytest.mark.parametrize(
    ("line", "message"),
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
    line: str, message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f"{line}\n", encoding="utf-8")
    status, out, error = command("analyze", hs.assets.trained_model(), "--config", "run.toml", "--out", "o")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: run.toml: ") and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_numbers_may_stand_in_quotes_and_lists_in_texts() -> None:
    settings = {"checkpoint": "x", "source": "x", "max_sentences": "3", "metrics": "bleu, chrf", "batch_tokens": "auto"}
    config = make_config(EvaluateConfig, settings)
    assert (config.max_sentences, config.metrics, config.batch_tokens) == (3, ("bleu", "chrf"), None)


# Options of the MHR fork and of fairseq are answered with ours, which are there.


# mhr.md §6: every flag that the fork registers
FORK_FLAGS = re.findall(
    r"--\S+",
    """
--mask-layer-type --mask-layer --mask-head --mhr-experiment --head-confidence-method --gamma-conf --radius
--loss-start-after --enc-self-alpha-loss-ratio --dec-self-alpha-loss-ratio --dec-enc-alpha-loss-ratio
--use-alphas-bias --cosine-sim-loss --dynamic-type --start-dynamic-mhr --dynamic-swap-frequency
--dynamic-max-switches --dynamic-rest --dynamic-end-epoch --keep-alphas-eval --save-heads-cos_sim
""",
)


def options_of(command: str) -> set[str]:
    """The long options of a command."""
    target: Any = typer.main.get_command(main.app)
    for word in command.split():
        target = target.get_command(None, word)
    return {name for option in target.params for name in (*option.opts, *option.secondary_opts)}


def test_every_flag_of_the_fork_is_in_the_table() -> None:
    assert {flag.replace("_", "-") for flag in FORK_FLAGS} == set(FORK)
    assert all(counterpart(flag) is FORK[flag.replace("_", "-")] for flag in FORK_FLAGS)
    assert not set(FORK) & set(FAIRSEQ) and set(SHORT.values()) <= set(FAIRSEQ)


@pytest.mark.slow
def test_what_is_named_is_there() -> None:
    by_command: dict[str, set[str]] = {}
    for option, entry in {**FORK, **FAIRSEQ}.items():
        assert entry.commands or entry.note, option
        for command in filter(None, entry.commands.split("|")):
            flags = by_command.setdefault(command, options_of(command))
            for flag in re.findall(r"--[a-z-]+", entry.options):
                assert flag in flags, (option, command, flag)
            assert option not in flags or option in entry.options, (option, command)
        all_flags = set().union(*by_command.values())
        for flag in re.findall(r"--[a-z][a-z-]*[a-z]", entry.note):
            assert flag in all_flags or flag in options_of(TRAIN) | options_of("analyze"), (option, flag)


# What commands say of files that are not there, before anything heavy is imported, and of what they left out.


MODEL = str(hs.assets.trained_model())
TYPED_COMMANDS = {
    "evaluate": ["evaluate", MODEL],
    "analyze": ["analyze", MODEL, "--out", "o"],
    "rank": ["prune", "rank", MODEL, "--by", "magnitude", "--keep", "3", "--out", "o"],
    "remove": ["prune", "remove", MODEL, "--heads", "cross.0.0", "--out", "o"],
    "sweep": ["prune", "sweep", MODEL, "--out", "o"],
    "l0": ["prune", "l0", MODEL, "--out", "o"],
    "train": ["train", "baseline", "--out", "o"],
}
SCRIPT = """
import sys
for words in {commands!r}:
    sys.argv = ["headscope", *words, "--source", "missing.txt"]
    from headscope.cli import main
    try:
        main.run()
    except SystemExit as ended:
        print(words[1], ended.code, "torch" in sys.modules)
"""


FOREIGN_NAMES = {
    *("help", "help_all", "json", "verbose", "config", "set", "version", "no"),  # of no declaration
    *("batch_size", "path", "cosine_sim_loss", "head_confidence_method"),  # of fairseq and the MHR fork
    "the_name",  # of an example
}
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


@cache
def nodes_of_source() -> list[tuple[ast.AST, str]]:
    """All nodes of the source with their modules, without the tables of options of other programs."""
    foreign = (mhr_options.__name__, error_messages.__name__)
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if name not in foreign}
    return [(node, name) for name, tree in trees.items() for node in ast.walk(tree)]


def names_in(node: ast.AST) -> list[str]:
    """Options that code names: `--the-name` in a text, `flag.the_name`, `flag("the_name")`, `flags("the_name", …)`."""
    match node:
        case ast.Constant(value=str(text)):
            return [name.replace("-", "_") for name in OPTION.findall(text)]
        case ast.Attribute(value=ast.Name(id="flag"), attr=name):
            return [] if name == "spelling" else [name]
        case ast.Call(func=ast.Name(id="flag"), args=[ast.Constant(value=name), *_]):
            return [str(name)]
        case ast.Call(func=ast.Name(id="flags"), args=names):
            return [str(name.value) for name in names if isinstance(name, ast.Constant)]
    return []


@pytest.mark.slow
def test_every_option_that_a_text_names_is_one() -> None:
    flags = [option.flag for command in commands() for option in command.options]
    names = FOREIGN_NAMES | {flag[2:].removeprefix("set=").rpartition(".")[2].replace("-", "_") for flag in flags}
    names |= {f"no_{name}" for name in names}
    assert not [(name, module) for node, module in nodes_of_source() for name in names_in(node) if name not in names]


def messages_in(function: ast.FunctionDef) -> Iterator[str]:
    """The string literals of a function without docstrings; an f-string is one text."""
    blanks = {id(part): "" for node in ast.walk(function) if isinstance(node, ast.JoinedStr) for part in node.values}
    blanks |= {id(node.value): "" for node in ast.walk(function) if isinstance(node, ast.Expr)}
    for node in ast.walk(function):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(getattr(part, "value", "")) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield blanks.get(id(node), node.value)


@pytest.mark.slow
def test_messages_of_the_library_name_options_as_the_front_end_does() -> None:
    for node, module in nodes_of_source():
        if isinstance(node, ast.FunctionDef) and not module.startswith("headscope.cli."):
            for text in messages_in(node):
                words = re.sub("`[^`]*`", "", text)  # which are commands
                match = not words.startswith(("headscope ", "convert ", "prune remove ")) and OPTION.search(words)
                assert not match, f"{module}: {text}"


@pytest.mark.parametrize(
    ("name", "value", "spelling"),
    [
        ("ig_steps", None, "--set integrated_gradients.ig-steps"),
        ("long", "truncate", "--set long=truncate"),
        ("max_length", 9, "--max-length 9"),
        ("alignments", "FILE", "--set alignment.alignments=FILE"),
    ],
)
def test_an_option_is_named_as_it_is_typed(name: str, value: object, spelling: str) -> None:
    command: Any = analyze
    assert typed_option(command.entries, command.owners, name, value) == spelling


@pytest.mark.slow
def test_a_missing_text_is_said_before_torch_is_imported(python: Callable[..., str], tmp_path: Path) -> None:
    lines = python("-c", SCRIPT.format(commands=list(TYPED_COMMANDS.values()))).splitlines()
    assert [line.split()[1:] for line in lines] == [["2", "False"]] * len(TYPED_COMMANDS)


def test_list_without_a_kind_lists_the_kinds(command: Command) -> None:
    status, out, _ = command("list", "--json")
    assert status == 0 and {"analyses", "criteria", "metrics"} < json.loads(out).keys()
    assert all(json.loads(out).values()), "each says what it is"

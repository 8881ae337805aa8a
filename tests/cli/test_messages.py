"""What commands say of files that are not there, before anything heavy is imported, and of what they left out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.cli import mhr_options, usage_errors
from headscope.cli.analyze import analyze
from headscope.cli.options import as_typed
from tests.oracles.commands import commands

Command = Callable[..., tuple[int, str, str]]
MODEL = str(hs.assets.trained())
COMMANDS = {
    "evaluate": ["evaluate", MODEL],
    "analyze": ["analyze", MODEL, "--out", "o"],
    "rank": ["prune", "rank", MODEL, "--by", "magnitude", "--keep", "3", "--out", "o"],
    "remove": ["prune", "remove", MODEL, "--heads", "cross.0.0", "--out", "o"],
    "sweep": ["prune", "sweep", MODEL, "--out", "o"],
    "l0": ["prune", "l0", MODEL, "--out", "o"],
    "train": ["train", "baseline", "--out", "o"],
}
IN_A_PROCESS = """
import sys
for words in {commands!r}:
    sys.argv = ["headscope", *words, "--source", "missing.txt"]
    from headscope.cli import main
    try:
        main.run()
    except SystemExit as ended:
        print(words[1], ended.code, "torch" in sys.modules)
"""


ROOT = Path(hs.__file__).parents[1]
OTHERS = {
    *("--help", "--help-all", "--json", "--verbose", "--config", "--set", "--version", "--no"),  # of no declaration
    *("--batch-size", "--path", "--cosine-sim-loss", "--head-confidence-method"),  # of fairseq and the MHR fork
    "--the-name",  # of an example
}


def flags_in_texts() -> Iterator[tuple[str, str]]:
    """Every `--flag` in a text of the source, with its place; but the tables of what other programs have."""
    for path in sorted(path for area in ("headscope", "cli", "analyses") for path in (ROOT / area).rglob("*.py")):
        if path.name in (Path(str(module.__file__)).name for module in (mhr_options, usage_errors)):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*", node.value):
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.slow
def test_every_flag_that_a_text_names_is_an_option() -> None:
    words = [option.flag for command in commands() for option in command.options]
    known = {f"--{word[2:].removeprefix('set=').rpartition('.')[2].replace('_', '-')}" for word in words}
    known |= OTHERS | {f"--no-{name[2:]}" for name in known}
    assert not {name: place for name, place in flags_in_texts() if name not in known}


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("raise --ig-steps", "raise --set integrated_gradients.ig-steps"),
        ("--long truncate, or --max-length 9", "--set long=truncate, or --max-length 9"),
        (
            "--alignments FILE; --align-corpus and --x",
            "--set alignment.alignments=FILE; --set alignment.align-corpus and --x",
        ),
        ("`headscope prune rank --ig-steps`, --set lrp.rules", "`headscope prune rank --ig-steps`, --set lrp.rules"),
    ],
)
def test_an_option_without_a_flag_is_named_as_it_is_set(message: str, typed: str) -> None:
    command: Any = analyze
    assert as_typed(command.entries, command.owners, message) == typed


@pytest.mark.slow
def test_a_missing_text_is_said_before_torch_is_imported(python: Callable[..., str], tmp_path: Path) -> None:
    said = python("-c", IN_A_PROCESS.format(commands=list(COMMANDS.values()))).splitlines()
    assert [line.split()[1:] for line in said] == [["2", "False"]] * len(COMMANDS)


def test_list_without_a_kind_lists_the_kinds(command: Command) -> None:
    status, out, _ = command("list", "--json")
    assert status == 0 and {"analyses", "criteria", "metrics"} < json.loads(out).keys()

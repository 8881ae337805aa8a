"""Every number that an option of any command takes, far too large or none at all: one line of refusal, or work."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.config_files import configurable
from tests.oracles import commands
from tests.oracles.commands import Command, Option, Stage

COMMANDS = commands.commands()
BASELINE = next(each for each in COMMANDS if each.words == ("train", "baseline"))
SWIFT = settings(
    max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
NEVER = ("nan", "inf", "9" * 40, "9" * 5000, "x")
ABSURD = ("-1", "0", "-0.5", "5e-324", "1e37", "1e308", "2147483647", "2147483648", "9223372036854775807")
TOML = ("[1, 2]", "{ a = 1 }", "true", "1.5", "2020-01-01", "'x'", "nan", "-1", "[]", "''", "[[1]]", "0x" + "f" * 99)
# They say how long a command works: with more than its folder has, or two billion, they do as they are told.
LONG = {"--updates", "--max-epochs", "--tune-updates", "--rounds", "--set=batch", "--seeds"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


def named(command: Command) -> str:
    return " ".join(command.words)


def numbers(command: Command) -> list[Option]:
    """Those of a variant's own where another variant has the others."""
    variant = command.words[0] == "train" and command is not BASELINE
    shared = {option.flag for option in BASELINE.options} if variant else set()
    return [option for option in command.options if option.number and option.flag not in shared]


def test_the_commands_are_all_there() -> None:
    names = {named(command) for command in COMMANDS}
    assert {"show", "analyze", "evaluate", "translate", "convert", "train baseline", "prune l0", "plot heads"} <= names
    assert sum(len(numbers(each)) for each in COMMANDS) > 150


@pytest.mark.parametrize("command", [each for each in COMMANDS if numbers(each)], ids=named)
def test_what_no_number_can_be_is_refused_in_one_line(command: Command, stage: Stage, tmp_path: Path) -> None:
    """Every option with one such text, and with all of them over the options of a command."""
    plain = stage.arguments(command.words, tmp_path / "out")
    for number, option in enumerate(numbers(command)):
        value = NEVER[number % len(NEVER)]
        found = commands.ran([*plain, f"{option.flag}={value}"], stdin=b"a b\n")
        assert found.status == 2 and found.orderly, (option, value[:30], found)
        assert not (tmp_path / "out").exists() and len(found.error) < 1000


CHOICES = [(command, option) for command in COMMANDS for option in numbers(command) if option.flag not in LONG]


def test_absurd_numbers_work_or_are_refused(stage: Stage) -> None:
    @SWIFT
    @given(st.sampled_from(CHOICES), st.sampled_from(ABSURD))
    def tried(choice: tuple[Command, Option], value: str) -> None:
        command, option = choice
        out = stage.folder / f"out{next(stage.numbers)}"
        found = commands.ran([*stage.arguments(command.words, out), f"{option.flag}={value}"], stdin=b"a b\n")
        assert found.orderly, found

    tried()


def test_a_config_file_may_hold_anything(stage: Stage) -> None:
    @SWIFT
    @given(st.sampled_from([each for each in COMMANDS if " ".join(each.words) in configurable()]), st.data())
    def tried(command: Command, data: st.DataObject) -> None:
        option = data.draw(st.sampled_from([each for each in command.options if each.flag not in LONG]))
        path = stage.folder / "options.toml"
        path.write_text(
            f"{option.flag.removeprefix('--').removeprefix('set=')} = {data.draw(st.sampled_from(TOML))}\n",
            encoding="utf-8",
        )
        plain = stage.arguments(command.words, stage.folder / f"out{next(stage.numbers)}")
        given = [part for part in plain if part.partition("=")[0] != option.flag]
        found = commands.ran([*given, "--config", str(path)], stdin=b"a b\n")
        assert found.orderly, (command, found)

    tried()

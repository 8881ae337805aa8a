"""Numbers of options, far too large or none at all, and damaged files: one line of refusal, or work."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headscope.cli.options import read_config
from headscope.config.analyze import AnalyzeConfig
from headscope.config.option import declared_options
from headscope.data.corpus import open_corpus
from headscope.data.vocabulary import Merges
from headscope.engine.frequencies import read_counts
from headscope.errors import CheckpointError, HeadscopeError
from headscope.files.tables import write_pickle
from headscope.formats.fairseq.format import read_dictionary
from headscope.formats.pickles import read_pickle
from headscope.formats.story_of_heads.model import read_hp
from headscope.heads import select_heads
from headscope.pruning.scores_file import read_scores
from headscope.report import fork
from headscope.training.checkpoints import read_state
from headscope.training.swaps import read_schedule
from scripts.config_files import configurable
from tests.oracles import checkpoints, commands
from tests.oracles.commands import Command, Option, Stage
from tests.oracles.damage import damages

COMMANDS = commands.commands()
BASELINE = next(entry for entry in COMMANDS if entry.words == ("train", "baseline"))
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


def command_name(command: Command) -> str:
    return " ".join(command.words)


def numbers(command: Command) -> list[Option]:
    """Those of a variant's own where another variant has the others."""
    variant = command.words[0] == "train" and command is not BASELINE
    shared = {option.flag for option in BASELINE.options} if variant else set()
    return [option for option in command.options if option.number and option.flag not in shared]


def test_the_commands_are_all_there() -> None:
    names = {command_name(command) for command in COMMANDS}
    assert {"show", "analyze", "evaluate", "translate", "convert", "train baseline", "prune l0", "plot heads"} <= names
    assert sum(len(numbers(entry)) for entry in COMMANDS) > 150


@pytest.mark.parametrize("command", [entry for entry in COMMANDS if numbers(entry)], ids=command_name)
def test_what_no_number_can_be_is_refused_in_one_line(command: Command, stage: Stage, tmp_path: Path) -> None:
    """Every option with one such text, and with all of them over the options of a command."""
    plain = stage.arguments(command.words, tmp_path / "out")
    for number, option in enumerate(numbers(command)):
        value = NEVER[number % len(NEVER)]
        outcome = commands.run_cli([*plain, f"{option.flag}={value}"], stdin=b"a b\n")
        assert outcome.status == 2 and outcome.orderly, (option, value[:30], outcome)
        assert not (tmp_path / "out").exists() and len(outcome.error) < 1000


CHOICES = [(command, option) for command in COMMANDS for option in numbers(command) if option.flag not in LONG]


def test_absurd_numbers_work_or_are_refused(stage: Stage) -> None:
    @SWIFT
    @given(st.sampled_from(CHOICES), st.sampled_from(ABSURD))
    def attempt(choice: tuple[Command, Option], value: str) -> None:
        command, option = choice
        out = stage.folder / f"out{next(stage.numbers)}"
        outcome = commands.run_cli([*stage.arguments(command.words, out), f"{option.flag}={value}"], stdin=b"a b\n")
        assert outcome.orderly, outcome

    attempt()


def test_a_config_file_may_hold_anything(stage: Stage) -> None:
    @SWIFT
    @given(st.sampled_from([entry for entry in COMMANDS if " ".join(entry.words) in configurable()]), st.data())
    def attempt(command: Command, data: st.DataObject) -> None:
        option = data.draw(st.sampled_from([entry for entry in command.options if entry.flag not in LONG]))
        path = stage.folder / "options.toml"
        path.write_text(
            f"{option.flag.removeprefix('--').removeprefix('set=')} = {data.draw(st.sampled_from(TOML))}\n",
            encoding="utf-8",
        )
        plain = stage.arguments(command.words, stage.folder / f"out{next(stage.numbers)}")
        arguments = [part for part in plain if part.partition("=")[0] != option.flag]
        outcome = commands.run_cli([*arguments, "--config", str(path)], stdin=b"a b\n")
        assert outcome.orderly, (command, outcome)

    attempt()


# Every file that a user may hand over, damaged at random: it is read, or refused in one line.

Reader = Callable[[Path], object]
LAYOUT = checkpoints.small().layout
OPTIONS = list(declared_options(AnalyzeConfig))
TABLE = 'seed = 3\nonly = ["a", "b"]\nlang = "a"\n'
CONLLU = "# text = a b\n1\ta\t_\tX\t_\t_\t2\tnsubj\t_\t_\n2\tb\t_\tX\t_\t_\t0\troot\t_\t_\n\n"
HP = '{"res_steps": "nlda", "rescale_emb": true, "num_heads": 4, "alive_heads": {"enc-self": [[1, 0]]}}'
SCORES = "site,layer,head,score\ncross,0,0,1\ncross,0,1,2.5\n"
SWAPS = json.dumps(
    {"2": [{f"{end}_{name}": value for end in "sd" for name, value in (
        ("layer", "0"), ("head", 1 if end == "s" else 0), ("layer_module", "self_attn"),
        ("transformer_module", "encoder"))}]}
)  # fmt: skip


PLAIN: dict[str, tuple[str, str, Reader]] = {
    "heads": ("heads.txt", "cross.0.0\nencoder-self.1.*\n", lambda path: select_heads(str(path), LAYOUT)),
    "text": ("text.en", "a b\nc d e\n", lambda path: list(open_corpus(path))),
    "parses": ("text.conllu", CONLLU, lambda path: list(open_corpus(None, parses=path))),
    "counts": ("counts.txt", "a 5\nb 2\n", lambda path: read_counts(checkpoints.small(), path)),
    "options": ("options.toml", TABLE, lambda path: read_config(path, OPTIONS, {})),
    "dictionary": ("dict.en.txt", "a 5\nb 2\n", lambda path: read_dictionary(path, 6, None, owner="x")),
    "codes": ("codes", "#version: 0.2\na b\nab c</w>\n", lambda path: Merges.read(path.read_bytes())),
    "ranked codes": ("codes", "a\tb\t0\nab\tc\t1\n", lambda path: Merges.read(path.read_bytes())),
    "hp": ("hp.json", HP, read_hp),
    "swaps": ("swaps.json", SWAPS, lambda path: read_schedule(path, LAYOUT)),
    "scores": ("scores.csv", SCORES, lambda path: read_scores(path, LAYOUT)),
}


def holds(path: Path, read: Reader, *, examples: int = 10) -> None:
    """Whatever is done to a file, it is read or refused in one line."""
    sound = path.read_bytes()
    read(path)

    @settings(SWIFT, max_examples=examples)
    @given(damages(path.name, sound))
    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except HeadscopeError as error:
            assert 0 < len(str(error)) < 1000

    try:
        attempt()
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize("kind", PLAIN)
def test_single_files(kind: str, tmp_path: Path) -> None:
    name, content, read = PLAIN[kind]
    (tmp_path / name).write_text(content, encoding="utf-8")
    holds(tmp_path / name, read)


def test_states_of_gates(tmp_path: Path) -> None:
    """What `prune l0 --resume` goes on from; a record of another kind is none."""
    record = {"settings": {"a": [1, 2.5]}, "nll": {"before": 1.0}, "weights": torch.ones(3, 5)}
    torch.save(record, tmp_path / "state.pt")
    holds(tmp_path / "state.pt", lambda path: read_state(path.parent, "settings", "nll"), examples=60)
    foreign: list[object] = [[1], {"settings": {}}, {"nll": [1]}, torch.ones(2)]
    for other in foreign:
        torch.save(other, tmp_path / "state.pt")
        with pytest.raises(CheckpointError, match=r"state\.pt"):
            read_state(tmp_path, "settings", "nll")


PICKLE = {"encoder": [{"self_attn": np.array([[0.5, 0.25, 0.75, 4.0], [0.5, 0.5, 0.5, 3.0]])}], "decoder": []}


def test_pickles_of_the_fork(tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "confs.pkl", PICKLE)
    holds(path, lambda path: (read_pickle(path), fork.confidence_run(path)), examples=100)

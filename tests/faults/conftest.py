"""Commands run in this process, and what they read."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headscope.cli import main
from tests.faults import cases

Outcome = tuple[int, str]
Command = Callable[[list[str]], Outcome]


def one_line(err: str) -> bool:
    """Whether stderr has an error and nothing else."""
    return err.startswith("error: ") and err.count("\n") == 1


@pytest.fixture
def headscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run a command: exit status and stderr. What faults leave to the garbage collector is gone after the test."""

    def run(arguments: list[str]) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["headscope", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main.run()
        return int(exit_info.value.code or 0), capsys.readouterr().err

    gc.freeze()  # what was there before the test is not looked through after it
    yield run
    gc.collect()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs of commands."""
    folder = tmp_path_factory.mktemp("inputs")
    cases.prepare(folder)
    return folder

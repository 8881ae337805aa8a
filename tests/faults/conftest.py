"""Commands run in this process, and what they read."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headscope.cli import main
from tests.faults import cases
from tests.faults.faults import Moments

Ran = tuple[int, str]
Command = Callable[[list[str]], Ran]


@dataclass(frozen=True)
class Whole:
    """What a command does when nothing goes wrong: its files with their sizes, its writes and its calls."""

    files: dict[str, int]
    moments: Moments


@dataclass(frozen=True)
class Prepared:
    """What commands read, and what each of them does with it when nothing goes wrong."""

    folder: Path
    whole: dict[str, Whole]


def one_line(err: str) -> bool:
    """Whether stderr has an error and nothing else."""
    return err.startswith("error: ") and err.count("\n") == 1


@pytest.fixture
def headscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run a command: exit status and stderr. What faults leave to the garbage collector is gone after the test."""

    def run(arguments: list[str]) -> Ran:
        monkeypatch.setattr(sys, "argv", ["headscope", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run()
        return int(ended.value.code or 0), capsys.readouterr().err

    yield run
    gc.collect()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """Every command runs once, so that nothing is imported during a fault; `plot` draws a run of `analyze`."""
    folder = tmp_path_factory.mktemp("inputs")
    cases.prepare(folder)
    with cases.short_demo(folder):
        yield Prepared(folder, _whole(folder, tmp_path_factory))


def _whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    whole = {}
    for name, case in cases.CASES.items():
        place = folder if name == "figures" else tmp_path_factory.mktemp(name)
        out = folder / "run" if name == "figures" else case.place(place)
        with pytest.MonkeyPatch.context() as patch, Moments(place).counted() as moments:
            patch.setattr(sys, "argv", ["headscope", *case.command(folder, out)])
            with pytest.raises(SystemExit) as ended:
                main.run()
        assert not ended.value.code, name
        sizes = {file: (out / file if out.is_dir() else out).stat().st_size for file in cases.digests(out)}
        whole[name] = Whole(sizes, moments)
    return whole

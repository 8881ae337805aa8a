"""Helpers that run commands and write files, and folders of the original programs' numbers.

The complete numbers lie beside the repository, an excerpt in it.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_FOLDER = ROOT / "tests" / "data" / "oracles"
"""The excerpt that `scripts.cut_fixtures` makes, in files of the same names."""
SHARED_FOLDER = ROOT.parent / "shared"
CommandResult = tuple[int, str, str]
"""Exit status, stdout, stderr."""
Command = Callable[..., CommandResult]
"""The fixture `command`."""


def succeed(command: Command, *arguments: object) -> str:
    """Stdout of a command that ends well."""
    status, out, err = command(*arguments)
    assert status == 0, err
    return out


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456789\n".format("4d7a" * 16)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def first_lines(path: Path, folder: Path, count: int) -> Path:
    """A file of the same name in a folder that has the first lines alone."""
    return write_lines(folder / path.name, path.read_text(encoding="utf-8").splitlines()[:count])


def shared_folder(environment: Mapping[str, str], default: Path = SHARED_FOLDER) -> Path:
    """The folder of the complete numbers; without it tests fail if CI or HEADSCOPE_SHARED is set, else are skipped."""
    folder = Path(environment.get("HEADSCOPE_SHARED") or default)
    if not folder.is_dir():
        missing = f"the checkpoints of the original programs are not in {folder}; HEADSCOPE_SHARED names their folder"
        if environment.get("HEADSCOPE_SHARED") or environment.get("CI"):
            pytest.fail(missing, pytrace=False)  # a traceback would print the environment
        pytest.skip(missing)
    return folder

"""A table that a command writes once it has measured: checked before the work, and again before it replaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headscope.files.folders import check_writable, replacing_folder
from headscope.files.output_checks import Input, check_file
from headscope.files.writing import write_atomically


class Written(NamedTuple):
    """Where a result is, a remark where that is not where it was to be, and whether another process was quicker."""

    path: Path
    remark: str = ""
    late: bool = False


class OutputFile:
    """The file `path`, which may replace another with `force` alone, and none of the `inputs`.

    OutputError at once where it must not or cannot be written.
    """

    def __init__(self, path: Path, *, inputs: Sequence[Input] = (), force: bool = False) -> None:
        self.path, self.inputs, self.force = path, list(inputs), force
        self._check()
        check_writable(path)

    def protect(self, inputs: Sequence[Input]) -> None:
        """Further inputs, which were found when the others were opened; OutputError where it is one of them."""
        self.inputs += inputs
        self._check()

    def write(self, write: Callable[[Path], object], *, complete: bool) -> Written:
        """Write it where nothing is replaced that may not be: what was measured is never lost.

        What is not `complete` replaces nothing and goes to FILE.new, and so does the result where another process was
        quicker to write FILE.
        """
        check_file(self.path, inputs=self.inputs, force=True)
        new = replacing_folder(self.path)
        if not complete and self.path.exists():
            remark = f"{self.path} stays as it was; {new} has the sentences that were done"
            return Written(write_atomically(new, write), remark)
        if self.force:
            return Written(write_atomically(self.path, write))
        beside = write_atomically(_free(new), write)
        try:
            _rename_to_new(beside, self.path)
        except FileExistsError:
            return Written(beside, f"{self.path} came meanwhile and stays; this result is in {beside}", late=True)
        return Written(self.path)

    def _check(self) -> None:
        check_file(self.path, inputs=self.inputs, force=self.force)


def _rename_to_new(old: Path, new: Path) -> None:
    """Rename a file; FileExistsError where there is one of the new name, also if it came this moment."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if new.exists():
            raise FileExistsError(str(new)) from None
        old.rename(new)
    else:
        old.unlink()


def _free(path: Path) -> Path:
    """The path, or with a number where that is taken."""
    numbers = (path.with_name(f"{path.name}{number}") for number in range(2, 1000))
    return next((name for name in (path, *numbers) if not name.exists()), path)

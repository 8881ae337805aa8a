"""Zip files that others wrote, and arrays of .npz: nothing is unpickled, and nothing larger than it says is read."""

from __future__ import annotations

import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.errors import CheckpointError, one_line, reason_of, restate

RATIO = 100  # weights hardly compress; a member that is said to shrink further is refused before it is read
ZIP = b"PK\x03\x04"
BROKEN_ZIP = (
    *(EOFError, KeyError, NotImplementedError, OSError, OverflowError, RuntimeError, UnicodeDecodeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""What `zipfile` raises at damaged files."""


def first_member(path: Path) -> str:
    """Name of the member that a zip file begins with, "" where it is none; works on truncated files too."""
    try:
        with path.open("rb") as file:
            head = file.read(30)
            if len(head) < 30 or not head.startswith(ZIP):
                return ""
            return file.read(min(int.from_bytes(head[26:28], "little"), 200)).decode("utf-8", errors="replace")
    except OSError:
        return ""


def refuse_bombs(archive: zipfile.ZipFile) -> None:
    """BadZipFile for a member that would be far larger than its stored bytes."""
    for info in archive.infolist():
        if info.file_size > RATIO * max(info.compress_size, 2**16):
            raise zipfile.BadZipFile(f"its member {info.filename[:80]} is said to be far larger than what is stored")


def zip_damage(path: Path) -> str | None:
    """The damage of a zip file, whose members are all read and compared with their checksums. None if it is intact.

    `torch.serialization.set_crc32_options(False)` leaves out all checksums: zeros.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bombs(archive)
            members = archive.infolist()
            for info in members:
                archive.open(info).close()  # the names of a member are the same in both places
            if (member := archive.testzip() if any(info.CRC for info in members) else None) is not None:
                return f"the checksum of its member {member[:80]} is another one"
    except BROKEN_ZIP as error:
        return reason_of(error, max_length=120)
    return None


BROKEN = (*BROKEN_ZIP, MemoryError, RecursionError, SyntaxError, TypeError, tokenize.TokenError)
BFLOAT16 = np.dtype("V2")
"""How numpy writes ml_dtypes' bfloat16."""


class Arrays:
    """The arrays of floats of an .npz, read one at a time; CheckpointError in one line for whatever is broken.

    Bytes are in the order of this machine, whatever their order in the file; bfloat16 is widened to float32.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading("the archive"), zipfile.ZipFile(path) as archive:
            refuse_bombs(archive)
            self.names = frozenset(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))

    def __getitem__(self, name: str) -> NDArray[Any]:
        with self._reading(name), np.load(self.path, allow_pickle=False) as archive:
            array = np.asarray(archive[name])
        if (array.dtype.kind != "f" and array.dtype != BFLOAT16) or array.dtype.itemsize > 8:
            kind = one_line(array.dtype.str)[:40]
            raise CheckpointError(f"{self.path}: array {name[:80]} is of the type {kind}; save it as float32")
        return native_numbers(array)

    @contextmanager
    def _reading(self, content: str) -> Iterator[None]:
        problem = f"{self.path} is truncated or broken: {content} ({{why}})"
        with restate(CheckpointError, problem, *BROKEN), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's about headers that Python 2 wrote
            yield


def native_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Numbers in the byte order of this machine; bfloat16, which numpy stores as two bytes without meaning, as float32.

    The order of bfloat16 is that of the machine that wrote it, which no file says: little-endian.
    """
    if array.dtype == BFLOAT16:
        return (np.frombuffer(array.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)

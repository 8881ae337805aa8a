"""Untrusted zip files, and the arrays of .npz: nothing is unpickled, and oversized members are refused."""

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

RATIO = 100  # weights hardly compress; a member with a larger compression ratio is refused before it is read
ZIP = b"PK\x03\x04"
BROKEN_ZIP = (
    *(EOFError, KeyError, NotImplementedError, OSError, OverflowError, RuntimeError, UnicodeDecodeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""The errors of `zipfile` for damaged files."""


def first_member(path: Path) -> str:
    """The name of the first member of a zip file, even a truncated one; "" for other files."""
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
    """What is wrong with a zip file, by the checksums of all its members; None if it is intact.

    Checksums are not compared if all are 0, as torch writes them after `set_crc32_options(False)`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bombs(archive)
            members = archive.infolist()
            for info in members:
                archive.open(info).close()  # compares the member's two headers
            if (member := archive.testzip() if any(info.CRC for info in members) else None) is not None:
                return f"the checksum of its member {member[:80]} is another one"
    except BROKEN_ZIP as error:
        return reason_of(error, max_length=120)
    return None


BROKEN = (*BROKEN_ZIP, MemoryError, RecursionError, SyntaxError, TypeError, tokenize.TokenError)
BFLOAT16 = np.dtype("V2")
"""The dtype that numpy writes for bfloat16 of ml_dtypes."""


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
    """Numbers in the byte order of this machine; bfloat16, which numpy stores as opaque pairs of bytes, as float32.

    The file does not record the byte order of bfloat16; little-endian is assumed.
    """
    if array.dtype == BFLOAT16:
        return (np.frombuffer(array.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)

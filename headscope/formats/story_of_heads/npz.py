"""Arrays of numbers out of an .npz that others wrote: nothing is unpickled, nothing larger than it says is read."""

from __future__ import annotations

import io
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

from headscope.errors import CheckpointError

RATIO = 100  # weights hardly compress; a member that is said to shrink further is refused before it is read
BROKEN = (
    *(EOFError, KeyError, MemoryError, NotImplementedError, OSError, OverflowError, RecursionError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


class Arrays:
    """The arrays of an .npz, read one at a time; CheckpointError in one line for whatever is broken.

    `kind` is that of their numbers, as numpy writes it: "f" floats, "u" integers without a sign.
    """

    def __init__(self, path: Path, *, kind: str = "f") -> None:
        self.path, self.kind = path, kind
        with self._reading("the archive"), zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                archive.open(info).close()  # its name must be the same in both places: a bit flip hides no array
            names = archive.namelist()
        self.names = frozenset(name.removesuffix(".npy") for name in names if name.endswith(".npy"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one array, from its header."""
        with self._reading(name), zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as member:
            return _header(member)[0]

    def __getitem__(self, name: str) -> NDArray[Any]:
        with self._reading(name), zipfile.ZipFile(self.path) as archive:
            return self._array(archive, name)

    def read(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, sorted; the archive, which may have thousands, is opened once."""
        arrays = {}
        with self._reading("the archive"), zipfile.ZipFile(self.path) as archive:
            for name in sorted(self.names):
                with self._reading(name):
                    arrays[name] = self._array(archive, name)
        return arrays

    def _array(self, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as member:
            shape, fortran, dtype = _header(member)
            size = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if dtype.kind != self.kind or size != info.file_size - member.tell():
                raise ValueError("its header does not fit its content")
        if info.file_size > RATIO * max(info.compress_size, 2**16):
            raise ValueError("it is said to be far larger than what is stored")
        content = io.BytesIO(archive.read(info))  # to its end, so that the checksum is compared
        _header(content)
        flat = np.frombuffer(content.getvalue(), dtype=dtype, offset=content.tell())
        return flat.reshape(shape, order="F" if fortran else "C")

    @contextmanager
    def _reading(self, content: str) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's about headers that Python 2 wrote
                yield
        except BROKEN as error:
            detail = " ".join(str(error).split())[:120] or type(error).__name__
            raise CheckpointError(f"{self.path} is truncated or broken: {content} ({detail})") from None


def first_member(path: Path) -> str:
    """Name of the member that a zip file begins with, "" where it is none; works on truncated files too."""
    try:
        with path.open("rb") as file:
            head = file.read(30)
            if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
                return ""
            return file.read(min(int.from_bytes(head[26:28], "little"), 200)).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"npy version {version} is unknown")
    return tuple(shape), bool(fortran), dtype

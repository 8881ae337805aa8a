"""Zip files that others wrote, and arrays of .npz: nothing is unpickled, and nothing larger than it says is read."""

from __future__ import annotations

import io
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.errors import CheckpointError, one_line, reason_of

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


def zip_damage(path: Path) -> str | None:
    """What is wrong with a zip file: every member is read and compared with its checksum. None if nothing is.

    `torch.serialization.set_crc32_options(False)` leaves out all checksums: zeros.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for info in members:
                if info.file_size > RATIO * max(info.compress_size, 2**16):
                    return f"its member {info.filename[:80]} is said to be far larger than what is stored"
                archive.open(info).close()  # the names of a member are the same in both places
            if (member := archive.testzip() if has_checksums(members) else None) is not None:
                return f"the checksum of its member {member[:80]} is another one"
    except BROKEN_ZIP as error:
        return " ".join(str(error).split())[:120] or type(error).__name__
    return None


def has_checksums(members: Iterable[zipfile.ZipInfo]) -> bool:
    """Whether the members of a zip have checksums."""
    return any(info.CRC for info in members)


BROKEN = (*BROKEN_ZIP, MemoryError, RecursionError, SyntaxError, TypeError, tokenize.TokenError)
BFLOAT16 = np.dtype("V2")
"""How numpy writes ml_dtypes' bfloat16."""


class Arrays:
    """The arrays of an .npz, read one at a time; CheckpointError in one line for whatever is broken.

    `kind` is that of their numbers, as numpy writes it: "f" floats, "u" integers without a sign. Bytes are in the order
    of this machine, whatever their order in the file; bfloat16 is widened to float32.
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
            if size != info.file_size - member.tell() and not dtype.hasobject:
                raise ValueError("its header does not fit its content")
        if (dtype.kind != self.kind and not (self.kind == "f" and dtype == BFLOAT16)) or dtype.itemsize > 8:
            raise CheckpointError(
                f"{self.path}: array {name[:80]} is of the type {one_line(dtype.str)[:40]}; save it as "
                f"{'float32' if self.kind == 'f' else 'unsigned integers'}"
            )
        if info.file_size > RATIO * max(info.compress_size, 2**16):
            raise ValueError("it is said to be far larger than what is stored")
        content = io.BytesIO(archive.read(info))  # to its end, so that the checksum is compared
        _header(content)
        flat = np.frombuffer(content.getvalue(), dtype=dtype, offset=content.tell())
        return native_numbers(flat).reshape(shape, order="F" if fortran else "C")

    @contextmanager
    def _reading(self, content: str) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's about headers that Python 2 wrote
                yield
        except BROKEN as error:
            detail = reason_of(error, max_length=120)
            raise CheckpointError(f"{self.path} is truncated or broken: {content} ({detail})") from None


def native_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Numbers in the byte order of this machine; bfloat16, which numpy stores as two bytes without meaning, as float32.

    The order of bfloat16 is that of the machine that wrote it, which no file says: little-endian.
    """
    if array.dtype == BFLOAT16:
        return (np.frombuffer(array.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32).reshape(array.shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"npy version {version} is unknown")
    return tuple(shape), bool(fortran), dtype

"""Zip files that others wrote: their first member, and their checksums."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

RATIO = 100  # weights hardly compress; a member that is said to shrink further is refused before it is read
ZIP = b"PK\x03\x04"
BROKEN = (
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
            damaged = archive.testzip() if has_checksums(members) else None
        if damaged is not None:
            return f"the checksum of its member {damaged[:80]} is another one"
        with path.open("rb") as file:
            around = next((info.filename for info in members if not _is_intact_around(file, info)), None)
    except BROKEN as error:
        return " ".join(str(error).split())[:120] or type(error).__name__
    kinds = {(info.create_version, info.create_system, info.internal_attr, info.external_attr) for info in members}
    if around is not None or (len(kinds) > 1 and _is_of_torch(members)):
        return f"its directory and the header of its member {(around or '')[:80]} do not fit"
    return None


def _is_of_torch(members: Iterable[zipfile.ZipInfo]) -> bool:
    return any(info.filename.endswith("/data.pkl") for info in members)


def _is_intact_around(file: BinaryIO, info: zipfile.ZipInfo) -> bool:
    """Whether what torch writes around a member is whole: no checksum covers its header and the filling before it."""
    file.seek(info.header_offset)
    _, *header, crc, size, whole, name, extra = struct.unpack("<4s3H2HIIIHH", file.read(30))
    filling = file.read(name + extra)[name:]
    if filling[:1] != b"F" and filling[1:2] != b"B":
        return True  # of another program, or of a member of 4 GiB
    file.seek(info.compress_size, 1)
    year, month, day, hour, minute, second = info.date_time
    when = [hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day]
    sizes = (info.CRC, info.compress_size, info.file_size)
    return (
        header == [info.extract_version, info.flag_bits, info.compress_type, *when]
        and all(value in (0, known) for value, known in zip((crc, size, whole), sizes, strict=True))
        and filling == b"FB" + struct.pack("<H", extra - 4) + b"Z" * (extra - 4)
        and (not info.flag_bits & 8 or file.read(16) == b"PK\x07\x08" + struct.pack("<III", *sizes))
    )


def has_checksums(members: Iterable[zipfile.ZipInfo]) -> bool:
    """Whether the members of a zip have checksums."""
    return any(info.CRC for info in members)


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip does; never fails."""
    return bool(first_member(path))

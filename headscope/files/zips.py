"""Zip files that others wrote: their first member, and their checksums."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

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
            if (damaged := archive.testzip() if has_checksums(members) else None) is not None:
                return f"the checksum of its member {damaged[:80]} is another one"
    except BROKEN as error:
        return " ".join(str(error).split())[:120] or type(error).__name__
    return None


def has_checksums(members: Iterable[zipfile.ZipInfo]) -> bool:
    """Whether the members of a zip have checksums."""
    return any(info.CRC for info in members)

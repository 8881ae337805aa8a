"""Pickles that others wrote: arrays (the MHR fork's results, story-of-heads' vocabularies), and torch's tensors.

Sizes that a file declares are compared with the file before memory is taken; tensors stay on disk until they are read.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.errors import CheckpointError, DataError, reason_of
from headscope.files.archives import has_checksums, native_numbers, zip_damage
from headscope.files.reading import read_bytes
from headscope.formats.safe_pickle import BROKEN, MAX_STEPS, Refused, Storage, StoredTensor, StubType, Unpickler

MAX_MATRICES = 2 << 30  # batches of matrices between heads grow with the corpus
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")


def read_pickle(path: Path, classes: Collection[str] = ()) -> Any:
    """What a pickle holds, objects of numpy and of `classes` as `StubType`; DataError in one line for anything else."""
    data = read_bytes(path, limit=MAX_MATRICES)
    try:
        return Unpickler(data, names=classes, max_steps=max(len(data), MAX_STEPS)).load()
    except Refused as error:
        raise DataError(f"{path} is no pickle that headscope reads: {error}") from None
    except BROKEN as error:
        raise DataError(
            f"{path} is truncated or broken ({reason_of(error, max_length=120)}); nothing of it was executed"
        ) from None


def array_of(value: object) -> NDArray[Any] | None:
    """The numbers of an array that `read_pickle` read. Returns None if `value` is no array of numbers."""
    description = _describe_array(value)
    if description is None:
        return None
    shape, dtype, data = description
    if dtype.lstrip("<>=|") not in NUMBERS or not isinstance(data, bytes):
        return None
    count = int(np.prod(shape, dtype=object))
    if count * np.dtype(dtype).itemsize != len(data):
        return None
    order = "F" if cast(StubType, value).state[3] is True else "C"
    return native_numbers(np.frombuffer(data, dtype=dtype, count=count)).reshape(shape, order=cast(Any, order))


def rows_of(value: object) -> list[NDArray[Any]] | None:
    """The rows of a matrix, or the arrays of an array of arrays; None for anything else."""
    description = _describe_array(value)
    if description is not None and description[1].startswith("O") and isinstance(description[2], list):
        rows = [array_of(row) for row in description[2]]
        return [row for row in rows if row is not None] if all(row is not None for row in rows) else None
    matrix = array_of(value)
    return None if matrix is None or matrix.ndim < 2 else list(matrix)


def _describe_array(value: object) -> tuple[tuple[int, ...], str, object] | None:
    if not (isinstance(value, StubType) and value.name.endswith("multiarray._reconstruct")):
        return None
    state = value.state
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple)):
        return None
    shape, dtype = state[1], state[2]
    if not all(isinstance(size, int) and 0 <= size < 2**40 for size in shape) or len(shape) > 8:
        return None
    if not (isinstance(dtype, StubType) and dtype.name == "numpy.dtype" and dtype.args):
        return None
    kind = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    return (shape, (order if order in ("<", ">") else "") + kind, state[4]) if isinstance(kind, str) else None


MAX_BYTES = 16 << 20  # of pickle, without tensors; fairseq's largest language models have about one million
LEGACY = bytes.fromhex("80028a0a6cfc9c46f920") + bytes.fromhex("6aa850192e")  # pickle of torch's magic number


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as torch.save writes it (zip or legacy); never fails."""
    try:
        with path.open("rb") as handle:
            head = handle.read(4096)
    except OSError:
        return False
    if head.startswith(b"PK\x03\x04") and len(head) > 30:
        return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b"data.pkl")
    return head.startswith(LEGACY)


def begins_with_name(path: Path, name: str) -> bool:
    """Whether the first MiB of a file of torch.save, where the names of its weights are, has one; never fails."""
    try:
        with path.open("rb") as handle:
            return name.encode() in handle.read(1 << 20)
    except OSError:
        return False


def read_torch(path: Path) -> Any:
    """What torch.save wrote, tensors as `StoredTensor`; CheckpointError in one line for anything unsafe or broken."""
    try:
        with path.open("rb") as handle:
            is_zip = handle.read(4) == b"PK\x03\x04"
        return _read_zip(path) if is_zip else _read_legacy(path)
    except Refused as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except _BROKEN as error:
        raise CheckpointError(
            f"{path} is truncated or broken ({reason_of(error, max_length=120)}); copy it again"
        ) from None


def read_tensors(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a mapping; CheckpointError where their bytes cannot be read."""
    tensors = {key: value for key, value in content.items() if isinstance(value, StoredTensor)}
    try:
        # one storage may serve many tensors: a few are tied weights, thousands are an attack
        if sum(value.bytes for value in tensors.values()) > 4 * path.stat().st_size:
            raise Refused("its tensors have more than four times the numbers of the file; it is broken or hostile")
        return {key: value.read() for key, value in tensors.items()}
    except Refused as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, RuntimeError, *_BROKEN) as error:
        raise CheckpointError(
            f"{path} is truncated or broken ({reason_of(error, max_length=120)}); copy it again"
        ) from None


_BROKEN = (zipfile.BadZipFile, zlib.error, *BROKEN)


# Containers: the zip of torch 1.6 and later, and what came before.


def _read_zip(path: Path) -> Any:
    archive = zipfile.ZipFile(path)  # stays open as long as tensors may be asked for
    members = {info.filename: info for info in archive.infolist()}
    if damage := zip_damage(path):
        raise Refused(f"it is truncated or broken ({damage}); copy it again")
    if not has_checksums(members.values()):
        for info in members.values():
            del info.CRC  # else zipfile would compare with zero
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in members.values()):
        raise Refused("it is a compressed or encrypted zip, which torch never writes; unpack it and zip it stored")
    program = next((name for name in members if name.endswith("data.pkl")), None)
    if program is None:
        raise Refused("it is a zip without data.pkl, so torch.save did not write it")
    root = program.removesuffix("data.pkl")

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        info = members.get(f"{root}data/{key}")
        if info is None or info.file_size != count * dtype.itemsize:
            found_size = "is not there" if info is None else f"has {info.file_size:,} bytes"
            raise Refused(f"storage {key[:40]!r} should have {count:,} numbers, but {found_size}; the file is broken")
        return Storage(dtype, count, key, partial(archive.read, info))

    if members[program].file_size > MAX_BYTES:
        raise Refused(f"its pickle has {members[program].file_size:,} bytes; at most {MAX_BYTES:,} are read")
    if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
        raise Refused("it was written on a big-endian machine; save it anew on an ordinary one")
    return Unpickler(archive.read(program), storage=storage).load()


def _read_legacy(path: Path) -> Any:
    """Five pickles (magic, version, system, content, storage keys), then count and bytes of every storage."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = io.BytesIO(handle.read(MAX_BYTES))
    if not head.getbuffer()[: len(LEGACY)] == LEGACY:
        raise Refused("it is no file of torch.save")
    spans: dict[str, tuple[int, int]] = {}
    storages: dict[str, Storage] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        if count * dtype.itemsize > size:
            raise Refused(f"storage {key[:40]!r} claims {count:,} numbers, more than the file has; it is broken")
        storages[key] = Storage(dtype, count, key, lambda: _slice(path, *spans[key]))
        return storages[key]

    pickles = [Unpickler(head, storage=storage).load() for _ in range(5)]
    if pickles[1] != 1001 or not isinstance(pickles[2], dict) or pickles[2].get("little_endian") is not True:
        raise Refused("it is a legacy file of an unknown version or of a big-endian machine; save it anew")
    keys = pickles[4]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(storages):
        raise Refused("its list of storages does not fit its content; the file is broken")
    position = head.tell()
    for key in keys:
        count = int.from_bytes(_slice(path, position, 8), "little", signed=True)
        if count != storages[key].count or position + 8 + count * storages[key].dtype.itemsize > size:
            raise Refused(f"storage {key[:40]!r} is not as large as its tensors need; the file is truncated or broken")
        spans[key] = (position + 8, count * storages[key].dtype.itemsize)
        position = sum(spans[key])
    return pickles[3]


def _slice(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as handle:
        handle.seek(start)
        data = handle.read(length)
    if len(data) != length:
        raise Refused("the file ends in the middle; copy it again")
    return data

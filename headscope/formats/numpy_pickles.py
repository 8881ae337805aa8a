"""Pickles of containers and numpy arrays: the MHR fork's result files and the vocabularies of story-of-heads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headscope.errors import DataError, reason_of
from headscope.files.reading import read_bytes
from headscope.formats.safe_pickle import BROKEN, MOST_STEPS, Machine, Refused, StubType

MOST_BYTES = 2 << 30  # batches of matrices between heads grow with the corpus
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")


def read_pickle(path: Path, classes: Collection[str] = ()) -> Any:
    """What a pickle holds, objects of numpy and of `classes` as `StubType`; DataError in one line for anything else."""
    data = read_bytes(path, limit=MOST_BYTES)
    try:
        return Machine(data, names=classes, most_steps=max(len(data), MOST_STEPS)).run()
    except Refused as error:
        raise DataError(f"{path} is no pickle that headscope reads: {error}") from None
    except BROKEN as error:
        raise DataError(
            f"{path} is truncated or broken ({reason_of(error, most=120)}); nothing of it was executed"
        ) from None


def array_of(value: object) -> NDArray[Any] | None:
    """The numbers of an array that `read_pickle` read. Returns None if `value` is no array of numbers."""
    described = _described(value)
    if described is None:
        return None
    shape, dtype, data = described
    if dtype.lstrip("<>=|") not in NUMBERS or not isinstance(data, bytes):
        return None
    count = int(np.prod(shape, dtype=object))
    if count * np.dtype(dtype).itemsize != len(data):
        return None
    order = "F" if cast(StubType, value).state[3] is True else "C"
    return np.frombuffer(data, dtype=dtype, count=count).reshape(shape, order=cast(Any, order))


def rows_of(value: object) -> list[NDArray[Any]] | None:
    """The rows of a matrix, or the arrays of an array of arrays; None for anything else."""
    described = _described(value)
    if described is not None and described[1].startswith("O") and isinstance(described[2], list):
        rows = [array_of(row) for row in described[2]]
        return [row for row in rows if row is not None] if all(row is not None for row in rows) else None
    matrix = array_of(value)
    return None if matrix is None or matrix.ndim < 2 else list(matrix)


def _described(value: object) -> tuple[tuple[int, ...], str, object] | None:
    """Shape, type and content as an array's state (version, shape, dtype, Fortran order, content) says them."""
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

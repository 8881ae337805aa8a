"""Pickles that others wrote, read without running anything: containers, numbers, text, numpy arrays.

Classes that a pickle names are not looked up: those that are expected become an `PlainStub` object that keeps
its arguments and its state, any other is an error. The pure Python unpickler is used with a short list of
operations; the C one can be made to allocate gigabytes by a file of twenty bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from headscope.errors import DataError
from headscope.files.reading import read_bytes

MOST_BYTES = 2 << 30  # batches of matrices between heads grow with the corpus


class PlainStub:
    """Stands for an object of a class that a pickle names; knows what it was made from, does nothing."""

    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object) -> PlainStub:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state


class DtypeStub(PlainStub):
    """A numpy dtype."""


class ArrayStub(PlainStub):
    """A numpy array."""


Classes = Mapping[tuple[str, str], type[PlainStub]]
NUMPY: Classes = {
    ("numpy", "ndarray"): PlainStub,
    ("numpy", "dtype"): DtypeStub,
    ("numpy.core.multiarray", "_reconstruct"): ArrayStub,
    ("numpy._core.multiarray", "_reconstruct"): ArrayStub,
}
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")
KEYS = (str, int, float, bytes, type(None))
_ALLOWED = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT "
    "MEMOIZE GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD"
)
Operation = Callable[[Any], None]
_BASE: Any = pickle._Unpickler


class _Unpickler(_BASE):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Operation]] = {
        getattr(pickle, name)[0]: _BASE.dispatch[getattr(pickle, name)[0]] for name in _ALLOWED.split()
    }

    def __init__(self, data: bytes, classes: Classes) -> None:
        super().__init__(io.BytesIO(data))
        self.classes = classes

    def find_class(self, module: str, name: str) -> type[PlainStub]:
        found = self.classes.get((str(module), str(name)))
        if found is None:
            raise pickle.UnpicklingError(f"it names {str(module)[:40]!r} {str(name)[:40]!r}, which is not allowed")
        return found

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def load_setitems(self) -> None:
        self._put(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def _put(self, items: list[Any]) -> None:
        """Keys are plain: the hash of tuples that hold each other twice, sixty deep, is never done."""
        its = self.stack[-1]
        if not isinstance(its, dict) or not all(isinstance(key, KEYS) for key in items[::2]):
            raise pickle.UnpicklingError("it has a dictionary with unusual keys")
        its.update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict


BROKEN = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


def read_pickle(path: Path, classes: Classes = NUMPY) -> Any:
    """What a pickle holds, with `PlainStub` objects for `classes`; DataError in one line for anything else."""
    data = read_bytes(path, most=MOST_BYTES)
    try:
        return _Unpickler(data, classes).load()
    except BROKEN as error:
        said = " ".join(str(error).split())[:160] if isinstance(error, pickle.UnpicklingError) else ""
        why = said or f"it is truncated or broken, {type(error).__name__}"
        raise DataError(f"{path} is no pickle that headscope reads ({why}); nothing of it was run") from None


def array_of(value: object) -> NDArray[Any] | None:
    """The numbers of an array that `read_pickle` read, None where `value` is no array of numbers."""
    found = _described(value)
    if found is None:
        return None
    shape, kind, data = found
    if kind.lstrip("<>=|") not in NUMBERS or not isinstance(data, bytes):
        return None
    count = int(np.prod(shape, dtype=object))
    if count * np.dtype(kind).itemsize != len(data):
        return None
    order = "F" if cast(Any, value).state[3] is True else "C"
    return np.frombuffer(data, dtype=kind, count=count).reshape(shape, order=cast(Any, order))


def rows_of(value: object) -> list[NDArray[Any]] | None:
    """The rows of a matrix, or the arrays of an array of arrays; None for anything else."""
    found = _described(value)
    if found is not None and found[1].startswith("O") and isinstance(found[2], list):
        rows = [array_of(each) for each in found[2]]
        return [row for row in rows if row is not None] if all(row is not None for row in rows) else None
    matrix = array_of(value)
    return None if matrix is None or matrix.ndim < 2 else list(matrix)


def _described(value: object) -> tuple[tuple[int, ...], str, object] | None:
    """Shape, type and content as an array's state says them."""
    state = value.state if isinstance(value, ArrayStub) else None
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple)):
        return None
    shape, its = state[1], state[2]
    if not all(isinstance(size, int) and 0 <= size < 2**40 for size in shape) or len(shape) > 8:
        return None
    if not (isinstance(its, DtypeStub) and its.args and isinstance(its.args[0], str)):
        return None
    order = its.state[1] if isinstance(its.state, tuple) and len(its.state) > 1 else "|"
    return shape, (order if order in ("<", ">") else "") + its.args[0], state[4]

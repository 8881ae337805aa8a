"""The one reader of pickles that others wrote: nothing that a file names is imported or called.

A pickle is a program. `Unpickler` is Python's own with few instructions, names and steps; a class is at most a
`StubType` that keeps its name, arguments and state. `torch.load(weights_only=True)` reads torch files alone, does not
bound the steps (hashing one key can take for ever), and refuses classes that are not installed, as fairseq's.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy
import torch
from torch import Tensor

MAX_STEPS = 1_000_000
ADVICE = "nothing of it was executed; if you trust the file, load it with the program that wrote it and save it anew"

STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16},
        **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8},
        **{"Byte": torch.uint8, "Bool": torch.bool},
    }.items()
}
# Names that may occur; a call of one makes a StubType.
INERT = {
    *STORAGES,
    *(f"typing.{kind}" for kind in ("Any", "Dict", "List", "Optional", "Tuple", "Union")),
    "_operator.getitem",  # how omegaconf's records of types say list[int]
    "numpy.dtype",
    "numpy.ndarray",
    *(f"{core}.multiarray._reconstruct" for core in ("numpy.core", "numpy._core")),
    *(f"builtins.{kind}" for kind in ("int", "float", "bool", "str", "dict", "list", "tuple", "object", "type")),
    *(f"torch.{kind}" for kind in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "device")),
}
INERT_PACKAGES = ("fairseq.", "omegaconf.")
PYTHON_2 = {"unicode": "str", "long": "int"}  # what the pickles of torch.save call them, in Python 3 too

BROKEN = (
    *(pickle.UnpicklingError, struct.error, AttributeError, EOFError, IndexError, KeyError, MemoryError),
    *(NotImplementedError, OverflowError, RecursionError, TypeError, ValueError),
)
"""What reading a truncated or damaged file may raise."""


class Refused(Exception):
    """Why a file is not read."""


@dataclass(eq=False)
class StubType:
    """What a pickle would have made an object of: its class, arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = self.state if isinstance(self.state, dict) else {}
        self.state[key] = value


@dataclass(eq=False)
class Storage:
    """`count` numbers of one type on disk, in a file whose size has been checked."""

    dtype: torch.dtype
    count: int
    key: str
    fetch: Callable[[], bytes] = field(repr=False)

    @cached_property
    def numbers(self) -> Tensor:
        """All of them, read once."""
        data = self.fetch()
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that has not been read yet; its shape fits its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, contiguous; tensors of one storage share memory where they can."""
        return self.storage.numbers.as_strided(self.shape, self.stride, self.offset).contiguous()


@dataclass(frozen=True)
class Name:
    """A global that a pickle mentions, not imported; a call makes what `make` does, of its arguments."""

    name: str
    make: Callable[..., Any] = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


class Unpickler(pickle._Unpickler):
    """Runs one pickle and leaves what follows it unread.

    `names` may occur beside those of every file; `storage(dtype, key, count)` finds the numbers of tensors (None: there
    may be none). Refused after `max_steps` steps, and for names and values that do not belong there.
    """

    stack: list[Any]

    def __init__(
        self,
        data: bytes | io.BytesIO,
        *,
        names: Collection[str] = (),
        storage: Callable[[torch.dtype, str, int], Storage] | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        super().__init__(io.BytesIO(data) if isinstance(data, bytes) else data, encoding="latin-1")
        self.names, self.storage, self.max_steps = names, storage, max_steps
        self.storages: dict[str, Storage] = {}
        self.spent = 0

    def spend(self, steps: int) -> None:
        """Count steps; Refused beyond `max_steps`."""
        self.spent += steps
        if self.spent > self.max_steps:
            raise Refused(f"its pickle takes more than {self.max_steps:,} steps; it is broken or hostile")

    def find_class(self, module: str, name: str) -> Name:
        """What stands for a global; Refused for one that a checkpoint has no need of."""
        full = f"{module}.{name}" if module != "__builtin__" else f"builtins.{PYTHON_2.get(name, name)}"
        if full in MAPPINGS:
            return Name(full, self._mapping)
        if full in ("builtins.set", "builtins.frozenset"):
            return Name(full, self._set)
        if full == "_codecs.encode":
            return Name(full, self._encode_text)
        if full in CALLED:
            return Name(full, CALLED[full])
        if full in INERT or full.startswith(INERT_PACKAGES) or full in self.names:
            return Name(full, lambda *args: StubType(full, args))
        printable = "".join(c if c.isprintable() else "?" for c in full)[:80]
        raise Refused(f"its pickle asks for {printable}, which a checkpoint has no need of; {ADVICE}")

    def _mapping(self, pairs: Any = (), *_: Any) -> dict[Any, Any]:
        pairs = list(pairs.items()) if isinstance(pairs, dict) else pairs if isinstance(pairs, list) else []
        self.spend(len(pairs))
        check_keys(key for key, _ in pairs)
        return dict(pairs)

    def _set(self, values: Any = ()) -> set[Any]:
        self.spend(len(values))
        check_keys(values)
        return set(values)

    def _encode_text(self, text: Any, *_: Any) -> bytes:
        self.spend(len(_as(str, text)) // 16)
        data: bytes = text.encode("latin-1")
        return data

    def persistent_load(self, pid: Any) -> Storage:
        """The numbers of a tensor, as `storage` finds them; Refused for anything else."""
        kind, name, key, _, count = cast("tuple[Any, ...]", _as(tuple, pid))[:5]
        dtype = STORAGES.get(_as(Name, name).name)
        if kind != "storage" or self.storage is None or dtype is None or type(count) is not int or count < 0:
            raise Refused("its pickle refers to something that is no storage of numbers; the file is broken")
        if _as(str, key) not in self.storages:
            self.storages[key] = self.storage(dtype, key, count)
        storage = self.storages[key]
        if (storage.dtype, storage.count) != (dtype, count):
            raise Refused(f"storage {key[:40]!r} is used with two sizes or types; the file is broken")
        return storage

    def build(self) -> None:
        """Set the state of what is on top: never by a method, nor of anything but a record."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, argparse.Namespace):
            self.spend(len(_as(dict, state)))
            vars(target).update({_as(str, key): value for key, value in state.items()})
        elif isinstance(target, StubType):
            target.state = state
        elif not isinstance(target, (dict, StoredTensor)):  # an OrderedDict's or tensor's extra attributes
            raise Refused(f"its pickle sets the state of a {type(target).__name__}; {ADVICE}")


def check_keys(keys: Iterable[Any]) -> None:
    """Refused for a key that cannot be hashed at once: tuples within tuples can be made to take for ever."""
    plain = (str, int, float, bytes, type(None), StubType, Name)
    for key in keys:
        parts = key if isinstance(key, tuple) and len(key) < 64 else (key,)
        if not all(isinstance(part, plain) for part in parts):
            raise Refused(f"its pickle has a {type(key).__name__} as a key; the file is broken or hostile")


def _as(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise Refused(f"its pickle has a {type(value).__name__} where a {kind.__name__} must be; the file is broken")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    numbers = (offset, *_as(tuple, shape), *_as(tuple, stride))
    if len(shape) != len(stride) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise Refused("its pickle has a tensor without a proper shape; the file is broken")
    count = _as(Storage, storage).count
    total = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if total else 0
    if total and (last >= count or total > count):
        raise Refused(f"a tensor of {total:,} numbers lies outside its storage of {count:,}; the file is broken")
    return StoredTensor(storage, offset if total else 0, shape, stride)


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool | StubType:
    kind: Sequence[Any] = _as(StubType, dtype).args
    type_code = kind[0] if kind else None
    if not isinstance(type_code, str) or type_code not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1"):
        return StubType("numpy.scalar", ())
    if not isinstance(data, bytes) or len(data) != int(type_code[1]):
        raise Refused("its pickle has a number of the wrong length; the file is broken")
    number: int | float | bool = numpy.frombuffer(data, dtype=f"<{type_code}")[0].item()
    return number


MAPPINGS = {"builtins.dict", *(f"collections.{kind}" for kind in ("OrderedDict", "Counter", "defaultdict"))}
CALLED: dict[str, Callable[..., Any]] = {
    **{f"torch._utils._rebuild_{kind}": _tensor for kind in ("tensor", "tensor_v2")},
    **{
        f"torch._utils._rebuild_{kind}": lambda tensor, *_: _as(StoredTensor, tensor)
        for kind in ("parameter", "parameter_with_state")
    },
    "argparse.Namespace": lambda *_: argparse.Namespace(),
    "torch.Size": lambda sizes: _as(tuple, sizes),
    **{f"{core}.multiarray.scalar": _scalar for core in ("numpy.core", "numpy._core")},
}
"""What calling a name makes, where that is more than a `StubType`; never a call of what it names."""


class _Instructions(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise Refused(f"its pickle uses the instruction {code}, which torch.save never writes; {ADVICE}")


def _guard(run: Callable[[Any], None], keys: slice | None) -> Callable[[Any], None]:
    """An instruction that counts as a step, after a check of the keys among the values since the last mark."""

    def step(machine: Unpickler) -> None:
        machine.spend(1)
        if keys is not None:
            check_keys(machine.stack[keys])
        run(machine)

    return step


_KEYS = {
    **{pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(None, None, 2), pickle.DICT: slice(None, None, 2)},
    pickle.ADDITEMS: slice(None),
}
_PLAIN = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS PUT BINPUT LONG_BINPUT "
    "MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BINPERSID"
)
_OURS = pickle._Unpickler.dispatch
Unpickler.dispatch = _Instructions(
    {
        **{code[0]: _guard(_OURS[code[0]], None) for name in _PLAIN.split() for code in (getattr(pickle, name),)},
        **{code[0]: _guard(_OURS[code[0]], keys) for code, keys in _KEYS.items()},
        ord(pickle.NEWOBJ): _guard(_OURS[ord(pickle.REDUCE)], None),
        ord(pickle.BUILD): _guard(Unpickler.build, None),
    }
)

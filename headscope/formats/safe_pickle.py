"""The one reader of pickles that others wrote: nothing that a file names is imported or called.

A pickle is a program. `Machine` runs it with plain values, containers and a short list of names; a class is at most a
`StubType` that keeps its name, arguments and state. Torch files (`torch_files`), the fork's results and vocabularies
(`numpy_pickles`) are read with it. `torch.load(weights_only=True)` reads torch files alone, and breaks two promises: it
does not bound the steps that a file takes (hashing one key can take for ever), and it refuses every class that is not
installed and listed by name, as those of fairseq's and omegaconf's configs are.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

MOST_STEPS = 1_000_000
ADVICE = "nothing of it was executed; if you trust the file, load it with the program that wrote it and save it anew"

STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16},
        **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8},
        **{"Byte": torch.uint8, "Bool": torch.bool},
    }.items()
}
# Names that may occur; whatever is made with them is a record that does nothing.
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


@dataclass(frozen=True)
class Name:
    """A global that a pickle mentions, not imported."""

    name: str


@dataclass(eq=False)
class StubType:
    """What a pickle would have made an object of: its class, arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Storage:
    """Numbers on disk: `count` of a type, in a file whose size has been checked."""

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


MARK = object()
VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
    "MARK": lambda: MARK,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Machine:
    """Runs one pickle and leaves what follows it unread.

    `names` may occur beside those of every file; `storage(dtype, key, count)` finds the numbers of tensors (None: there
    may be none). Refused after `most_steps` steps, and for names and values that do not belong there.
    """

    def __init__(
        self,
        data: bytes | io.BytesIO,
        *,
        names: Collection[str] = (),
        storage: Callable[[torch.dtype, str, int], Storage] | None = None,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self.handle = io.BytesIO(data) if isinstance(data, bytes) else data
        self.names, self.storage, self.most_steps = names, storage, most_steps
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}
        self.spent = 0

    def run(self) -> Any:
        """The value that the pickle makes."""
        for opcode, argument, _ in pickletools.genops(self.handle):
            self._spend(1)
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in VALUES:
                self.stack.append(argument)
            elif name in FRESH:
                self.stack.append(FRESH[name]())
            elif name in TUPLES:
                self.stack[-TUPLES[name] :] = [tuple(self.stack[-TUPLES[name] :])]
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise Refused(f"its pickle uses {name}, which torch.save never writes; {ADVICE}")
                step(argument)
        raise Refused("its pickle has no end; copy it again")

    def _spend(self, steps: int) -> None:
        self.spent += steps
        if self.spent > self.most_steps:
            raise Refused(f"its pickle takes more than {self.most_steps:,} steps; it is broken or hostile")

    def _since_mark(self) -> list[Any]:
        mark = next(n for n in range(len(self.stack) - 1, -2, -1) if n < 0 or self.stack[n] is MARK)
        if mark < 0:
            raise Refused("its pickle is broken; copy it again")
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def _pop(self, argument: Any) -> None:
        self.stack.pop()

    def _put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, argument: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    _binget = _long_binget = _get

    def _tuple(self, argument: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _list(self, argument: Any) -> None:
        self.stack.append(self._since_mark())

    def _dict(self, argument: Any) -> None:
        values = self._since_mark()
        self.stack.append({})
        self._fill(values)

    def _append(self, argument: Any) -> None:
        value = self.stack.pop()
        _as(list, self.stack[-1]).append(value)

    def _appends(self, argument: Any) -> None:
        values = self._since_mark()
        _as(list, self.stack[-1]).extend(values)

    def _additems(self, argument: Any) -> None:
        values = self._since_mark()
        _as(set, self.stack[-1]).update(map(_key, values))

    def _setitem(self, argument: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _setitems(self, argument: Any) -> None:
        self._fill(self._since_mark())

    def _fill(self, values: list[Any]) -> None:
        """Put keys and values, one after the other, into the dictionary or the record on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, StubType):
            target.state = target.state if isinstance(target.state, dict) else {}
            target = target.state
        if len(values) % 2:
            raise Refused("its pickle is broken; copy it again")
        for key, value in zip(values[::2], values[1::2], strict=True):
            _as(dict, target)[_key(key)] = value

    def _global(self, argument: str) -> None:
        self.stack.append(self._name(*argument.split(" ", 1)))

    def _stack_global(self, argument: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._name(_as(str, module), _as(str, name)))

    def _name(self, module: str, name: str) -> Name:
        full = f"{module}.{name}" if module != "__builtin__" else f"builtins.{PYTHON_2.get(name, name)}"
        if full in CALLED or full in INERT or full.startswith(INERT_PACKAGES) or full in self.names:
            return Name(full)
        shown = "".join(c if c.isprintable() else "?" for c in full)[:80]
        raise Refused(f"its pickle asks for {shown}, which a checkpoint has no need of; {ADVICE}")

    def _reduce(self, argument: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._made(_as(Name, function).name, _as(tuple, args)))

    _newobj = _reduce

    def _build(self, argument: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, argparse.Namespace):
            state = _as(dict, state)
            self._spend(len(state))
            vars(target).update({_as(str, key): value for key, value in state.items()})
        elif isinstance(target, StubType):
            target.state = state
        elif not isinstance(target, (dict, StoredTensor)):  # an OrderedDict's or tensor's extra attributes
            raise Refused(f"its pickle sets the state of a {type(target).__name__}; {ADVICE}")

    def _binpersid(self, argument: Any) -> None:
        kind, name, key, _, count = cast("tuple[Any, ...]", _as(tuple, self.stack.pop()))[:5]
        dtype = STORAGES.get(_as(Name, name).name)
        if kind != "storage" or self.storage is None or dtype is None or type(count) is not int or count < 0:
            raise Refused("its pickle refers to something that is no storage of numbers; the file is broken")
        if _as(str, key) not in self.storages:
            self.storages[key] = self.storage(dtype, key, count)
        storage = self.storages[key]
        if (storage.dtype, storage.count) != (dtype, count):
            raise Refused(f"storage {key[:40]!r} is used with two sizes or types; the file is broken")
        self.stack.append(storage)

    def _made(self, name: str, args: tuple[Any, ...]) -> Any:
        """What calling a name would make; never a call."""
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return _tensor(*args[:4])
        if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return _as(StoredTensor, args[0])
        if name == "argparse.Namespace":
            return argparse.Namespace()
        if name in ("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"):
            pairs = args[0] if args and isinstance(args[0], (list, dict)) else []
            self._spend(len(pairs))
            return {_key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}
        if name in ("builtins.set", "builtins.frozenset"):
            self._spend(len(_as(list, args[0])) if args else 0)
            return set(map(_key, args[0] if args else ()))
        if name == "torch.Size":
            return _as(tuple, args[0])
        if name == "_codecs.encode":
            self._spend(len(_as(str, args[0])) // 16)
            return args[0].encode("latin-1")
        if name.endswith("multiarray.scalar"):
            return _scalar(*args)
        return StubType(name, args)


CALLED = {
    *(f"torch._utils._rebuild_{kind}" for kind in ("tensor_v2", "tensor", "parameter", "parameter_with_state")),
    *(f"collections.{kind}" for kind in ("OrderedDict", "Counter", "defaultdict")),
    *("argparse.Namespace", "builtins.set", "builtins.frozenset", "torch.Size", "_codecs.encode"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
}


def _as(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise Refused(f"its pickle has a {type(value).__name__} where a {kind.__name__} must be; the file is broken")


def _key(value: Any) -> Any:
    """A key that can be hashed at once: tuples within tuples can be made to take forever."""
    plain = (str, int, float, bytes, type(None), StubType, Name)
    if isinstance(value, plain) or (
        isinstance(value, tuple) and len(value) < 64 and all(isinstance(part, plain) for part in value)
    ):
        return value
    raise Refused(f"its pickle has a {type(value).__name__} as a key; the file is broken or hostile")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    numbers = (offset, *_as(tuple, shape), *_as(tuple, stride))
    if len(shape) != len(stride) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise Refused("its pickle has a tensor without a proper shape; the file is broken")
    _as(Storage, storage)
    total = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if total else 0
    if total and (last >= storage.count or total > storage.count):
        raise Refused(
            f"a tensor of {total:,} numbers lies outside its storage of {storage.count:,}; the file is broken"
        )
    return StoredTensor(storage, offset if total else 0, shape, stride)


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool | StubType:
    """A numpy number as a Python one."""
    import numpy

    kind: Sequence[Any] = _as(StubType, dtype).args
    spelled = kind[0] if kind else None
    if not isinstance(spelled, str) or spelled not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1"):
        return StubType("numpy.scalar", ())
    if not isinstance(data, bytes) or len(data) != int(spelled[1]):
        raise Refused("its pickle has a number of the wrong length; the file is broken")
    number: int | float | bool = numpy.frombuffer(data, dtype=f"<{spelled}")[0].item()
    return number

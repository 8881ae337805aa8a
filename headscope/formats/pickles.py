"""The reader of pickles that others wrote: files of torch.save, the MHR fork's arrays, story-of-heads' vocabularies.

A pickle is a program; nothing that it names is imported or called. `Unpickler` is Python's own, limited to a few
instructions, names and steps; objects of other classes become a `StubType`. `torch.load(weights_only=True)` would read
torch files only, sets no bound on steps (hashing one key can take for ever), and refuses classes that are not
installed, such as fairseq's. Declared sizes are compared with the file before memory is allocated; tensors are mapped
until `read_tensors` copies them.
"""

from __future__ import annotations

import argparse
import io
import math
import mmap
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.errors import CheckpointError, DataError, HeadscopeError, reason_of
from headscope.files.archives import first_member, native_numbers, zip_damage
from headscope.files.reading import read_bytes

MAX_STEPS = 1_000_000  # instructions and container entries of one pickle
MAX_BYTES = 16 << 20  # of a pickle without tensors; fairseq's largest language models have about one million
MAX_MATRICES = 2 << 30  # bytes of a pickle of head-by-head matrices, which grows with the corpus
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")
LEGACY = bytes.fromhex("80028a0a6cfc9c46f920") + bytes.fromhex("6aa850192e")  # pickle of torch's magic number
ADVICE = "nothing of it was executed; if you trust the file, load it with the program that wrote it and save it anew"

STORAGES = {
    **{"torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16},
    **{"torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32},
    **{"torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8},
    "torch.BoolStorage": torch.bool,
}
# Names that may occur; a call of one makes a StubType.
INERT = {
    *STORAGES,
    *(f"typing.{kind}" for kind in ("Any", "Dict", "List", "Optional", "Tuple", "Union")),
    *("_operator.getitem", "numpy.dtype", "numpy.ndarray"),  # the first is how omegaconf says list[int]
    *(f"{core}.multiarray._reconstruct" for core in ("numpy.core", "numpy._core")),
    *(f"builtins.{kind}" for kind in ("int", "float", "bool", "str", "dict", "list", "tuple", "object", "type")),
    *(f"torch.{kind}" for kind in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "device")),
}
PYTHON_2 = {"unicode": "str", "long": "int"}  # what the pickles of torch.save call them, in Python 3 too

BROKEN = (
    *(pickle.UnpicklingError, struct.error, AttributeError, EOFError, IndexError, KeyError, MemoryError),
    *(NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile, zlib.error),
)


class Refused(Exception):
    """The reason why a file is not read."""


@dataclass(eq=False)
class StubType:
    """A stub for an object of a pickle: its class, arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = self.state if isinstance(self.state, dict) else {}
        self.state[key] = value


@dataclass(frozen=True)
class Name:
    """A global that a pickle names. It is not imported; calling it calls `make` instead."""

    name: str
    make: Callable[..., Any] = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


class Unpickler(pickle._Unpickler):
    """Runs one pickle and leaves the bytes after it unread.

    `names` are globals allowed in addition to those of every file; `storage(dtype, key, count)` returns the numbers of
    a tensor (None: tensors are refused). Refused after `max_steps` steps, and for unexpected names and values.
    """

    stack: list[Any]

    def __init__(
        self,
        data: bytes | io.BytesIO,
        *,
        names: Collection[str] = (),
        storage: Callable[[torch.dtype, str, int], Tensor] | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        super().__init__(io.BytesIO(data) if isinstance(data, bytes) else data, encoding="latin-1")
        self.names, self.storage, self.max_steps = names, storage, max_steps
        sets = dict.fromkeys(("builtins.set", "builtins.frozenset"), self._set)
        self.calls = CALLS | dict.fromkeys(MAPPINGS, self._mapping) | sets | {"_codecs.encode": self._encode_text}
        self.steps = 0

    def spend(self, steps: int) -> None:
        """Count steps; Refused beyond `max_steps`."""
        self.steps += steps
        if self.steps > self.max_steps:
            raise Refused(f"its pickle takes more than {self.max_steps:,} steps; it is broken or hostile")

    def find_class(self, module: str, name: str) -> Name:
        """The stub of a global; Refused for one that a checkpoint does not need."""
        full = f"{module}.{name}" if module != "__builtin__" else f"builtins.{PYTHON_2.get(name, name)}"
        if full in self.calls:
            return Name(full, self.calls[full])
        if full in INERT or full.startswith(("fairseq.", "omegaconf.")) or full in self.names:
            return Name(full, lambda *args: StubType(full, args))
        raise Refused(f"its pickle asks for {ascii(full)[1:-1][:80]}, which a checkpoint has no need of; {ADVICE}")

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
        return bytes(text, "latin-1")

    def persistent_load(self, pid: Any) -> Tensor:
        """The numbers of a tensor, as `storage` finds them; Refused for anything else."""
        kind, name, key, _, count = cast("tuple[Any, ...]", _as(tuple, pid))[:5]
        dtype = STORAGES.get(_as(Name, name).name)
        if kind != "storage" or self.storage is None or dtype is None or type(count) is not int or count < 0:
            raise Refused("its pickle refers to something that is no storage of numbers; the file is broken")
        return self.storage(dtype, _as(str, key), count)

    def build(self) -> None:
        """Set the state of the object on top of the stack without calling a method of it; Refused for most classes."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, argparse.Namespace):
            self.spend(len(_as(dict, state)))
            vars(target).update({_as(str, key): value for key, value in state.items()})
        elif isinstance(target, StubType):
            target.state = state
        elif not isinstance(target, (dict, Tensor)):  # an OrderedDict's or tensor's extra attributes
            raise Refused(f"its pickle sets the state of a {type(target).__name__}; {ADVICE}")


def check_keys(keys: Iterable[Any]) -> None:
    """Refused for a key that is not quick to hash: nested tuples can be built so that hashing takes for ever."""
    plain = (str, int, float, bytes, type(None), StubType, Name)
    for key in keys:
        parts = key if isinstance(key, tuple) and len(key) < 64 else (key,)
        if not all(isinstance(part, plain) for part in parts):
            raise Refused(f"its pickle has a {type(key).__name__} as a key; the file is broken or hostile")


def _as(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise Refused(f"its pickle has a {type(value).__name__} where a {kind.__name__} must be; the file is broken")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage [n]; Refused where it would exceed the storage."""
    numbers, count = (offset, *_as(tuple, shape), *_as(tuple, stride)), len(_as(Tensor, storage))
    if len(shape) != len(stride) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise Refused("its pickle has a tensor without a proper shape; the file is broken")
    total = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if total else 0
    if total and (last >= count or total > count):
        raise Refused(f"a tensor of {total:,} numbers lies outside its storage of {count:,}; the file is broken")
    return torch.as_strided(storage, shape, stride, offset if total else 0)


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool | StubType:
    kind = _as(StubType, dtype).args
    if not kind or kind[0] not in NUMBERS:
        return StubType("numpy.scalar", ())
    return np.frombuffer(data, dtype=f"<{kind[0]}").item()


MAPPINGS = {"builtins.dict", *(f"collections.{kind}" for kind in ("OrderedDict", "Counter", "defaultdict"))}
CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2")), _tensor),
    **dict.fromkeys(
        (f"torch._utils._rebuild_{kind}" for kind in ("parameter", "parameter_with_state")),
        lambda tensor, *_: _as(Tensor, tensor),
    ),
    "argparse.Namespace": lambda *_: argparse.Namespace(),
    "torch.Size": lambda sizes: _as(tuple, sizes),
    **dict.fromkeys((f"{core}.multiarray.scalar" for core in ("numpy.core", "numpy._core")), _scalar),
}
"""Names whose call makes more than a `StubType`, and the function that runs in the place of the named one."""


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


_KEYS = {  # instructions that put keys into a dict or set, and which values since the last mark are these keys
    **{pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(None, None, 2), pickle.DICT: slice(None, None, 2)},
    pickle.ADDITEMS: slice(None),
}
_PLAIN = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS PUT BINPUT LONG_BINPUT "
    "MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BINPERSID"
)
_PYTHONS = pickle._Unpickler.dispatch
Unpickler.dispatch = _Instructions(
    {ord(getattr(pickle, name)): _guard(_PYTHONS[ord(getattr(pickle, name))], None) for name in _PLAIN.split()}
    | {ord(code): _guard(_PYTHONS[ord(code)], keys) for code, keys in _KEYS.items()}
    | {ord(pickle.NEWOBJ): _guard(_PYTHONS[ord(pickle.REDUCE)], None), ord(pickle.BUILD): _guard(Unpickler.build, None)}
)


@contextmanager
def _reading(path: Path, kind: type[HeadscopeError]) -> Iterator[None]:
    """Within the block, errors about an unsafe or broken file become a `kind` of one line."""
    try:
        yield
    except Refused as error:
        raise kind(f"{path}: {error}") from None
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}") from None
    except BROKEN as error:
        raise kind(f"{path} is truncated or broken ({reason_of(error, max_length=120)}); copy it again") from None


def is_torch_file(path: Path, name: str = "") -> bool:
    """Whether torch.save wrote a file that has `name` in its first MiB, where names of weights are; never fails."""
    try:
        with path.open("rb") as handle:
            head = handle.read(1 << 20)
    except OSError:
        return False
    return (head.startswith(LEGACY) or first_member(path).endswith("data.pkl")) and name.encode() in head


def read_torch(path: Path) -> Any:
    """The content of a file of torch.save, tensors mapped; CheckpointError for anything unsafe or broken."""
    with _reading(path, CheckpointError), path.open("rb") as handle:
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)  # stays open as long as there are tensors
        return _read_zip(path, data) if data[:4] == b"PK\x03\x04" else _read_legacy(data)


def read_tensors(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies in memory of the tensors of a mapping; CheckpointError where their bytes cannot be read."""
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    with _reading(path, CheckpointError):
        # one storage may serve many tensors: a few are tied weights, thousands are an attack
        if sum(value.nbytes for value in tensors.values()) > 4 * path.stat().st_size:
            raise Refused("its tensors have more than four times the numbers of the file; it is broken or hostile")
        return {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}


def _map_tensor(data: mmap.mmap, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Numbers [n] of a mapped file; copied where they are not aligned as torch requires."""
    if not count:
        return torch.empty(0, dtype=dtype)
    if start % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start)
    return torch.frombuffer(bytearray(data[start : start + count * dtype.itemsize]), dtype=dtype)


def _read_zip(path: Path, data: mmap.mmap) -> Any:
    if damage := zip_damage(path):
        raise zipfile.BadZipFile(damage)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in members.values()):
        raise Refused("it is a compressed or encrypted zip, which torch never writes; unpack it and zip it stored")
    root = next((name.removesuffix("data.pkl") for name in members if name.endswith("data.pkl")), None)
    if root is None:
        raise Refused("it is a zip without data.pkl, so torch.save did not write it")

    def start(info: zipfile.ZipInfo) -> int:
        return int(info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26)))

    def content(name: str) -> bytes:
        if (info := members[f"{root}{name}"]).file_size > MAX_BYTES:
            raise Refused(f"its {name} is larger than the {MAX_BYTES:,} bytes that are read")
        return data[start(info) : start(info) + info.file_size]

    def storage(dtype: torch.dtype, key: str, count: int) -> Tensor:
        info = members.get(f"{root}data/{key}")
        if info is None or info.file_size != count * dtype.itemsize:
            raise Refused(f"storage {key[:40]!r} has not the {count:,} numbers that it should; the file is broken")
        return _map_tensor(data, dtype, start(info), count)

    if f"{root}byteorder" in members and content("byteorder") != b"little":
        raise Refused("it was written on a big-endian machine; save it anew on an ordinary one")
    return Unpickler(content("data.pkl"), storage=storage).load()


def _read_legacy(data: mmap.mmap) -> Any:
    """Five pickles (magic, version, system, content, storage keys), then count and bytes of every storage.

    The sizes of storages stand behind the content, so the content is read twice: first on the meta device.
    """
    head, positions, pickles = io.BytesIO(data[:MAX_BYTES]), list[int](), list[Any]()
    counts, starts = dict[str, tuple[int, int]](), dict[str, int]()

    def measure(dtype: torch.dtype, key: str, count: int) -> Tensor:
        if count * dtype.itemsize > len(data):
            raise Refused(f"storage {key[:40]!r} claims {count:,} numbers, more than the file has; it is broken")
        counts[key] = count, dtype.itemsize
        return torch.empty(count, dtype=dtype, device="meta")

    def storage(dtype: torch.dtype, key: str, count: int) -> Tensor:
        if counts[key] != (count, dtype.itemsize):
            raise Refused(f"storage {key[:40]!r} is used with two sizes or types; the file is broken")
        return _map_tensor(data, dtype, starts[key], count)

    for _ in range(5):
        positions.append(head.tell())
        pickles.append(Unpickler(head, storage=measure).load())
    _, version, system, _, keys = pickles
    if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("it is a legacy file of an unknown version or of a big-endian machine; save it anew")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(counts):
        raise Refused("its list of storages does not fit its content; the file is broken")
    offset = head.tell()
    for key in keys:
        count, width = counts[key]
        if struct.unpack_from("<q", data, offset) != (count,) or offset + 8 + count * width > len(data):
            raise Refused(f"storage {key[:40]!r} is not as large as its tensors need; the file is truncated or broken")
        starts[key], offset = offset + 8, offset + 8 + count * width
    head.seek(positions[3])
    return Unpickler(head, storage=storage).load()


def read_pickle(path: Path, classes: Collection[str] = ()) -> Any:
    """The content of a pickle, objects of numpy and of `classes` as `StubType`; DataError for anything else."""
    data = read_bytes(path, limit=MAX_MATRICES)
    with _reading(path, DataError):
        return Unpickler(data, names=classes, max_steps=max(len(data), MAX_STEPS)).load()


def array_of(value: object) -> NDArray[Any] | None:
    """The numpy array that a stub of `read_pickle` describes. Returns None if `value` is no array of numbers."""
    match value:
        case StubType(state=(_, tuple(shape), StubType(args=(str(kind), *_), state=details), fortran, bytes(data))):
            order = details[1] if isinstance(details, tuple) and len(details) > 1 else "="
            if (
                kind in NUMBERS
                and order in ("<", ">", "|", "=")
                and all(type(size) is int and size >= 0 for size in shape)
            ):
                with suppress(ValueError):  # another number of bytes
                    numbers = native_numbers(np.frombuffer(data, dtype=order + kind))
                    return numbers.reshape(shape, order="F" if fortran is True else "C")
    return None


def rows_of(value: object) -> list[NDArray[Any]] | None:
    """The rows of a matrix, or the arrays of an array of arrays; None for anything else."""
    match value:
        case StubType(state=(_, tuple(_), StubType(args=(str(kind), *_)), _, list(items))) if kind.startswith("O"):
            rows = [array for item in items if (array := array_of(item)) is not None]
            return rows if len(rows) == len(items) else None
    matrix = array_of(value)
    return None if matrix is None or matrix.ndim < 2 else list(matrix)

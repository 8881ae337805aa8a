"""Hostile and damaged torch files: nothing is executed, every one ends in one line, none takes time or memory."""

import argparse
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.errors import CheckpointError
from headscope.files.archives import Arrays
from headscope.formats.base import open_checkpoint
from headscope.formats.pickles import (
    LEGACY,
    MAX_STEPS,
    Refused,
    StubType,
    Unpickler,
    is_torch_file,
    read_tensors,
    read_torch,
)
from tests.makers.shared import Call

pytestmark = pytest.mark.slow

MARKER = "headscope-was-here"
PUSH = b"\x8c"  # SHORT_BINUNICODE


def text(value: str) -> bytes:
    return PUSH + bytes([len(value)]) + value.encode()


def as_zip(path: Path, program: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A file in the format of torch 1.6 and later, with the pickle `program`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def legacy(path: Path, program: bytes, keys: tuple[str, ...] = (), data: bytes = b"") -> Path:
    """A file in the format of torch before 1.6."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = [LEGACY, pickle.dumps(1001, 2), pickle.dumps(system, 2), program, pickle.dumps(list(keys), 2), data]
    path.write_bytes(b"".join(parts))
    return path


class StateSetter:
    """Pickles as an object whose state is set by `__setstate__`."""

    def __reduce__(self) -> Any:
        return argparse.Namespace, (), Call(os.mkdir, MARKER)


def raw(module: str, name: str, argument: bytes = text(MARKER)) -> bytes:
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + argument + b"\x85R."


EVIL = Call(os.mkdir, MARKER)
PLAIN = {"args": argparse.Namespace(arch="transformer"), "model": {}}
NESTED_CALLS: dict[str, Any] = {
    "alone": EVIL,
    "in a list": [[EVIL]],
    "as a value": {**PLAIN, "x": EVIL},
    "in args": {"args": argparse.Namespace(arch=EVIL), "model": {}},
    "as args": {"args": EVIL, "model": {}},
    "in cfg": {"args": None, "cfg": {"model": {"arch": EVIL}}, "model": {}},
    "in weights": {**PLAIN, "model": OrderedDict(weight=EVIL)},
    "in optimizer state": {**PLAIN, "last_optimizer_state": {"state": {0: {"step": EVIL}}}},
    "in extra state": {**PLAIN, "extra_state": {"metrics": [(10, EVIL)]}},
    "in a built state": StateSetter(),
    "eval": Call(eval, f"__import__('os').mkdir('{MARKER}')"),
    "exec": Call(exec, f"import os; os.mkdir('{MARKER}')"),
    "getattr": Call(getattr, Call(__import__, "os"), "mkdir"),
    "a process": Call(subprocess.Popen, ["mkdir", MARKER]),
    "pickle again": Call(pickle.loads, pickle.dumps(EVIL)),
    "torch again": Call(torch.load, MARKER),
    "storage from bytes": Call(torch.storage._load_from_bytes, pickle.dumps(EVIL)),
    "a huge bytearray": Call(bytearray, 1 << 60),
    "a huge tensor": Call(torch.Tensor, 1 << 40),
    "objects of numpy": np.array([EVIL], dtype=object),
}
RAW = {
    "INST": b"\x80\x02(X\x12\x00\x00\x00headscope-was-hereios\nmkdir\n.",
    "OBJ": b"\x80\x02(cos\nmkdir\nX\x12\x00\x00\x00headscope-was-hereo.",
    "EXT1": b"\x80\x02\x82\x01.",
    "NEWOBJ_EX": b"\x80\x04cos\nmkdir\n" + text(MARKER) + b"\x85}\x92.",
    "dotted": b"\x80\x04" + text("os") + text("path.os.mkdir") + b"\x93" + text(MARKER) + b"\x85R.",
    "through a good module": raw("argparse", "_os.mkdir"),
    "through collections": raw("collections", "_sys.modules.clear", b")"),
    "posix": raw("posix", "mkdir"),
    "nt": raw("nt", "mkdir"),
    "python 2": raw("__builtin__", "eval"),
    "a line feed": b"\x80\x04" + text("os\nx") + text("mkdir") + b"\x93" + text(MARKER) + b"\x85R.",
    "not a global": b"\x80\x02" + text("os.mkdir") + text(MARKER) + b"\x85R.",
    "attributes of a list": b"\x80\x02]}" + text("append") + text(MARKER) + b"sb.",
    "no stop": b"\x80\x02]",
    "nothing": b"",
    "empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02]t.",
    "unknown memo": b"\x80\x02h\x05.",
}


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """During a test, the file's code makes no folder, and memory and CPU time are bounded."""
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    begin = time.process_time()
    yield
    seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not (tmp_path / MARKER).exists(), "code of the file was executed"
    assert seconds < 20
    assert peak < 256 << 20


def refusal(path: Path, match: str | None = None) -> str:
    with pytest.raises(CheckpointError, match=match) as error:
        open_checkpoint(str(path), format="fairseq", device="cpu")
    message = str(error.value)
    assert "\n" not in message
    assert path.name in message
    return message


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("write", [as_zip, legacy])
@pytest.mark.parametrize("name", NESTED_CALLS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_that_would_run_code_are_named_and_not_made(
    tmp_path: Path, name: str, write: Any, protocol: int
) -> None:
    path = write(tmp_path / "c.pt", pickle.dumps(NESTED_CALLS[name], protocol))
    message = refusal(path, "its pickle asks for .*; nothing of it was executed; if you trust the file, load it with")
    if name.startswith(("in ", "as ", "alone")):
        assert f"asks for {os.mkdir.__module__}.mkdir," in message


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("write", [as_zip, legacy])
@pytest.mark.parametrize("name", RAW)
def test_programs_written_by_hand_end_in_one_line(tmp_path: Path, name: str, write: Any) -> None:
    refusal(write(tmp_path / "c.pt", RAW[name]))


def tensor(count: int, *, offset: int = 0, shape: bytes = b"K\x03\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """A pickle of one tensor over storage "0" that claims `count` floats."""
    number = b"\x8a\x08" + struct.pack("<q", count)
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number + b"tQ"
    start = b"\x8a\x08" + struct.pack("<q", offset)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + start + shape + stride + b"\x89NtR."


def test_a_tensor_written_by_hand_is_read(tmp_path: Path) -> None:
    data = struct.pack("<3f", 1, 2, 3)
    for path in (
        as_zip(tmp_path / "z.pt", tensor(3), {"0": data}),
        legacy(tmp_path / "l.pt", tensor(3), ("0",), struct.pack("<q", 3) + data),
    ):
        assert is_torch_file(path)
        assert read_tensors(path, {"x": read_torch(path)})["x"].tolist() == [1, 2, 3]


BIG = b"\x8a\x08" + struct.pack("<q", 1 << 61)
SIZES = {
    "more than there is": (tensor(1 << 40), "numbers"),
    "one more": (tensor(4), "numbers"),
    "negative": (tensor(-1), "no storage of numbers"),
    "overflowing": (tensor(1 << 62), "numbers"),
    "a large shape": (tensor(3, shape=BIG + b"\x85"), "lies outside its storage of 3"),
    "a large product": (tensor(3, shape=BIG + BIG + b"\x86", stride=b"K\x00K\x00\x86"), "lies outside its storage"),
    "repeated by stride 0": (tensor(3, shape=b"K\x04\x85", stride=b"K\x00\x85"), "lies outside its storage"),
    "a large stride": (tensor(3, stride=BIG + b"\x85"), "lies outside its storage"),
    "a negative stride": (tensor(3, stride=b"J\xff\xff\xff\xff\x85"), "without a proper shape"),
    "a large offset": (tensor(3, offset=1 << 50), "lies outside its storage"),
    "a negative offset": (tensor(3, offset=-1), "without a proper shape"),
    "no shape": (tensor(3, shape=b"N", stride=b"N"), "tuple must be"),
}


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("name", SIZES)
def test_declared_sizes_are_checked_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    program, message = SIZES[name]
    data = struct.pack("<3f", 1, 2, 3)
    refusal(as_zip(tmp_path / "z.pt", program, {"0": data}), message)
    refusal(legacy(tmp_path / "l.pt", program, ("0",), struct.pack("<q", 3) + data))
    refusal(legacy(tmp_path / "t.pt", tensor(3), ("0",), struct.pack("<q", 3) + data[:-1]), "not as large as")
    refusal(legacy(tmp_path / "k.pt", tensor(3), ("1",), struct.pack("<q", 3) + data), "list of storages does not fit")


@pytest.mark.usefixtures("limits")
def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * (20 << 20))
    (tmp_path / "deflated.pt").write_bytes(content.getvalue())
    refusal(tmp_path / "deflated.pt", "its member archive/data.pkl is said to be far larger than what is stored")
    np.savez_compressed(tmp_path / "deflated.npz", weights=np.zeros(5 << 20, np.float32))
    with pytest.raises(CheckpointError, match=r"its member weights\.npy is said to be far larger"):
        Arrays(tmp_path / "deflated.npz")
    data = bytearray(as_zip(tmp_path / "c.pt", tensor(3), {"0": bytes(12)}).read_bytes())
    index = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)  # the directory's entry of the storage
    data[index + 20 : index + 28] = struct.pack("<II", 0xFFFFFF00, 0xFFFFFF00)
    (tmp_path / "claims.pt").write_bytes(data)
    refusal(tmp_path / "claims.pt", "truncated or broken")
    refusal(
        as_zip(tmp_path / "large.pt", b"\x80\x02" + b"0" * (17 << 20)), "larger than the 16,777,216 bytes that are read"
    )


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02]r\xff\xff\xff\xff.",  # a memo of four thousand million entries
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",  # bytes of that length
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b"x.",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",  # a deep nest
        b"\x80\x02})q\x00" + b"0h\x00h\x00\x86q\x00" * 60 + b"Ns.",  # a key that takes 2**60 steps to hash
        b"\x80\x02]q\x00(" + b"K\x01" * 90_000 + b"e0" + b"cbuiltins\nset\nh\x00\x85R0" * 5_000 + b"N.",
    ],
)
def test_programs_that_would_take_for_ever_are_cut_short(tmp_path: Path, program: bytes) -> None:
    refusal(as_zip(tmp_path / "c.pt", program))


def test_one_storage_does_not_become_thousands_of_tensors(tmp_path: Path) -> None:
    base = torch.zeros(200, 50)
    torch.save({"args": PLAIN["args"], "model": {f"w{n}": base.T for n in range(2000)}}, tmp_path / "c.pt")
    refusal(tmp_path / "c.pt", "more than four times the numbers of the file")


def test_ordinary_content_is_what_torch_loads(tmp_path: Path) -> None:
    shared = torch.arange(12.0).view(3, 4)
    content: dict[str, Any] = {
        "args": argparse.Namespace(a=1, b="ü", c=[1.5, None, True], d=(2**40, b"x")),
        "model": OrderedDict(one=shared, transposed=shared.T, row=shared[1], empty=torch.empty(0, 3)),
        "types": {str(t): torch.ones(2, dtype=t) for t in (torch.float16, torch.bfloat16, torch.int8, torch.bool)},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "set": {1, 2},
        "numpy": [np.float64(0.25), np.int64(-3)],
        "size": torch.Size([2, 3]),
    }
    for zip_format in (True, False):
        path = tmp_path / f"{zip_format}.pt"
        torch.save(content, path, _use_new_zipfile_serialization=zip_format)
        copy = read_torch(path)
        assert vars(copy["args"]) == vars(content["args"])
        assert (copy["set"], copy["numpy"], copy["size"]) == ({1, 2}, [0.25, -3], (2, 3))
        for part in ("model", "types"):
            state = read_tensors(path, copy[part])
            assert list(state) == list(content[part])
            assert all(torch.equal(state[key], x) and state[key].dtype == x.dtype for key, x in content[part].items())
        assert copy["parameter"].tolist() == [1, 1]


def test_classes_of_fairseq_and_omegaconf_are_inert(tmp_path: Path) -> None:
    path = as_zip(tmp_path / "c.pt", raw("fairseq.dataclass.configs", "Anything"))
    stub = read_torch(path)
    assert isinstance(stub, StubType)
    assert (stub.name, stub.args) == ("fairseq.dataclass.configs.Anything", (MARKER,))
    assert "fairseq" not in sys.modules


def test_a_program_has_a_bounded_number_of_steps() -> None:
    with pytest.raises(Refused, match="1,000"):
        Unpickler(b"\x80\x02(" + b"]0" * 600 + b"N.", max_steps=1000).load()
    assert MAX_STEPS == 1_000_000

"""Arrays of story-of-heads files: read out of an .npz that others wrote, and which of them is which weight.

Nothing is unpickled, and nothing larger than it says is read. One table tells arrays and weights of the `Transformer`,
in both directions.
"""

from __future__ import annotations

import io
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.errors import CheckpointError, reason_of
from headscope.model.native.transformer_config import TransformerConfig

RATIO = 100  # weights hardly compress; a member that is said to shrink further is refused before it is read
BROKEN = (
    *(EOFError, KeyError, MemoryError, NotImplementedError, OSError, OverflowError, RecursionError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


class Arrays:
    """The arrays of an .npz, read one at a time; CheckpointError in one line for whatever is broken.

    `kind` is that of their numbers, as numpy writes it: "f" floats, "u" integers without a sign.
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
            if dtype.kind != self.kind or size != info.file_size - member.tell():
                raise ValueError("its header does not fit its content")
        if info.file_size > RATIO * max(info.compress_size, 2**16):
            raise ValueError("it is said to be far larger than what is stored")
        content = io.BytesIO(archive.read(info))  # to its end, so that the checksum is compared
        _header(content)
        flat = np.frombuffer(content.getvalue(), dtype=dtype, offset=content.tell())
        return flat.reshape(shape, order="F" if fortran else "C")

    @contextmanager
    def _reading(self, content: str) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's about headers that Python 2 wrote
                yield
        except BROKEN as error:
            detail = reason_of(error, most=120)
            raise CheckpointError(f"{self.path} is truncated or broken: {content} ({detail})") from None


def first_member(path: Path) -> str:
    """Name of the member that a zip file begins with, "" where it is none; works on truncated files too."""
    try:
        with path.open("rb") as file:
            head = file.read(30)
            if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
                return ""
            return file.read(min(int.from_bytes(head[26:28], "little"), 200)).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"npy version {version} is unknown")
    return tuple(shape), bool(fortran), dtype


Form = Literal["matrix", "vector", "embedding bias", "gates"]
SOURCE, TARGET = "mod/emb_inp/mat:0", "mod/emb_out/mat:0"
QKV = ("query", "key", "value")
NORM = ("weight", "scale:0"), ("bias", "bias:0")


SLOT = re.compile(r"\w*(Adam|Adagrad|Adadelta|RMSProp|Momentum|Ftrl|Average)(_\d+)?")
COUNTER = re.compile(r"(.*/)?(global_step|batch_no|learning_rate_multiplier|beta[12]_power(_\d+)?):0")


@dataclass(frozen=True)
class ArrayRule:
    """One array of a file and the weights of the `Transformer` that it joins, along their first axis.

    A "matrix" is stored input-major: transposed. Embedding tables count as vectors: they stay as they are.
    """

    array: str
    weights: tuple[str, ...]
    form: Form = "vector"

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """The array of weights."""
        joined = torch.cat([state[name] for name in self.weights])
        if self.form == "matrix":
            return joined.T
        if self.form == "embedding bias":
            return joined.view(1, 1, -1)
        return joined.view(1, -1, 1, 1) if self.form == "gates" else joined

    def unpack(self, array: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of an array; the sizes of the parts are those in `shapes`."""
        joined = array.T if self.form == "matrix" else array
        joined = joined.flatten() if self.form in ("embedding bias", "gates") else joined
        parts = torch.split(joined, [len(shapes[name]) for name in self.weights])
        return {name: part.contiguous() for name, part in zip(self.weights, parts, strict=True)}


def is_training_state(name: str, weights: Collection[str]) -> bool:
    """Whether an array is of an optimizer (`…/<weight>/Adam:0`) or a counter of steps: no result depends on it."""
    if COUNTER.fullmatch(name):
        return True
    scope, _, slot = name.removesuffix(":0").rpartition("/")
    return SLOT.fullmatch(slot) is not None and any(
        f"/{scope}".endswith(f"/{weight.removesuffix(':0')}") for weight in weights
    )


def array_rules(config: TransformerConfig, *, loss: str, combined: bool, shared: bool) -> Iterator[ArrayRule]:
    """All arrays of a model.

    `loss` is the scope of the output projection, `combined` says that cross attention has one matrix for
    queries, keys and values, `shared` that there is one embedding table.
    """
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None
    table = "decoder.embeddings.tokens.weight"
    yield ArrayRule(SOURCE, (table if config.share_embeddings else "encoder.embeddings.tokens.weight",))
    if not shared:
        yield ArrayRule(TARGET, (table,))
    if encoder.embedding_bias:
        yield ArrayRule("mod/emb_inp_bias:0", ("encoder.embeddings.bias",), "embedding bias")
    for side, name, stack in (("enc", "encoder", encoder), ("dec", "decoder", decoder)):
        gates = "hard-concrete.v1"
        for i in range(stack.layers):
            layer = f"{name}.layers.{i}"
            yield from _attention(f"mod/{side}_attn-{i}", f"{layer}.self_attention", True, stack.self_mixing == gates)
            if side == "dec":
                array, weight = f"mod/dec_enc_attn-{i}", f"{layer}.cross_attention"
                yield from _attention(array, weight, combined, stack.cross_mixing == gates)
            for array, part in (("conv1", "inner"), ("conv2", "outer")):
                yield from _linear(f"mod/{side}_ffn-{i}/{array}", (f"{layer}.ffn.{part}",))
            yield from _norm(f"mod/{side}_ffn-{i}/layer_norm", f"{layer}.ffn_norm")
        if stack.final_norm:
            yield from _norm(f"mod/{side}_out_norm", f"{name}.norm")
    if not config.tie_output:
        yield ArrayRule(f"{loss}/logits/W:0", ("output.weight",), "matrix")
    if config.output_bias:
        yield ArrayRule(f"{loss}/logits/b:0", ("output.bias",))


def _attention(array: str, weight: str, combined: bool, gated: bool) -> Iterator[ArrayRule]:
    if combined:
        yield from _linear(f"{array}/mem_conv", tuple(f"{weight}.{part}" for part in QKV))
    else:
        yield from _linear(f"{array}/query_conv", (f"{weight}.query",))
        yield from _linear(f"{array}/mem_conv", (f"{weight}.key", f"{weight}.value"))
    yield from _linear(f"{array}/out_conv", (f"{weight}.output",))
    yield from _norm(f"{array}/layer_norm", f"{weight}_norm")
    if gated:
        yield ArrayRule(f"{array}/gate/log_a:0", (f"{weight}.mixing.log_a",), "gates")


def _linear(array: str, modules: tuple[str, ...]) -> Iterator[ArrayRule]:
    yield ArrayRule(f"{array}/W:0", tuple(f"{module}.weight" for module in modules), "matrix")
    yield ArrayRule(f"{array}/b:0", tuple(f"{module}.bias" for module in modules))


def _norm(array: str, weight: str) -> Iterator[ArrayRule]:
    for parameter, suffix in NORM:
        yield ArrayRule(f"{array}/{suffix}", (f"{weight}.{parameter}",))

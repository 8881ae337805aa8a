"""Results of a run: tables, arrays and signatures, written atomically."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headscope.files.writing import write_atomically
from headscope.version import VERSION

if TYPE_CHECKING:
    import pandas as pd
    import torch


@dataclass(frozen=True)
class Signature:
    """Everything that a number depends on, in sacreBLEU's manner: `m:confidence.voita|eos:excl|…|v:0.1.0`."""

    entries: Mapping[str, str]

    def __str__(self) -> str:
        return "|".join(f"{key}:{value}" for key, value in self.entries.items())

    def having(self, **changes: str) -> Signature:
        """A copy with entries replaced, or added at the front."""
        first = {key: value for key, value in changes.items() if key not in self.entries}
        return Signature({**first, **{key: changes.get(key, value) for key, value in self.entries.items()}})


class _Checkpoint(Protocol):
    """The part of a checkpoint that is in signatures."""

    format: str

    @property
    def digest(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def signature_of(
    entries: Mapping[str, str],
    *,
    checkpoint: _Checkpoint | None = None,
    data: tuple[str, object] | None = None,
    off: Mapping[str, str] | None = None,
    transformers: bool = False,
    replicates: int | None = None,
    seed: int | None = None,
) -> Signature:
    """A signature of `entries`, followed by those that all signatures share.

    These are, where given: the digest of the text and its number of sentences (`data`), the checkpoint with the masked
    heads (`off`), versions of torch and transformers, bootstrap `replicates`, `seed` and the version of headscope.
    """
    signed = dict(entries)
    if data is not None:
        signed["data"] = f"sha1={data[0][:12]},n={data[1]}"
    if checkpoint is not None:
        signed["ckpt"] = f"{checkpoint.format}-sha256={checkpoint.digest[:12]}"
        signed |= off or {}
        signed["dtype"] = str(checkpoint.dtype).removeprefix("torch.")
        signed["device"] = checkpoint.device.type
    signed["torch"] = version("torch")
    if transformers:
        signed["tf"] = version("transformers")
    numbers = {"boot": replicates, "seed": seed}
    return Signature(signed | {key: str(value) for key, value in numbers.items() if value is not None} | {"v": VERSION})


def signed_rows(frame: pd.DataFrame, signature: Signature) -> dict[str, Any]:
    """A table as JSON values, with the signature of its numbers; NaN becomes null."""
    return {"signature": str(signature), "rows": json.loads(frame.to_json(orient="records"))}


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write numpy arrays as a compressed .npz."""
    return write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))


def write_pickle(path: Path, value: Any) -> Path:
    """Write a pickle of plain containers and numpy arrays, protocol 3 as the MHR fork does; numpy 1 opens it too."""
    new, old = (f"cnumpy.{core}.multiarray\n_reconstruct\n".encode() for core in ("_core", "core"))
    content = pickle.dumps(value, protocol=3).replace(new, old)
    return write_atomically(path, lambda temporary: temporary.write_bytes(content))

"""Signatures of numbers: everything that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from headscope.version import VERSION


def count_of(count: int, noun: str) -> str:
    """`1 head`, `2,000 heads`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Signature:
    """Everything that a number depends on, in sacreBLEU's manner: `m:confidence.voita|eos:excl|…|v:0.1.0`."""

    entries: Mapping[str, str]

    def __str__(self) -> str:
        return "|".join(f"{key}:{value}" for key, value in self.entries.items())

    def with_entries(self, **changes: str) -> Signature:
        """A copy with entries replaced, or added at the front."""
        first = {key: value for key, value in changes.items() if key not in self.entries}
        return Signature({**first, **{key: changes.get(key, value) for key, value in self.entries.items()}})


def signature_of(
    entries: Mapping[str, str],
    *,
    checkpoint: Any = None,
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
    named_values = dict(entries)
    if data is not None:
        named_values["data"] = f"sha1={data[0][:12]},n={data[1]}"
    if checkpoint is not None:
        named_values["ckpt"] = f"{checkpoint.format}-sha256={checkpoint.digest[:12]}"
        named_values |= off or {}
        of_type = f" of {checkpoint.quantization}" if checkpoint.quantization else ""
        named_values["dtype"] = str(checkpoint.dtype).removeprefix("torch.") + of_type
        named_values["device"] = checkpoint.device.type
    named_values["torch"] = version("torch")
    if transformers:
        named_values["tf"] = version("transformers")
    numbers = {"boot": replicates, "seed": seed}
    return Signature(
        named_values | {key: str(value) for key, value in numbers.items() if value is not None} | {"v": VERSION}
    )

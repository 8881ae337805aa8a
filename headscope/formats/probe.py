"""What a conversion is checked by: random inputs, and the logits that the files which were written give of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Probe(NamedTuple):
    """Random ids that two models are compared on: sources [2 s], which of them are real [2 s], targets [2 t]."""

    source: Tensor
    real: Tensor
    target: Tensor


@dataclass(frozen=True)
class Conversion:
    """What a format made of a native model: its class there, and logits [2 t V] of the probe from the files.

    `opens` and `limits` are lines of the card: which programs open it, and which do not. `file` is what to open in the
    folder, where it is not the folder itself.
    """

    architecture: str
    logits: Tensor
    notes: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    file: str = ""

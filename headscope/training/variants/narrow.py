"""Heads that read a slice of the input each (narrow self-attention, Bloem 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headscope.config import option
from headscope.training.variant import variant
from headscope.training.variants.wide import Wide, WideOptions


@dataclass(frozen=True)
class NarrowOptions(WideOptions):
    """Options of `narrow`."""

    d_head: int | None = option(
        None, "Width of a head's queries, keys and values; default: its slice's.", maximum=2**18, common=True
    )
    head_input: Literal["full", "slice"] = option(
        "slice", "slice: every head reads its own part of the input; full: all of it.", common=True
    )


@variant
class Narrow(Wide):
    """The input is cut into h slices, a head reads its own: 3·d²/h + d² weights and d biases of the output.

    With `shared_qkv` all heads have the same small matrices: 3·(d/h)² + d² weights, d biases of the output.
    """

    name = "narrow"
    summary = "Heads that read a slice of the input each."
    Options = NarrowOptions

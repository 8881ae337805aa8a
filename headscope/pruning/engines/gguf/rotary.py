"""Rotary embeddings as llama.cpp computes them from what a file says, held against those of transformers.

llama.cpp scales frequencies by `rope.scaling.type` and `rope.scaling.factor`, or divides each by an entry of
`rope_freqs`, and multiplies cosines and sines by `rope.scaling.attn_factor`, with YaRN also by 1 + 0.1·ln(factor)
(src/llama-context.cpp; ggml_rope_yarn_corr_dims of ggml.c). There are keys of YaRN's bounds, `beta_fast` and
`beta_slow`, which none of these architectures reads; frequencies with other bounds are written as divisors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SCALINGS = ("default", "linear", "llama3", "yarn")
BETA_FAST, BETA_SLOW = 32.0, 1.0
ROUNDING = 2e-6  # of frequencies, which transformers computes in single precision
BOUNDS = {"beta_fast": BETA_FAST, "beta_slow": BETA_SLOW, "truncate": True}


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """What a file says: `kind` and `factor` scale frequencies ("" and None: they are as `theta` has them).

    `trained` is YaRN's original context, `gain` what cosines and sines are multiplied by besides, `divisors` [k/2] of
    the frequencies (empty: none). `unfit` names what nothing of these can say.
    """

    theta: float
    kind: str = ""
    factor: float | None = None
    trained: int | None = None
    gain: float = 1.0
    divisors: Tensor = field(default_factory=lambda: torch.empty(0))
    unfit: str = ""

    @property
    def plain(self) -> bool:
        """Whether frequencies are those of `theta`."""
        return self.factor is None and self.gain == 1 and not len(self.divisors) and not self.unfit


def rotary_of(model: Any, width: int, *, divides: bool) -> Rotary:
    """How a file says what the rotary embeddings of a model compute; `divides`: its architecture reads `rope_freqs`."""
    rope = rope_parameters(model.config)
    wanted = type(model.model.rotary_emb)(model.config)  # anew: the model's own may have been rounded to half precision
    frequencies, scaling = wanted.inv_freq.double().cpu(), float(wanted.attention_scaling)  # [k/2]
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    found = _SCALED[kind](plain, rope) if kind in _SCALED else None
    exact = found is not None and found.shape == frequencies.shape
    if found is not None and exact and bool(((found - frequencies).abs() <= ROUNDING * frequencies.abs()).all()):
        if kind == "default":
            return Rotary(theta=theta, gain=scaling)
        factor = float(rope["factor"])
        own = 1 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1 else 1.0
        trained = int(rope["original_max_position_embeddings"]) if kind == "yarn" else None
        return Rotary(theta=theta, kind=kind, factor=factor, trained=trained, gain=scaling / own)
    if divides and frequencies.shape == plain.shape:
        return Rotary(theta=theta, gain=scaling, divisors=(plain / frequencies).float())
    named = ", ".join(
        f"{name} {rope[name]}" for name, usual in BOUNDS.items() if rope.get(name, usual) not in (usual, None)
    )
    return Rotary(theta=theta, unfit=f"{kind} frequencies" + (f" with {named}" if named else ""))


def rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary parameters as transformers has them, with what it takes for those of YaRN that are not there."""
    rope: dict[str, Any] = {"rope_type": "default", **config.rope_parameters}
    if rope["rope_type"] == "yarn":
        longest = config.max_position_embeddings
        rope["original_max_position_embeddings"] = rope.get("original_max_position_embeddings") or longest
        rope["factor"] = rope.get("factor") or longest / rope["original_max_position_embeddings"]
    return rope


def _yarn(plain: Tensor, rope: dict[str, Any]) -> Tensor:
    """Frequencies [k/2] between divided and whole ones, with the bounds that llama.cpp takes (ggml.c)."""
    width, theta = 2 * len(plain), float(rope["rope_theta"])
    trained = float(rope["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        """The rotary pair that turns so often over the original context."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(0, math.floor(pair(BETA_FAST))), min(width - 1, math.ceil(pair(BETA_SLOW)))
    ramp = ((torch.arange(len(plain), dtype=torch.float64) - low) / max(0.001, high - low)).clamp(0, 1)
    return plain / float(rope["factor"]) * ramp + plain * (1 - ramp)


_SCALED: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "default": lambda plain, rope: plain,
    "linear": lambda plain, rope: plain / float(rope["factor"]),
    "yarn": _yarn,
}
"""Frequencies [k/2] that llama.cpp makes of the plain ones, by its names of scalings."""

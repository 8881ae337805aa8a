"""Which version of Voita's rules, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from headscope.errors import ConfigError

ALLOWED = {
    "version": ("2021", "2019", "paper"),
    "mode": ("alpha-beta", "eps"),
    "norm_jacobian": ("published", "exact"),
}


@dataclass(frozen=True, kw_only=True)
class VoitaSettings:
    """Settings of the rules; the defaults are those of the program.

    - `version` "2021": the program as it is; "2019": as first published; "paper": the rule in the paper's
      appendix A. All other settings belong to "2021".
    - `mode` "alpha-beta": positive and negative impacts are normalised apart; "eps": together.
    - `attention_constant`: attention weights are constants, so that relevance goes to values only.
    - `norm_jacobian` "published" leaves the epsilon of a layer norm out of one factor, as the program does;
      "exact" keeps it.
    """

    version: Literal["2021", "2019", "paper"] = "2021"
    mode: Literal["alpha-beta", "eps"] = "alpha-beta"
    attention_constant: bool = False
    alpha: float = 0.5
    beta: float = 0.5
    epsilon: float = 1e-5
    norm_jacobian: Literal["published", "exact"] = "published"

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"voita {name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if not self.epsilon > 0:
            raise ConfigError(f"voita epsilon is {self.epsilon}; it must be more than 0")
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if self.version != "2021" and changed != ["version"]:
            raise ConfigError(
                f"version {self.version!r} of voita has no settings; mode, attention_constant, alpha, beta, epsilon "
                "and norm_jacobian belong to version '2021'"
            )

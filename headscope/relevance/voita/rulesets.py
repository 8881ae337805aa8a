"""Voita's rules as rule sets: `voita` as the program is, and its other modes and versions."""

from __future__ import annotations

from dataclasses import dataclass, field

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.relevance.rulesets import Explanation, RuleSet, Steps, Target, register
from headscope.relevance.voita.length_groups import explain_batch
from headscope.relevance.voita.settings import VoitaSettings


@dataclass(frozen=True)
class Voita(RuleSet):
    """Starts from an indicator at each position; rescaling makes it non-linear, so positions are explained apart."""

    name: str
    summary: str
    settings: VoitaSettings = field(default_factory=VoitaSettings)
    linear = False
    steps = "each"

    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        return None

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """`values` are 1 where something is explained: the indicator, not a logit."""
        if steps != "each":
            raise ConfigError(f"{self.name} is not linear, it explains each position by itself; choose steps 'each'")
        return explain_batch(checkpoint, batch, settings=self.settings, target=target)


register(Voita("voita", "LRP as in Voita et al.'s program, 2021: alpha-beta rule on exact Jacobians"))
register(
    Voita(
        "voita-constant",
        "the same with attention weights as constants",
        VoitaSettings(attention_constant=True),
    )
)
register(Voita("voita-eps", "the same in its signed mode (ill-conditioned at norms)", VoitaSettings(mode="eps")))
register(
    Voita(
        "voita-eps-constant",
        "the signed mode with attention weights as constants",
        VoitaSettings(mode="eps", attention_constant=True),
    )
)
register(Voita("voita-2019", "the program as first published; superseded", VoitaSettings(version="2019")))
register(Voita("voita-paper", "contribution ratios of the paper's appendix A", VoitaSettings(version="paper")))

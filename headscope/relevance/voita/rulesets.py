"""Voita's rules as rule sets: `voita` is the program's default; its other modes and versions."""

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
    """Starts from an indicator at each position; rescaling is not linear, so positions are explained one by one."""

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


for name, summary, settings in (
    ("voita", "LRP as in Voita et al.'s program, 2021: alpha-beta rule on exact Jacobians", VoitaSettings()),
    ("voita-constant", "the same with attention weights as constants", VoitaSettings(attention_constant=True)),
    ("voita-eps", "the same in its signed mode (ill-conditioned at norms)", VoitaSettings(mode="eps")),
    (
        "voita-eps-constant",
        "the signed mode with attention weights as constants",
        VoitaSettings(mode="eps", attention_constant=True),
    ),
    ("voita-2019", "the program as first published; superseded", VoitaSettings(version="2019")),
    ("voita-paper", "contribution ratios of the paper's appendix A", VoitaSettings(version="paper")),
):
    register(Voita(name, summary, settings))

"""EAP-IG on heads: gradients averaged along the way from the corrupt prompt to the clean one (Hanna et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headscope.analyses.patching import PromptAnalysis
from headscope.attribution.patching import CONTEXT, integrated_effects
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.base import analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site


@dataclass(frozen=True)
class EapIgOptions:
    """Options of `eap_ig`."""

    eap_steps: int = option(
        30,
        "Points of `eap_ig` between the corrupt and the clean prompt.",
        metavar="N",
        panel="Prompts",
        minimum=1,
        maximum=1000,
    )


@analysis
class EapIg(PromptAnalysis):
    """(z_clean − z_corrupt) · mean of ∂m/∂z along the path of input embeddings (EAP-IG, Hanna et al. 2024).

    z is a head's context, m the objective of `patching`. Gradients are taken at e_corrupt + (n / N)(e_clean −
    e_corrupt), n = 0 … N − 1 (`eap-steps`), as in the authors' program. The unit is a head, where the authors score
    edges. Positive: the head speaks for the answer. N forward and backward passes, and two forward ones.
    """

    name = "eap_ig"
    reads = "contexts"
    group = "prompts"
    order = 402
    default = False
    many_passes = True
    needs = frozenset({"contrast"})
    summary = "the effect of patching by gradients averaged from the corrupt prompt to the clean one"
    measures = (
        Measure(
            "eap_ig",
            "EAP-IG",
            unit="logits",
            signed=True,
            keep="highest",
            why="the answer depends least on what they carry, by integrated gradients",
        ),
    )
    Options = EapIgOptions

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        result = integrated_effects(checkpoint, batch, steps=self.options.eap_steps)
        return self.ratios(checkpoint, batch, result, {CONTEXT: self.name})

    def signature(self) -> dict[str, str]:
        return {"eap-steps": str(self.options.eap_steps)}

"""Attribution patching: the effects of all heads to first order, from one backward pass (Nanda 2023; AtP*)."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.analyses.patching import PatchingOptions, PromptAnalysis
from headscope.attribution.patching import CHANNELS, CONTEXT, first_order_effects
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.base import analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site


@analysis
class AttributionPatching(PromptAnalysis):
    """First-order estimate of `patching`: Σ (z − z') · ∂m/∂z over positions (Nanda 2023; Kramár et al. 2024).

    z is a head's context in the changed run, z' in the other, m the objective of `patching`; mean over prompts, with
    its signs. Two forward passes and one backward pass for all heads. Three more columns swap only queries, keys or
    values and compute the context anew, softmax included: for queries and keys the correction of AtP*, with all
    positions of a head at once. No GradDrop.
    """

    name = "attribution_patching"
    reads = "contexts"
    group = "prompts"
    order = 401
    default = False
    needs = frozenset({"contrast"})
    summary = "the effect of patching to first order, and what comes through queries, keys and values"
    measures = (
        Measure(
            "attribution_patching",
            "attribution patching",
            unit="logits",
            signed=True,
            keep="highest",
            why="the answer depends least on what they carry, to first order",
        ),
        Measure("attribution_patching_query", "attribution patching, queries", unit="logits", signed=True),
        Measure("attribution_patching_key", "attribution patching, keys", unit="logits", signed=True),
        Measure("attribution_patching_value", "attribution patching, values", unit="logits", signed=True),
    )
    Options = PatchingOptions

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        result = first_order_effects(checkpoint, batch, direction=self.options.direction)
        names = {CONTEXT: self.name} | {channel: f"{self.name}_{channel}" for channel in CHANNELS}
        return self.ratios(checkpoint, batch, result, names)

    def signature(self) -> dict[str, str]:
        return {"patched": f"{self.options.direction}/context"}

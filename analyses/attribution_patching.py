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
    """What `patching` measures, to first order: (z − z') · ∂m/∂z over positions (Nanda 2023; Kramár et al. 2024).

    z is the context of a head in the run that is changed, z' in the other, m the objective of `patching`; mean over
    prompts, with the signs of `patching`. Two forward passes and one backward pass give all heads. The three further
    columns say through what it comes: the head's context is computed anew with the queries, the keys or the values of
    the other run in the place of its own, softmax included, and the change goes with the same gradient. For queries and
    keys that is the correction of AtP* (Σ (A − A') · ∂m/∂A), which does not vanish where attention is saturated;
    here all positions of a head are patched at once, where the paper takes each as a node. A key or value that several
    heads share counts for each of them. Not done: GradDrop.
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

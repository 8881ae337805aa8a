"""An objective on one batch as a function of head gates, which captum attributes to the gates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headscope.attribution.gatevector import Contexts, GateFunction, Keep, split_gates
from headscope.attribution.objectives.base import Objective, ObjectiveOutput
from headscope.attribution.replacements import replacement
from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.heads import Layout, Site
from headscope.model.prefix_cache import LayerIndex
from headscope.model.process_settings import keep_freed_memory

Of = Literal["damage", "value"]


@dataclass
class GatedObjective:
    """The value of an objective on one batch under the gates that are set; the first call is the intact model's.

    Higher is better. "damage": minus the objective's damage, 0 where no gate is closed. "value": the objective's
    value with the intact pass's aim, minus it where lower is better; the two differ by a constant but for
    `representation`, whose damage is a cosine distance and whose value is a projection.
    """

    checkpoint: Checkpoint
    objective: Objective
    batch: Batch
    of: Of
    intact: ObjectiveOutput | None = None
    ready: Batch = field(init=False)

    def __post_init__(self) -> None:
        self.ready = self.objective.prepared(self.checkpoint, self.batch)

    def __call__(self) -> Tensor:
        """One forward pass: [b]."""
        output = self.objective.output(self.checkpoint, self.ready)
        aim = None if self.intact is None else self.intact.aim
        outcome = self.objective.evaluate(self.checkpoint, output, self.ready, aim)
        if self.intact is None:
            self.intact = outcome
        if self.of == "damage":
            return -self.objective.damage(self.intact, outcome)
        return outcome.values if self.objective.higher_is_better else -outcome.values


@dataclass(frozen=True)
class ExplainedBatch:
    """f(gates) of a batch, its open gates [b N], and the counts that importances [b N] are divided by."""

    f: GateFunction
    gates: Tensor
    counts: Tensor
    layout: Layout

    def ratios(self, name: str, importances: Tensor) -> dict[tuple[str, Site, int], Ratio]:
        """Sums and counts of a statistic at every (site, layer)."""
        return {
            (name, site, layer): Ratio(part, self.counts[:, None])
            for (site, layer), part in split_gates(importances, self.layout).items()
        }


@contextmanager
def explained_batch(
    checkpoint: Checkpoint,
    objective: Objective,
    batch: Batch,
    *,
    layer_index: LayerIndex | None,
    of: Of = "damage",
    keep: Keep = "first",
    ablate_with: str = "zero",
    closed: Contexts | None = None,
) -> Iterator[ExplainedBatch]:
    """Within the block: the objective of every sentence of a batch as a function of head gates.

    A closed head's context is replaced as `ablate_with` says (see `headscope.attribution.replacements`), or by that of
    `closed`, which has the contexts of another run over as many positions. Hundreds of passes over one batch follow, so
    a command's process keeps freed memory (`headscope.model.process_settings`).
    """
    keep_freed_memory()
    gated_objective = GatedObjective(checkpoint, objective, batch, of)
    replace = replacement(ablate_with)

    def closed_contexts(contexts: Contexts) -> Contexts:
        return replace(contexts, batch, objective.seed) if closed is None else closed

    encoder_only = checkpoint.two_sided and batch.target is None
    sites = frozenset({Site.ENCODER_SELF}) if encoder_only else frozenset(Site)
    f = GateFunction(
        checkpoint.model,
        gated_objective,
        layer_index=layer_index,
        keep=keep,
        sites=sites,
        closed_contexts=closed_contexts,
    )
    with f.entered():
        assert gated_objective.intact is not None
        dtype = torch.float64 if checkpoint.dtype is torch.float64 else torch.float32
        yield ExplainedBatch(
            f, torch.ones(len(batch.indices), f.size, dtype=dtype), gated_objective.intact.counts.cpu(), f.layout
        )

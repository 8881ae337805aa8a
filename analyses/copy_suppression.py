"""Copy suppression: heads that lower the logit of the token that they look at (McDougall et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attribution.residual_stream import ResidualStream, SiteLayer, read_states, stream_of, why_no_stream
from headscope.bootstrap import Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, LabelRule, analysis
from headscope.engine.evidence.labels import Rate
from headscope.formats.base import Checkpoint

LOWEST = 10
ROWS, CELLS = 64, 2**26  # tokens whose logits are held at a time, and numbers of W_O W_U


@dataclass(frozen=True)
class CopySuppressionOptions(LabelOptions):
    """Options of `copy_suppression`."""

    copy_suppression_tokens: int = option(
        1000, "Tokens of the vocabulary that copy suppression is measured on.", metavar="N", minimum=1
    )


@analysis
class CopySuppression(Analysis):
    """Share of tokens whose own logit is among the ten lowest that the head writes (McDougall et al. 2023).

    Logits are E' W_V W_O W_U, gains of norms folded in, biases left out; E' are embeddings after the first layer's
    feed-forward network, its heads off. Measured on `copy-suppression-tokens` drawn tokens; `copy_suppression_chance`
    is ten over the vocabulary. Pre-norm decoders only. Whether the head looks at what is about to be predicted is not
    measured.

    Label `copy-suppression`: at least 0.5 and twice chance, with tokens as units.
    """

    name = "copy_suppression"
    version = 2
    order = 143
    default = False
    sampled = True
    passes = frozenset()
    summary = "share of tokens whose own logit a head lowers most of all where it looks at them"
    measures = (
        Measure("copy_suppression", "tokens whose logit it lowers most", range=(0, 1)),
        Measure("copy_suppression_chance", "the same by chance", range=(0, 1)),
    )
    functions = (
        HeadFunction("copy-suppression", "⊖", "x", "#aa4466", "lowers the logit of what it attends to", order=15),
    )
    Options = CopySuppressionOptions
    lowered: dict[SiteLayer, Tensor]
    chance: float

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        plain = torch.tensor(checkpoint.plain_ids(side="target"))
        generator = torch.Generator().manual_seed(self.run.seed)
        ids = (
            plain[torch.randperm(len(plain), generator=generator)[: self.options.copy_suppression_tokens]].sort().values
        )
        self.chance = LOWEST / len(stream.readout.weight)
        self.lowered = {
            site_layer: lowest(stream, site_layer, states, ids.to(states.device)).T.cpu().double()
            for site_layer, states in read_states(stream, ids).items()
        }

    def rules(self) -> Sequence[LabelRule]:
        rate = Rate("of sampled tokens are among the ten it lowers most")
        return [LabelRule("copy-suppression", self.name, 0.5, chance="copy_suppression_chance", rate=rate)]

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        statistics = {}
        for site_layer, is_lowest in self.lowered.items():  # [n h]
            count = torch.ones(len(is_lowest), 1)
            statistics[(self.name, *site_layer)] = Ratio(is_lowest, count)
            statistics[("copy_suppression_chance", *site_layer)] = Ratio(torch.full_like(is_lowest, self.chance), count)
        return super().report(aggregates.over_units(statistics))

    def signature(self) -> dict[str, str]:
        return {"tokens": str(self.options.copy_suppression_tokens), **super().signature()}


def lowest(stream: ResidualStream, site_layer: SiteLayer, states: Tensor, ids: Tensor) -> Tensor:
    """Whether what each head writes for tokens [n], read as states [n d], has them among its ten lowest logits: [h n].

    Where logits tie, the token comes first; a head whose writing is read by no logit lowers none. Heads and tokens
    are taken so many at a time that their logits fit in memory.
    """
    heads, parts = stream.factors(site_layer), []
    contexts = states @ heads.value  # [h n k]
    size = max(1, CELLS // (contexts.shape[-1] * len(stream.readout.weight)))
    for some, output in zip(contexts.split(size), heads.output.split(size), strict=True):
        table, is_lowest = stream.unembed(output), []  # [h k V]
        for context, own_ids in zip(some.split(ROWS, dim=1), ids.split(ROWS), strict=True):
            logits = context @ table  # [h n V]
            own = logits.gather(-1, own_ids[None, :, None].expand(len(some), -1, 1))
            is_reachable = stream.reaches_logits(context @ output, logits)
            is_lowest.append(((logits < own).sum(dim=-1) < LOWEST) & is_reachable)
        parts.append(torch.cat(is_lowest, dim=1))
    return torch.cat(parts)

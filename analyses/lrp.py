"""Layer-wise relevance propagation: the relevance of every head for the model's predictions (Voita et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.aggregate import stack_layers
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, RunOptions, analysis, head_table
from headscope.engine.evidence.significance import spearman
from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, Site, SiteLayer
from headscope.relevance.backward import Backward, explain_backward
from headscope.relevance.rulesets import RULE_SETS, Explanation, Steps, Target, explained_quantity

MEASURES = ("relevance", "raw", "absolute", "value_share", "qk_share")


@dataclass(frozen=True)
class LrpOptions:
    """Options of `lrp`."""

    rules: str = option(
        "", "Rule sets of `lrp`, comma-separated (`headscope list rules`); default: what fits.", metavar="NAMES"
    )
    target_token: Literal["top1", "reference", "contrastive"] = option(
        "top1", "Which logit `lrp` explains at each position."
    )
    steps: Literal["", "sum", "each"] = option(
        "", "`lrp`: all positions in one backward pass, or each by itself; default: by rule set.", metavar="sum|each"
    )


@analysis
class Lrp(Analysis):
    """Mean over explained predictions of a head's relevance at weights·V, normalised over its layer's heads.

    `lrp` is of the first rule set (`headscope.relevance.rulesets`). lrp.csv has normalised, raw and absolute relevance
    of every rule set, and what goes on through values and through queries and keys; lrp_rules.csv rank correlations
    between rule sets. `voita` normalises each prediction by itself (Voita et al. 2019); backward rule sets explain all
    predictions of a sentence in one pass, or one each with `--steps each`.
    """

    name = "lrp"
    group = "importance"
    order = 205
    summary = "relevance of heads for what the model says, by layer-wise relevance propagation"
    measures = (
        Measure(
            "lrp",
            "LRP relevance",
            range=(0, None),
            overview=2,
            keep="highest",
            why="predictions get the least relevance from them",
            within_layer=True,
        ),
    )
    default = False
    needs = frozenset({"labels"})
    Options = LrpOptions
    merges = ("relevance",)

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.target: Target = self.options.target_token
        self.steps: Steps | None = self.options.steps or None
        self.names: Sequence[str] = tuple(dict.fromkeys(filter(None, map(str.strip, self.options.rules.split(",")))))
        for name in self.names:
            if not RULE_SETS.get(name).linear and self.steps == "sum":
                raise ConfigError(f"{flag('steps', 'sum')}: {name} is not linear and explains each position by itself")
        self.steps_by_rules: dict[str, Steps] = {}
        self.quantity = ""
        self.relevance: dict[tuple[int, Site], dict[int, Tensor]] = {}

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        has_target = batch.target is not None
        # `voita` was made for encoder–decoders of the native kind
        self.names = self.names or ("voita" if checkpoint.is_native and has_target else "attnlrp",)
        self.quantity = explained_quantity(checkpoint, has_target=has_target, target=self.target)
        ratios: dict[tuple[str, Site, int], Ratio] = {}
        for name, explanation in self._explanations(checkpoint, batch).items():
            for (site, layer), relevance in explanation.relevance.items():
                relevance_shares = relevance.normalize()
                if self.run.detail and name == self.names[0]:
                    self._keep(batch, (site, layer), relevance_shares, explanation.counts)
                measures = (relevance.raw, relevance.absolute, relevance.value_share, relevance.qk_share)
                predictions = explanation.counts.to(relevance_shares.dtype)[..., None]
                weights = predictions * relevance_shares.isfinite()  # [p b h]
                columns = [((relevance_shares.nan_to_num() * weights).sum(dim=0), weights.sum(dim=0))]
                columns += [_sum_counts(values, explanation.counts) for values in measures]
                totals, counts = zip(*columns, strict=True)
                ratios[name, site, layer] = Ratio(torch.stack(totals, dim=-1), torch.stack(counts, dim=-1))
        return ratios

    def _explanations(self, checkpoint: Checkpoint, batch: Batch) -> dict[str, Explanation]:
        """The explanation of every rule set; backward rule sets with the same steps share a forward pass."""
        by_steps: dict[Steps, list[Backward]] = {}
        explanations: dict[str, Explanation] = {}
        for name in self.names:
            rule_set = RULE_SETS.get(name)
            steps = self.steps_by_rules[name] = self.steps or rule_set.steps
            if reason := rule_set.applies(checkpoint, has_target=batch.target is not None):
                raise ConfigError(f"{flag('rules', name)}: {reason}")
            if isinstance(rule_set, Backward):
                by_steps.setdefault(steps, []).append(rule_set)
            else:
                explanations[name] = rule_set.explain(checkpoint, batch, target=self.target, steps=steps)
        for steps, rule_sets in by_steps.items():
            explanations |= explain_backward(checkpoint, batch, rule_sets, target=self.target, steps=steps)
        return {name: explanations[name] for name in self.names}

    def _keep(self, batch: Batch, site_layer: SiteLayer, relevance: Tensor, counts: Tensor) -> None:
        """Keep the relevance [p h] of each sentence's explained positions, from all [p b h]."""
        site, layer = site_layer
        for row, number in enumerate(batch.indices.tolist()):
            sentence_relevance = relevance[counts[:, row] > 0, row]
            self.relevance.setdefault((number, site), {})[layer] = sentence_relevance.float().cpu()

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        order = sorted(aggregates.sums, key=lambda key: (self.names.index(key[0]), SITES.index(key[1]), key[2]))
        estimates = {key: aggregates.ratio(*key) for key in order}
        first = {key[1:]: estimate.at((..., 0)) for key, estimate in estimates.items() if key[0] == self.names[0]}
        detail = {f"{n}/{site}": stack_layers(layers) for (n, site), layers in sorted(self.relevance.items())}
        tables = {"lrp": _table(estimates)} | self._agreement(estimates)
        return AnalysisReport(columns={"lrp": first}, tables=tables, detail={"lrp": detail})

    def _agreement(self, estimates: Mapping[tuple[str, Site, int], Estimate]) -> dict[str, pd.DataFrame]:
        """`lrp_rules.csv`: the rank correlation of every two rule sets in a layer, and the top head of each."""
        rows = []
        for first, second in combinations(self.names, 2):
            for site, layer in [(site, layer) for name, site, layer in estimates if name == first]:
                pair = [estimates[name, site, layer].value[..., 0] for name in (first, second)]
                tops = [int(values.argmax()) for values in pair]
                compared: dict[str, object] = {"first": first, "second": second, "site": site.value, "layer": layer}
                rows.append(compared | {"spearman": spearman(*pair), "first_head": tops[0], "second_head": tops[1]})
        return {"lrp_rules": pd.DataFrame(rows)} if rows else {}

    def signature(self) -> dict[str, str]:
        steps = "+".join(dict.fromkeys(self.steps_by_rules.values()))
        return {"rules": "+".join(self.names), "explains": self.quantity, "steps": steps}


def _sum_counts(values: Tensor | None, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_p values [p b h] and the number of predictions, [b h] each; zeros where there are no values."""
    heads = counts.sum(dim=0)[:, None]
    if values is None:
        return torch.zeros_like(heads), torch.zeros_like(heads)
    weight = (counts > 0).to(values.dtype)[..., None]
    total = (values * weight).sum(dim=0)
    return total, heads.to(total.dtype).expand_as(total)


def _table(estimates: Mapping[tuple[str, Site, int], Estimate]) -> pd.DataFrame:
    frames = []
    for (name, site, layer), estimate in estimates.items():
        columns = {measure: estimate.at((..., number)) for number, measure in enumerate(MEASURES)}
        frames.append(head_table({(site, layer): columns}))
        frames[-1].insert(0, "rules", name)
    return pd.concat(frames, ignore_index=True)

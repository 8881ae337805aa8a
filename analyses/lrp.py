"""How much of a prediction each head is responsible for: layer-wise relevance propagation (Voita et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Array, Estimate, Ratio
from headscope.data.encoded import Batch
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, Column, Options, analysis
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, Site
from headscope.relevance.backward import Backward, explain_backward
from headscope.relevance.rulesets import (
    RULE_SETS,
    STEPS,
    TARGETS,
    Explanation,
    RuleSet,
    Steps,
    Target,
    explained_quantity,
)

MEASURES = ("relevance", "raw", "absolute", "value_share", "qk_share")


def default_rules(checkpoint: Checkpoint, *, has_target: bool) -> str:
    """`voita` for encoder–decoders of the native kind, which it was made for; `attnlrp` for all others."""
    return "voita" if checkpoint.is_native and has_target else "attnlrp"


@analysis
class Lrp(Analysis):
    """Mean over explained predictions of a head's relevance, normalised over the heads of its layer.

    Relevance is read at the contexts weights·V; absolute values are normalised (`headscope.relevance.readout`).
    Column `lrp` is of the first rule set; `lrp.csv` has every rule set's normalised, raw and absolute relevance, and
    how much of it goes on through values and through queries and keys, per explained prediction. What is
    explained, and in how many passes: `headscope.relevance.backward`. Voita et al. normalise each prediction by itself,
    as `voita` does here. The rule sets that are backward passes explain all predictions of a sentence together,
    in one pass, unless `--steps each` asks for one pass for every position; a sentence then counts as often as it
    has predictions.
    """

    name = "lrp"
    group = "importance"
    order = 205
    summary = "relevance of heads for what the model says, by layer-wise relevance propagation"
    default = False
    needs = frozenset({"labels"})

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.target, self.steps = _target(options.target_token), _steps(options.steps)
        self.names: Sequence[str] = tuple(filter(None, options.rules.split(",")))
        for name in self.names:
            self._check(name, RULE_SETS.get(name))
        self.used: dict[str, Steps] = {}
        self.quantity = ""
        self.kept: dict[tuple[int, Site], dict[int, Tensor]] = {}

    def _check(self, name: str, rule_set: RuleSet) -> None:
        if self.steps == "sum" and not rule_set.linear:
            raise ConfigError(f"--steps sum: {name} is not linear, so it explains each position by itself")

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        has_target = batch.target is not None
        self.names = self.names or (default_rules(checkpoint, has_target=has_target),)
        self.quantity = explained_quantity(checkpoint, has_target=has_target, target=self.target)
        found: dict[tuple[str, Site, int], Ratio] = {}
        for name, its in self._explanations(checkpoint, batch).items():
            for (site, layer), relevance in its.relevance.items():
                normal = relevance.normalized()
                if self.options.detail and name == self.names[0]:
                    self._keep(batch, (site, layer), normal, its.counts)
                shares = (relevance.value_share, relevance.qk_share)
                parts = [
                    _times(normal, its.counts),
                    _once(relevance.raw, its.counts),
                    _once(relevance.absolute, its.counts),
                ]
                parts += [_once(share, its.counts) for share in shares]
                totals, counts = zip(*parts, strict=True)
                found[name, site, layer] = Ratio(torch.stack(totals, dim=-1), torch.stack(counts, dim=-1))
        return found

    def _explanations(self, checkpoint: Checkpoint, batch: Batch) -> dict[str, Explanation]:
        """Every rule set's explanation; rule sets that are backward passes in the same way share a forward pass."""
        together: dict[Steps, list[Backward]] = {}
        found: dict[str, Explanation] = {}
        for name in self.names:
            rule_set = RULE_SETS.get(name)
            steps = self.used[name] = self.steps or rule_set.steps
            if why := rule_set.applies(checkpoint, has_target=batch.target is not None):
                raise ConfigError(f"--rules {name}: {why}")
            if isinstance(rule_set, Backward):
                together.setdefault(steps, []).append(rule_set)
            else:
                found[name] = rule_set.explain(checkpoint, batch, target=self.target, steps=steps)
        for steps, rule_sets in together.items():
            found |= explain_backward(checkpoint, batch, rule_sets, target=self.target, steps=steps)
        return {name: found[name] for name in self.names}

    def _keep(self, batch: Batch, place: tuple[Site, int], normal: Tensor, counts: Tensor) -> None:
        """Normalised relevance [p h] of every sentence, of the positions that are explained."""
        site, layer = place
        for row, number in enumerate(batch.indices.tolist()):
            its = normal[counts[:, row] > 0, row]
            self.kept.setdefault((number, site), {})[layer] = its.float().cpu()

    def own(self) -> dict[tuple[int, Site], dict[int, Tensor]]:
        return self.kept

    def add(self, own: dict[tuple[int, Site], dict[int, Tensor]]) -> None:
        self.kept = dict(sorted({**self.kept, **own}.items()))

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        order = sorted(aggregates.sums, key=lambda key: (self.names.index(key[0]), SITES.index(key[1]), key[2]))
        estimates = {key: aggregates.ratio(*key) for key in order}
        first = {
            (site, layer): _measure(its, 0) for (name, site, layer), its in estimates.items() if name == self.names[0]
        }
        return AnalysisReport(
            columns=[Column("lrp", first)],
            tables={"lrp": pd.DataFrame(_rows(estimates))},
            detail={"lrp": {f"{number}/{site}": _layers(its) for (number, site), its in self.kept.items()}},
        )

    def signature(self) -> dict[str, str]:
        steps = "+".join(dict.fromkeys(self.used.values()))
        return {"rules": "+".join(self.names), "explains": self.quantity, "steps": steps}


def _times(normal: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_p normalised relevance [p b h], each as often as it stands for a prediction, and how often that is."""
    weights = counts.to(normal.dtype)[..., None] * normal.isfinite()  # [p b h]
    return (normal.nan_to_num() * weights).sum(dim=0), weights.sum(dim=0)


def _once(values: Tensor | None, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_p values [p b h] and the number of predictions [b h]; none of them where there are no values."""
    heads = counts.sum(dim=0)[:, None]
    if values is None:
        return torch.zeros_like(heads), torch.zeros_like(heads)
    explained = (counts > 0).to(values.dtype)[..., None]
    total = (values * explained).sum(dim=0)
    return total, heads.to(total.dtype).expand_as(total)


def _measure(its: Estimate, number: int) -> Estimate:
    parts: list[Array] = [each[..., number] for each in (its.value, its.low, its.high)]
    return Estimate(*parts)


def _rows(estimates: Mapping[tuple[str, Site, int], Estimate]) -> list[dict[str, object]]:
    rows = []
    for (name, site, layer), its in estimates.items():
        for head in range(its.value.shape[0]):
            row: dict[str, object] = {"rules": name, "site": site.value, "layer": layer, "head": head}
            for number, measure in enumerate(MEASURES):
                for end, part in (("", its.value), ("_low", its.low), ("_high", its.high)):
                    row[measure + end] = float(part[head, number])
            rows.append(row)
    return rows


def _layers(layers: Mapping[int, Tensor]) -> Array:
    """[p h] of every layer as [p layer h]; layers with fewer heads are filled with NaN."""
    shape = (max(len(its) for its in layers.values()), max(layers) + 1, max(its.shape[1] for its in layers.values()))
    found = torch.full(shape, float("nan"), dtype=torch.float64)
    for layer, its in layers.items():
        found[: len(its), layer, : its.shape[1]] = its
    array: Array = found.numpy()
    return array


def _target(name: str) -> Target:
    for known in TARGETS:
        if name == known:
            return known
    raise ConfigError(f"--target-token {name!r} is not known; choose {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")


def _steps(name: str) -> Steps | None:
    for known in STEPS:
        if name == known:
            return known
    if name:
        raise ConfigError(f"--steps {name!r} is not known; choose {' or '.join(STEPS)}")
    return None

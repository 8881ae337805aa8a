"""Mixings of heads: attentive experts (Peng, Schwartz, Li and Smith 2020), and the matrices of MHR."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio
from headscope.config.declarations import AnalysisFigure, Measure
from headscope.data.encoded import Batch
from headscope.data.vocabulary import Vocabulary
from headscope.distributed import widest
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.evaluation.likelihood import token_sums
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.interface import watch_modules
from headscope.model.mixing.base import head_matrices, mixings_of
from headscope.model.mixing.experts import Experts, expert_mode, experts_of, head_factors, membership, most_responsible

TOKENS, MIN_COUNT = 10, 5  # tokens in the table of an expert, and the fewest occurrences of each
OneMode = Literal["argmax", "random"]
MODES: tuple[OneMode, ...] = ("argmax", "random")
EVEN = 1e-6  # gates prefer no expert if their entropy is this near to the maximum, in nats


@analysis
class ExpertUse(Analysis):
    """Entropy of gates, how often each expert is the most responsible, and the tokens that go with it.

    An encoder has one gate a sentence, a decoder one a position. `expert_factor` is a head's mean factor: 1 in plain
    attention, at most h/k. experts.csv: the heads that each expert lacks, its mean responsibility and share of gates
    that it leads; experts_gates.csv: entropy beside that of an even gate; experts_tokens.csv: the ten tokens of largest
    pointwise mutual information log p(t, e) / (p(t) p(e)) among those that occur five times. Ties share a gate.
    """

    name = "experts"
    reads = "contexts"
    order = 132
    summary = "mixtures of attentive experts: entropy of gates, use of experts, tokens of experts"
    measures = (Measure("expert_factor", "mean factor of experts", range=(0, None)),)
    figures = (
        AnalysisFigure(
            "experts",
            "Mixtures of attentive experts: how much each expert counts, and the tokens that go with it.",
            "headscope.report.figures.experts:draw_experts",
        ),
    )

    gates: dict[SiteLayer, Tensor]
    mixtures: dict[SiteLayer, Experts]
    subwords: dict[bool, tuple[str, ...]]
    vocabulary: int

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        gated = any(mixture.gate is not None for mixture in experts_of(checkpoint.model))
        return None if gated else "is for models that mix experts by gates; this one does not"

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.gates, self.mixtures = {}, {}
        for site, layer, mixing in mixings_of(checkpoint.model):
            if isinstance(mixing, Experts) and mixing.gate is not None:
                self.mixtures[site, layer] = mixing
        self.vocabulary = checkpoint.vocabulary
        sides = {True: getattr(checkpoint, "source", None), False: getattr(checkpoint, "target", None)}
        self.subwords = {reads: words.subwords for reads, words in sides.items() if isinstance(words, Vocabulary)}

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Keep the output of each gate, which runs just before `observe` sees the heads of its module."""
        gates = {site_layer: mixture.gate for site_layer, mixture in self.mixtures.items() if mixture.gate is not None}
        with watch_modules(gates, lambda site_layer, _, log_gates: self.gates.update({site_layer: log_gates.detach()})):
            yield

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        site_layer = (heads.site, heads.layer)
        if site_layer not in self.mixtures:
            return {}
        raw_gates, mixture = self.gates.pop(site_layer), self.mixtures[site_layer]
        dtype = widest(raw_gates.device)
        best, log_gates = most_responsible(raw_gates).to(dtype), raw_gates.to(dtype)  # [b p e]
        is_query = heads.queries if log_gates.shape[1] > 1 else heads.queries.any(dim=-1, keepdim=True)  # [b p]
        weight = is_query.to(log_gates.dtype)
        gates, ties = log_gates.exp(), best.sum(dim=-1, keepdim=True)  # [b p e], [b p 1]
        values = {
            "entropy": -(gates * log_gates).sum(dim=-1, keepdim=True),
            "responsibility": gates,
            "share": best / ties,
            "tied": (ties > 1).to(gates.dtype),
            "factor": head_factors(gates, heads=mixture.heads, size=mixture.size),
        }
        count = weight.sum(dim=-1, keepdim=True)  # [b 1]
        ratios = {name: Ratio(torch.einsum("bpc,bp->bc", value, weight), count) for name, value in values.items()}
        return ratios | {"tokens": self._tokens(heads, best, mixture.experts)}

    def _tokens(self, heads: HeadBatch, best: Tensor, experts: int) -> Ratio:
        """Counts of tokens [1 e V] at which an expert alone is the most responsible, given `best` [b p e]."""
        has_one_expert = heads.queries & (best.sum(dim=-1) == 1)  # [b t]
        cells = best.argmax(dim=-1) * self.vocabulary + heads.query_side.ids  # [b t]
        counts = best.new_zeros(experts * self.vocabulary)
        counts.index_add_(0, cells.flatten(), has_one_expert.flatten().to(counts.dtype))
        return Ratio(counts.view(1, experts, -1), counts.new_ones(1), per_batch=True)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        experts, gates, tokens = [], [], []
        factors: dict[SiteLayer, Estimate] = {}
        for site_layer in aggregates.site_layers("entropy"):
            mixture = self.mixtures[site_layer]
            factors[site_layer] = aggregates.ratio("factor", *site_layer)
            location: dict[str, Any] = {"site": site_layer[0].value, "layer": site_layer[1]}
            entropy = aggregates.ratio("entropy", *site_layer).cell("entropy", 0)
            tied = aggregates.ratio("tied", *site_layer).cell("tied", 0)
            gates.append({**location, "experts": mixture.experts, **entropy, "even": math.log(mixture.experts), **tied})
            estimates = {name: aggregates.ratio(name, *site_layer) for name in ("responsibility", "share")}
            for number, has_head in enumerate(membership(mixture.heads, mixture.size)):
                lacks = ";".join(map(str, (1 - has_head).nonzero()[:, 0].tolist()))
                experts.append({**location, "expert": number, "lacks": lacks})
                for name, estimate in estimates.items():
                    experts[-1] |= estimate.cell(name, number)
            counts = aggregates.sums[("tokens", *site_layer)].total.sum(dim=0)
            tokens += [{**location, **row} for row in self._top(counts, reads=site_layer[0] is Site.ENCODER_SELF)]
        report.columns["expert_factor"] = factors
        report.tables = {"experts": pd.DataFrame(experts), "experts_gates": pd.DataFrame(gates)}
        if tokens:
            report.tables["experts_tokens"] = pd.DataFrame(tokens)
        if even := [f"{row['site']}.{row['layer']}" for row in gates if row["entropy"] > row["even"] - EVEN]:
            examples = ", ".join(even[:4]) + (" …" if len(even) > 4 else "")
            report.remarks.append(
                f"experts: the gates of {examples} ({len(even)} of {len(gates)} modules) weigh all experts alike, "
                "as if they had not been trained: none is preferred"
            )
        return report

    def _top(self, counts: Tensor, *, reads: bool) -> Iterator[dict[str, Any]]:
        names, of_token = self.subwords.get(reads, ()), counts.sum(dim=0)
        expectation = (counts.sum(dim=1, keepdim=True) * of_token / counts.sum()).clamp_min(1e-300)
        information = torch.where((counts > 0) & (of_token >= MIN_COUNT), (counts / expectation).log(), -torch.inf)
        for expert, row in enumerate(information):
            values, ids = row.sort(descending=True, stable=True)
            for value, number in list(zip(values.tolist(), ids.tolist(), strict=True))[:TOKENS]:
                if value > 0:
                    token = names[number] if number < len(names) else str(number)
                    yield {"expert": expert, "token": token, "pmi": value, "count": int(counts[expert, number])}


@analysis
class OneExpert(Analysis):
    """The loss when every gate takes one expert, in nats per token (Peng et al. 2020, §5.1).

    one_expert.csv: mean -log p with the most responsible expert ("argmax") and with a drawn one ("random"), and the
    rise over the mixture; without gates (Uni-MAE) the second only. BLEU: `headscope evaluate --expert top|random|N`.
    """

    name = "one_expert"
    reads = "contexts"
    sampled = True
    order = 133
    needs = frozenset({"labels"})
    summary = "mixtures of attentive experts: loss with one expert a gate instead of the mixture"

    site_layer: SiteLayer
    modes: Sequence[OneMode] = MODES

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return None if experts_of(checkpoint.model) else "is for models that mix experts; this one does not"

    def inspect(self, checkpoint: Checkpoint) -> None:
        first = checkpoint.attention_sites.order[0]
        self.site_layer = (first.site, first.layer)
        if ExpertUse.applies(checkpoint):
            self.modes = ("random",)

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        if batch.labels is None:
            return {}
        mixtures = experts_of(checkpoint.model)
        soft, _, count, _ = token_sums(checkpoint.logits(batch), batch.labels)
        losses = {"soft": soft}
        drawn_on = [checkpoint.device] if checkpoint.device.type == "cuda" else []
        for mode in self.modes:
            with expert_mode(mixtures, mode), torch.random.fork_rng(devices=drawn_on):
                torch.manual_seed(self.run.seed + int(batch.indices[0]))
                losses[mode] = token_sums(checkpoint.logits(batch), batch.labels)[0]
            losses[f"{mode}_drop"] = losses[mode] - soft
        return {(name, *self.site_layer): Ratio(loss[:, None], count[:, None]) for name, loss in losses.items()}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        soft = float(aggregates.ratio("soft", *self.site_layer).value[0])
        rows = [
            {
                "expert": mode,
                "nll_mixture": soft,
                **aggregates.ratio(mode, *self.site_layer).cell("nll", 0),
                **aggregates.ratio(f"{mode}_drop", *self.site_layer).cell("drop", 0),
            }
            for mode in self.modes
        ]
        return AnalysisReport(tables={"one_expert": pd.DataFrame(rows)})


def matrix_numbers(alpha: Tensor, singular_values: Tensor) -> dict[str, float]:
    """Σσ, Σ_{i≠j}|a_ij| / Σ|a_ij|, ‖(A − Aᵀ)/2‖² / ‖A‖² and ‖A − I‖ (Frobenius) of A [h h], singular values σ."""
    size, diagonal = alpha.abs().sum(), alpha.diagonal().abs().sum()
    skew = (alpha - alpha.T).square().sum() / 4
    return {
        "nuclear_norm": float(singular_values.sum()),
        "off_diagonal": float((size - diagonal) / size),  # NaN for a matrix of zeros
        "skew_share": float(skew / alpha.square().sum()),
        "from_identity": float(torch.linalg.matrix_norm(alpha - torch.eye(len(alpha), dtype=alpha.dtype))),
    }


@analysis
class Alphas(Analysis):
    """The matrices of models that mix heads linearly (MHR), entry by entry and as a whole.

    Row i makes new head i out of the old ones. `alpha_own` is a head's diagonal entry, `alpha_others` the share of its
    row off the diagonal, in absolute values. alphas.csv has every entry; alphas_modules.csv the nuclear norm Σσ, the
    off-diagonal share Σ_{i≠j}|a_ij| / Σ|a_ij|, the skew share ‖(A − Aᵀ)/2‖² / ‖A‖² and ‖A − I‖; alphas_spectrum.csv the
    singular values. Exact: low = high = value.
    """

    name = "alphas"
    order = 130
    summary = "the matrices of models that mix heads: nuclear norm, spectrum, off-diagonal and skew shares"
    measures = (
        Measure("alpha_own", "mixing weight on itself", signed=True),
        Measure("alpha_others", "share mixed in from others", range=(0, 1)),
    )
    figures = (
        AnalysisFigure(
            "alphas",
            "Matrices of models that mix heads, with their singular values; also of checkpoints, and from the fork's "
            "files.",
            "headscope.report.figures.layers:draw_alphas",
            from_pickle="headscope.report.fork:alphas_run",
            from_checkpoint="headscope.report.fork:checkpoint_alphas",
        ),
    )
    passes = frozenset()

    alphas: dict[SiteLayer, Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        mixes = head_matrices(checkpoint.model)
        return None if mixes else "is for models that mix heads by a matrix; this one does not"

    def inspect(self, checkpoint: Checkpoint) -> None:
        matrices = head_matrices(checkpoint.model)
        self.alphas = {site_layer: matrix.detach().cpu().double() for site_layer, matrix in matrices.items()}
        for site_layer, alpha in self.alphas.items():
            other_shares = 1 - alpha.abs().diagonal() / alpha.abs().sum(dim=1)
            self.exact[site_layer] = {"alpha_own": alpha.diagonal(), "alpha_others": other_shares}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        singular_values = {site_layer: torch.linalg.svdvals(alpha) for site_layer, alpha in self.alphas.items()}
        report.tables["alphas"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "head": i, "source": j, "alpha": value}
            for (site, layer), alpha in self.alphas.items()
            for i, row in enumerate(alpha.tolist())
            for j, value in enumerate(row)
        )
        report.tables["alphas_modules"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "heads": len(alpha)}
            | matrix_numbers(alpha, singular_values[site, layer])
            for (site, layer), alpha in self.alphas.items()
        )
        report.tables["alphas_spectrum"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "index": index, "singular_value": value}
            for (site, layer), values in singular_values.items()
            for index, value in enumerate(values.tolist())
        )
        return report

"""Composition of heads: how much of what an earlier head writes a later one reads (Elhage et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.attribution.residual_stream import NO_QUERY_KEY, HeadFactors, stream_of, why_no_stream
from headscope.bootstrap import Array, Estimate
from headscope.config import option
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, LabelTests, Rate, analysis, head_ids
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Site, SiteLayer

HALFWAY = 0.5  # from the baseline to the highest score that two heads with these singular values can have


@dataclass(frozen=True)
class CompositionOptions:
    """Options of `composition`."""

    composition_partners: int = option(
        10, "Earlier heads with the highest scores that composition.csv lists of each head.", metavar="N", minimum=1
    )


@analysis
class Composition(Analysis):
    """‖W_OV¹ R‖ / (‖W_OV¹‖ ‖R‖) of every head with every head of an earlier layer (Elhage et al. 2021).

    Frobenius norms; R is W_QK of the later head for Q-composition, its transpose for K-, W_OV for V-composition.
    Columns: the highest score with an earlier head, less the baseline 1/√n (root mean square over rotations; n is the
    stream's width, less one where the norm subtracts the mean). Gains of norms are folded in; positions and norms of
    single queries and keys are left out. Pre-norm decoders only. composition.csv has the best partners. Exact: low =
    high = value.

    Label `q-composition:L.H` (`k-`, `v-`): at least halfway from the baseline to the highest score that the singular
    values allow (von Neumann), and above rotations by a tested margin.
    """

    name = "composition"
    version = 2
    order = 141
    default = False
    passes = frozenset()
    summary = "how much of what earlier heads write a head reads: Q-, K- and V-composition"
    measures = (
        Measure("composition_q", "Q-composition above chance", signed=True),
        Measure("composition_k", "K-composition above chance", signed=True),
        Measure("composition_v", "V-composition above chance", signed=True),
    )
    functions = (
        HeadFunction("q-composition", "◩", "Q", "#999933", "queries read what an earlier head writes", order=9),
        HeadFunction("k-composition", "◪", "K", "#882255", "keys read what an earlier head writes", order=10),
        HeadFunction("v-composition", "◨", "V", "#44aa99", "values read what an earlier head writes", order=11),
    )
    Options = CompositionOptions

    scores: dict[tuple[SiteLayer, str], PairScores]
    earlier: dict[SiteLayer, list[HeadId]]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        layers = [layer for (site, layer), heads in checkpoint.layout.items() if site is Site.DECODER_SELF and heads]
        why_too_shallow = "is for models of at least two layers" if len(layers) < 2 else None
        return why_no_stream(checkpoint, embeddings=False) or why_too_shallow

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=False)
        output_spectra: dict[SiteLayer, Tensor] = {}
        self.scores, self.earlier = {}, {}
        for later in stream.norms:
            reader, parts = stream.factors(later), dict[str, list[PairScores]]()
            for earlier, spectrum in output_spectra.items():
                for kind, scores in compositions(stream.factors(earlier), reader, spectrum).items():
                    parts.setdefault(kind, []).append(scores)
            counts = {site_layer: checkpoint.layout[site_layer] for site_layer in output_spectra}
            self.earlier[later] = [head for site_layer, count in counts.items() for head in head_ids(site_layer, count)]
            for kind, part in parts.items():
                pairs = self.scores[later, kind] = PairScores.concatenate(part)
                above = pairs.strongest()[1] - pairs.baseline
                self.exact[later] = {**self.exact.get(later, {}), f"composition_{kind}": above}
            output_spectra[later] = spectra(reader.value, centred_output(reader))

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = super().report(aggregates), LabelTests(min_instances=0)
        for (site_layer, kind), pairs in self.scores.items():
            (best, score), earlier = pairs.strongest(), self.earlier[site_layer]
            baseline, highest = pairs.baseline, pairs.of(pairs.highest, best).numpy()
            names = [earlier[head] for head in best.tolist()]
            labels = np.array([f"{kind}-composition:{head.layer}.{head.head}" for head in names], dtype=object)
            tests.add(
                site_layer,
                f"composition_{kind}",
                labels,
                Estimate.exact(score),
                np.minimum(pairs.p(best) * len(earlier), 1.0),
                counts=None,
                threshold=baseline + HALFWAY * (highest - baseline),
                baseline=baseline,
                rate=Rate("as a composition score, 1 at most", "of unrelated heads"),
            )
        tests.conclude(report)
        if {kind for _, kind in self.scores} == {"v"}:
            report.remarks = [f"composition: of values alone, {NO_QUERY_KEY}"]
        report.tables["composition"] = pd.DataFrame(list(self._rows()))
        return report

    def _rows(self) -> Iterator[dict[str, object]]:
        for ((site, layer), kind), pairs in self.scores.items():
            scores = pairs.score  # [e h]
            order = scores.argsort(dim=0, descending=True)[: self.options.composition_partners]
            for head in range(scores.shape[1]):
                for number in order[:, head].tolist():
                    earlier, score = self.earlier[site, layer][number], scores[number, head].item()
                    yield {
                        "site": site.value,
                        "layer": layer,
                        "head": head,
                        "kind": kind,
                        "earlier_layer": earlier.layer,
                        "earlier_head": earlier.head,
                        "score": score,
                        "baseline": pairs.baseline,
                        "highest": pairs.highest[number, head].item(),
                        "above": score - pairs.baseline,
                    }


@dataclass(frozen=True)
class PairScores:
    """Composition scores [e h] of e earlier heads with h later ones, in a stream of `dimensions`.

    `variance` [e h] is that of the squared score over random rotations of one head, `highest` [e h] the largest score
    that the singular values of the two heads allow.
    """

    score: Tensor
    variance: Tensor
    highest: Tensor
    dimensions: int

    @classmethod
    def concatenate(cls, parts: list[PairScores]) -> PairScores:
        """The scores of several earlier layers joined."""
        columns = zip(*((part.score, part.variance, part.highest) for part in parts), strict=True)
        score, variance, highest = map(torch.cat, columns)
        return cls(score, variance, highest, parts[0].dimensions)

    @property
    def baseline(self) -> float:
        """The root mean square of a score over all rotations."""
        return float(self.dimensions**-0.5)

    def strongest(self) -> tuple[Tensor, Tensor]:
        """The earlier head with the highest score of every head, and that score: [h]."""
        score, earlier = self.score.nan_to_num(nan=-1.0).max(dim=0)
        return earlier, score.masked_fill(score < 0, torch.nan)

    def of(self, values: Tensor, earlier: Tensor) -> Tensor:
        """Values [e h] with one earlier head [h] for each later one: [h]."""
        return values.gather(0, earlier[None])[0]

    def p(self, earlier: Tensor) -> Array:
        """P(squared score of a rotated pair ≥ the one observed) with one earlier head [h] for each later one: [h]."""
        square, variance = self.of(self.score, earlier).square(), self.of(self.variance, earlier)
        mean = 1 / self.dimensions
        shape = (mean**2 / variance).clamp(max=1e12)
        return torch.special.gammaincc(shape, square * shape / mean).numpy()


def compositions(writer: HeadFactors, reader: HeadFactors, spectrum: Tensor) -> dict[str, PairScores]:
    """Q-, K- and V-composition of an earlier layer's heads, with their `spectra` [e k], with a later layer's.

    V alone where the heads' rows of queries or keys cannot be told.
    """
    rights = {"v": (reader.value, centred_output(reader).transpose(1, 2))}
    if reader.query is not None and reader.key is not None:
        rights = {"q": (reader.query, reader.key), "k": (reader.key, reader.query), **rights}
    output, value_gram = centred_output(writer), writer.value.transpose(1, 2) @ writer.value
    n = output.shape[-1] - reader.centred
    scores = {}
    for kind, (left_map, right) in rights.items():
        squares = _squares(output, value_gram, left_map, right.transpose(1, 2) @ right)
        read = spectra(right, left_map.transpose(1, 2))
        scale = spectrum.sum(dim=-1)[:, None] * read.sum(dim=-1)  # ‖W_OV‖² ‖R‖² [e h]
        flat, flat_read = (part.square().sum(dim=-1) / part.sum(dim=-1).square() for part in (spectrum, read))
        variance = 2 * (flat[:, None] - 1 / n) * (flat_read - 1 / n) / max((n - 1) * (n + 2), 1)
        width = min(spectrum.shape[-1], read.shape[-1])
        highest = (spectrum[:, :width] @ read[:, :width].T / scale).sqrt()
        tiny = torch.finfo(torch.float64).tiny
        scores[kind] = PairScores((squares / scale).sqrt(), variance.clamp(min=tiny), highest, n)
    return scores


def centred_output(heads: HeadFactors) -> Tensor:
    """W_O [h k d] as it is read: where norms subtract the mean, without it."""
    return heads.output - heads.output.mean(dim=-1, keepdim=True) if heads.centred else heads.output


def spectra(left: Tensor, right: Tensor) -> Tensor:
    """Squared singular values of left · right, the largest first, for left [h d k] and right [h k d]: [h k]."""
    product = (left.transpose(1, 2) @ left @ (right @ right.transpose(1, 2))).cpu().double()
    squares: Tensor = torch.linalg.eigvals(product).real.clamp(min=0)
    return squares.sort(dim=-1, descending=True).values


def _squares(output: Tensor, value_gram: Tensor, left: Tensor, right_gram: Tensor) -> Tensor:
    """‖W_V W_O L Rᵀ‖² [e h] = tr(W_VᵀW_V · X · RᵀR · Xᵀ) with X = W_O L.

    `output` [e k d], left [h d m], and of W_V and R the products with themselves, [e k k] and [h m m].
    """
    e, k, d = output.shape
    h, _, m = left.shape
    flat = output.reshape(e * k, d) @ left.transpose(0, 1).reshape(d, h * m)
    inner = flat.view(e, k, h, m).transpose(1, 2)  # [e h k m]
    squares = (value_gram[:, None] @ inner) * (inner @ right_gram)
    return squares.sum(dim=(2, 3)).cpu().double().clamp(min=0)

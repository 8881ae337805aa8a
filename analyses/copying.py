"""Copying heads: the eigenvalues of a head's full OV circuit (Elhage et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.special import ndtr
from torch import Tensor

from headscope.attribution.residual_stream import HeadFactors, SiteLayer, stream_of, why_no_stream
from headscope.bootstrap import Estimate
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, Column, RunOptions, analysis, head_table
from headscope.engine.evidence.label_words import Rate
from headscope.engine.evidence.labels import LabelTests
from headscope.formats.base import Checkpoint

THRESHOLD = 0.5


@analysis
class Copying(Analysis):
    """Re Σλ / Σ|λ| over the eigenvalues λ of the OV circuit W_E W_V W_O W_U (Elhage et al. 2021).

    1: attending to a token raises its own logit; −1: lowers it. Gains of norms and their subtraction of the mean are
    folded in, biases left out. Pre-norm decoders only; layers between embedding and head are ignored. `copying_chance`
    is the score's standard deviation if W_V is turned at random: ‖W_V W_O W_U W_E‖ / (√d Σ|λ|).

    Label `copying`: at least 0.5, and further above 0 than chance allows. Exact: low = high = value.
    """

    name = "copying"
    order = 140
    default = False
    passes = frozenset()
    summary = "eigenvalues of the OV circuit: does a head raise the logit of what it attends to"
    measures = (
        Measure("copying", "copying score", range=(-1, 1), signed=True),
        Measure("copying_chance", "spread of copying by chance", range=(0, None)),
    )
    functions = (
        HeadFunction("copying", "◎", "c", "#332288", "copying: raises the logit of what it attends to", order=8),
    )

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.spectra: dict[SiteLayer, Spectra] = {}

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        product = stream.vocabulary_product()
        for site_layer in stream.site_layers:
            self.spectra[site_layer] = ov_spectra(stream.factors(site_layer), product)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = AnalysisReport(), LabelTests(min_instances=0)
        scores: dict[SiteLayer, Estimate] = {}
        chances: dict[SiteLayer, Estimate] = {}
        for site_layer, spectra in self.spectra.items():
            score = scores[site_layer] = Estimate.exact(spectra.score)
            chance = chances[site_layer] = Estimate.exact(spectra.chance)
            p = ndtr(-score.value / chance.value)
            tests.add(
                site_layer,
                "copying",
                "copying",
                score,
                p,
                threshold=THRESHOLD,
                counts=None,
                baseline=chance.value,
                rate=Rate("as a copying score, 1 at most", "its spread by chance"),
            )
        tests.conclude(report)
        report.columns = [Column("copying", scores), Column("copying_chance", chances)]
        report.tables["copying"] = head_table({place: _columns(spectra) for place, spectra in self.spectra.items()})
        return report


@dataclass(frozen=True)
class Spectra:
    """Eigenvalues [h k] of the OV circuits of one layer, and the spread of their sums by chance [h].

    `zero` [h] marks heads whose circuit is nothing but rounding: they write nowhere that the vocabulary is read from.
    """

    eigenvalues: Tensor
    spread: Tensor
    zero: Tensor

    @property
    def size(self) -> Tensor:
        """Σ|λ| [h]; NaN where it is nothing but rounding."""
        return self.eigenvalues.abs().sum(dim=-1).masked_fill(self.zero, torch.nan)

    @property
    def score(self) -> Tensor:
        """Re Σλ / Σ|λ| [h]; NaN for a head whose circuit is zero."""
        return self.eigenvalues.real.sum(dim=-1) / self.size

    @property
    def chance(self) -> Tensor:
        """The spread of the score by chance [h]."""
        return self.spread / self.size


def ov_spectra(heads: HeadFactors, product: Tensor) -> Spectra:
    """The spectra of one layer, product [d d] being W_U W_E."""
    reads = heads.output @ product.to(heads.output.device)  # [h k d]
    circuits = (reads @ heads.value).cpu().double()  # [h k k]
    gram = heads.value.transpose(1, 2) @ heads.value  # [h k k]
    squares = torch.einsum("hij,hjd,hid->h", gram, reads, reads).cpu().double()  # ‖W_V W_O W_U W_E‖²
    eigenvalues = torch.linalg.eigvals(circuits)
    largest = (
        heads.output.flatten(1).norm(dim=1)
        * product.norm().to(heads.output.device)
        * heads.value.flatten(1).norm(dim=1)
    )
    rounding = len(product) * torch.finfo(product.dtype).eps * largest.cpu().double()
    zero = eigenvalues.abs().sum(dim=-1) <= rounding
    return Spectra(eigenvalues, (squares / len(product)).clamp(min=0).sqrt(), zero)


def _columns(spectra: Spectra) -> dict[str, Tensor]:
    real = spectra.eigenvalues.real
    return {
        "trace": real.sum(dim=-1),
        "absolute": spectra.eigenvalues.abs().sum(dim=-1),
        "positive_share": (real > 0).double().mean(dim=-1),
    }

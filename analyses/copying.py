"""Copying heads: the eigenvalues of a head's full OV circuit (Elhage et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import ndtr
from torch import Tensor

from headscope.attribution.residual_stream import HeadFactors, SiteLayer, stream_of, why_no_stream
from headscope.bootstrap import Estimate
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis, head_table
from headscope.engine.evidence.labels import LabelTests, Rate
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

    spectra: dict[SiteLayer, Spectra]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return why_no_stream(checkpoint, embeddings=True)

    def inspect(self, checkpoint: Checkpoint) -> None:
        stream = stream_of(checkpoint, embeddings=True)
        product = stream.vocabulary_product()
        self.spectra = {place: ov_spectra(stream.factors(place), product) for place in stream.site_layers}
        self.exact["copying"] = {place: Estimate.exact(each.score) for place, each in self.spectra.items()}
        self.exact["copying_chance"] = {place: Estimate.exact(each.chance) for place, each in self.spectra.items()}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = super().report(aggregates), LabelTests(min_instances=0)
        rate = Rate("as a copying score, 1 at most", "its spread by chance")
        for site_layer, score in self.exact["copying"].items():
            chance = self.exact["copying_chance"][site_layer].value
            about: dict[str, Any] = {"threshold": THRESHOLD, "counts": None, "baseline": chance, "rate": rate}
            tests.add(site_layer, "copying", "copying", score, ndtr(-score.value / chance), **about)
        tests.conclude(report)
        report.tables["copying"] = head_table({place: each.columns for place, each in self.spectra.items()})
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

    @property
    def columns(self) -> dict[str, Tensor]:
        """What copying.csv has of every head."""
        real, absolute = self.eigenvalues.real, self.eigenvalues.abs().sum(dim=-1)
        return {"trace": real.sum(dim=-1), "absolute": absolute, "positive_share": (real > 0).double().mean(dim=-1)}


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

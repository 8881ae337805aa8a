"""What heads write: norms of it and of their parameters (Kobayashi et al. 2020), and its direct effect on logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from headscope.attribution.readout import Readout, find_readout
from headscope.attribution.residual_stream import output_slices
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.data.encoded import IGNORED
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_table
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import precise, repeat_groups
from headscope.model.interface import watch_modules
from headscope.model.projections import Slices


@analysis
class Contribution(Analysis):
    """Mean over queries of Σ_s w_ts ‖f(x_s)‖, f(x) = (x W_V + b_V) W_O of the head (Kobayashi et al. 2020).

    `contribution_sum` is ‖Σ_s w_ts f(x_s)‖: less where keys cancel. Special tokens are no queries; the sums run over
    all visible keys. Without the output bias and what follows it; linear mixing is folded into W_O.
    """

    name = "contribution"
    reads = "rows"
    group = "importance"
    order = 203
    default = False
    summary = "norm of the vectors that a head writes (Kobayashi et al. 2020)"
    measures = (
        Measure(
            "contribution",
            "contribution",
            range=(0, None),
            keep="highest",
            why="the vectors that they write are the shortest",
            within_layer=True,
        ),
        Measure(
            "contribution_sum",
            "summed contribution",
            range=(0, None),
            keep="highest",
            why="the sums of what they write are the shortest",
            within_layer=True,
        ),
    )

    grams: dict[tuple[Site, int], Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        for (site, layer), matrices in output_slices(checkpoint).items():
            if isinstance(matrices, str):
                return f"{site}.{layer}: {matrices}"
        return None

    def inspect(self, checkpoint: Checkpoint) -> None:
        slices = {place: precise(cast(Tensor, matrices)) for place, matrices in output_slices(checkpoint).items()}
        self.grams = {place: output @ output.transpose(1, 2) for place, output in slices.items()}  # [h k k]

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        gram = self.grams[heads.site, heads.layer]
        name = f"norms of values/{heads.site}/{heads.layer}"  # the same for every block of queries
        value_norms = heads.of_batch.get(
            name, heads.batch, lambda: norms(repeat_groups(heads.value.to(gram.dtype), len(gram)), gram)
        )  # [b h s]
        weighted_norms = torch.einsum("bhts,bhs->bht", heads.weights, value_norms)
        return {
            "contribution": heads.over_queries(weighted_norms),
            "contribution_sum": heads.over_queries(norms(heads.context, gram)),
        }


def norms(vectors: Tensor, gram: Tensor) -> Tensor:
    """‖vector · W_O‖ [b h n] of vectors [b h n k], from gram [h k k] = W_O W_Oᵀ of each head."""
    return torch.einsum("bhnk,bhnk->bhn", vectors @ gram, vectors).clamp(min=0).sqrt()


MATRICES = (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))


@analysis
class Magnitude(Analysis):
    """Frobenius norms of a head's slices: `magnitude` of W_O, `magnitude_all` the product of all four.

    Without biases; heads of a group share W_K and W_V. The product does not change when W_O is scaled up and W_V down.
    Exact: low = high = value.
    """

    name = "magnitude"
    group = "importance"
    order = 202
    default = False
    passes = frozenset()
    summary = "norm of a head's slice of W_O, and product of the norms of all four slices"
    measures = (
        Measure(
            "magnitude", "norm of W_O", range=(0, None), keep="highest", why="their slices of W_O are the smallest"
        ),
        Measure(
            "magnitude_all",
            "norms of all four slices",
            range=(0, None),
            keep="highest",
            why="the slices of their four matrices are the smallest",
        ),
    )

    norms: dict[tuple[Site, int], dict[str, Tensor]]

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.norms = {
            place: {f"norm_{letter}": _norms(getattr(of, name), checkpoint.layout[place]) for letter, name in MATRICES}
            for place, of in checkpoint.projections.items()
        }
        for place, norms in self.norms.items():
            product = torch.stack([*norms.values()]).prod(dim=0)
            self.exact[place] = {"magnitude": norms["norm_o"], "magnitude_all": product}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        report.tables["magnitude"] = head_table(self.norms)
        return report


def _norms(slices: Slices | None, heads: int) -> Tensor:
    if slices is None:
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    norms: Tensor = slices.matrices().cpu().double().flatten(1).norm(dim=-1)
    return norms.repeat_interleave(heads // len(slices.units), dim=0)


@analysis
class DirectLogit(Analysis):
    """Mean over predicted tokens of LN(o_h) · (W_U[y] − mean of W_U over the vocabulary) (Elhage et al. 2021).

    o_h is what the head writes, without the output bias; LN the last norm with σ held; y the reference's token. Later
    layers are not counted. Pre-norm decoders only. Factors after the norm (T5) and on what is added (Granite) are part
    of it; a norm on a layer's sum of heads (Gemma 3, OLMo 2) is applied with σ held; linear mixing is folded into W_O.
    """

    name = "direct_logit"
    reads = "contexts"
    group = "importance"
    order = 204
    default = False
    needs = frozenset({"labels"})
    sites = frozenset({Site.DECODER_SELF, Site.CROSS})
    afterwards = True
    summary = "direct effect of a head on the logit of the reference (Elhage et al. 2021)"
    measures = (
        Measure(
            "direct_logit",
            "direct effect on the logit",
            signed=True,
            keep="highest",
            why="they raise the logit of the reference least",
        ),
    )

    readout: Readout
    slices: dict[tuple[Site, int], Tensor]
    scales: dict[tuple[Site, int], Tensor]
    last: tuple[Tensor, Tensor] | None = None
    directions: tuple[Tensor, Tensor] | None = None

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.predicts != "words":
            return "needs a model that predicts words (one with a language-model head)"
        for (site, layer), matrices in output_slices(checkpoint).items():
            if site in cls.sites and isinstance(matrices, str):
                return f"{site}.{layer}: {matrices}"
        readout = find_readout(checkpoint)
        return readout if isinstance(readout, str) else None

    def inspect(self, checkpoint: Checkpoint) -> None:
        readout = find_readout(checkpoint)
        assert isinstance(readout, Readout)
        self.readout, self.slices, self.scales = readout, {}, {}
        for site_layer, matrices in output_slices(checkpoint).items():
            if site_layer in readout.writing and isinstance(matrices, Tensor):
                self.slices[site_layer] = readout.writing[site_layer].fold(matrices)

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        """The last norm's input and output, and 1/σ of norms on what layers write [b t 1], pass by pass."""
        norms = {place: writing.norm for place, writing in self.readout.writing.items() if writing.norm is not None}

        def see(place: tuple[Site, int] | None, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = inputs[0].detach(), output.detach()
            if place is None:
                self.last = (x, y)
            else:
                self.scales[place] = norms[place].scale(precise(x), precise(y))

        last = {} if self.readout.norm is None else {None: self.readout.norm.module}
        with watch_modules(last | {place: norm.module for place, norm in norms.items()}, see):
            yield

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        labels = heads.batch.labels
        assert labels is not None, "the batch was read without labels"
        has_label = labels != IGNORED  # [b t]
        place, dtype = (heads.site, heads.layer), heads.context.dtype
        if self.directions is None or self.directions[0] is not labels:  # once per batch; zero without a label
            directions = torch.zeros(*labels.shape, self.readout.weight.shape[1], dtype=dtype, device=labels.device)
            if self.last is None:
                x = y = directions[has_label]
            else:
                x, y = (states[has_label].to(dtype) for states in self.last)
            directions[has_label] = self.readout.direction(labels[has_label], x, y)
            self.directions = (labels, directions)
        towards = self.directions[1]  # what a written vector is worth at every position [b t d]
        if place in self.scales:
            towards = towards * self.scales[place].to(dtype)
        per_head = torch.einsum("btd,hkd->bhtk", towards, self.slices[place].to(towards.dtype))
        values = torch.einsum("bhtk,bhtk->bh", heads.context, per_head)
        return {"direct_logit": Ratio(values, has_label.sum(dim=-1, keepdim=True))}

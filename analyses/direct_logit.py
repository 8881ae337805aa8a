"""Direct logit attribution: a head's direct effect on the logit of the reference (Elhage et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from headscope.attribution.readout import Readout, find_readout
from headscope.attribution.residual_stream import output_slices
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.data.encoded import IGNORED
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.attention import precise
from headscope.model.interface import watch_modules


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
    slices: dict[SiteLayer, Tensor]
    scales: dict[SiteLayer, Tensor]
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
        norms = {
            site_layer: writing.norm for site_layer, writing in self.readout.writing.items() if writing.norm is not None
        }

        def see(site_layer: SiteLayer | None, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = inputs[0].detach(), output.detach()
            if site_layer is None:
                self.last = (x, y)
            else:
                self.scales[site_layer] = norms[site_layer].scale(precise(x), precise(y))

        last = {} if self.readout.norm is None else {None: self.readout.norm.module}
        with watch_modules(last | {site_layer: norm.module for site_layer, norm in norms.items()}, see):
            yield

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        labels = heads.batch.labels
        assert labels is not None, "the batch was read without labels"
        has_label = labels != IGNORED  # [b t]
        site_layer, dtype = (heads.site, heads.layer), heads.context.dtype
        if self.directions is None or self.directions[0] is not labels:  # once per batch; zero without a label
            directions = torch.zeros(*labels.shape, self.readout.weight.shape[1], dtype=dtype, device=labels.device)
            if self.last is None:
                x = y = directions[has_label]
            else:
                x, y = (states[has_label].to(dtype) for states in self.last)
            directions[has_label] = self.readout.direction(labels[has_label], x, y)
            self.directions = (labels, directions)
        towards = self.directions[1]  # what a written vector is worth at every position [b t d]
        if site_layer in self.scales:
            towards = towards * self.scales[site_layer].to(dtype)
        per_head = torch.einsum("btd,hkd->bhtk", towards, self.slices[site_layer].to(towards.dtype))
        values = torch.einsum("bhtk,bhtk->bh", heads.context, per_head)
        return {"direct_logit": Ratio(values, has_label.sum(dim=-1, keepdim=True))}

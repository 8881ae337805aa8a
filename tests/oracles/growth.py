"""Nuclear norms by eigenvalues, and the fork's criterion written out, for tests of the growth loss."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headscope.data.encoded import IGNORED
from headscope.heads import Site, SiteLayer
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.native.transformer import Transformer
from headscope.training.prepare import collate
from tests.oracles import mhr

KEYS = {
    Site.ENCODER_SELF: "encoder.{}.self_attn",
    Site.DECODER_SELF: "decoder.{}.self_attn",
    Site.CROSS: "decoder.{}.enc_attn",
}


def polar(a: Tensor) -> Tensor:
    """U·Vᵀ of A = U·Σ·Vᵀ, as A·(AᵀA)^(-1/2)."""
    values, vectors = torch.linalg.eigh(a.T @ a)
    root: Tensor = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    return a @ root


def fork_batch(oracles: Path) -> tuple[Transformer, Tensor, dict[SiteLayer, Tensor]]:
    """The reference model, its summed loss on the reference's batch of 16 sentences, and the contexts of all heads."""
    checkpoint, corpus = mhr.load_reference(oracles)
    model, batch = checkpoint.model.train(), collate(mhr.pairs(checkpoint, corpus), np.arange(16))
    contexts: dict[SiteLayer, Tensor] = {}
    site_layers = {id(module): (site, layer) for site, layer, _, module in model.attention_modules()}

    def record(call: AttentionCall, _: Tensor) -> None:
        contexts[site_layers[id(call.module)]] = call.context

    assert batch.labels is not None
    with tap_contexts(record, before_mixing=True):
        log_p = model(**checkpoint.arguments(batch.source, batch.target)).log_softmax(dim=-1)
    real = batch.labels != IGNORED
    nll = (-log_p.gather(-1, batch.labels.clamp_min(0)[..., None])[..., 0] * real).sum()
    smooth = (-log_p.sum(dim=-1) * real).sum()
    return model, 0.9 * nll + 0.1 / log_p.shape[-1] * smooth, contexts

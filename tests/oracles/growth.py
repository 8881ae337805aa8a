"""Nuclear norms by eigenvalues, and the fork's criterion written out, for tests of the growth loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from oracles import mhr
from torch import Tensor

from headscope.heads import Site
from headscope.model.attention import AttentionCall, tapped
from headscope.model.transformer import Transformer

KEYS = {
    Site.ENCODER_SELF: "encoder.{}.self_attn",
    Site.DECODER_SELF: "decoder.{}.self_attn",
    Site.CROSS: "decoder.{}.enc_attn",
}


def polar(a: Tensor) -> Tensor:
    """U·Vᵀ of A = U·Σ·Vᵀ, as A·(AᵀA)^(-1/2)."""
    values, vectors = torch.linalg.eigh(a.T @ a)
    return a @ (vectors @ torch.diag(values.rsqrt()) @ vectors.T)


def fork_batch(shared: Path) -> tuple[Transformer, Tensor, dict[tuple[Site, int], Tensor]]:
    """The reference model, its summed loss on the reference's batch of 16 sentences, and the contexts of all heads.

    Sources are padded on the left, and padding has the embedding of id 1 without a position, as in the fork.
    """
    its, corpus = mhr.theirs(shared)
    model = its.model.train()
    assert its.source is not None and its.target is not None
    sentences = [sentence for _, sentence in zip(range(16), corpus, strict=False)]
    read = [[*its.source.encode(each.source), its.source.end] for each in sentences]
    said = [[*its.target.encode(each.target or ""), its.target.end] for each in sentences]
    source, target, labels = (torch.full((16, max(map(len, rows))), 1) for rows in (read, said, said))
    for row, (a, b) in enumerate(zip(read, said, strict=True)):
        source[row, source.shape[1] - len(a) :] = torch.tensor(a)
        labels[row, : len(b)] = torch.tensor(b)
        target[row, : len(b)] = torch.tensor([its.target.start, *b[:-1]])
    masks = {"source_mask": source != 1, "target_mask": target != 1}
    for stack, real in ((model.encoder, masks["source_mask"]), (model.decoder, masks["target_mask"])):
        assert stack is not None
        stack.embeddings.register_forward_hook(_padding(real))
    seen: dict[tuple[Site, int], Tensor] = {}
    places = {id(module): (site, layer) for site, layer, _, module in model.attention_modules()}

    def see(call: AttentionCall, _: Tensor) -> None:
        seen[places[id(call.module)]] = call.context

    with tapped(see, before_mixing=True):
        log_p = model(source, target, **masks).log_softmax(dim=-1)
    real = labels != 1
    nll = (-log_p.gather(-1, labels[..., None])[..., 0] * real).sum()
    smooth = (-log_p.sum(dim=-1) * real).sum()
    return model, 0.9 * nll + 0.1 / log_p.shape[-1] * smooth, seen


def _padding(real: Tensor) -> Any:
    def put(module: Any, _: Any, found: Tensor) -> Tensor:
        return torch.where(real[..., None], found, module.tokens.weight[1] * module.scale)

    return put

"""Greedy continuation of a prompt, with every head's weights at each step: what a decoder looks at while it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite, base_of, eval_mode
from headscope.model.forward import with_cache
from headscope.model.native.transformer import Transformer
from headscope.model.taps import observing


@dataclass(frozen=True)
class WrittenToken:
    """A token that was written, and the weights [h s] of the query that predicted it at every (site, layer).

    Key s of the weights is that of position `first[site, layer]` + s: a cache of a sliding window holds the last keys.
    """

    token: int
    weights: dict[tuple[Site, int], Tensor]
    first: dict[tuple[Site, int], int]


@torch.no_grad()
def continue_greedily(
    checkpoint: Checkpoint, prompt: list[int], *, steps: int, stop: frozenset[int]
) -> Iterator[WrittenToken]:
    """The most likely token after a prompt, and after that, until one of `stop` or for so many steps.

    The prompt but its last token is read with the model's own attention and not observed, so that no weights of all its
    queries are held.
    """
    ids = torch.tensor([prompt], device=checkpoint.device)
    with eval_mode(checkpoint.model):
        advance = _advancing(checkpoint, ids)
        token = ids[:, -1]
        for number in range(steps):
            seen: dict[tuple[Site, int], Tensor] = {}
            with _kept_weights(checkpoint, seen):
                token = advance(token).argmax(dim=-1)  # [1]
            total = len(prompt) + number
            yield WrittenToken(int(token), seen, {place: total - weights.shape[-1] for place, weights in seen.items()})
            if int(token) in stop:
                return


def _advancing(checkpoint: Checkpoint, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Read a prompt [1 n] but its last token; gives a function from a token [1] to the logits of the next one [1 V]."""
    model: Any = checkpoint.model
    if isinstance(model, Transformer):
        state = model.begin(ids)
        return lambda token: model.step(token, state)
    held = with_cache(base_of(model), input_ids=ids[:, :-1])[1] if ids.shape[1] > 1 else None

    def advance(token: Tensor) -> Tensor:
        nonlocal held
        output, held = with_cache(model, held, input_ids=token[:, None])
        logits: Tensor = output.logits[:, -1]
        return logits

    return advance


@contextmanager
def _kept_weights(checkpoint: Checkpoint, seen: dict[tuple[Site, int], Tensor]) -> Iterator[None]:
    """Within the block the weights of the last query [h s] of every decoder self attention are kept."""

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        if attention_site.site is Site.DECODER_SELF:
            weights = call.weights[0, :, -1].detach()
            seen[attention_site.place] = weights if weights.element_size() > 2 else weights.float()

    with observing(checkpoint.model, see):
        yield

"""Head statistics in the files of the MHR fork, for scripts that read those: nesting, types and shapes as there.

Every file is {"encoder": [{"self_attn": X}, …], "decoder": [{"self_attn": X, "enc_attn": X}, …]}, a list entry a
layer. X is for
- confidence (`confs_eval/NAME-base.pkl`, `…-advanced.pkl`): float64 [n h+1], a row a batch: scores, batch size;
- `cosine_similarities_eval`, `l2_pairwise_distances_eval`: a vector a batch, [b h h] flattened and then b, as
  float64 [n b·h·h+1], or as an array of n vectors where their lengths differ;
- `alphas_eval`: float32 [h h].

`rows` says what a row is. "corpus": one row for all sentences, each measured without padding, decoders
teacher-forced over all positions; scores are means over sentences, and the matrices too (b is 1). "batch": a
row for each 32 sentences, put together and padded as fairseq-generate does, padding counted as the fork
counts it, decoders teacher-forced. "generate": the same batches searched, so that decoder rows are what the
fork saves: the last decoding step alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.capture import observing
from headscope.data import Batch, Corpus, Encoded, Losses, Side, batches, side
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import Site
from headscope.model.attention import AttentionCall
from headscope.model.mixing.alpha import Alpha
from headscope.model.places import Place
from headscope.model.search import search
from headscope.runfiles import nested

Rows = Literal["corpus", "batch", "generate"]
ROWS: tuple[Rows, ...] = get_args(Rows)
BATCH = 32  # the fork's --batch-size
SCORES = {"base": "confs_eval", "advanced": "confs_eval"}
MATRICES = {"cosine": "cosine_similarities_eval", "l2": "l2_pairwise_distances_eval"}
At = tuple[Site, int]


def mhr_pickles(
    checkpoint: Checkpoint, corpus: Corpus, *, rows: Rows = "corpus", limit: int, tokens: int = 2048
) -> dict[str, Any]:
    """Content of every file by its path (`mhr/confs_eval/checkpoint_best-base.pkl`), in a pass of its own.

    ConfigError for an unknown `rows`, or where a model that is no `Transformer` is to be batched as fairseq does.
    """
    if rows not in ROWS:
        raise ConfigError(f"--mhr-rows {rows!r} is not known; choose one of {', '.join(ROWS)}")
    if rows != "corpus" and not isinstance(checkpoint, TransformerCheckpoint):
        raise ConfigError(f"--mhr-rows {rows} is for fairseq-like models; take 'corpus' for {checkpoint.path}")
    found = _Rows(whole=rows == "corpus")
    last: dict[At, AttentionCall] = {}

    def see(place: Place, call: AttentionCall) -> None:
        last[place.site, place.layer] = call

    with torch.inference_mode(), observing(checkpoint.model, see):
        for batch in _batches(checkpoint, corpus, rows, limit, tokens):
            last.clear()
            batch = batch.to(checkpoint.device)
            if rows == "corpus":
                checkpoint.forward(batch)
            elif isinstance(checkpoint, TransformerCheckpoint):
                _as_the_fork(checkpoint, batch, searching=rows == "generate")
            for at, call in last.items():
                queries, keys = _sides(at[0], batch) if rows == "corpus" else (None, None)
                found.add(at, fork_numbers(call, queries, keys))
    name = Path(checkpoint.path).name.removesuffix(".pt").removesuffix(".npz")
    files = {f"{SCORES[kind]}/{name}-{kind}": found.scores(kind) for kind in SCORES}
    files |= {f"{folder}/{name}": found.matrices(kind) for kind, folder in MATRICES.items()}
    if alphas := _alphas(checkpoint):
        files[f"alphas_eval/{name}"] = alphas
    return {f"mhr/{file}.pkl": nested(places) for file, places in files.items()}


def fork_numbers(call: AttentionCall, queries: Tensor | None, keys: Tensor | None) -> dict[str, Tensor]:
    """base and advanced [b h], cosine and l2 [b h h] of every sentence (spec of the fork, §4).

    Weights are those before mixing, with the last query × last key zeroed; `base` is max_{t,s}, `advanced`
    Σ_s max_t / (S − 1). Contexts before mixing are flattened over positions: 1 + cosine, and the distance.
    `queries` [b t] and `keys` [b s] say which are real; None: all of them, as the fork has it.
    """
    weights, context = call.weights.float(), call.context.float()
    b, _, t, s = weights.shape
    queries = weights.new_ones(b, t, dtype=torch.bool) if queries is None else queries
    keys = weights.new_ones(b, s, dtype=torch.bool) if keys is None else keys
    lengths, widths = queries.sum(dim=1), keys.sum(dim=1)
    weights = weights * (queries[:, None, :, None] & keys[:, None, None, :])
    weights[torch.arange(b, device=weights.device), :, lengths - 1, widths - 1] = 0
    flat = (context * queries[:, None, :, None]).flatten(2)  # [b h t·k]
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    return {
        "base": weights.amax(dim=(-1, -2)),
        "advanced": weights.amax(dim=-2).sum(dim=-1) / (widths - 1)[:, None],
        "cosine": 1 + unit @ unit.transpose(1, 2),
        "l2": torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist"),
    }


class _Rows:
    """Rows of every file, or with `whole` sums of what one row will say."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.kept: dict[str, dict[At, list[Tensor]]] = {kind: {} for kind in (*SCORES, *MATRICES)}
        self.counts: dict[At, int] = {}

    def add(self, at: At, numbers: Mapping[str, Tensor]) -> None:
        """What one batch gives for one module."""
        for kind, values in numbers.items():
            mine = self.kept[kind].setdefault(at, [])
            if self.whole:
                values = values.double().sum(dim=0, keepdim=True).cpu()
                values = values if not mine else values + mine.pop()
            mine.append(values.cpu())
        self.counts[at] = self.counts.get(at, 0) + len(numbers["base"])

    def scores(self, kind: str) -> dict[At, NDArray[Any]]:
        """Scores and batch size, a row a batch."""
        found = {}
        for at, batches_of in self.kept[kind].items():
            if self.whole:
                rows = [[*(each[0] / self.counts[at]).tolist(), self.counts[at]] for each in batches_of]
            else:
                rows = [[*each.mean(dim=0).tolist(), len(each)] for each in batches_of]
            found[at] = np.array(rows, dtype=np.float64)
        return found

    def matrices(self, kind: str) -> dict[At, NDArray[Any]]:
        """Matrices and batch size, a vector a batch."""
        found = {}
        for at, batches_of in self.kept[kind].items():
            divisor = self.counts[at] if self.whole else 1
            vectors = [np.append((each / divisor).double().flatten().numpy(), len(each)) for each in batches_of]
            if len({len(vector) for vector in vectors}) == 1:
                found[at] = np.stack(vectors)
            else:
                found[at] = np.empty(len(vectors), dtype=object)
                found[at][:] = vectors
        return found


def _sides(site: Site, batch: Batch) -> tuple[Tensor, Tensor]:
    """Which queries and keys are real."""
    text = batch.source if batch.target is None else batch.target
    queries = batch.source if site is Site.ENCODER_SELF else text
    keys = text if site is Site.DECODER_SELF else batch.source
    return queries.real, keys.real


def _alphas(checkpoint: Checkpoint) -> dict[At, NDArray[Any]]:
    modules: Iterable[tuple[Site, int, str, Any]] = getattr(checkpoint.model, "attention_modules", tuple)()
    return {
        (site, layer): module.mixing.alpha.detach().float().cpu().numpy().copy()
        for site, layer, _, module in modules
        if isinstance(module.mixing, Alpha) and module.heads
    }


# Batches


def _batches(checkpoint: Checkpoint, corpus: Corpus, rows: Rows, limit: int, tokens: int) -> Iterator[Batch]:
    if rows == "corpus":
        yield from batches(corpus, checkpoint, tokens=tokens, limit=limit, long="truncate", losses=Losses())
        return
    texts = list(corpus)
    sources = checkpoint.encode([text.source for text in texts], side="source", limit=limit)
    targets: Sequence[Encoded | None] = [None] * len(texts)
    if corpus.has_target:
        targets = checkpoint.encode([text.target or "" for text in texts], side="target", limit=limit)
    shuffled = np.random.RandomState(1).permutation(len(texts)).tolist()  # its order of equally long sentences
    shortest_first = sorted(shuffled, key=lambda n: (len(sources[n].ids), _length(targets[n])))
    for first in range(0, len(texts), BATCH):
        mine = shortest_first[first : first + BATCH]
        longest_first = torch.tensor([len(sources[n].ids) for n in mine]).sort(descending=True).indices
        mine = [mine[place] for place in longest_first.tolist()]  # as fairseq collates, with torch's order of ties
        others = [its for n in mine if (its := targets[n]) is not None]
        target = side(others) if others else None
        yield Batch(torch.tensor(mine), 0, _left(side([sources[n] for n in mine])), target)


def _length(its: Encoded | None) -> int:
    return 0 if its is None else len(its.ids)


def _left(its: Side) -> Side:
    """The padding moved before the texts."""
    width = its.ids.shape[1]
    order = (torch.arange(width) + its.real.sum(dim=1, keepdim=True)) % width
    return Side(*(each.gather(1, order) for each in (its.ids, its.real, its.special)))


def _as_the_fork(checkpoint: TransformerCheckpoint, batch: Batch, *, searching: bool) -> None:
    """One batch through encoder and decoder; a decoder-only model, or no target, has its one side alone."""
    model, source, target = checkpoint.model, batch.source, batch.target
    with ExitStack() as stack:
        if model.encoder is not None:
            stack.enter_context(_zero_where(~source.real, model.encoder.embeddings))
        if searching and checkpoint.target is not None and model.encoder is not None:
            its, most = checkpoint.target, model.config.decoder.max_positions
            search(
                model,
                source.ids,
                source.real,
                start=its.start,
                end=its.end,
                pad=its.pad,
                unknown=its.unknown,
                config=checkpoint.search if most is None else replace(checkpoint.search, limit=most - 1),
            )
            return
        if target is not None:
            stack.enter_context(_zero_where(~target.real, model.decoder.embeddings))
        checkpoint.forward(batch)


@contextmanager
def _zero_where(padded: Tensor, embeddings: torch.nn.Module) -> Iterator[None]:
    """Padding is embedded as zero, positions included, which is what fairseq does and what the fork counts."""

    def zeroed(_: torch.nn.Module, __: Any, states: Tensor) -> Tensor:
        return states.masked_fill(padded[..., None], 0)

    handle = embeddings.register_forward_hook(zeroed)
    try:
        yield
    finally:
        handle.remove()

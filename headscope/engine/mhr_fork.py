"""Head statistics in the files of the MHR fork, with its nesting, types and shapes, for scripts that read these files.

Every file is {"encoder": [{"self_attn": X}, …], "decoder": [{"self_attn": X, "enc_attn": X}, …]}, a list entry a
layer. X is for
- confidence (`confs_eval/NAME-base.pkl`, `…-advanced.pkl`, `…-pairwise.pkl`): float64 [n h+1], a row a batch:
  scores, batch size;
- `cosine_similarities_eval`, `l2_pairwise_distances_eval`: a vector a batch, [b h h] flattened and then b, as
  float64 [n b·h·h+1], or as an array of n vectors where their lengths differ;
- `alphas_eval`: float32 [h h].

`rows` defines the rows. "corpus": one row for all sentences, each measured without padding, decoders teacher-forced
over all positions; scores and matrices are means over sentences (`advanced` over those with two keys or more; b is 1).
"batch": a row for each batch, which is composed and padded as fairseq-generate does, with padding counted as in the
fork, decoders teacher-forced. "generate": the same batches, decoded by beam search, so that decoder rows are those that
the fork saves: the last decoding step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.data.batching import batches
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch, Encoded, map_tensors, pad_side
from headscope.errors import ConfigError, flag
from headscope.formats.base import Checkpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import SiteLayer
from headscope.model.attention import AttentionCall
from headscope.model.discovery import AttentionSite
from headscope.model.mixing.base import head_matrices
from headscope.model.taps import observing
from headscope.results.study_files import nest

SEED = 1  # fairseq-generate's; it decides the order of equally long sentences
MULTIPLE = 8  # --required-batch-size-multiple
SENTENCES = 32


class BatchSize(NamedTuple):
    """fairseq's --batch-size and --max-tokens: at most so many sentences, and sentences × longest side; None: no limit.

    Without either limit a batch has 32 sentences.
    """

    sentences: int | None = None
    tokens: int | None = None


DEFAULT_SIZE = BatchSize()


def fork_batches(checkpoint: TransformerCheckpoint, corpus: Corpus, *, limit: int, size: BatchSize) -> Iterator[Batch]:
    """Batches of all sentences as fairseq-generate makes them: shortest sources first, in a batch the longest first.

    Sources are padded on the left, targets on the right, with padding ids, which the model embeds as fairseq does
    (`headscope.model.native.layers`). ConfigError if a single sentence has more than `size.tokens`.
    """
    texts, target_words = list(corpus), checkpoint.target
    source_words = checkpoint.source if checkpoint.two_sided else target_words
    assert source_words is not None and target_words is not None, "they have encoded the text"
    sources = checkpoint.encode([text.source for text in texts], side="source", limit=limit)
    targets, lengths = list[Encoded](), [(len(source.ids), 0) for source in sources]
    if corpus.has_target:
        targets = [*checkpoint.encode([text.target or "" for text in texts], side="target", limit=limit)]
        lengths = [(length, len(target.ids)) for (length, _), target in zip(lengths, targets, strict=True)]
    random_order = np.random.RandomState(SEED).permutation(len(texts)).tolist()
    for group in groups(sorted(random_order, key=lengths.__getitem__), lengths, size):
        # by torch's sort, as in fairseq, so that ties come in the same order
        longest_first = torch.tensor([lengths[n][0] for n in group]).sort(descending=True).indices
        numbers = [group[position] for position in longest_first.tolist()]
        read = pad_side([sources[n] for n in numbers], pad=source_words.padding)
        target = pad_side([targets[n] for n in numbers], pad=target_words.padding) if targets else None
        width = read.ids.shape[1]
        order = (torch.arange(width) + read.real.sum(dim=1, keepdim=True)) % width
        padded_left = map_tensors(read, partial(torch.gather, dim=1, index=order))
        yield Batch(torch.tensor(numbers), 0, padded_left, target)


def groups(order: Sequence[int], lengths: Sequence[tuple[int, int]], size: BatchSize) -> list[list[int]]:
    """Cut `order` into batches as fairseq's batch_by_size does: a full batch is closed at a multiple of 8."""
    closed_batches, batch, longest = list[list[int]](), list[int](), 0
    max_sentences = SENTENCES if size.sentences is None and size.tokens is None else size.sentences
    for number in order:
        longest = max(longest, *lengths[number])
        if size.tokens is not None and longest > size.tokens:
            raise ConfigError(
                f"{flag('mhr_max_tokens', size.tokens)}: sentence {number + 1} has {longest} subwords; raise it, or "
                f"give {flag.max_length} {size.tokens}"
            )
        is_full = size.tokens is not None and longest * (len(batch) + 1) > size.tokens
        if batch and (is_full or len(batch) == max_sentences):
            n_closed = max(MULTIPLE * (len(batch) // MULTIPLE), len(batch) % MULTIPLE)
            closed_batches.append(batch[:n_closed])
            batch = batch[n_closed:]
            longest = max(max(lengths[n]) for n in (*batch, number))
        batch.append(number)
    return [*closed_batches, batch] if batch else closed_batches


def without_last_cell(weights: Tensor, queries: Tensor, keys: Tensor, *, rows: slice = slice(None)) -> Tensor:
    """Weights [b h t s] with 0 for padding and for the last real query's weight on the last real key.

    The fork zeroes the last cell of the padded batch and does not mask padding; with padding set to 0, a batch of N
    gives the same numbers as N batches of one there. `queries` [b t] and `keys` [b s] mark real positions, with padding
    on either side. `rows`: the queries that `weights` are of, if not all.
    """
    last = _last(queries)[:, rows, None] & _last(keys)[:, None, :]
    outside = ~(queries[:, rows, None] & keys[:, None, :]) | last  # [b t s]
    return weights.masked_fill(outside[:, None], 0.0)


def base_confidence(weights: Tensor) -> Tensor:
    """max_{t,s} weights [b h]; always 1 under a causal mask, where the first query sees only itself."""
    return weights.amax(dim=(-1, -2))


def advanced_confidence(largest: Tensor, widths: Tensor) -> Tensor:
    """Σ_s max_t weights / (S − 1) [b h], with S = `widths` [b] the number of keys; not finite for a single key.

    `largest` [b h s] is the largest weight that any query gives to each key.
    """
    return largest.sum(dim=-1) / (widths - 1)[:, None]


def map_distances(weights: Tensor) -> Tensor:
    """‖W_i − W_j‖ [b h h] of the maps W [t s] of all heads."""
    flat = weights.flatten(2)  # [b h t·s]
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")


def _last(real: Tensor) -> Tensor:
    """A mask [b n] of the last real position of each sentence."""
    positions = torch.arange(real.shape[1], device=real.device)
    return positions == (real * (positions + 1)).argmax(dim=1, keepdim=True)


Rows = Literal["corpus", "batch", "generate"]
SCORES = dict.fromkeys(("base", "advanced", "pairwise"), "confs_eval")
MATRICES = {"cosine": "cosine_similarities_eval", "l2": "l2_pairwise_distances_eval"}


def mhr_pickles(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    rows: Rows = "corpus",
    limit: int,
    tokens: int = 2048,
    size: BatchSize = DEFAULT_SIZE,
) -> dict[str, Any]:
    """The content of every file by its path (`mhr/confs_eval/checkpoint_best-base.pkl`), from a pass of its own.

    `size` limits batches that are rows; with rows "corpus" a batch has `tokens` positions. ConfigError for other rows
    if the model is not a `Transformer`, which fairseq could batch.
    """
    if rows != "corpus" and not checkpoint.is_native:
        raise ConfigError(f"{flag('mhr_rows', rows)} is for fairseq-like models; take 'corpus' for {checkpoint.path}")
    file_rows: dict[str, dict[SiteLayer, list[NDArray[Any]]]] = {kind: {} for kind in (*SCORES, *MATRICES)}
    sums: dict[tuple[str, SiteLayer], tuple[Tensor, int]] = {}
    last: dict[SiteLayer, AttentionCall] = {}

    def see(attention_site: AttentionSite, call: AttentionCall) -> None:
        last[attention_site.site_layer] = call

    if rows == "corpus":
        stream = batches(corpus, checkpoint, tokens=tokens, limit=limit)
    else:
        stream = fork_batches(cast(TransformerCheckpoint, checkpoint), corpus, limit=limit, size=size)
    with torch.inference_mode(), observing(checkpoint.model, see):
        for batch in (batch.to(checkpoint.device) for batch in stream):
            last.clear()
            native = cast(TransformerCheckpoint, checkpoint)  # where rows are batches
            if rows == "generate" and native.two_sided and native.target is not None:
                native.beam_search(batch.source, native.search)
            else:
                checkpoint.forward(batch)
            for at, call in last.items():
                real = [side.real for side in batch.sides(at[0])] if rows == "corpus" else [None, None]
                for kind, values in fork_numbers(call, *real).items():
                    if rows == "corpus":
                        total, count = sums.get((kind, at), (torch.zeros(()), 0))
                        sums[kind, at] = total + values.double().sum(dim=0, keepdim=True).cpu(), count + len(values)
                    else:
                        file_rows[kind].setdefault(at, []).append(_row(kind, values.cpu(), len(values)))
    for (kind, at), (total, count) in sums.items():
        file_rows[kind][at] = [_row(kind, total / count, count)]
    arrays = {kind: {at: _stack_rows(part) for at, part in parts.items()} for kind, parts in file_rows.items()}
    name = Path(checkpoint.path).name.removesuffix(".pt").removesuffix(".npz")
    files = {f"{SCORES[kind]}/{name}-{kind}": arrays[kind] for kind in SCORES}
    files |= {f"{folder}/{name}": arrays[kind] for kind, folder in MATRICES.items()}
    if alphas := fork_alphas(checkpoint):
        files[f"alphas_eval/{name}"] = alphas
    return {f"mhr/{file}.pkl": nest(arrays_by_site) for file, arrays_by_site in files.items()}


def fork_numbers(call: AttentionCall, queries: Tensor | None, keys: Tensor | None) -> dict[str, Tensor]:
    """The fork's base, advanced and pairwise [b h], cosine and l2 [b h h] of every sentence.

    Weights and contexts are those before mixing; cosine (as 1 + cosine) and l2 compare contexts flattened over
    positions. `queries` [b t] and `keys` [b s] mark real positions, and `advanced` leaves out sentences with a single
    key; None: all positions are real, as in the fork, which divides by 0 for a single key.
    """
    weights, context = call.weights.float(), call.context.float()
    b, _, t, s = weights.shape
    alone = keys is not None
    queries = weights.new_ones(b, t, dtype=torch.bool) if queries is None else queries
    keys = weights.new_ones(b, s, dtype=torch.bool) if keys is None else keys
    widths = keys.sum(dim=1)
    weights = without_last_cell(weights, queries, keys)
    spread = advanced_confidence(weights.amax(dim=-2), widths)
    flat = (context * queries[:, None, :, None]).flatten(2)  # [b h t·k]
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    return {
        "base": base_confidence(weights),
        "advanced": spread[widths > 1] if alone else spread,
        "pairwise": map_distances(weights).sum(dim=-1),  # not divided by h − 1
        "cosine": 1 + unit @ unit.transpose(1, 2),
        "l2": torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist"),
    }


def _row(kind: str, values: Tensor, count: int) -> NDArray[Any]:
    """A row of a file: mean scores and their number of sentences, or flattened matrices and their number."""
    numbers = values.mean(dim=0) if kind in SCORES else values.flatten()
    return np.append(numbers.double().numpy(), count if kind in SCORES else len(values))


def _stack_rows(rows: list[NDArray[Any]]) -> NDArray[Any]:
    """Rows as a matrix, or as an object array if their lengths differ."""
    if len({len(row) for row in rows}) == 1:
        return np.stack(rows)
    row_objects = np.empty(len(rows), dtype=object)
    row_objects[:] = rows
    return row_objects


def fork_alphas(checkpoint: Checkpoint) -> dict[SiteLayer, NDArray[Any]]:
    """The alpha matrix [h h] of every module that mixes heads with one; empty for models that do not."""
    matrices = head_matrices(checkpoint.model)
    return {site_layer: matrix.detach().float().cpu().numpy().copy() for site_layer, matrix in matrices.items()}
